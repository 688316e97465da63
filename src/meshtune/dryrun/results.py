"""Everything that is shown of a simulation: tables for the terminal and the page, pictures, files of traces.

page_of      tables and pictures             report/dryrun/
write_files  DIR/dryrun.html, a picture each; trace.json for Perfetto; rank-<R>.pickle for memory_viz
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshtune.dryrun.kernels import BLOCKS, Kernels
from meshtune.dryrun.pictures import drawable, write_trace
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.snapshot import write_snapshot
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import side_by_side
from meshtune.report.dryrun.page import TOP, DryRun, write
from meshtune.report.dryrun.tables import operation
from meshtune.units import count, counted, duration, human, significant

MOST_KERNELS = 30  # operations of a block that are listed
MOST_COLLECTIVES = 6  # kinds of collectives that are listed
TRACE = "trace.json"
RESERVED = "reserved by the allocator"
OTHERWISE = {True: "without expandable segments", False: "with expandable segments"}


def page_of(simulation: Simulation, *, top: int = TOP) -> DryRun:
    """Tables and pictures of a simulation. top: groups of the largest tensors of each rank."""
    allocators = {
        RESERVED: simulation.replays,
        OTHERWISE[simulation.expandable]: simulation.other_replays,
    }
    run = drawable(simulation, times=simulation.times, replays=allocators, workspaces=simulation.workspaces)
    return replace(run, others=[table for table in tables(simulation) if table.rows], top=top)


def tables(simulation: Simulation) -> Iterator[Table]:
    """Yield the tables on time: the prediction next to the simulation, kernels, collectives by two models."""
    if simulation.predicted:
        yield side_by_side(simulation.as_dict())
    if simulation.costs is None:
        return
    kernels = simulation.kernels_of[simulation.fullest.rank]
    yield kernels_listing("Kernels of a step", [replace(row, name=row.place) for row in kernels.totals()])
    of_block = kernels.of_block()
    rest = len(of_block) - MOST_KERNELS
    note = f"Left out: {counted(rest, 'operation')} with less time."
    yield kernels_listing(
        "Kernels of a mean block, for one micro-batch", of_block[:MOST_KERNELS], note if rest > 0 else ""
    )
    every = simulation.disagreements
    rest = len(every) - MOST_COLLECTIVES
    lines = tuple((line,) for line in every[:MOST_COLLECTIVES])
    note = (f"Left out: {counted(rest, 'kind')} of collectives with less time.",) * (rest > 0)
    title = "Collectives that NCCL's tables predict otherwise"
    yield Table.of_rows(title, ("collective",), lines, ("collective",), note)


def kernels_listing(title: str, rows: list[Kernels], note: str = "") -> Table:
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
    name = "operation" if rows and rows[0].place == BLOCKS and rows[0].name != BLOCKS else "place"
    heads = (name, "phase", "kernels", "FLOP", "moved", "FLOP/B", "seconds alone")
    return Table.of_rows(title, heads, lines, (name, "phase"), (note,) if note else ())


def write_files(folder: Path, simulation: Simulation, run: DryRun) -> list[Path]:
    """Write page, pictures and traces into `folder`, and return the files. Files that exist are replaced.

    run: of `page_of`. Raises NotDrawn without Altair, and OSError.
    """
    files = write(folder, run)
    if simulation.times:
        files.append(folder / TRACE)
        write_trace(files[-1], simulation.times[-1], simulation.traces)
    for trace in simulation.traces:
        if trace.rank in simulation.replays:
            files.append(folder / f"rank-{trace.rank}.pickle")
            write_snapshot(files[-1], trace.steps, simulation.workspaces, expandable=simulation.expandable)
    return files
