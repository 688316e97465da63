"""The parts of a step in time, from what each rank measured (clock.py): they add up to the step.

    forward, backward     only computation, recomputation apart
    recomputation         what a backward repeats of the forward
    communication         collectives of tensor, context and data parallelism that nothing hides
    bubble                waiting in a pipeline for hidden states and their gradients, sends included
    waiting               for the slowest rank, in any other collective
    optimizer             the update, with the gradients' norm and clipping
    loading               waiting for the next batch
    rest                  all else

All ranks of a collective end it at the same time: the one that waited least came last, and its wait is the
collective itself. What the others waited longer, they waited for that rank. The two are told apart step by
step, among the ranks of a pipeline stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from meshtune.layout import Layout
from meshtune.placement.ranks import coordinates
from meshtune.rundir import PARTS

COMPUTED = ("forward", "backward", "recomputation", "optimizer", "loading")  # measured as they are
AXIS_PARTS = {  # axis of the layout -> part of the planner's time that its collectives are
    "tp": "tensor", "cp": "context", "pp": "pipeline", "dp_shard": "data", "dp_replicate": "data"
}  # fmt: skip
WAITS = (*dict.fromkeys(AXIS_PARTS.values()), "experts", "other")  # experts: of ep; other: of all ranks
MEASURED = (*COMPUTED, *(f"wait {axis}" for axis in WAITS))  # by a clock, on each rank
SHOWN_RANKS = 64  # up to this many, each has its own numbers in a row


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, from every rank's clock."""

    seconds: float  # of the step, mean over ranks
    parts: Mapping[str, float]  # by PARTS, means over ranks
    exposed: Mapping[str, float]  # `communication` by axis (tensor, context, data), means over ranks
    busy: Sequence[float]  # of each rank: what it neither waited for others nor for data
    idle: Sequence[float]  # of each rank: waiting in the pipeline
    loading: Sequence[float]  # of each rank: waiting for data

    @property
    def slowest(self) -> int:
        """The rank that was busy longest."""
        return max(range(len(self.busy)), key=self.busy.__getitem__)

    @property
    def median_busy(self) -> float:
        return median(self.busy)


def step_time(layout: Layout, ranks: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> StepTime:
    """Put the ranks' clocks together.

    ranks: seconds by MEASURED, of each rank; seconds: of its whole step.
    """
    means = {name: mean(rank.get(name, 0.0) for rank in ranks) for name in MEASURED}
    stages: dict[int, list[Mapping[str, float]]] = {}
    for number, rank in enumerate(ranks):
        stages.setdefault(coordinates(layout, number)["pp"], []).append(rank)
    exposed = {
        axis: mean(min(rank.get(f"wait {axis}", 0.0) for rank in stage) for stage in stages.values())
        for axis in WAITS
        if axis != "pipeline"
    }
    parts = {name: means[name] for name in COMPUTED}
    parts["communication"] = sum(exposed.values())
    parts["bubble"] = means["wait pipeline"]
    parts["waiting"] = sum(means[f"wait {axis}"] for axis in exposed) - parts["communication"]
    step = mean(seconds)
    parts["rest"] = max(0.0, step - sum(parts.values()))
    waited = [sum(rank.get(f"wait {axis}", 0.0) for axis in WAITS) for rank in ranks]
    loading = [rank.get("loading", 0.0) for rank in ranks]
    return StepTime(
        seconds=step,
        parts={name: parts[name] for name in PARTS},
        exposed={axis: value for axis, value in exposed.items() if value},
        busy=[whole - wait - load for whole, wait, load in zip(seconds, waited, loading, strict=True)],
        idle=[rank.get("wait pipeline", 0.0) for rank in ranks],
        loading=loading,
    )


def time_row(
    step: int, found: StepTime, in_flight: Sequence[float] | None = None, **facts: Any
) -> dict[str, Any]:
    """The row of a step's time by part.

    in_flight: most micro-batches that each rank of a pipeline held. facts: more columns, for causes.py; those
    that are None are left out.
    """
    row: dict[str, Any] = {"kind": "time", "step": step, "seconds": found.seconds, "parts": dict(found.parts)}
    ranks = len(found.busy)
    if ranks > 1:
        row["exposed"] = dict(found.exposed)
        row["slowest"] = {
            "rank": found.slowest, "busy": found.busy[found.slowest], "median_busy": found.median_busy
        }  # fmt: skip
        if ranks <= SHOWN_RANKS:
            row["busy"], row["loading"] = list(found.busy), list(found.loading)
    if in_flight is not None and ranks <= SHOWN_RANKS:
        row["idle"], row["in_flight"] = list(found.idle), list(in_flight)
    return row | {name: value for name, value in facts.items() if value is not None}
