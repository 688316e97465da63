"""A layout that was dry-run: its traced ranks, what it needs of a GPU, and the planner's prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.costs import Costs
from meshtune.dryrun.kernels import KernelTable, kernel_table
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.routing import BALANCED
from meshtune.dryrun.streams import StepTime, simulate
from meshtune.dryrun.workspaces import Workspaces
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.notebook import Notebook
from meshtune.placement.columns import at
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import attention_kernel
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.search import Choice, peaks_of_ranks
from meshtune.plan.workload import Workload
from meshtune.units import counted, duration, human


@dataclass(frozen=True, repr=False)
class Simulation(Notebook):
    """Two steps of each distinct rank of a layout."""

    model: str  # its name, for sentences
    layout: Layout
    cluster: Cluster
    kernels: str  # whose path was traced: "cuda" or "cpu"
    documents: tuple[int, ...]  # lengths of those in each sequence
    traces: tuple[RankTrace, ...]  # ascending by rank
    stands_for: Mapping[int, str]  # rank -> ranks that are like it
    outside: int  # bytes of a GPU that its allocator does not give: CUDA's context, NCCL's buffers
    workload: Workload | None = None  # with the layout's batch; None for a model that the planner can't count
    predicted: Choice | None = None  # by the planner
    copies: Mapping[int, int] = field(default_factory=dict)  # ranks.pipeline_copies
    expandable: bool = True  # segments of the GPU's allocator
    routing: str = BALANCED.kind  # of tokens to experts
    notes: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()  # if it does not fit: what would

    @cached_property
    def fullest(self) -> RankTrace:
        """The traced rank whose allocator holds most in a later step; of several, that with the highest peak
        (an allocator reserves whole pages, so that ranks are often equal).
        """
        return max(self.traces, key=lambda trace: (self.reserved(trace), trace.steps[1].peak()[0]))

    @cached_property
    def workspaces(self) -> Workspaces | None:
        """Memory of the GPU's kernels; None for processors."""
        if self.kernels != "cuda":
            return None
        gpu, workload = self.cluster.gpu, self.workload
        kernel = workload.attention_kernel(gpu) if workload else attention_kernel("meshtune", gpu)
        return Workspaces(gpu.architecture, kernel)

    @cached_property
    def replays(self) -> Mapping[int, Sequence[Replay]]:
        """Rank -> its two steps on torch's allocator, behind the reference's pass; empty for processors."""
        return self._replayed(expandable=self.expandable)

    @cached_property
    def other_replays(self) -> Mapping[int, Sequence[Replay]]:
        """The same steps on an allocator with the other setting of expandable segments."""
        return self._replayed(expandable=not self.expandable)

    def _replayed(self, *, expandable: bool) -> dict[int, list[Replay]]:
        return {
            trace.rank: replay_steps(trace.every, workspaces=self.workspaces, expandable=expandable)[-2:]
            for trace in (self.traces if self.workspaces else ())
        }

    @cached_property
    def full(self) -> Sequence[Replay]:
        """The fullest rank's steps on a GPU with this capacity, which gets free segments back when it is
        full; `out_of_memory` of the last one is set if memory runs out. Empty for processors.
        """
        if self.workspaces is None:
            return ()
        room = int(self.capacity) - self.outside
        return replay_steps(
            self.fullest.every, workspaces=self.workspaces, expandable=self.expandable, capacity=room
        )[-2:]

    def reserved(self, trace: RankTrace) -> int:
        """Bytes that the allocator holds for a rank in its second step; on processors, the most in use."""
        if self.workspaces:
            return self.replays[trace.rank][-1].reserved
        return max(step.peak()[0] for step in trace.every)

    @property
    def need(self) -> int:
        """Bytes of a GPU that the fullest rank takes where there is room."""
        return self.reserved(self.fullest) + self.outside

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory of the rank that needs most of it for what it offloads."""
        return max(trace.steps[1].host_bytes for trace in self.traces)

    @property
    def capacity(self) -> float:
        """Bytes of a GPU, or of its memory budget."""
        return min(self.cluster.memory, self.cluster.memory_budget or self.cluster.memory)

    @property
    def fits(self) -> bool:
        """True if both steps run, if necessary by giving free memory back to the GPU."""
        return self.need <= self.capacity or (bool(self.full) and self.full[-1].out_of_memory is None)

    @property
    def reference_is_largest(self) -> bool:
        """Whether more is in use in the reference's pass than in a step, on the fullest rank."""
        before, *steps = (step.peak()[0] for step in self.fullest.every)
        return len(steps) > 1 and before > max(steps)

    @property
    def summary_line(self) -> str:
        time = f" A step takes {duration(self.times[-1].seconds)}." if self.times else ""
        return f"{self.model} on {self.cluster.title}: {self.verdict}{time}"

    @property
    def verdict(self) -> str:
        """Say whether the layout fits, with the numbers."""
        free = self.capacity - self.need
        each = f"{human(self.need)} of {human(self.capacity)} on its fullest rank, {self.fullest.rank:,}"
        if free >= 0:
            return f"{self.layout} fits: it needs {each}; {human(free)} stay free."
        if not self.workspaces:
            return f"{self.layout} does not fit: it needs {each}, {human(-free)} too much."
        least = self.other_replays[self.fullest.rank][-1].reserved + self.outside
        instead = "" if self.expandable else f"With {SETTING} the allocator takes {human(least)}."
        if self.fits:
            first, later = (counted(replay.flushes, "time") for replay in self.full)
            return (
                f"{self.layout} fits barely: the allocator would take {each}. Where the GPU is full it gives "
                f"free memory back, {first} in the first step and {later} in a later one, and each time the "
                f"host waits for all kernels. {instead}"
            ).rstrip()
        more = instead if least <= self.capacity else ""
        return f"{self.layout} does not fit: it needs {each}, {human(-free)} too much. {more}".rstrip()

    @cached_property
    def costs(self) -> Costs | None:
        """Seconds of operations; None for processors and for a model that the planner can't count."""
        if self.workload is None or not self.cluster.timed:
            return None
        return Costs.of(self.workload, self.cluster)

    @cached_property
    def kernels_of(self) -> Mapping[int, KernelTable]:
        """Rank -> kernels of its second step; their seconds are 0 without `costs`."""
        return {trace.rank: kernel_table(trace, self.costs) for trace in self.traces}

    @cached_property
    def times(self) -> Sequence[StepTime]:
        """The first step and a later one on streams; () without `costs`."""
        if self.costs is None:
            return ()
        return [simulate(self.traces, self.layout, self.costs, step, copies=self.copies) for step in (1, 2)]

    @cached_property
    def predicted_peaks(self) -> Mapping[int, Liveness]:
        """The planner's memory of the first, a middle and the last pipeline rank, by index; empty for a model
        that it can't count.
        """
        if self.workload is None:
            return {}
        return peaks_of_ranks(self.workload, self.cluster, self.layout)

    def predicted_memory(self, trace: RankTrace, *, nearest: bool = False) -> dict[str, Any] | None:
        """Bytes that the planner predicts on the pipeline rank of a trace, by category as Memory.as_dict and
        by kind of tensor as Liveness.at_peak. Where the planner predicts another rank of the middle, the
        fullest there: with `nearest` its bytes, else None.
        """
        if not (peaks := self.predicted_peaks):
            return None
        index = trace.coordinates.get("pp", 0)
        middle = (other for other in peaks if 0 < other < self.layout.pp - 1)
        alike = (other for other in middle if nearest or self.copies.get(other) == index)
        if (peak := peaks.get(index) or peaks.get(next(alike, -1))) is None:
            return None
        return at(peak.memory(), 0).as_dict() | {"tensors": peak.at_peak()}
