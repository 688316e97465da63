"""A comparison as a page and in the terminal: curves of all runs over each other, tables of what differs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from meshtune.report.compare.runs import Comparison, Line, in_words
from meshtune.report.draw.document import Document, OnPage, Pictures
from meshtune.report.draw.kinds import Lines, Series
from meshtune.report.draw.page import notes, text
from meshtune.report.draw.table import BEST, Column, Table
from meshtune.report.draw.theme import OTHERS
from meshtune.report.run.panels import series, smoothed
from meshtune.report.run.report import conventions
from meshtune.report.run.samples import Asked, samples_section
from meshtune.report.run.summary import of_kind
from meshtune.rundir import Row
from meshtune.units import GIB, printable

ENVIRONMENT = "Model and environment that differ"


class Curve(NamedTuple):
    """A column of rows that becomes a panel."""

    key: str  # of the panel
    title: str
    unit: str
    kind: str  # of the rows
    column: str
    form: str  # d3 format of a value
    from_zero: bool = True
    noisy: bool = False  # True: long runs are drawn as their running mean, without the first step
    per: float = 1  # divides the values


CURVES = (  # a new panel is one row
    Curve("loss", "Training loss", "per label token", "train", "loss", ".4f", False, True),
    Curve("eval", "Held-out loss", "per label token", "eval", "loss", ".4f", False),
    Curve("exact_match", "Exact match", "of held-out prompts", "eval", "exact_match", ".1%"),
    Curve("learning_rate", "Learning rate", "", "train", "learning_rate", ".2e"),
    Curve("speed", "Speed", "tokens/s per device", "train", "tokens_per_second_per_gpu", ",.0f", noisy=True),
    Curve("grad_norm", "Gradient norm", "before clipping", "train", "grad_norm", ".3f", noisy=True),
    Curve("time", "Step time", "seconds", "train", "step_seconds", ".3f", noisy=True),
    Curve("memory", "Peak memory", "GiB", "train", "peak_memory_bytes", ".2f", per=GIB),
)


def comparison_page(comparison: Comparison) -> Document:
    """The comparison's parts."""
    environment = [*map(in_words, comparison.environment)]
    nothing = "<section><p class='empty'>Nothing has been measured yet.</p></section>"
    names, settings = comparison.names, _table("Settings that differ", comparison.names, comparison.settings)
    after = (
        settings.html("compared") or "<section><p class='empty'>All settings are the same.</p></section>",
        _table(ENVIRONMENT, names, environment).html("compared"),
        _samples(comparison),
    )
    return Document(
        name=" · ".join(comparison.names),
        kind="comparison",
        subtitle=text(f"{len(comparison.names)} runs: {', '.join(str(run.path) for run in comparison.runs)}"),
        parts=(
            OnPage(_table("", names, comparison.figures).html("compared") or nothing),
            OnPage(notes(comparison.notes)),
            Pictures(panels(comparison)),
            *map(OnPage, after),
        ),
        footer=text(
            "Made by meshtune from the files of these runs' folders. " + conventions(comparison.facts)
        ),
    )


def panels(comparison: Comparison) -> list[Lines]:
    """Every panel that any run has values for, with a curve for each run that has."""
    rows = [run.rows() for run in comparison.runs]
    drawn = []
    for one in CURVES:
        curves, averaged = [], False
        for name, colour, of_run in zip(comparison.names, OTHERS, rows, strict=False):
            parts = _curves(one, of_kind(of_run, one.kind))
            curves += [replace(parts[-1], name=name, colour=colour)] if parts[-1].x else []
            averaged |= len(parts) > 1
        unit = f"{one.unit}, running mean" if averaged else one.unit
        height = 280 if one.key == "loss" else 190
        axis = f"{one.title.lower()}, {one.unit}".removesuffix(", ")
        drawn.append(
            Lines(one.key, one.title, unit, tuple(curves), one.form, axis, one.from_zero, height=height)
        )
    end = max((x for panel in drawn for curve in panel.series for x in curve.x), default=1)
    return [replace(panel, x_end=end) for panel in drawn if panel.series]


def _curves(one: Curve, rows: Sequence[Row]) -> tuple[Series, ...]:
    """(The values of one run,), or (they, their running mean) of a noisy column of many values."""
    if one.noisy:  # compiling in the first step would flatten all the others
        return smoothed("", rows[1:] if one.key != "loss" and len(rows) > 10 else rows, one.column)
    return (series("", "other" if one.kind == "eval" else "main", rows, one.column, unit=one.per),)


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Final figures and settings that differ, in the terminal."""
    tables = (
        _table("", comparison.names, comparison.figures),
        _table("Settings that differ", comparison.names, comparison.settings),
        _table(ENVIRONMENT, comparison.names, [*map(in_words, comparison.environment)]),
    )
    parts: list[RenderableType] = []
    for table in tables:
        if table.rows:
            parts += [table] if table.title else [table, Text()]
    for note in comparison.notes:
        parts += [Text(note, style="yellow"), Text()]
    return Group(*parts)


def _table(title: str, names: Sequence[str], lines: Sequence[Line]) -> Table:
    """A line a quantity or setting, a column a run."""
    columns = [Column("", [line.name for line in lines], heading=True, style="dim")]
    for place, name in enumerate(names):
        cells = [
            Text(printable(line.cells[place]), style=BEST if line.best and line.best[place] else "")
            for line in lines
        ]
        columns.append(Column(printable(name), cells, wraps=True))
    return Table(title, tuple(columns))


def _samples(comparison: Comparison) -> str:
    """HTML of held-out prompts with the expected answer and each run's last one; "" without any."""
    rows = [
        Asked(one.prompt, one.question, one.expected, tuple(each and each.after for each in one.answers))
        for one in comparison.samples
    ]
    return samples_section(comparison.names, rows, "the runs' samples.jsonl")
