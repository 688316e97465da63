"""Bytes that a rank holds at each event of a step, from the rows of tensors.py, and the peak of them all.

At each event the fullest of its points counts; what torch's allocator holds in addition, as a share of what
comes and goes, is added to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.layout import RECOMPUTATIONS, Layout
from meshtune.meter.trace import ACTIVATIONS, COMMUNICATION, GATHERED, LOGITS, TEMPORARY
from meshtune.placement.columns import Columns, Number
from meshtune.placement.ranks import process_groups
from meshtune.plan.accounting import Accounting
from meshtune.plan.memory.flight import InFlight, activations_in_flight
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import EVENTS, HEAD_REDUCE, OVERHEAD, POINTS, TIED, tensors
from meshtune.plan.work import Work
from meshtune.units import human

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster


@dataclass(frozen=True)
class Memory:
    """Bytes by category on the pipeline rank that holds most, at the event of a step when it does.

    One number per layout.
    """

    weights: Number
    gathered_weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    logits: Number
    communication: Number
    temporary: Number
    overhead: Number
    event: Number  # index in EVENTS
    rank: Number  # index in RANKS
    host: Number = 0.0  # of pinned host memory, not part of the peak, on the rank that holds most there

    @property
    def peak(self) -> Number:
        return sum(getattr(self, name) for name in CATEGORIES)

    def as_dict(self) -> dict[str, Any]:
        """Bytes by category, their sum as "peak", the "event" of that peak, and "host" unless 0, of one
        layout.
        """
        sizes = {name: getattr(self, name) for name in CATEGORIES}
        host = {"host": self.host} if self.host else {}
        return {**sizes, "peak": self.peak, "event": EVENTS[int(self.event)]} | host


CATEGORIES = tuple(field.name for field in fields(Memory) if field.name not in ("event", "rank", "host"))
CATEGORY_NAMES = {name: name.replace("_", " ") for name in CATEGORIES} | {
    "optimizer": "optimizer state",
    "communication": "communication buffers",
    "temporary": "temporaries of the update",
}
EVENT_OF = np.array([-1, *(EVENTS.index(event) for event in list(POINTS.values())[1:])])


class Liveness:
    """Tensors of a step, and what of them is alive at its points.

    flight: None: the most micro-batches that a rank has.
    """

    def __init__(self, step: Step, flight: InFlight | None = None) -> None:
        self.step, self.flight = step, flight or activations_in_flight(step)
        self.shape, self.tensors = np.shape(self.flight.total), list(tensors(step, self.flight))
        self.host = self.flight.host + step.states.host  # bytes of host memory
        # Shares that come and go within a step; weights that ZeRO-1 and -2 gather stay.
        transient = dict.fromkeys((ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY), 1.0)
        self.transient = transient | {GATHERED: step.layouts.zero == 3}

    def at(self, point: int) -> tuple[Number, Number]:
        """Bytes at a point of (all tensors, those that come and go)."""
        total, moving = 0.0, 0.0
        for _, category, born, dies, size in self.tensors:
            if born <= point <= dies:
                total = total + size
                if category in self.transient:
                    moving = moving + size * self.transient[category]
        return total, moving

    def fullest(self) -> Iterator[tuple[Number, Number]]:
        """Yield for each event (its fullest point, bytes with the allocator's reserve at it)."""
        step = self.step
        occurs = {HEAD_REDUCE: step.head_reduce > 0, TIED: step.tied > 0}
        for index in range(len(EVENTS)):
            point, most, moving = 0, -np.inf, 0.0
            for other in np.flatnonzero(index == EVENT_OF).tolist():
                total, transient = self.at(other)
                fuller = (total > most) & occurs.get(other, True)
                point, most = np.where(fuller, other, point), np.where(fuller, total, most)
                moving = np.where(fuller, transient, moving)
            yield point, most + step.accounting.reserved * moving

    def alive(self, point: Number, rank: Number | None = None) -> Iterator[tuple[str, str, Number]]:
        """Yield (name, category, bytes at a point) on all ranks or on `rank` of each layout; 0: not alive."""
        for name, category, born, dies, size in self.tensors:
            if rank is not None and np.ndim(size) > 1:  # else it is the same on all ranks
                size = _of_rank(np.broadcast_to(size, self.shape), rank)
            yield name, category, np.where((born <= point) & (point <= dies), size, 0.0)

    def parts(self, point: Number, rank: Number | None = None) -> dict[str, Number]:
        """Bytes by category at a point, as in `alive`; overhead: idle memory of streams, and `untraced`."""
        parts: dict[str, Number] = {}
        for _, category, size in self.alive(point, rank):
            parts[category] = parts[category] + size if category in parts else size
        return parts | {OVERHEAD: parts[OVERHEAD] + sum(self.untraced(parts).values())}

    def untraced(self, parts: Mapping[str, Number]) -> dict[str, Number]:
        """Bytes of the overhead by name, without tensors. parts: tensors' bytes by category."""
        accounting = self.step.accounting
        moving = sum(parts[category] * share for category, share in self.transient.items())
        return {
            "reserve of the allocator": accounting.reserved * moving,
            "CUDA context": accounting.context,
            "workspaces": accounting.workspace,
            "communicators": accounting.communicator * process_groups(self.step.layouts),
        }

    @cached_property
    def peak(self) -> tuple[Number, Number]:
        """(Point, index of the rank) at which most is held, reserve included, for each layout."""
        point, most = 0, -np.inf
        for fullest, size in self.fullest():
            higher = size > most
            point, most = np.where(higher, fullest, point), np.where(higher, size, most)
        rank = np.argmax(most, 0)
        return _of_rank(point, rank), rank

    def memory(self) -> Memory:
        """Bytes by category at the peak."""
        point, rank = self.peak
        host = np.max(np.broadcast_to(self.host, self.shape), 0)
        return Memory(**self.parts(point, rank), event=EVENT_OF[point], rank=rank, host=host)

    def timeline(self) -> dict[str, dict[str, Number]]:
        """Bytes that each pipeline rank holds at each of EVENTS, by category: [RANKS, layouts] each."""
        return {event: self.parts(point) for event, (point, _) in zip(EVENTS, self.fullest(), strict=True)}

    def at_peak(self) -> list[dict[str, Any]]:
        """Name, category and bytes of each kind of tensor and of what is untraced at the peak of the only
        layout, the largest first; of all together they are the peak.
        """
        sizes: Counter[tuple[str, str]] = Counter()
        for name, category, size in self.alive(*self.peak):
            sizes[name, category] += size.item()
        for name, size in self.untraced(self.parts(*self.peak)).items():
            sizes[name, OVERHEAD] += np.asarray(size).item()
        largest = [(key, size) for key, size in sizes.most_common() if size]
        return [{"name": name, "category": category, "bytes": size} for (name, category), size in largest]


def in_host_memory(size: float, layout: Layout, cluster: Cluster, *, states: bool) -> str:
    """A sentence on the pinned host memory that a rank needs for what it offloads; "" for 0 bytes.

    states: those of the optimizer are among it.
    """
    kept = [f"recompute={layout.recompute} keeps inputs of blocks"] * RECOMPUTATIONS[layout.recompute].host
    kept += ["train.offload=optimizer keeps the optimizer's states"] * states
    ranks = min(cluster.node, layout.world)
    machine = f", {human(size * ranks)} for the {ranks} of a machine" if ranks > 1 else ""
    if not size:
        return ""
    apart = "It isn't part of a GPU's peak."
    if cluster.gpu.processor:
        apart = "Processors compute in the same memory: add it to the peak."
    elif cluster.ram is not None and size * ranks > cluster.ram:
        apart += f" This machine has only {human(cluster.ram)}: use shorter sequences, or more machines."
    return f"{' and '.join(kept)} in {human(size)} of pinned host memory per rank{machine}. {apart}"


def peak(
    work: Work, layouts: Columns, accounting: Accounting, seq_len: Number, stages: Stages | None = None
) -> Memory:
    """The most that any pipeline rank holds at any event of a step, overhead included.

    stages: blocks of each pipeline rank; None: as the stack cuts them.
    """
    stages = stages or Stages.cut(work, layouts, accounting.stage_cut)
    return Liveness(Step(work, layouts, accounting, seq_len, stages)).memory()


def _of_rank(values: Number, rank: Number) -> Number:
    """Values [layouts] from values [RANKS, layouts]. rank: for each layout, the index to take."""
    return values[0] if len(values) == 1 else values[rank, np.arange(values.shape[1])]
