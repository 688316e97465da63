"""A dry run as a page and as pictures: what the pictures and tables of this folder show, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.report.draw.document import Document, OnPage, Pictures
from meshtune.report.draw.kinds import Panel
from meshtune.report.draw.page import notes, text, tiles
from meshtune.report.draw.picture import SUFFIXES
from meshtune.report.draw.picture import write as write_picture
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.panels import (
    Starts,
    memory_panel,
    pipeline_panel,
    rank_title,
    streams_panel,
)
from meshtune.report.dryrun.tables import (
    collectives_table,
    host_reads_table,
    largest_table,
    module_table,
    peak_table,
    substitutes_table,
    workspaces_table,
)
from meshtune.rundir import write_text_atomically
from meshtune.units import human

if TYPE_CHECKING:
    from meshtune.plan.over_time import Timed

TOP = 20  # groups of tensors on a page
PAGE = "dryrun.html"
FOOTER = "Counted by meshtune on fake tensors; nothing here was measured on a GPU."


@dataclass(frozen=True)
class DryRun:
    """All that a page can show; what is left out has no picture and no table."""

    model: str
    layout: Layout
    cluster: str  # its title, such as "8 x h100-sxm"
    traces: Sequence[RankTrace]  # at least one
    verdict: str = ""  # whether it fits, as a sentence
    capacity: float = 0  # bytes of a GPU; 0: not known
    # By rank:
    starts: Mapping[int, Sequence[Starts]] = field(default_factory=dict)  # of each step's operations
    busy: Mapping[int, Sequence[tuple[str, float, float, str, str]]] = field(default_factory=dict)  # Busy
    reserved: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)  # see peak_table
    workspaces: Mapping[int, Sequence[tuple[str, int, int, str]]] = field(
        default_factory=dict
    )  # see its table
    timed: Sequence[Timed] = ()  # passes of the pipeline
    others: Sequence[Table] = ()  # tables that are made elsewhere
    notes: Sequence[str] = ()
    top: int = TOP  # groups of the largest tensors of each rank


def panels(run: DryRun) -> list[Panel]:
    """Memory of each rank, the pipeline, and the streams of each rank, as far as they are known."""
    drawn: list[Panel] = [
        memory_panel(trace, capacity=run.capacity, starts=run.starts.get(trace.rank, ()))
        for trace in run.traces
    ]
    if run.timed:
        drawn.append(pipeline_panel(run.timed))
    return drawn + [
        streams_panel(
            run.busy[trace.rank], title=f"Streams of {rank_title(trace)}", key=f"streams_of_rank_{trace.rank}"
        )
        for trace in run.traces
        if trace.rank in run.busy
    ]


def listings(run: DryRun) -> list[Table]:
    """Every table that has a row: the peaks of all ranks side by side, then all else of each rank."""
    tables = [peak_table(run.traces, run.reserved), *run.others]
    for trace in run.traces:
        tables += rank_listings(run, trace)
    return [table for table in (*tables, substitutes_table(run.traces)) if table.rows]


def rank_listings(run: DryRun, trace: RankTrace) -> list[Table]:
    """Every table of one rank that has a row, but for its peak."""
    tables = (
        largest_table(trace, run.layout, run.top),
        module_table(trace),
        collectives_table(trace),
        workspaces_table(trace, run.workspaces.get(trace.rank, ())),
        host_reads_table(trace),
    )
    return [table for table in tables if table.rows]


def dryrun_page(run: DryRun, drawn: Sequence[Panel]) -> str:
    """The dry run as the HTML text of a page. drawn: its charts, of `panels`."""
    first, later = (max(trace.steps[number].peak()[0] for trace in run.traces) for number in (0, 1))
    facts = {"peak of the first step": human(first), "peak of later steps": human(later)}
    for title, held in run.reserved.items():
        facts[title] = human(max(max(sizes) for sizes in held.values()))
    if run.capacity:
        facts["a GPU has"] = human(run.capacity)
    verdict = f"<p>{text(run.verdict)}</p>" if run.verdict else ""
    return Document(
        name=run.model,
        kind="dry run",
        subtitle=f"<code>{text(run.layout)}</code> on {text(run.cluster)}",
        parts=(
            OnPage(f"<section>{tiles(facts.items(), wide=True)}{verdict}{notes(run.notes)}</section>"),
            Pictures(drawn),
            *listings(run),
        ),
        footer=FOOTER,
    ).html()


def write(folder: Path, run: DryRun, *, suffix: str = SUFFIXES[0]) -> list[Path]:
    """Write the page and a picture of each panel into `folder`, and return the files.

    suffix: of the pictures, .png or .svg. Files that exist are replaced. Raises NotDrawn without Altair.
    """
    drawn = panels(run)
    file = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, dryrun_page(run, drawn))
    title = f"{run.model} · {run.layout} · simulated"
    return [
        file,
        *(write_picture(folder / f"{panel.key}{suffix}", [[panel]], title=title) for panel in drawn),
    ]
