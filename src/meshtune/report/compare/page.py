"""A comparison as a Document: curves of all runs over each other, tables of what differs."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group
from rich.text import Text

from meshtune.report.compare.runs import Comparison, Line, in_words
from meshtune.report.draw.document import Document, InTerminal, Notes, OnPage, Part, Pictures
from meshtune.report.draw.kinds import Lines
from meshtune.report.draw.page import EMPTY, text
from meshtune.report.draw.table import BEST, Column, Table
from meshtune.report.draw.theme import OTHERS
from meshtune.report.run.panels import QUANTITIES
from meshtune.report.run.report import conventions
from meshtune.report.run.samples import samples_table
from meshtune.units import printable

LOSS = QUANTITIES[0]._replace(title="Training loss", second=None)
DRAWN = (
    LOSS,
    LOSS._replace(key="eval", title="Held-out loss", kind="eval", smoothed=False),
    *(one for one in QUANTITIES[1:] if one.key not in ("mfu", "noise_scale")),
)


def comparison_page(comparison: Comparison) -> Document:
    """Final figures, settings and environment that differ, and answers to the same prompts."""
    names, environment = comparison.names, [*map(in_words, comparison.environment)]
    figures = _table("", names, comparison.figures)
    settings = _table("Settings that differ", names, comparison.settings)
    others = _table("Model and environment that differ", names, environment)
    nothing = OnPage(EMPTY.format("Nothing has been measured yet."))
    same = OnPage(EMPTY.format("All settings are the same."))
    parts: list[Part] = [
        *([figures, InTerminal(Text())] if figures.rows else [nothing]),
        OnPage(Notes(comparison.notes)),
        Pictures(panels(comparison)),
        settings if settings.rows else same,
        *([others] if others.rows else []),
        OnPage(samples_table(names, comparison.samples, "the runs' samples.jsonl")),
        *(InTerminal(Group(Text(note, style="yellow"), Text())) for note in comparison.notes),
    ]
    return Document(
        " · ".join(names),
        parts,
        comparison.as_dict(),
        "comparison",
        text(f"{len(names)} runs: {', '.join(str(run.path) for run in comparison.runs)}"),
        text("Made by meshtune from the files of these runs' folders. " + conventions(comparison.facts)),
    )


def panels(comparison: Comparison) -> list[Lines]:
    """Every panel that any run has values for, with a curve for each run that has."""
    rows = [run.rows() for run in comparison.runs]
    drawn = []
    for quantity in DRAWN:
        curves, averaged = [], False
        for name, colour, of_run in zip(comparison.names, OTHERS, rows, strict=False):
            parts = quantity._replace(second=None).curves(of_run)
            averaged |= len(parts) > 1
            curves += [replace(part, name=name, colour=colour) for part in parts[-1:]]
        unit = f"{quantity.unit}, running mean" if averaged else quantity.unit
        drawn.append(quantity.panel(curves, unit, 0))
    end = max((x for panel in drawn for curve in panel.series for x in curve.x), default=1)
    return [replace(panel, x_end=end) for panel in drawn if panel.series]


def _table(title: str, names: Sequence[str], lines: Sequence[Line]) -> Table:
    """A line a quantity or setting, a column a run."""
    columns = [Column("", [line.name for line in lines], heading=True, style="dim")]
    for place, name in enumerate(names):
        cells = [
            Text(printable(line.cells[place]), style=BEST if line.best and line.best[place] else "")
            for line in lines
        ]
        columns.append(Column(printable(name), cells, wraps=True))
    return Table(title, tuple(columns), kind="compared")
