"""docs/memory-timeline.md has the tensors of a step as the planner has them, and the bytes of its events."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from made_plans import machines, workload

from meshtune.layout import Layout
from meshtune.placement.columns import Columns, Number
from meshtune.plan.accounting import accounting_of
from meshtune.plan.memory.flight import activations_in_flight
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import POINTS, tensors
from meshtune.plan.memory.timeline import CATEGORIES, EVENTS, Liveness
from meshtune.plan.search import stages_of

GIB = 2**30
PAGE = Path(__file__).parents[3] / "docs" / "memory-timeline.md"
ROW = re.compile(r"^\| `([\w-]+)` \|((?: \**[\d.]+\** \|){5})$", re.M)


WORKLOAD = workload(size=256, seq_len=8192)
ACCOUNTING = accounting_of(WORKLOAD, machines(64))


def without_overhead(parts: Mapping[str, Number]) -> list[Number]:
    """Bytes by category, without overhead."""
    return [size for name, size in parts.items() if name != "overhead"]


def test_the_page_has_the_numbers_of_the_formula() -> None:
    rows = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
    assert len(rows) == 4
    layouts = Columns.of([Layout.parse(text) for text in rows])
    timeline = Liveness(
        Step(WORKLOAD.work, layouts, ACCOUNTING, 8192, stages_of(WORKLOAD, layouts))
    ).timeline()
    computed = [
        np.broadcast_to(sum(without_overhead(timeline[event])), (3, len(rows))).max(0) / GIB
        for event in EVENTS
    ]
    for number, (text, cells) in enumerate(rows.items()):
        printed = [float(cell) for cell in re.findall(r"[\d.]+", cells)]
        assert printed == pytest.approx([event[number] for event in computed], abs=0.051), text
        assert "**" in cells.split("|")[int(np.argmax([event[number] for event in computed]))]


def test_the_page_lists_the_tensors_of_the_planner() -> None:
    """A new kind of tensor is a row of its table: what this prints where it fails."""
    layouts = Columns.of([Layout.parse("zero3x64-mb1-ga4")])
    step = Step(WORKLOAD.work, layouts, ACCOUNTING, 8192, Stages.even(32, layouts))
    alive: dict[tuple[str, str], set[str]] = {}
    for name, category, born, dies, _ in tensors(step, activations_in_flight(step)):
        alive.setdefault((name, category), set()).update(list(POINTS.values())[born : dies + 1])
    table = [
        " | ".join(
            ["", name, category.replace("_", " "), *("•" if event in events else "" for event in EVENTS)]
        )
        for (name, category), events in sorted(alive.items(), key=lambda row: CATEGORIES.index(row[0][1]))
    ]
    lines = [re.sub(r" +", " ", f"{row.strip()} |") for row in table]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "\n" + "\n".join(lines)
