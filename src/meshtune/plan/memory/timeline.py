"""Bytes that a rank holds at each event of a step, from the rows of tensors.py, and the peak of them all.

At each event the fullest of its points counts; what torch's allocator holds in addition, as a share of what
comes and goes, is added to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from meshtune.meter.trace import GATHERED
from meshtune.placement.columns import Columns, Number
from meshtune.plan.accounting import Accounting
from meshtune.plan.memory.activations import MicroBatchSizes, loss_bytes
from meshtune.plan.memory.flight import activations_in_flight
from meshtune.plan.memory.reserved import TRANSIENT, overhead, stream_bytes, transient
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import EVENTS, HEAD_REDUCE, OVERHEAD, POINTS, TIED, tensors
from meshtune.plan.work import Work


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

    @property
    def peak(self) -> Number:
        return sum(getattr(self, name) for name in CATEGORIES)

    def as_dict(self) -> dict[str, Any]:
        """Bytes by category, their sum as "peak", and the "event" of that peak, of one layout."""
        sizes = {name: getattr(self, name) for name in CATEGORIES}
        return {**sizes, "peak": self.peak, "event": EVENTS[int(self.event)]}


CATEGORIES = tuple(field.name for field in fields(Memory) if field.name not in ("event", "rank"))
CATEGORY_NAMES = {name: name.replace("_", " ") for name in CATEGORIES} | {
    "optimizer": "optimizer state",
    "communication": "communication buffers",
    "temporary": "temporaries of the update",
}
EVENT_OF = np.array([EVENTS.index(event) for event in POINTS.values()])


class Table:
    """Tensors of a step, added up by category and by the points between which they are alive."""

    def __init__(self, step: Step) -> None:
        self.step, inputs = step, (step.work, step.layouts, step.accounting)
        sizes = MicroBatchSizes.of(*inputs, step.seq_len)
        self.loss = loss_bytes(*inputs, sizes)
        self.flight = activations_in_flight(*inputs, step.seq_len, step.stages, self.loss)
        self.shape = np.shape(self.flight.total)
        streams = stream_bytes(*inputs, step.elements, step.stages)
        self.sums = added(
            ((category, *alive), size)
            for _, category, *alive, size in tensors(step, self.loss, self.flight, streams)
        )
        self.totals = added((alive, size) for (_, *alive), size in self.sums.items())
        moving = {**dict.fromkeys(TRANSIENT, 1.0), GATHERED: step.layouts.zero == 3}
        self.moving = added(
            (alive, size * moving[category])
            for (category, *alive), size in self.sums.items()
            if category in moving
        )

    def fullest(self) -> Iterator[tuple[Number, Number]]:
        """Yield for each event (its fullest point, bytes with the allocator's reserve at it)."""
        step, reserved = self.step, self.step.accounting.reserved
        occurs = {
            HEAD_REDUCE: step.reduced_head * step.accounting.reduce_bytes > 0,
            TIED: step.tied * step.accounting.precision.gradient > 0,
        }
        for index in range(len(EVENTS)):
            first, *points = np.flatnonzero(index == EVENT_OF).tolist()
            point: Number = np.full(self.shape, first)
            most, moving = (alive(sums, first) for sums in (self.totals, self.moving))
            for other in points:
                size = alive(self.totals, other)
                fuller = (size > most) & occurs.get(other, True)
                point, most = np.where(fuller, other, point), np.where(fuller, size, most)
                moving = np.where(fuller, alive(self.moving, other), moving)
            yield point, most + reserved * moving

    def parts(self, point: Number, rank: Number | None = None) -> dict[str, Number]:
        """Bytes by category at a point, overhead included, on all ranks or on `rank` of each layout."""
        parts: dict[str, Number] = {}
        for (category, born, dies), size in self.sums.items():
            size = size if rank is None else _of_rank(np.broadcast_to(size, self.shape), rank)
            size = np.where((born <= point) & (point <= dies), size, 0.0)
            parts[category] = parts[category] + size if category in parts else size
        layouts = self.step.layouts
        parts[OVERHEAD] = parts[OVERHEAD] + overhead(layouts, self.step.accounting, transient(parts, layouts))
        return parts


def added(rows: Iterable[tuple[Iterable[Any], Number]]) -> dict[tuple[Any, ...], Number]:
    """Add up rows of (key, bytes) by key."""
    sums: dict[tuple[Any, ...], Number] = {}
    for key, size in rows:
        sums[tuple(key)] = sums[tuple(key)] + size if tuple(key) in sums else size
    return sums


def alive(sums: Mapping[tuple[Any, ...], Number], point: int) -> Number:
    """Bytes at a point. sums: by the first and the last point at which they are alive."""
    return sum(size for (born, dies), size in sums.items() if born <= point <= dies)


def step_timeline(
    work: Work, layouts: Columns, accounting: Accounting, seq_len: Number, stages: Stages, **flags: bool
) -> dict[str, dict[str, Number]]:
    """Bytes that each pipeline rank holds at each of EVENTS, by category: [RANKS, layouts] each.

    flags: of `Step`.
    """
    table = Table(Step(work, layouts, accounting, seq_len, stages, **flags))
    return {event: table.parts(point) for event, (point, _) in zip(EVENTS, table.fullest(), strict=True)}


def peak(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    seq_len: Number,
    stages: Stages | None = None,
    **flags: bool,
) -> Memory:
    """The most that any pipeline rank holds at any event of a step, overhead included.

    stages: blocks of each pipeline rank; None: as the stack cuts them. flags: of `Step`.
    """
    stages = stages or Stages.cut(work, layouts, accounting.stage_cut)
    table = Table(Step(work, layouts, accounting, seq_len, stages, **flags))
    point, most = 0, -np.inf
    for fullest, size in table.fullest():
        higher = size > most
        point, most = np.where(higher, fullest, point), np.where(higher, size, most)
    rank = np.argmax(most, 0)
    point = _of_rank(point, rank)
    return Memory(**table.parts(point, rank), event=EVENT_OF[point], rank=rank)


def _of_rank(values: Number, rank: Number) -> Number:
    """Values [layouts] from values [RANKS, layouts]. rank: for each layout, the index to take."""
    return values[0] if len(values) == 1 else np.take_along_axis(values, rank[None], 0)[0]
