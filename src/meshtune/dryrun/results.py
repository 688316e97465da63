"""Everything that is shown of a simulation: tables for the terminal and the page, pictures, files of traces.

page_of      tables and pictures             report/dryrun/
write_files  DIR/dryrun.html, a picture each; trace.json for Perfetto; rank-<R>.pickle for memory_viz
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.kernels import BLOCKS, Kernels
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.snapshot import write_snapshot
from meshtune.dryrun.streams import COMPUTE, RankTime, StepTime
from meshtune.dryrun.workspaces import Workspaces
from meshtune.meter.trace import CATEGORIES, RankTrace, StepTrace
from meshtune.plan.over_time import Timed
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import side_by_side
from meshtune.report.dryrun.living import operation
from meshtune.report.dryrun.page import TOP, DryRun, write
from meshtune.rundir import write_text_atomically
from meshtune.units import count, counted, duration, human, significant

MOST_KERNELS = 30  # operations of a block that are listed
MOST_COLLECTIVES = 6  # kinds of collectives that are listed
TRACE = "trace.json"
PASSES = 0  # number of the thread with a rank's passes in TRACE; streams follow
KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
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


def drawable(
    simulation: Simulation,
    *,
    times: Sequence[StepTime] = (),
    replays: Mapping[str, Mapping[int, Sequence[Replay]]] | None = None,
    workspaces: Workspaces | None = None,
) -> DryRun:
    """Values to draw and to list of a simulation.

    times: of its first step and of a later one; (): memory is drawn over operations, and no streams.
    replays: title -> rank -> its steps. workspaces: of the GPU's architecture.
    """
    traces = simulation.traces
    timed = [trace for trace in traces if times and has_time(times[-1], trace.rank)]
    return DryRun(
        model=simulation.model,
        layout=simulation.layout,
        cluster=simulation.cluster.title,
        traces=traces,
        verdict=simulation.verdict,
        capacity=simulation.capacity,
        starts={
            trace.rank: [
                starts(rank_of(time, trace.rank), step, time.seconds)
                for step, time in zip(trace.steps, times, strict=True)
            ]
            for trace in timed
            if trace.micro_batches == trace.of  # else an operation runs at several times
        },
        busy={trace.rank: busy(rank_of(times[-1], trace.rank)) for trace in timed},
        reserved={
            title: {rank: [one.reserved for one in steps] for rank, steps in by_rank.items()}
            for title, by_rank in (replays or {}).items()
            if by_rank
        },
        timed=[one for rank in times[-1].ranks for one in passes(rank)]
        if times and simulation.layout.pp > 1
        else (),
        workspaces={
            trace.rank: [(row.name, row.operations, row.bytes, row.source) for row in workspaces.table(trace)]
            for trace in traces
        }
        if workspaces
        else {},
        notes=simulation.notes,
    )


def has_time(time: StepTime, rank: int) -> bool:
    """True for the traces that were simulated: one for each rank of the pipeline."""
    return any(one.trace == rank for one in time.ranks)


def rank_of(time: StepTime, rank: int) -> RankTime:
    """Times of the pipeline rank that runs the trace of `rank`."""
    return next(one for one in time.ranks if one.trace == rank)


# A trace for Perfetto #

#     process    a rank of the pipeline
#     thread     its passes; then a thread for each stream
#     counter    bytes by category, of ranks that were traced themselves
#
# The format is Chrome's JSON ("Trace Event Format", Google 2016): M names processes and threads, X is an
# event with its duration, C a counter; times in microseconds.


Event = dict[str, Any]


def write_trace(file: Path, time: StepTime, traces: Sequence[RankTrace], step: int = 2) -> None:
    """Write a simulated step. traces, step: those that were simulated. Raises OSError."""
    events = list(events_of(time, traces, step))
    write_text_atomically(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def events_of(time: StepTime, traces: Sequence[RankTrace], step: int) -> Iterator[Event]:
    """Yield the events of all ranks of the pipeline."""
    traced = {trace.rank: trace for trace in traces}
    for rank in time.ranks:
        itself = traced[rank.trace].coordinates.get("pp", 0) == rank.pp
        like = "" if itself else f", as rank {rank.trace:,}"
        yield from _names(rank, f"pipeline rank {rank.pp}{like}")
        for each in passes(rank):
            name = f"{KINDS[each.kind]} {each.micro_batch}, stage {each.stage}"
            yield _complete(rank.pp, PASSES, name, "pass", each.start, each.end)
        threads = _threads(rank)
        for each in rank.intervals:
            event = _complete(rank.pp, threads[each.stream], each.name, each.part, each.begin, each.end)
            event["args"] = {
                "module": each.module, "phase": each.phase, "stage": each.stage,
                "micro-batch": each.micro_batch, "operation": each.operation,
            }  # fmt: skip
            yield event
        if itself:
            yield from _memory(rank, traced[rank.trace], time.seconds, step)


def _threads(rank: RankTime) -> dict[str, int]:
    """Number of the thread of each stream: the compute stream's first, then as they begin."""
    streams = dict.fromkeys([COMPUTE, *(each.stream for each in rank.intervals)])
    return {stream: number for number, stream in enumerate(streams, PASSES + 1)}


def _names(rank: RankTime, title: str) -> Iterator[Event]:
    yield _named(rank.pp, PASSES, "process_name", name=title)
    yield _named(rank.pp, PASSES, "process_sort_index", sort_index=rank.pp)
    for stream, thread in {"passes": PASSES, **_threads(rank)}.items():
        yield _named(rank.pp, thread, "thread_name", name=stream)
        yield _named(rank.pp, thread, "thread_sort_index", sort_index=thread)


def _named(process: int, thread: int, what: str, **values: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": values}


def _complete(process: int, thread: int, name: str, category: str, begin: float, end: float) -> Event:
    """An event with its duration. Both ends are rounded to nanoseconds, so that neighbours don't overlap."""
    first, last = round(1e9 * begin), round(1e9 * end)
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": first / 1000, "dur": (last - first) / 1000,
    }  # fmt: skip


def _memory(rank: RankTime, trace: RankTrace, seconds: float, step: int) -> Iterator[Event]:
    """Bytes by category whenever they change; of changes at one time the highest sum, then the last one."""
    traced = trace.steps[step - 1]
    times = starts(rank, traced, seconds)
    highest: dict[float, dict[str, int]] = {}
    last: dict[float, dict[str, int]] = {}
    for at, sizes in traced.timeline():
        time = round(1e9 * times[max(at, 0)]) / 1000 if times[:-1] else 0.0
        highest[time] = max(highest.get(time, sizes), sizes, key=lambda each: sum(each.values()))
        last[time] = sizes
    for time, sizes in highest.items():
        settled = [(time + 0.001, last[time])] if last[time] != sizes else []  # a nanosecond later
        for begin, parts in ((time, sizes), *settled):
            args = {category: parts.get(category, 0) for category in CATEGORIES}
            yield {"ph": "C", "pid": rank.pp, "tid": PASSES, "name": "memory", "ts": begin, "args": args}


# Timeline #

# Without torch.


def passes(rank: RankTime) -> list[Timed]:
    """Passes of a rank, each from its first kernel to its last one, in the order in which they begin."""
    found: list[Timed] = []
    for each in rank.intervals:
        if each.stream != COMPUTE or not each.kind:
            continue
        key = each.kind, each.stage, each.micro_batch
        if found and (found[-1].kind, found[-1].stage, found[-1].micro_batch) == key:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(Timed(rank.pp, each.kind, each.begin, each.end, each.stage, each.micro_batch))
    return found


def busy(rank: RankTime) -> list[tuple[str, float, float, str, str]]:
    """(Stream, begin, end, label, part) of each kernel and collective, for report.dryrun's streams_panel.

    The part of kernels is their phase: all of them are computation.
    """
    return [
        (
            each.stream,
            each.begin,
            each.end,
            " ".join(filter(None, (each.name, each.module))),
            each.phase if each.stream == COMPUTE else each.part,
        )
        for each in rank.intervals
    ]


def starts(rank: RankTime, step: StepTrace, seconds: float) -> list[float]:
    """Seconds at which each operation begins on the compute stream, ascending, then the step's end.

    Operations without a kernel, and those on other streams, begin with the last kernel before them. seconds:
    of the step.
    """
    begins: dict[int, float] = {}
    for each in rank.intervals:
        if each.stream == COMPUTE:
            begins.setdefault(each.operation, each.begin)
    times, now = [], 0.0
    for number in range(len(step.operations)):
        now = max(now, begins.get(number, now))
        times.append(now)
    return [*times, seconds]
