"""A layout that was dry-run: its traced ranks, what it needs of a GPU, and the planner's prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.costs import Costs
from meshtune.dryrun.kernels import KernelTable, kernel_table
from meshtune.dryrun.nccl import Nccl, differences
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.streams import StepTime, simulate
from meshtune.dryrun.workspaces import Workspaces
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.meter.trace import PHASES, RankTrace, StepTrace
from meshtune.placement.columns import at
from meshtune.plan.cluster import Cluster
from meshtune.plan.facts import cluster_facts
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.search import Choice, peaks_of_ranks
from meshtune.plan.workload import Workload
from meshtune.report.dryrun.living import Peak, alike, levels, made_by
from meshtune.report.dryrun.remedies import remedy
from meshtune.units import counted, human


@dataclass(frozen=True)
class Simulation:
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
        return Workspaces(self.cluster.gpu.architecture) if self.kernels == "cuda" else None

    @cached_property
    def replays(self) -> Mapping[int, Sequence[Replay]]:
        """Rank -> its two steps on torch's allocator; empty for processors."""
        return self._replayed(expandable=self.expandable)

    @cached_property
    def other_replays(self) -> Mapping[int, Sequence[Replay]]:
        """Those of the allocator that has expandable segments if this one has not, else has none."""
        return self._replayed(expandable=not self.expandable)

    def _replayed(self, *, expandable: bool) -> dict[int, list[Replay]]:
        return {
            trace.rank: replay_steps(trace.steps, workspaces=self.workspaces, expandable=expandable)
            for trace in (self.traces if self.workspaces else ())
        }

    @cached_property
    def full(self) -> Sequence[Replay]:
        """The fullest rank's steps on a GPU of this capacity, whose allocator gives free segments back where
        it is full; its last one says whether memory ran out. Empty for processors.
        """
        if self.workspaces is None:
            return ()
        room = int(self.capacity) - self.outside
        return replay_steps(
            self.fullest.steps, workspaces=self.workspaces, expandable=self.expandable, capacity=room
        )

    def reserved(self, trace: RankTrace) -> int:
        """Bytes that the allocator holds for a rank in its second step; on processors, those in use."""
        return self.replays[trace.rank][-1].reserved if self.workspaces else trace.steps[1].peak()[0]

    @property
    def need(self) -> int:
        """Bytes of a GPU that the fullest rank takes where there is room."""
        return self.reserved(self.fullest) + self.outside

    @property
    def capacity(self) -> float:
        """Bytes of a GPU, or of its memory budget."""
        return min(self.cluster.memory, self.cluster.memory_budget or self.cluster.memory)

    @property
    def fits(self) -> bool:
        """True if both steps run; an allocator that would hold more than there is gives free memory back."""
        return self.need <= self.capacity or (bool(self.full) and self.full[-1].out_of_memory is None)

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

    def allocator(self, trace: RankTrace) -> dict[str, Any] | None:
        """Facts of torch's allocator on a rank, its figures those of both steps; None for processors."""
        if self.workspaces is None:
            return None
        replays, others = self.replays[trace.rank], self.other_replays[trace.rank]
        return {
            "expandable_segments": self.expandable,
            "active_bytes": [replay.active for replay in replays],
            "reserved_bytes": [replay.reserved for replay in replays],
            "segments": [len(replay.segments) for replay in replays],
            "other_reserved_bytes": [replay.reserved for replay in others],
            "workspaces": [asdict(row) for row in self.workspaces.table(trace)],
        }

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
        """The planner's memory by index in the pipeline: the first, a middle and the last rank; empty for a
        model that it can't count.
        """
        if self.workload is None:
            return {}
        return peaks_of_ranks(self.workload, self.cluster, self.layout)

    def predicted_memory(self, trace: RankTrace) -> dict[str, Any] | None:
        """Bytes that the planner predicts on the pipeline rank of a trace, by category as Memory.as_dict and
        by kind of tensor as Liveness.at_peak; on one in the middle those of the fullest there.
        """
        if not (peaks := self.predicted_peaks):
            return None
        index = trace.coordinates.get("pp", 0)
        middle = next((other for other in peaks if 0 < other < self.layout.pp - 1), 0)
        peak = peaks[index if index in peaks else middle]
        return at(peak.memory(), 0).as_dict() | {"tensors": peak.at_peak()}

    @cached_property
    def disagreements(self) -> list[str]:
        """Sentences on collectives that NCCL's tables and the planner's formulas predict differently."""
        nccl = Nccl.of(self.cluster)
        if self.costs is None or nccl is None:
            return []
        return differences(self.fullest.collectives(self.fullest.steps[-1]), nccl, self.costs.collective)

    def time(self) -> dict[str, Any] | None:
        """Facts of a later step's time, in seconds; None without `costs`."""
        if self.workload is None or not self.times:
            return None
        first, later = self.times
        return {
            "seconds": later.seconds,
            "first_step_seconds": first.seconds,
            "tokens_per_second_per_gpu": self.workload.tokens / later.seconds / self.layout.world,
            "parts": vars(later.parts),
            "collectives": self.disagreements,
        }

    def as_dict(self, top: int = 0) -> dict[str, Any]:
        """The document of `dryrun --json`; bytes and seconds. top: groups of each rank's largest tensors."""
        ranks = [
            facts | {"largest": largest(trace, self.layout, top)}
            for facts, trace in zip(self._document["ranks"], self.traces, strict=True)
        ]
        return self._document | {"ranks": ranks}

    @cached_property
    def _document(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layout": str(self.layout),
            "world": self.layout.world,
            "cluster": cluster_facts(self.cluster),
            "kernels": self.kernels,
            "documents": list(self.documents),
            "fits": self.fits,
            "need_bytes": self.need,
            "outside_bytes": self.outside,
            "capacity": self.capacity,
            "fullest_rank": self.fullest.rank,
            "time": self.time(),
            "ranks": [
                rank_facts(
                    trace, self.stands_for[trace.rank], self.reserved(trace), self.kernels_of[trace.rank]
                )
                | {"allocator": self.allocator(trace), "predicted": self.predicted_memory(trace)}
                for trace in self.traces
            ],
            "predicted": self.predicted and self.predicted.as_dict(),
            "notes": list(self.notes),
            "instead": list(self.instead),
        }


# Facts #


EVENTS = 400  # entries of a timeline at most


def rank_facts(trace: RankTrace, stands_for: str, reserved: int, kernels: KernelTable) -> dict[str, Any]:
    """An entry of `ranks`; the outer figures are the second step's, which is like all later ones.

    stands_for: ranks that are like this one. reserved: bytes that the allocator holds for the second step.
    kernels: of that step.
    """
    first, second = trace.steps
    return {
        "rank": trace.rank,
        "stands_for": stands_for,
        "coordinates": trace.coordinates,
        "stages": list(trace.stages),
        "peak_bytes": second.peak()[0],
        "reserved_bytes": reserved,
        "flops": sum(trace.times(operation) * operation.flops for operation in second.operations),
        "collectives": [kind._asdict() for kind in trace.collective_kinds(second)],
        "phases": phases(kernels),
        "host_reads": dict(second.host_reads),
        "substitutes": list(trace.substitutes),
        "micro_batches": {"traced": trace.micro_batches, "of": trace.of, "steady": trace.steady},
        "trace_seconds": trace.seconds,
        "steps": [step_facts(first), step_facts(second)],
    }


def largest(trace: RankTrace, layout: Layout, top: int) -> list[dict[str, Any]]:
    """The `top` largest groups of tensors that are alike at the peak of later steps, with the setting that
    removes or shrinks each; bytes are those of the whole group.
    """
    peak = Peak.of(trace.steps[-1])
    return [
        {
            "bytes": tensors.bytes,
            "count": tensors.count,
            "tensor": tensors.name,
            "made_by": made_by(tensors),
            "shape": list(tensors.shape),
            "dtype": tensors.dtype,
            "category": tensors.category,
            "setting": remedy(tensors, layout, peak.vocabulary),
        }
        for tensors in alike(peak.storages)[:top]
    ]


def phases(kernels: KernelTable) -> dict[str, dict[str, int]]:
    """Kernels, FLOPs and bytes moved by each phase of a step; a collective is a kernel."""
    sums: dict[str, dict[str, int]] = {
        phase: dict.fromkeys(("kernels", "flops", "bytes"), 0) for phase in PHASES
    }
    for row in kernels.rows:
        for name, number in zip(sums[row.phase], (row.launches, row.flops, row.bytes), strict=True):
            sums[row.phase][name] += round(number)
    return {phase: counts for phase, counts in sums.items() if any(counts.values())}


def step_facts(step: StepTrace) -> dict[str, Any]:
    """Peak of one step, its composition, the peak of each phase, and the timeline.

    An entry of the timeline has the operation during which the bytes are held: phase, module and name.
    """
    peak, _ = step.peak()
    return {
        "step": step.step,
        "peak_bytes": peak,
        "by_category": positive(step.composition()),
        "phases": {
            phase: {"peak_bytes": size, "by_category": positive(parts)}
            for phase, (size, parts) in step.peaks.items()
        },
        "timeline": [[event(step, at), positive(sizes)] for at, sizes in levels(step, EVENTS)],
    }


def positive(sizes: Mapping[str, int]) -> dict[str, int]:
    """The categories that have any bytes."""
    return {name: size for name, size in sizes.items() if size}


def event(step: StepTrace, at: int) -> str:
    """Name an operation of the step: "forward model.layers.0.mlp.up_proj aten.mm.default"."""
    operation = step.operations[min(at, len(step.operations) - 1)]
    return " ".join(filter(None, (operation.phase, operation.module, operation.name)))
