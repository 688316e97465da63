"""The order of passes on each pipeline rank under every schedule: that of torch's schedules, without torch.

F  forward                B  whole backward
I  backward of inputs     W  backward of weights, the other half of a backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from meshtune.layout import Layout
from meshtune.placement.share import stage_of_rank

MOST_PASSES = 4800  # of a step, that pictures show


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    kind: str  # F, B, I or W
    stage: int
    micro_batch: int


@dataclass
class _Order:
    """Passes of one rank in the order in which they were added; micro-batches count up by stage and kind."""

    passes: list[Pass] = field(default_factory=list)
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    waiting: list[Pass] = field(default_factory=list)  # I whose W has not been added

    def add(self, kind: str, stage: int) -> None:
        """Add the next micro-batch's pass; B and I count together."""
        key = ("I" if kind == "B" else kind, stage)
        self.passes.append(Pass(kind, stage, self.counts[key]))
        self.counts[key] += 1
        if kind == "I":
            self.waiting.append(self.passes[-1])

    def add_weights(self) -> None:
        """Add the W of the oldest I that waits for it, if there is one."""
        if self.waiting:
            self.passes.append(self.waiting.pop(0)._replace(kind="W"))


def orders(layout: Layout) -> list[list[Pass]]:
    """The passes of each pipeline rank in their order; without a pipeline, of the only one."""
    by_schedule: dict[str, Callable[[Layout, int, tuple[int, ...]], list[Pass]]] = {
        "gpipe": _one_stage,
        "1f1b": _one_stage,
        "interleaved1f1b": _rounds,
        "zb": _rounds,
        "loopedbfs": _looped,
        "zbv": _zbv,
        "dualpipev": _dualpipev,
    }
    order_of = by_schedule[layout.schedule]
    return [
        order_of(layout, rank, stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank))
        for rank in range(layout.pp)
    ]


def _one_stage(layout: Layout, rank: int, stages: tuple[int, ...]) -> list[Pass]:
    """GPipe, 1F1B: forwards ahead, then a backward and a forward in turn."""
    steps, order = layout.gradient_accumulation_steps, _Order()
    ahead = steps if layout.schedule == "gpipe" else min(layout.pp - rank, steps)
    for step in range(steps + ahead):
        if step >= ahead:
            order.add("B", stages[0])
        if step < steps:
            order.add("F", stages[0])
    return order.passes


def _rounds(layout: Layout, rank: int, stages: tuple[int, ...]) -> list[Pass]:
    """Interleaved 1F1B and interleaved ZB-H1: micro-batches go round in equal groups."""
    steps, pp, count = layout.gradient_accumulation_steps, layout.pp, len(stages)
    group = steps // max(1, steps // pp)
    zero_bubble = layout.schedule == "zb"
    ahead = min((count - 1) * group + (1 if zero_bubble else 2) * (pp - 1 - rank), steps * count)
    order = _Order()
    for step in range(steps * count + ahead):
        if step < steps * count:
            order.add("F", stages[step // group % count])
        if step >= ahead:
            order.add("I" if zero_bubble else "B", stages[count - 1 - (step - ahead) // group % count])
            if step - ahead >= rank:
                order.add_weights()
    for _ in range(len(order.waiting)):
        order.add_weights()
    return order.passes


def _looped(layout: Layout, _: int, stages: tuple[int, ...]) -> list[Pass]:
    """Looped BFS: all micro-batches through one stage after the other, and back."""
    steps = range(layout.gradient_accumulation_steps)
    forwards = [Pass("F", stage, step) for stage in stages for step in steps]
    return forwards + [Pass("B", stage, step) for stage in reversed(stages) for step in reversed(steps)]


def _zbv(layout: Layout, rank: int, stages: tuple[int, ...]) -> list[Pass]:
    """ZB-V: down the ranks and up again; each W after its I, but those of the last micro-batches."""
    pp, (down, up), order = layout.pp, stages, _Order()
    steps = max(2 * pp - 1, layout.gradient_accumulation_steps)

    def backward(stage: int) -> None:
        order.add("I", stage)
        order.add_weights()

    for _ in range(2 * (pp - rank) - 1):
        order.add("F", down)
    for _ in range(rank):
        order.add("F", up)
        order.add("F", down)
    for _ in range(pp - rank):
        order.add("F", up)
        backward(up)
    while order.counts["F", up] < order.counts["F", down] or order.counts["F", down] < steps:
        if order.counts["F", down] < steps:
            order.add("F", down)
        backward(down)
        order.add("F", up)
        backward(up)
    for _ in range(rank):
        order.add("I", down)
        order.add("I", up)
    late: dict[int, list[Pass]] = {down: [], up: []}
    for one in order.waiting:
        late[one.stage].append(one)
    order.waiting = late[down]
    for _ in range(pp - rank):
        order.add("I", down)
        order.add_weights()
    order.waiting = late[up] + order.waiting
    for _ in range(len(order.waiting)):
        order.add_weights()
    return [one for one in order.passes if one.micro_batch < layout.gradient_accumulation_steps]


def _dualpipev(layout: Layout, rank: int, stages: tuple[int, ...]) -> list[Pass]:
    """DualPipeV in its eight steps; a forward with a backward comes before it."""
    pp, (down, up), order = layout.pp, stages, _Order()
    behind = pp - rank - 1
    for _ in range(2 * behind):
        order.add("F", down)
    for _ in range(rank + 1):
        order.add("F", down)
        order.add("F", up)
    for _ in range(behind):
        order.add("I", up)
        order.add_weights()
        order.add("F", up)
    for _ in range(layout.gradient_accumulation_steps - 2 * pp + rank + 1):
        for forward, backward in ((down, up), (up, down)):
            order.add("F", forward)
            order.add("B", backward)
    for _ in range(behind):
        order.add("B", up)
        order.add("F", up)
        order.add("B", down)
    kind = "B"
    for place in range(rank + 1):
        for stage, parity in ((up, 1), (down, 0)):
            if place == (rank + 1) // 2 and rank % 2 == parity:
                kind = "I"
            order.add(kind, stage)
    for _ in range(behind):
        order.add_weights()
        order.add(kind, down)
    for _ in range(rank + 1):
        order.add_weights()
    return order.passes
