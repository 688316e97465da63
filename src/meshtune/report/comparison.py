"""A finished run next to its predictions as tables, from documents of `plan compare RUN --json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshtune.plan.calibration import CONSTANTS, FACTOR, NOTABLE
from meshtune.plan.memory.timeline import CATEGORY_NAMES
from meshtune.report.bench import PART_NAMES
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import difference
from meshtune.units import counted, duration, human

Document = Mapping[str, Any]  # of one run
PREDICTIONS = ("at_start", "today")
HEADS = ("", "measured", "predicted\nat start", "\noff by", "planned\ntoday", "\noff by")


def tables(document: Document) -> Iterator[Table]:
    """Yield the tables of one run: time, memory, and the constants that are off."""
    name, layout = document["run"], document["layout"]
    steps = [(document[one] or {}).get("step_seconds") for one in ("measured", *PREDICTIONS)]
    notes = (f"Medians of {counted(document['steps'], 'step')}.", *document["missing"].values())
    time = (*_rows(document, "parts", PART_NAMES, duration), _row("step", steps, duration))
    yield Table.of_rows(f"{name} ({layout}), time", HEADS, time, ("",), notes, totals=1)
    memory = sorted(
        _rows(document, "memory", CATEGORY_NAMES | {"peak": "memory"}, human),
        key=lambda row: row[0] == "memory",
    )
    title = f"{name}, memory of tensors on its fullest rank"
    counted_not = () if document["measured"]["memory"] else ("It was not counted in this run.",)
    yield Table.of_rows(title, HEADS, tuple(memory), ("",), counted_not, totals=1)
    if document["off"] is not None:
        yield _constants(document)


def _constants(document: Document) -> Table:
    """One row for each group of parts that is off and each constant that explains it; then the remedy."""
    rows = [
        (words, _off(group), one["constant"], f"{one['factor']:.3g}", CONSTANTS[one["constant"]])
        for group in document["off"]
        for number, one in enumerate(group["explanations"])
        for words in [_named(group) if not number else "or"]
    ]
    notes = [
        f"{_named(group)}: off by {_off(group)}; no constant makes them agree by a factor up to {FACTOR:g}."
        for group in document["off"]
        if not group["explanations"]
    ]
    if not document["off"]:
        notes = [f"No part is off by {NOTABLE:.0%} of the step: no constant has to change."]
    if document["causes"]:
        notes.append(f"The run names another cause: {', '.join(document['causes'])}. Remove it first.")
    if rows:
        file = document["cluster"] or "my-cluster.toml"
        probe = "" if document["cluster"] else f"meshtune probe --out {file}, then "
        notes.append(
            f"To fit the constants: {probe}meshtune calibrate {document['run']} … --cluster {file}, with "
            "three runs or more."
        )
    heads = ("parts", "off by", "constant", "factor", "what it is")
    return Table.of_rows(f"{document['run']}, constants with which the parts of today's plan agree", heads,
                   tuple(rows), ("parts", "constant", "what it is"), tuple(notes))  # fmt: skip


def _named(group: Document) -> str:
    parts: list[str] = group["parts"]
    return ", ".join(PART_NAMES.get(part, part) for part in parts)


def _off(group: Document) -> str:
    return difference(group["predicted"], group["measured"], duration)


def _rows(
    document: Document, key: str, names: Mapping[str, str], written: Callable[[float], str]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each part under `key` that one of the columns has."""
    sources = [(document[column] or {}).get(key) for column in ("measured", *PREDICTIONS)]
    for name in dict.fromkeys(name for source in sources for name in source or ()):
        values = [None if source is None else source.get(name, 0.0) for source in sources]
        if any(values):
            yield _row(names.get(name, name), values, written)


def _row(name: str, values: list[float | None], written: Callable[[float], str]) -> tuple[str, ...]:
    measured, *others = ["" if value is None else written(value) for value in values]
    cells = [name, measured]
    for value, text in zip(values[1:], others, strict=True):
        off = "" if value is None or values[0] is None else difference(value, values[0], written)
        cells += [text, off]
    return tuple(cells)
