"""A simulation as the values that report/dryrun draws and lists.

Simulation ─┐
StepTime   ─┼─> report.dryrun.page.DryRun ─> panels, tables, a page
Replay     ─┘
"""

from collections.abc import Mapping, Sequence

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.streams import RankTime, StepTime
from meshtune.dryrun.timeline import busy, passes, starts
from meshtune.dryrun.workspaces import Workspaces
from meshtune.report.dryrun.page import DryRun


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
