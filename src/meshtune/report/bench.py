"""Benched layouts as tables: predicted, simulated and measured, from documents of `bench --json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshtune.plan.memory.timeline import CATEGORY_NAMES
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import difference, peaks
from meshtune.units import duration, human

Document = Mapping[str, Any]  # of one layout
COLUMNS = ("predicted", "simulated", "measured")
MEMORY_NAMES = CATEGORY_NAMES | {"peak": "memory"}
OFF = "off by: from what was measured, as a share of it"
PART_NAMES = {
    "communication": "exposed communication",
    "bubble": "pipeline's bubble",
    "waiting": "waiting for the slowest rank",
    "loading": "waiting for data",
}


def layouts_table(documents: Sequence[Document], speed_unit: str) -> Table:
    """One row a layout, the fastest first; those that failed last, with the reason."""
    ran = [one for one in documents if one["measured"]]
    ran.sort(key=lambda one: -one["measured"]["tokens_per_second_per_gpu"])
    mfu = any(one["measured"]["mfu"] is not None for one in ran)
    heads = ["layout", speed_unit, "step", "spread", *(["MFU"] if mfu else []), "memory"]
    rows = []
    for one in ran:
        found = one["measured"]
        share = [f"{found['mfu']:.1%}" if found["mfu"] is not None else ""] if mfu else []
        rows.append((
            one["layout"], f"{found['tokens_per_second_per_gpu']:,.0f}", duration(found["step_seconds"]),
            f"{found['spread']:.1%}", *share, human(found["memory"].get("peak", 0)) or "",
        ))  # fmt: skip
    steps = {one["measured"]["steps"] for one in ran}
    notes = (
        [f"Medians of {max(steps)} steps; spread: distance of their quartiles, of the median."]
        if steps
        else []
    )
    notes += [f"{one['layout']}: {one['failed']}" for one in documents if one["failed"]]
    return Table.of_rows("Measured", tuple(heads), tuple(rows), ("layout",), tuple(notes))


def side_by_side(document: Document) -> list[Table]:
    """Time by part and memory by category of one layout, as they are predicted, simulated and measured."""
    notes = (OFF,)
    if document["predicted"] and document["simulated"]:
        simulated = document["simulated"]
        notes = (peaks(simulated["rank"], document["predicted"]["event"], simulated["event"]), OFF)
    title, heads = str(document["layout"]), ("", *COLUMNS, "predicted\noff by", "simulated\noff by")
    step = [(document[name] or {}).get("step_seconds") for name in COLUMNS]
    time = [_row(*part, duration) for part in part_values(document, "parts", COLUMNS, PART_NAMES)]
    time.append(_row("step", step, duration))
    memory = [_row(*part, human) for part in part_values(document, "memory", COLUMNS, MEMORY_NAMES)]
    memory.sort(key=lambda row: row[0] == "memory")  # the sum comes last
    return [
        Table.of_rows(f"{title}, time", heads, tuple(time), ("",), totals=1),
        Table.of_rows(
            f"{title}, memory of tensors on its fullest rank", heads, tuple(memory), ("",), notes, totals=1
        ),
    ]


def part_values(
    document: Document, key: str, columns: Sequence[str], names: Mapping[str, str]
) -> Iterator[tuple[str, list[float | None]]]:
    """Yield (name, its value in each column) of each part under `key` that a column has above 0."""
    sources = [(document[column] or {}).get(key) for column in columns]
    for name in dict.fromkeys(name for source in sources for name in source or ()):
        values = [None if source is None else source.get(name, 0.0) for source in sources]
        if any(values):
            yield names.get(name, name), values


def _row(name: str, values: Sequence[float | None], written: Callable[[float], str]) -> tuple[str, ...]:
    *others, measured = values
    off = ("" if one is None or measured is None else difference(one, measured, written) for one in others)
    return (name, *("" if one is None else written(one) for one in values), *off)


def micro_batches_table(document: Mapping[str, Any]) -> Table:
    """The micro-batch sizes of one layout that were tried, in their order, and the largest that runs."""
    rows = tuple(
        (f"{one['size']:,}", "yes" if one["runs"] else "no", human(one["peak"]) if one["peak"] else "",
         one["reason"] or "")
        for one in document["tried"]
    )  # fmt: skip
    found, planned = document["micro_batch"], document["planned"]
    verdict = f"The largest that runs: {found:,}." if found else "None runs."
    if planned is not None:
        verdict += f" The planner says {planned:,}."
    heads = ("micro-batch", "runs", "memory", "why not")
    return Table.of_rows(str(document["layout"]), heads, rows, ("runs", "why not"), (verdict,))
