"""One step over time: the passes of each pipeline rank, and what the fullest rank holds meanwhile.

    placement/schedules.py  order of passes ┐
    seconds/                their times     ├──> StepOverTime: every pass with start and end
                                            │       └──> memory_over_time: bytes at the ends of passes
    memory/                 bytes           ┘

Nothing is added to the formulas: where a step has more micro-batches than are drawn, the rest repeats these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from meshtune.layout import ALL_AHEAD, Layout
from meshtune.placement.columns import Columns
from meshtune.placement.schedules import Pass, orders
from meshtune.placement.share import stage_blocks
from meshtune.plan.accounting import accounting_of
from meshtune.plan.machine import machine_of
from meshtune.plan.memory.reserved import transient
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import gradient_buffers
from meshtune.plan.memory.timeline import Table, step_timeline
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import Choice, end_costs, ranks_of
from meshtune.plan.seconds.block import Blocks
from meshtune.plan.seconds.collectives import gradient_collectives, optimizer_update
from meshtune.plan.seconds.ends import Ends, end_seconds
from meshtune.plan.seconds.pipeline import pipeline_seconds
from meshtune.plan.workload import Workload

MOST_PASSES = 2400  # that are drawn
ALONE = 3  # micro-batches that are drawn without a pipeline


class Timed(NamedTuple):
    """One pass, or what follows the passes, with its times in seconds."""

    rank: int
    kind: str  # F, B, I, W as in placement/schedules.py, data or optimizer
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
    if 2 * layout.stages * layout.gradient_accumulation_steps > 2 * MOST_PASSES:
        return None
    durations = _Durations.of(workload, choice)
    timed = list(_passes(layout, durations.seconds))
    data_end = max(one.end for one in timed) + durations.data
    for rank in range(layout.pp):
        last = max(one.end for one in timed if one.rank == rank)
        timed.append(Timed(rank, "data", last, last + durations.data))
        timed.append(Timed(rank, "optimizer", data_end, data_end + durations.optimizer))
    return StepOverTime(layout, whole, tuple(timed))


def _drawn(layout: Layout) -> int:
    """Micro-batches that are drawn: enough to fill the pipeline, and in whole rounds."""
    steps = layout.gradient_accumulation_steps
    if layout.pp == 1:
        return min(steps, ALONE)
    if layout.schedule in ALL_AHEAD:
        return steps
    rounds = max(2, min(3, MOST_PASSES // (2 * layout.stages * layout.pp)))
    return min(steps, rounds * layout.pp)


@dataclass(frozen=True)
class _Durations:
    """Seconds of a pass, and of what follows the passes."""

    forward: float  # of a block
    backward: float  # of a block, with its recomputation and the collectives of ZeRO
    weights: float  # the part of it that makes gradients of weights
    send: float  # to the next stage
    host: float  # of one micro-batch on a stage
    data: float  # collectives on gradients after the last backward
    optimizer: float  # the update, and the host's work for a step
    blocks: tuple[int, ...]  # of each stage
    ends: Ends

    @classmethod
    def of(cls, workload: Workload, choice: Choice) -> _Durations:
        columns, work, layout = Columns.of([choice.layout]), workload.work, choice.layout
        machine, tokens = machine_of(workload, choice.cluster), workload.seq_len
        documents = min(workload.document_tokens or tokens, tokens)
        every = Blocks.of(work, columns, machine, tokens, documents)
        block = every.mean(work.blocks / columns.pp)
        ends = end_seconds(work, columns, machine, tokens)
        pipeline = pipeline_seconds(work, columns, machine, tokens, blocks=every, ends=ends)
        seconds = {
            "forward": block.forward,
            "backward": block.backward + block.sharding,
            "weights": block.compute.weights,
            "send": pipeline.sends / (2 * columns.virtual_stages),
            "host": pipeline.host / columns.virtual_stages,
            "data": gradient_collectives(work, columns, machine, block),
            "optimizer": optimizer_update(work, columns, machine) + pipeline.host_step,
        }
        blocks = _stage_sizes(workload, layout)
        ends = Ends(*(float(np.squeeze(getattr(ends, each.name))) for each in fields(Ends)))
        numbers = {name: float(np.squeeze(value)) for name, value in seconds.items()}
        return cls(**numbers, blocks=blocks, ends=ends)

    def seconds(self, one: Pass) -> float:
        """Seconds of a pass with its send."""
        blocks, first = self.blocks[one.stage], one.stage == 0
        last = one.stage == len(self.blocks) - 1
        ends = self.ends
        weights = blocks * self.weights + first * ends.embedding + last * ends.weights
        inputs = blocks * (self.backward - self.weights) + last * ends.inputs
        inputs += (first + last) * ends.exchange + self.send
        match one.kind:
            case "F":
                at_ends = first * ends.exchange + last * ends.last_forward
                return blocks * self.forward + at_ends + self.host + self.send
            case "W":
                return weights
            case "I":
                return inputs
            case _:
                return inputs + weights


def _stage_sizes(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage: cut by cost by this engine, evenly by other tools."""
    blocks = int(workload.work.blocks)
    if workload.tool is not MESHTUNE:
        return tuple(len(part) for part in np.array_split(np.arange(blocks), layout.stages))
    first, last = end_costs(workload)
    return tuple(map(len, stage_blocks([1.0] * blocks, layout.stages, first=first, last=last)))


def _passes(layout: Layout, seconds: Callable[[Pass], float]) -> Iterator[Timed]:
    """Yield every pass, each as early as its inputs and its rank allow; those of a rank in their order."""
    waiting = orders(layout)
    ends: dict[Pass, float] = {}
    free = [0.0] * layout.pp
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
                free[rank] = ends[one] = start + seconds(one)
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

END, LAST = "end of backward", "end of the last backward"  # the latter with no micro-batch in flight


class Held(NamedTuple):
    """Bytes that a rank holds at one time, by category."""

    seconds: float
    event: str  # one of memory.timeline.EVENTS, or "forward"
    parts: dict[str, float]  # categories of Memory


def memory_over_time(workload: Workload, choice: Choice, drawn: StepOverTime) -> tuple[int, list[Held]]:
    """(Fullest pipeline rank, bytes that it holds at the ends of its passes and at the events inside them).

    Their peak is the layout's: the events are those of `step_timeline`, with as many micro-batches in flight
    as the rank has then.
    """
    at_rank = _RankMemory.of(workload, choice)
    held, started, found = 0.0, False, []
    share = 1 / choice.layout.stages_per_rank
    last_stage, timed = drawn.layout.stages - 1, drawn.of_rank(at_rank.rank)
    last = max(place for place, one in enumerate(timed) if one.kind in "BW")
    for place, one in enumerate(timed):
        ends_stage = one.stage == last_stage
        if one.kind == "F":
            found.append(at_rank.held(one.start, "forward", held, started))
            held += share
            found.append(at_rank.held(one.end, "forward", held, started))
            if ends_stage:
                found.append(at_rank.held(one.end, "loss", held, started))
        elif one.kind in "BI":
            if ends_stage:
                found.append(at_rank.held(one.start, "backward of the head", held, started))
            found.append(at_rank.held(one.start, "backward of a block", held, started))
            started = True
            if one.kind == "I":
                found.append(at_rank.held(one.end, "forward", held, started))
        if one.kind in "BW":
            held -= share
            event = at_rank.end_of_backward(last=place == last)
            found.append(at_rank.held(one.end, event, held, started))
        if one.kind == "optimizer":
            found += [at_rank.held(time, "update", 0.0, started) for time in (one.start, one.end)]
    return at_rank.rank, found


@dataclass(frozen=True)
class _RankMemory:
    """Bytes of one rank at each event, and how they change with the micro-batches in flight."""

    rank: int  # in the pipeline
    events: dict[str, dict[str, float]]  # event, or LAST -> category -> bytes
    in_flight: float  # activations of all micro-batches in flight at these events
    micro_batch: float  # of one of them
    no_gradients: float  # bytes of gradients before the first backward
    earlier_gradients: float  # of gradients that earlier micro-batches have left
    reserved: Callable[[Mapping[str, float]], float]  # overhead that grows with what comes and goes

    @classmethod
    def of(cls, workload: Workload, choice: Choice) -> _RankMemory:
        """Return the fullest rank's."""
        columns, work, tokens = Columns.of([choice.layout]), workload.work, workload.seq_len
        accounting = accounting_of(workload, choice.cluster)
        stages, place = ranks_of(workload, accounting, columns), int(choice.memory.rank)
        step = Step(work, columns, accounting, tokens, stages)
        table = Table(step)
        loss, flight, shape = table.loss, table.flight, table.shape

        def number(values: object) -> float:
            return float(np.broadcast_to(np.asarray(values), shape)[place, 0])

        alone = step_timeline(work, columns, accounting, tokens, stages, last_backward=True)
        timeline = step_timeline(work, columns, accounting, tokens, stages) | {LAST: alone[END]}
        events = {
            event: {name: number(of) for name, of in parts.items()} for event, parts in timeline.items()
        }
        flat = number(gradient_buffers(step))
        earlier = events["loss"]["gradients"] - number(stages.has_head * loss.gradients)
        before = earlier if accounting.precision.beside else flat
        return cls(
            rank=int(number(stages.rank)),
            events=events,
            in_flight=number(flight.total),
            micro_batch=number(flight.per_micro_batch),
            no_gradients=before,
            earlier_gradients=earlier,
            reserved=lambda parts: accounting.reserved * float(np.squeeze(transient(parts, columns))),
        )

    def end_of_backward(self, *, last: bool) -> str:
        """Name the event at the end of a backward. last: True for the step's; another one's holds more than
        what is in flight where an embedding's gradient is whole by then.
        """
        if last:
            return LAST
        return END if self.events[END] != self.events[LAST] else "forward"

    def held(self, seconds: float, event: str, micro_batches: float, started: bool) -> Held:
        """Bytes at an event with so many micro-batches in flight.

        event: of EVENTS, LAST, or "forward": none of them. started: whether a backward has made gradients.
        """
        at_event = self.events["loss" if event == "forward" else event]
        parts = dict(at_event)
        in_flight = micro_batches * self.micro_batch
        if event == "forward":
            parts |= {
                "activations": in_flight, "logits": 0.0, "gradients": self.earlier_gradients,
            }  # fmt: skip
        elif event == LAST:
            parts["activations"] += in_flight
        elif event == END:
            parts["activations"] += in_flight + self.micro_batch - self.in_flight
        elif event != "update":
            parts["activations"] += in_flight - self.in_flight
        if not started:
            parts["gradients"] += self.no_gradients - self.earlier_gradients
        elif event != "update":
            parts["gradients"] = max(parts["gradients"], self.earlier_gradients)
        parts["overhead"] += self.reserved(parts) - self.reserved(at_event)
        return Held(seconds, END if event == LAST else event, parts)
