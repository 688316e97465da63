"""The answer of a dry run as a Document, and the files of --plot.

document     one layout: verdict, tables, pictures; its facts are those of `dryrun --json`
joined       several layouts, with a table that compares them
write_files  DIR/dryrun.html, a picture each; trace.json for Perfetto; rank-<R>.pickle for memory_viz
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from meshtune.dryrun.kernels import Kernels
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.snapshot import write_snapshot
from meshtune.meter.trace import RankTrace
from meshtune.plan.machine import peak_flops
from meshtune.plan.memory.timeline import in_host_memory
from meshtune.report.draw.document import Document, InTerminal, Notes, OnPage, Part, Pictures
from meshtune.report.draw.kinds import Panel
from meshtune.report.draw.page import notes, text, tiles
from meshtune.report.draw.picture import Target
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import Facts, layouts_table, side_by_side
from meshtune.report.dryrun.facts import facts_of
from meshtune.report.dryrun.living import operation
from meshtune.report.dryrun.panels import (
    busy,
    memory_panel,
    passes,
    pipeline_panel,
    rank_title,
    roofline_panel,
    starts_of,
    streams_panel,
)
from meshtune.report.dryrun.perfetto import write_trace
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
from meshtune.units import count, counted, duration, human, significant

TOP = 20  # groups of the largest tensors of each rank
MOST_KERNELS = 30  # operations of a block that are listed
PAGE, TRACE = "dryrun.html", "trace.json"
FOOTER = "Counted by meshtune on fake tensors; nothing here was measured on a GPU."
RESERVED = "reserved by the allocator"
OTHERWISE = {True: "without expandable segments", False: "with expandable segments"}


def document(simulation: Simulation, top: int = TOP, *, drawn: Sequence[Panel] = ()) -> Document:
    """The answer for one layout. top: groups of the largest tensors of each rank. drawn: of `panels`."""
    facts = facts_of(simulation, top)
    verdict = Text(simulation.verdict, style="bold" if simulation.fits else "bold red")
    return Document(
        name=simulation.model,
        kind="dry run",
        subtitle=f"<code>{text(simulation.layout)}</code> on {text(simulation.cluster.title)}",
        parts=(
            InTerminal(verdict),
            InTerminal(Notes([*headlines(simulation, facts), ""], style="")),
            OnPage(headline_section(simulation)),
            Pictures(drawn),
            *tables(simulation, facts, top),
        ),
        facts=facts,
        footer=FOOTER,
    )


def joined(documents: Sequence[Document]) -> Document:
    """One answer for several layouts: that of each, and a table that compares them."""
    if len(documents) == 1:
        return documents[0]
    facts = [document.facts for document in documents]
    compared = [layouts_table(facts)] if all(layout["predicted"] for layout in facts) else []
    return Document("", [*map(InTerminal, documents), *compared], {"layouts": facts})


def headlines(simulation: Simulation, facts: Facts) -> Iterator[str]:
    """Yield sentences that stand below the verdict: the step's time, what was traced, notes."""
    if time := facts["time"]:
        yield (
            f"A step takes {duration(time['seconds'])}: {time['tokens_per_second_per_gpu']:,.0f} "
            f"{simulation.cluster.speed_unit}. These are the planner's seconds of each operation, laid on "
            "streams as the trace has them."
        )
    states = simulation.workload is not None and simulation.workload.offload != "none"
    if host := in_host_memory(simulation.host_bytes, simulation.layout, simulation.cluster, states=states):
        yield host
    trace = simulation.traces[0]
    if trace.micro_batches < trace.of:
        yield (
            f"{trace.micro_batches} of {trace.of} micro-batches were traced; the others count as number "
            f"{trace.steady}."
        )
    for rank, ranks in simulation.stands_for.items():
        if len(simulation.stands_for) > 1:
            yield f"Rank {rank:,} stands for {ranks}."
    yield from simulation.notes


def headline_section(simulation: Simulation) -> str:
    """HTML of the peaks as tiles, the verdict and the notes."""
    first, later = (max(trace.steps[step].peak()[0] for trace in simulation.traces) for step in (0, 1))
    sizes = {"peak of the first step": first, "peak of later steps": later}
    for title, by_rank in reserved(simulation).items():
        sizes[title] = max(max(steps) for steps in by_rank.values())
    sizes["a GPU has"] = int(simulation.capacity)
    figures = tiles(((name, human(size)) for name, size in sizes.items()), wide=True)
    return f"<section>{figures}<p>{text(simulation.verdict)}</p>{notes(simulation.notes)}</section>"


def reserved(simulation: Simulation) -> dict[str, dict[int, list[int]]]:
    """Bytes that the allocator holds at most in each step, by title and rank; none for processors."""
    replays = {RESERVED: simulation.replays, OTHERWISE[simulation.expandable]: simulation.other_replays}
    return {
        title: {rank: [step.reserved for step in steps] for rank, steps in by_rank.items()}
        for title, by_rank in replays.items()
        if by_rank
    }


def panels(simulation: Simulation) -> list[Panel]:
    """Memory of each rank, the pipeline, the streams of each rank, the roofline, as far as they are known."""
    drawn: list[Panel] = [
        memory_panel(trace, capacity=simulation.capacity, starts=starts_of(trace, simulation.times))
        for trace in simulation.traces
    ]
    later = simulation.times[-1] if simulation.times else None
    if later and simulation.layout.pp > 1:
        drawn.append(pipeline_panel([each for rank in later.ranks for each in passes(rank)]))
    for trace in simulation.traces:
        if later and (rank := later.of_trace(trace.rank)):
            title, key = f"Streams of {rank_title(trace)}", f"streams_of_rank_{trace.rank}"
            drawn.append(streams_panel(busy(rank), title=title, key=key))
    if simulation.costs and simulation.workload:
        fullest, peak = simulation.fullest, peak_flops(simulation.cluster.gpu, simulation.workload.precision)
        kinds, title = simulation.kernels_of[fullest.rank].kinds(), f"Roofline of {rank_title(fullest)}"
        roofline = roofline_panel(kinds, simulation.costs.machine, peak, title=title)
        drawn += [roofline] if roofline else []
    return [replace(panel, title=f"{panel.title}, simulated") for panel in drawn]


# Tables #


def tables(simulation: Simulation, facts: Facts, top: int) -> Iterator[Part]:
    """Yield every table that has a row: the peaks of all ranks, times, then all else of each rank, in the
    terminal only of the fullest one.
    """
    traces, held = simulation.traces, reserved(simulation)
    pairs = [peak_table(traces[first : first + 2], held) for first in range(0, len(traces), 2)]
    yield from pairs if len(pairs) == 1 else map(InTerminal, pairs)  # two have room in 80 columns
    if len(pairs) > 1:
        yield OnPage(peak_table(traces, held))
    yield from _with_rows(time_tables(simulation, facts))
    for trace in traces:
        of_rank = _with_rows(rank_tables(simulation, trace, top))
        yield from of_rank if trace is simulation.fullest else map(OnPage, of_rank)
    yield from _with_rows([substitutes_table(traces)])


def _with_rows(tables: Iterator[Table] | Sequence[Table]) -> list[Table]:
    return [table for table in tables if table.rows]


def rank_tables(simulation: Simulation, trace: RankTrace, top: int) -> Iterator[Table]:
    """Yield the tables of one rank, but for its peak."""
    yield largest_table(trace, simulation.layout, top)
    yield module_table(trace)
    yield collectives_table(trace)
    yield workspaces_table(trace, simulation.workspaces.table(trace) if simulation.workspaces else ())
    yield host_reads_table(trace)


def time_tables(simulation: Simulation, facts: Facts) -> Iterator[Table]:
    """Yield the tables on time: the prediction next to the simulation, and kernels."""
    if simulation.predicted:
        yield side_by_side(facts)
    if simulation.costs is None:
        return
    kernels = simulation.kernels_of[simulation.fullest.rank]
    yield kernels_table("Kernels of a step", kernels.totals())
    of_block = kernels.of_block()
    rest = len(of_block) - MOST_KERNELS
    note = f"Left out: {counted(rest, 'operation')} with less time."
    yield kernels_table(
        "Kernels of a mean block, for one micro-batch", of_block[:MOST_KERNELS], note if rest > 0 else ""
    )


def kernels_table(title: str, rows: list[Kernels], note: str = "") -> Table:
    """A table of kernels: launches, FLOPs, bytes moved, FLOPs per byte, seconds without others on the GPU."""
    lines = tuple(
        (
            operation(row.name),
            row.phase,
            f"{row.launches:,.0f}" if row.launches >= 9.5 else significant(row.launches, 2),
            count(row.flops) if row.flops else "",
            human(row.bytes),
            significant(row.intensity, 2) if row.flops else "",
            duration(row.seconds),
        )
        for row in rows
    )
    name = "operation" if rows and rows[0].name != rows[0].place else "place"
    heads = (name, "phase", "kernels", "FLOP", "moved", "FLOP/B", "isolated\nseconds")
    return Table.of_rows(title, heads, lines, (name, "phase"), (note,) if note else ())


# Files #


def write_files(
    target: Target, simulation: Simulation, document: Document, count: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write the pictures of a simulation; into a folder its page and traces too. Returns the files.

    count: as of Target.write. Files that exist are replaced. Raises OSError.
    """
    files = target.write(document, count)
    if not target.is_folder:
        return files
    folder = target.path
    files.insert(0, folder / PAGE)
    write_text_atomically(files[0], document.html())
    if simulation.times:
        files.append(folder / TRACE)
        write_trace(files[-1], simulation.times[-1], simulation.traces)
    for trace in simulation.traces:
        if trace.rank in simulation.replays:
            files.append(folder / f"rank-{trace.rank}.pickle")
            write_snapshot(files[-1], trace.steps, simulation.workspaces, expandable=simulation.expandable)
    return files
