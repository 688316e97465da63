"""Plans that were written as documents, on one page: from `plan --json`, and plan.yaml of run folders.

The page has what the documents have: memory and time of their layouts, the reasons in words, what was left
out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, check_file
from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.document import Document, OnPage, Pictures
from meshtune.report.draw.kinds import Panel
from meshtune.report.draw.page import sentences, text
from meshtune.report.draw.table import Column, Table
from meshtune.report.draw.words import model_title
from meshtune.report.plan.numbers import named, number, seconds
from meshtune.report.plan.page import FOOTER
from meshtune.report.plan.panels import memory_bars, predicted, time_bars
from meshtune.units import GIB
from meshtune.yaml_tree import read_yaml

SUFFIXES = (".json", ".yaml", ".yml")
MOST = 10  # layouts of one document
Tree = Mapping[str, Any]


@dataclass(frozen=True)
class PlanDocument:
    """One plan as it was written."""

    name: str
    model: str
    tree: Tree
    layouts: Sequence[Tree]  # as in `plan --json`, the best first


def read_plan(file: Path) -> PlanDocument | None:
    """The plan in a file; None for a file that holds none. Raises UserError for text that can't be read."""
    if file.suffix.lower() not in SUFFIXES or not file.exists():
        return None
    check_file(file)
    tree = _json(file) if file.suffix.lower() == ".json" else read_yaml(file)
    if not isinstance(tree, Mapping):
        return None
    given = tree.get("layouts") or [tree.get("predicted")]
    layouts = [one for one in given if isinstance(one, Mapping) and "memory" in one and "layout" in one]
    if not layouts:
        return None
    model = tree.get("model") or tree.get("workload") or {}
    name = (
        str(model.get("name") or model.get("model") or file.stem)
        if isinstance(model, Mapping)
        else str(model)
    )
    stem = file.resolve().parent.name if file.name == "plan.yaml" else file.stem
    return PlanDocument(stem, name, tree, layouts[:MOST])


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None


def document_panels(plans: Sequence[PlanDocument]) -> list[Panel]:
    """Memory of each layout and, where all have predicted times, the time of their steps. In front of layouts
    of several documents stands their name.
    """
    rows = [(plan, layout) for plan in plans for layout in plan.layouts]
    names = [f"{plan.name}: {one['layout']}" if len(plans) > 1 else str(one["layout"]) for plan, one in rows]
    memory = [one["memory"] for _, one in rows]
    capacities = {one.get("capacity") for one in memory}
    capacity = capacities.pop() if len(capacities) == 1 else None
    categories = [named({**dict.fromkeys(CATEGORIES, 0.0), **one}) for one in memory]
    drawn: list[Panel] = [memory_bars(names, categories, capacity, "Peak memory of a GPU")]
    if all(one.get("time") for _, one in rows):
        times = [{part: one["time"].get(part, 0.0) for part in PARTS} for _, one in rows]
        ends = [f"{seconds(one['step_seconds'])} · MFU {one['mfu']:.0%}" for _, one in rows]
        drawn.append(time_bars(names, times, ends, "Time of a step"))
    return predicted(drawn)


def document_page(plans: Sequence[PlanDocument]) -> Document:
    """The page's parts. plans: at least one."""
    after = []
    for plan in plans:
        tree = plan.tree
        title = f" of {plan.name}" if len(plans) > 1 else ""
        after += [
            replace(_layouts(plan), title=f"Layouts{title}").html("numbers layouts"),
            sentences(f"Why this layout{title}", _lines(tree.get("reasoning"))),
            sentences(f"What to change first{title}", _lines(tree.get("changes"))),
            sentences(f"Layouts left out{title}", map(_left_out, tree.get("rejected") or ())),
        ]
    return Document(
        name=" · ".join(dict.fromkeys(model_title(plan.model) for plan in plans)),
        kind="plan",
        subtitle=text(", ".join(f"{plan.name}: {_cluster(plan.tree)}" for plan in plans)),
        parts=(Pictures(document_panels(plans)), *map(OnPage, after)),
        footer=FOOTER,
    )


def _cluster(tree: Tree) -> str:
    cluster, workload = tree.get("cluster") or {}, tree.get("workload") or {}
    batch, length = workload.get("global_batch_size"), workload.get("seq_len")
    words = f"{cluster.get('gpus', '')} x {cluster.get('gpu', '')}".strip(" x")
    return f"{words}, global batch {batch:,} × {length:,} tokens" if batch and length else words


def _layouts(plan: PlanDocument) -> Table:
    """Table of the layouts."""
    rows, timed = plan.layouts, plan.layouts[0].get("step_seconds") is not None
    columns = [
        Column("", [f"{place}" for place in range(1, len(rows) + 1)]),
        Column("layout", [str(one["layout"]) for one in rows], words=True, code=True),
    ]
    if timed:
        columns += [
            Column("tokens/s/GPU", [number(one["tokens_per_second_per_gpu"]) for one in rows]),
            Column("step", [seconds(one["step_seconds"]) for one in rows]),
            Column("MFU", [f"{one['mfu']:.1%}" for one in rows]),
        ]
    columns.append(Column("peak GiB", [f"{one['memory']['peak'] / GIB:.1f}" for one in rows]))
    return Table("Layouts", tuple(columns))


def _lines(value: Any) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


def _left_out(group: Tree) -> str:
    return f"{group.get('count', 0):,}: {group.get('reason', '')} ({group.get('example', '')})"
