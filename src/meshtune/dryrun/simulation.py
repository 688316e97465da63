"""A layout that was dry-run: its traced ranks, what it needs of a GPU, and the planner's prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshtune.dryrun.facts import rank_facts
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.plan.cluster import Cluster
from meshtune.plan.facts import cluster_facts
from meshtune.plan.search import Choice
from meshtune.units import human


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
    predicted: Choice | None = None  # the planner's, None for a model that it can't count
    notes: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()  # if it does not fit: what would

    @cached_property
    def fullest(self) -> RankTrace:
        """The traced rank that needs most."""
        return max(self.traces, key=self.reserved)

    def reserved(self, trace: RankTrace) -> int:
        """Bytes that the allocator holds for a rank in its second step."""
        return trace.steps[1].peak()[0]

    @property
    def need(self) -> int:
        """Bytes of a GPU that the fullest rank needs."""
        return self.reserved(self.fullest) + self.outside

    @property
    def capacity(self) -> float:
        """Bytes of a GPU, or of its memory budget."""
        return min(self.cluster.memory, self.cluster.memory_budget or self.cluster.memory)

    @property
    def fits(self) -> bool:
        return self.need <= self.capacity

    @property
    def verdict(self) -> str:
        """Say whether the layout fits, with the numbers."""
        free = self.capacity - self.need
        each = f"{human(self.need)} of {human(self.capacity)} on its fullest rank, {self.fullest.rank:,}"
        if free < 0:
            return f"{self.layout} does not fit: it needs {each}, {human(-free)} too much."
        return f"{self.layout} fits: it needs {each}; {human(free)} stay free."

    def as_dict(self) -> dict[str, Any]:
        """The document of `dryrun --json`; bytes and seconds."""
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
            "ranks": [
                rank_facts(trace, self.stands_for[trace.rank], self.reserved(trace)) for trace in self.traces
            ],
            "predicted": self.predicted and self.predicted.as_dict(),
            "notes": list(self.notes),
            "instead": list(self.instead),
        }
