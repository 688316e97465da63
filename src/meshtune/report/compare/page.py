"""A comparison as a page and in the terminal: curves of all runs over each other, tables of what differs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshtune.report.compare.runs import Comparison, Line, in_words
from meshtune.report.draw.kinds import Lines, Series
from meshtune.report.draw.page import Page, text
from meshtune.report.draw.theme import OTHERS
from meshtune.report.run.panels import series, smoothed
from meshtune.report.run.report import conventions
from meshtune.report.run.samples import Asked, samples_section
from meshtune.report.run.summary import of_kind
from meshtune.rundir import Row
from meshtune.units import GIB, printable


class Column(NamedTuple):
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


COLUMNS = (  # a new panel is one row
    Column("loss", "Training loss", "per label token", "train", "loss", ".4f", False, True),
    Column("eval", "Held-out loss", "per label token", "eval", "loss", ".4f", False),
    Column("exact_match", "Exact match", "of held-out prompts", "eval", "exact_match", ".1%"),
    Column("learning_rate", "Learning rate", "", "train", "learning_rate", ".2e"),
    Column("speed", "Speed", "tokens/s per device", "train", "tokens_per_second_per_gpu", ",.0f", noisy=True),
    Column("grad_norm", "Gradient norm", "before clipping", "train", "grad_norm", ".3f", noisy=True),
    Column("time", "Step time", "seconds", "train", "step_seconds", ".3f", noisy=True),
    Column("memory", "Peak memory", "GiB", "train", "peak_memory_bytes", ".2f", per=GIB),
)


def comparison_page(comparison: Comparison) -> Page:
    """The comparison's parts."""
    environment = [*map(in_words, comparison.environment)]
    notes = "".join(f"<p class='note'>{text(note)}</p>" for note in comparison.notes)
    after = (
        _table("Settings that differ", comparison.names, comparison.settings, "All settings are the same."),
        _table("Model and environment that differ", comparison.names, environment, ""),
        _samples(comparison),
    )
    return Page(
        name=" · ".join(comparison.names),
        kind="comparison",
        subtitle=text(f"{len(comparison.names)} runs: {', '.join(str(run.path) for run in comparison.runs)}"),
        panels=panels(comparison),
        before=_table("", comparison.names, comparison.figures, "Nothing has been measured yet.") + notes,
        after="\n".join(section for section in after if section),
        footer=text(
            "Made by meshtune from the files of these runs' folders. " + conventions(comparison.facts)
        ),
    )


def panels(comparison: Comparison) -> list[Lines]:
    """Every panel that any run has values for, with a curve for each run that has."""
    rows = [run.rows() for run in comparison.runs]
    drawn = []
    for one in COLUMNS:
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


def _curves(one: Column, rows: Sequence[Row]) -> tuple[Series, ...]:
    """(The values of one run,), or (they, their running mean) of a noisy column of many values."""
    if one.noisy:  # compiling in the first step would flatten all the others
        return smoothed("", rows[1:] if one.key != "loss" and len(rows) > 10 else rows, one.column)
    return (series("", "other" if one.kind == "eval" else "main", rows, one.column, unit=one.per),)


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Final figures and settings that differ, in the terminal."""
    parts: list[RenderableType] = []
    for title, lines in (
        ("", comparison.figures),
        ("settings that differ", comparison.settings),
        ("model and environment that differ", [*map(in_words, comparison.environment)]),
    ):
        labels = max((len(line.name) for line in lines), default=0)
        width = (Console().width - labels - 4) // len(comparison.names) - 4
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
        table.add_column("", style="dim", no_wrap=True)
        for name in comparison.names:
            table.add_column(Text(at_slashes(printable(name), width)), overflow="fold")
        for line in lines:
            cells = zip(line.cells, line.best or [False] * len(line.cells), strict=True)
            table.add_row(
                Text(line.name),
                *(Text(at_slashes(printable(c), width), style="green" if b else "") for c, b in cells),
            )
        if lines:
            parts += [table, Text()]
    for note in comparison.notes:
        parts += [Text(note, style="yellow"), Text()]
    return Group(*parts)


def at_slashes(path: str, width: int) -> str:
    """The text on lines of at most `width` characters where it can be broken after a slash."""
    lines = [""]
    for part in re.split("(?<=/)", path):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _table(title: str, names: Sequence[str], lines: Sequence[Line], empty: str) -> str:
    """HTML of a section with a column per run; a sentence, or "" without it, where there are no lines."""
    heading = f"<h2>{title}</h2>" if title else ""
    if not lines:
        return f"<section>{heading}<p class='empty'>{text(empty)}</p></section>" if empty else ""
    head = "".join(f"<th>{text(name)}</th>" for name in names)
    rows = "".join(f"<tr><th>{text(line.name)}</th>{''.join(_cells(line))}</tr>" for line in lines)
    table = (
        f"<table class='facts compared'><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )
    return f"<section>{heading}<div class='wide'>{table}</div></section>"


def _cells(line: Line) -> Iterator[str]:
    for cell, best in zip(line.cells, line.best or [False] * len(line.cells), strict=True):
        yield f"<td{' class=best' if best else ''}>{text(cell)}</td>"


def _samples(comparison: Comparison) -> str:
    """HTML of held-out prompts with the expected answer and each run's last one; "" without any."""
    rows = [
        Asked(one.prompt, one.question, one.expected, tuple(each and each.after for each in one.answers))
        for one in comparison.samples
    ]
    return samples_section(comparison.names, rows, "the runs' samples.jsonl")
