"""Traces made by hand: two blocks on one rank, the second step with optimizer state."""

from collections.abc import Sequence

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.streams import COMPUTE, Interval, RankTime, StepTime
from meshtune.layout import Layout
from meshtune.meter.trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    RECOMPUTATION,
    TEMPORARY,
    UPDATE,
    WEIGHTS,
    Change,
    Collective,
    Operation,
    RankTrace,
    StepTrace,
    Storage,
)
from meshtune.placement.schedules import Pass
from meshtune.plan.cluster import cluster_of
from meshtune.plan.seconds.step import PARTS, Seconds
from meshtune.sections import ClusterConfig
from meshtune.units import MIB

BLOCKS = 2


class Writer:
    """Writes one step, operation by operation."""

    def __init__(self, number: int) -> None:
        self.step = StepTrace(number)

    def run(self, name: str, phase: str, module: str = "", collective: Collective | None = None) -> None:
        self.step.operations.append(
            Operation(name, phase, module, 0, 0, ((4, 4),), "bfloat16", collective=collective)
        )

    def allocate(self, mib: float, category: str, name: str = "", shape: tuple[int, ...] = (4, 4)) -> int:
        """Allocate in the last operation, or before the step; return the storage's number."""
        by = self.step.operations[-1] if self.step.operations else None
        place = (by.module, by.name, by.phase) if by else ("", "", "")
        storage = Storage(int(mib * MIB), category, *place, shape=shape, dtype="bfloat16", name=name)
        self.step.storages.append(storage)
        self._change(len(self.step.storages) - 1, True)
        return len(self.step.storages) - 1

    def free(self, number: int) -> None:
        self._change(number, False)

    def _change(self, number: int, allocated: bool) -> None:
        self.step.changes.append(Change(len(self.step.operations) - 1, number, allocated))


def step_of(number: int) -> StepTrace:
    """A step with a collective, recomputation, and in its middle a peak that one operation alone makes."""
    writer = Writer(number)
    blocks = [f"model.layers.{block}.mlp.up_proj" for block in range(BLOCKS)]
    for block in blocks:
        writer.allocate(10, WEIGHTS, f"{block}.weight")
    writer.allocate(3, WEIGHTS, "lm_head.weight")
    if number > 1:
        for block in blocks:
            writer.allocate(20, OPTIMIZER, f"{block}.weight")
    kept = []
    for block in blocks:
        writer.run(
            "c10d.allgather_.default", FORWARD, block, Collective("all_gather", "dp_shard", 8, 16 * MIB)
        )
        gathered = [writer.allocate(4, COMMUNICATION), writer.allocate(16, GATHERED)]
        writer.run("aten.mm.default", FORWARD, block)
        kept.append(writer.allocate(32, ACTIVATIONS))
        for one in gathered:
            writer.free(one)
    writer.run("aten.mm.default", FORWARD, "lm_head")
    logits = writer.allocate(100, LOGITS, shape=(4, 500))
    writer.free(logits)  # in the same operation
    sums = []
    for block in reversed(blocks):
        writer.run("aten.mm.default", RECOMPUTATION, block)
        again = writer.allocate(8, ACTIVATIONS)
        writer.run("aten.mm.default", BACKWARD, block)
        sums.append(writer.allocate(10, GRADIENTS))
        writer.free(again)
        writer.free(kept.pop())
        writer.run(
            "c10d.reduce_scatter_.default", BACKWARD, block, Collective("reduce_scatter", "dp_shard", 8, MIB)
        )
    writer.run("aten._fused_adamw_.default", UPDATE)
    update = writer.allocate(1, TEMPORARY)
    writer.free(update)
    writer.step.host_reads["meshtune/train/step.py:90 step"] += 2
    writer.step.host_copies["meshtune/attention/cuda.py:7 attend"] += 1
    return writer.step


def trace_of(rank: int = 0, *, of: int = 1, stages: tuple[int, ...] = (0,)) -> RankTrace:
    """A rank's trace. of: micro-batches of the step, of which one was traced."""
    coordinates = {"pp": stages[0] if stages else 0, "dp_replicate": 0, "dp_shard": rank, "cp": 0, "tp": 0}
    return RankTrace(rank, coordinates, stages, [step_of(1), step_of(2)], 1, of, 0 if of > 1 else -1)


def time_of(*ranks: int) -> StepTime:
    """A step of two seconds whose pipeline runs these traces, with a kernel and an all-gather each."""
    nothing = Seconds(**dict.fromkeys(PARTS, 0.0))
    mm = step_of(1).operations[1]
    intervals = [
        Interval((0, stream), 0.0, begin=begin, end=end, name="mm", part=part, of=mm, run=Pass("F", 0, 0))
        for stream, part, begin, end in ((COMPUTE, "compute", 0.0, 1.0), ("dp_shard", "data", 0.2, 0.5))
    ]
    return StepTime(2.0, [RankTime(pp, rank, intervals, nothing) for pp, rank in enumerate(ranks)], nothing)


def simulation_of(
    layout: str, *traces: RankTrace, model: str = "tiny", times: Sequence[StepTime] = ()
) -> Simulation:
    """A dry run with these traces, whose allocators reserve 250 MiB and 260 MiB. times: of both steps."""
    parsed = Layout.parse(layout)
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=parsed.world)).of_size(parsed.world)
    ranks = {trace.rank: "all ranks" for trace in traces}
    made = Simulation(model, parsed, cluster, "cuda", (8,), traces, ranks, 0)
    replays = {rank: [Replay(reserved=250 * MIB), Replay(reserved=260 * MIB)] for rank in ranks}
    vars(made).update(times=times, replays=replays, other_replays=replays)
    return made
