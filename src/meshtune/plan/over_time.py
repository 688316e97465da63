"""One step over time: the passes of each pipeline rank, and what the fullest rank holds meanwhile.

    placement/schedules.py  order of passes ┐
    seconds/                their times     ├──> StepOverTime: every pass with start and end
                                            │       └──> memory_over_time: bytes at the ends of passes
    memory/                 bytes           ┘

Nothing is added to the formulas: where a step has more micro-batches than are drawn, the rest repeats these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from meshtune.layout import ALL_AHEAD, Layout
from meshtune.placement.columns import Columns, rows
from meshtune.placement.schedules import MOST_PASSES, Pass, orders
from meshtune.placement.share import stage_blocks
from meshtune.plan.accounting import accounting_of
from meshtune.plan.machine import machine_of
from meshtune.plan.memory.flight import activations_in_flight
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import START
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import Choice, end_costs, ranks_of
from meshtune.plan.seconds.step import StepTime
from meshtune.plan.workload import Workload

ALONE = 3  # micro-batches that are drawn without a pipeline


class Timed(NamedTuple):
    """One pass, or what follows the passes, with its times in seconds."""

    rank: int
    kind: str  # F, B, I, W as in placement/schedules.py, N (without gradients), data or optimizer
    start: float
    end: float
    stage: int = -1  # -1: of no stage
    micro_batch: int = -1


@dataclass(frozen=True)
class StepOverTime:
    """A step of the first `layout.gradient_accumulation_steps` micro-batches."""

    layout: Layout  # with the micro-batches that are drawn
    whole: Layout
    timed: tuple[Timed, ...]  # in the order in which they start on each rank

    @property
    def end(self) -> float:
        return max(one.end for one in self.timed)

    def of_rank(self, rank: int) -> list[Timed]:
        return [one for one in self.timed if one.rank == rank]


def step_over_time(workload: Workload, choice: Choice) -> StepOverTime | None:
    """The passes of a step, each as early as its inputs and its rank allow; None: too many to draw."""
    whole = choice.layout
    layout = replace(whole, gradient_accumulation_steps=_drawn(whole))
    if 2 * layout.stages * layout.gradient_accumulation_steps > MOST_PASSES:
        return None
    seconds, before, data, optimizer = _durations(workload, choice)
    before *= layout.gradient_accumulation_steps / whole.gradient_accumulation_steps
    timed = [Timed(rank, "N", 0.0, before) for rank in range(layout.pp) if before]
    timed += _passes(layout, seconds, before)
    data_end = max(one.end for one in timed) + data
    for rank in range(layout.pp):
        last = max(one.end for one in timed if one.rank == rank)
        timed.append(Timed(rank, "data", last, last + data))
        timed.append(Timed(rank, "optimizer", data_end, data_end + optimizer))
    return StepOverTime(layout, whole, tuple(timed))


def _drawn(layout: Layout) -> int:
    """Micro-batches that are drawn: enough to fill the pipeline, and in whole rounds."""
    steps = layout.gradient_accumulation_steps
    if layout.pp == 1:
        return min(steps, ALONE)
    if layout.schedule in ALL_AHEAD:
        return steps
    rounds = max(2, min(3, MOST_PASSES // (4 * layout.stages * layout.pp)))
    return min(steps, rounds * layout.pp)


def _durations(workload: Workload, choice: Choice) -> tuple[Callable[[str, int], float], float, float, float]:
    """(Function of a kind of pass and its stage that returns the seconds of a pass with its send; seconds of
    the passes without gradients before the first; of collectives on gradients after the last backward; of the
    update with the host's work for a step).
    """
    workload = choice.decided(workload)
    columns, machine = Columns.of([choice.layout]), machine_of(workload, choice.cluster)
    time = StepTime(workload.work, columns, machine, workload.seq_len, workload.document_tokens)
    block, pipeline, ends, weights_of_block = time.block, time.pipeline, time.ends, time.block.compute.weights
    sizes = _stage_sizes(workload, choice.layout)
    send, host = pipeline.sends / (2 * columns.virtual_stages), pipeline.host / columns.virtual_stages

    @cache
    def seconds(kind: str, stage: int) -> float:
        blocks, first, last = sizes[stage], stage == 0, stage == len(sizes) - 1
        forward = blocks * block.forward + first * ends.exchange + last * ends.last_forward + host + send
        weights = blocks * weights_of_block + first * ends.embedding + last * ends.weights
        inputs = blocks * (block.backward + block.sharding - weights_of_block) + last * ends.inputs
        inputs = inputs + (first + last) * ends.exchange + send
        return np.squeeze({"F": forward, "W": weights, "I": inputs, "B": inputs + weights}[kind]).item()

    update = time.seconds.optimizer + pipeline.host_step
    mismatched = workload.work.mismatched
    before = mismatched * time.without_gradients.total if mismatched else 0.0
    before, data, update = (float(np.squeeze(size)) for size in (before, time.gradients, update))
    return seconds, before, data, update


def _stage_sizes(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage: cut by cost by this engine, evenly by other tools."""
    blocks = int(workload.work.blocks)
    if workload.tool is not MESHTUNE:
        return tuple(len(part) for part in np.array_split(np.arange(blocks), layout.stages))
    first, last = end_costs(workload)
    return tuple(map(len, stage_blocks([1.0] * blocks, layout.stages, first=first, last=last)))


def _passes(layout: Layout, seconds: Callable[[str, int], float], begin: float) -> Iterator[Timed]:
    """Yield every pass, each as early as its inputs and its rank allow; those of a rank in their order."""
    waiting = orders(layout)
    ends: dict[Pass, float] = {}
    free = [begin] * layout.pp
    while any(waiting):
        left = sum(map(len, waiting))
        for rank, order in enumerate(waiting):
            taken = 0
            for one in order:
                inputs = [min(ends[way] for way in ways if way in ends) for ways in _inputs(one, layout)
                          if any(way in ends for way in ways)]  # fmt: skip
                if len(inputs) < len(_inputs(one, layout)):
                    break
                start = max([free[rank], *inputs])
                free[rank] = ends[one] = start + seconds(one.kind, one.stage)
                yield Timed(rank, one.kind, start, free[rank], one.stage, one.micro_batch)
                taken += 1
            del order[:taken]
        assert sum(map(len, waiting)) < left, f"{layout.schedule} waits for itself"


def _inputs(one: Pass, layout: Layout) -> list[list[Pass]]:
    """Passes that must have ended before this one: one of each inner list."""
    kind, stage, number = one
    if kind == "F":
        return [[Pass("F", stage - 1, number)]] if stage else []
    if kind == "W":
        return [[Pass("I", stage, number)]]
    after = [[Pass(way, stage + 1, number) for way in "BI"]] if stage < layout.stages - 1 else []
    return [[Pass("F", stage, number)], *after]


# memory #

FORWARD, END, EARLIER_END = "forward", "end of backward", "end of an earlier backward"


class Held(NamedTuple):
    """Bytes that a rank holds at one time, by category."""

    seconds: float
    event: str  # one of memory.timeline.EVENTS, or "forward"
    parts: dict[str, float]  # categories of Memory


class Sample(NamedTuple):
    """A time at which the bytes that a rank holds are computed."""

    seconds: float
    event: str
    micro_batches: float  # in flight; a share of one that is in some of a rank's stages
    started: bool  # gradients are there: a backward has begun


def memory_over_time(workload: Workload, choice: Choice, drawn: StepOverTime) -> tuple[int, list[Held]]:
    """(Fullest pipeline rank, bytes that it holds at the ends of its passes and at the events inside them).

    Their peak is the layout's: the events are those of `Liveness.timeline`, with the micro-batches that the
    rank has in flight then.
    """
    workload = choice.decided(workload)
    columns, accounting = Columns.of([choice.layout]), accounting_of(workload, choice.cluster)
    place = int(choice.memory.rank)
    stages = rows(ranks_of(workload, accounting, columns), slice(place, place + 1))
    rank = int(stages.rank[0, 0])
    times = list(_times(drawn, rank, choice.layout))
    in_flight, started = np.array([[time.micro_batches for time in times], [time.started for time in times]])
    step = Step(workload.work, columns, accounting, workload.seq_len, stages)
    # A sum in addition to the gradients is there from the start.
    started = started + accounting.precision.beside > 0
    liveness = Liveness(step, activations_in_flight(step).holding(in_flight[None], started[None]))
    timeline = {
        event: {name: np.broadcast_to(size, liveness.shape)[0] for name, size in parts.items()}
        for event, parts in [*liveness.timeline().items(), (FORWARD, liveness.parts(np.array(START)))]
    }
    # Others are in flight behind all backwards but the last: their ends are shown where they count those.
    counts_others = choice.layout.pp > 1 and np.ptp(timeline[END]["activations"]) > 0
    events = {EARLIER_END: END if counts_others else FORWARD}
    held = []
    for number, time in enumerate(times):
        event = events.get(time.event, time.event)
        parts = {name: float(sizes[number]) for name, sizes in timeline[event].items()}
        held.append(Held(time.seconds, event, parts))
    return rank, held


def _times(drawn: StepOverTime, rank: int, layout: Layout) -> Iterator[Sample]:
    """Yield the ends of a rank's passes and the events inside them."""
    in_flight, started, share = 0.0, False, 1 / layout.stages_per_rank
    last_stage, timed = drawn.layout.stages - 1, drawn.of_rank(rank)
    last = max(place for place, one in enumerate(timed) if one.kind in "BW")
    for place, one in enumerate(timed):
        if one.kind == "N":
            yield Sample(one.start, FORWARD, in_flight, started)
        elif one.kind == "F":
            yield Sample(one.start, FORWARD, in_flight, started)
            in_flight += share
            yield Sample(one.end, FORWARD, in_flight, started)
            if one.stage == last_stage:
                yield Sample(one.end, "loss", in_flight, started)
        elif one.kind in "BI":
            if one.stage == last_stage:
                yield Sample(one.start, "backward of the head", in_flight, started)
            yield Sample(one.start, "backward of a block", in_flight, started)
            started = True
            if one.kind == "I":
                yield Sample(one.end, FORWARD, in_flight, started)
        if one.kind in "BW":
            in_flight -= share
            yield Sample(one.end, END if place == last else EARLIER_END, in_flight, started)
        if one.kind == "optimizer":
            yield Sample(one.start, "update", 0.0, started)
            yield Sample(one.end, "update", 0.0, started)
