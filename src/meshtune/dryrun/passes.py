"""A traced step cut into passes of micro-batches, and put together for every rank of the pipeline.

    trace of a rank ─> cut ─> before, {(kind, stage, micro-batch): operations}, after
    orders(layout)  ─> program ─> the same passes in the order of another rank, or of more micro-batches

Ranks and micro-batches that were not traced are copies: of a rank in the middle (ranks.pipeline_copies), of
the steady micro-batch. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshtune.dryrun.costs import makes_weight_gradient, matmul_sizes, runs
from meshtune.layout import Layout
from meshtune.meter.trace import FORWARD, UPDATE, Operation, RankTrace, StepTrace
from meshtune.placement.schedules import Pass, orders
from meshtune.placement.share import stage_of_rank

MESSAGES = ("send", "receive")


@dataclass
class Cut:
    """Operations of a step, by number, that run on a GPU or between GPUs."""

    before: list[int] = field(default_factory=list)
    passes: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)  # kind, stage, micro-batch
    after: list[int] = field(default_factory=list)
    message: int = 0  # bytes that are sent from a stage to the next one; 0: nothing is sent

    def run(self, kind: str, stage: int, micro_batch: int) -> list[int]:
        """Operations of a pass; where this micro-batch has none of its kind, of the one next to it.

        A backward that was traced in two halves is both.
        """
        found = [number for k, s, number in self.passes if (k, s) == (kind, stage)]
        if found:
            nearest = min(found, key=lambda number: abs(number - micro_batch))
            return self.passes[kind, stage, nearest]
        if kind == "B":
            return self.run("I", stage, micro_batch) + self.run("W", stage, micro_batch)
        return []


def is_message(operation: Operation) -> bool:
    """True for a send or a receive."""
    return operation.collective is not None and operation.collective.op in MESSAGES


def cut(step: StepTrace, planned: Sequence[Pass]) -> Cut:
    """Cut a step into passes. planned: those of its rank, by which a backward in two halves is known.

    A forward ends with its last operation outside of autograd: what it runs backward before, is the loss's.
    The second half of a backward begins with the first gradient of a weight, or after another pass. What
    belongs to no micro-batch (hooks on gradients) belongs to the pass before it.
    """
    operations, halves = step.operations, {(p.stage, p.micro_batch) for p in planned if p.kind == "I"}
    last_forward = {  # messages between two ranks are numbered together, whatever their stages
        (each.stage, each.micro_batch): number
        for number, each in enumerate(operations)
        if each.micro_batch >= 0 and each.phase == FORWARD and runs(each) and not is_message(each)
    }
    end = _end_of_passes(step)
    found, now = Cut(), ("", -1, -1)
    for number, each in enumerate(operations):
        if not runs(each):
            continue
        if number < end and is_message(each):
            assert each.collective is not None
            found.message = max(found.message, each.collective.bytes)
            continue
        place = each.stage, each.micro_batch
        if number < end and each.micro_batch >= 0:
            kind = "F" if number <= last_forward.get(place, -1) else "B"
            if kind == "B" and place in halves:
                within = now == ("I", *place) and not _of_weights(each, step)
                kind = "I" if within or ("I", *place) not in found.passes else "W"
            now = kind, *place
        of_pass = found.passes.setdefault(now, []) if now[0] else found.before
        (found.after if number >= end else of_pass).append(number)
    return found


def _of_weights(operation: Operation, step: StepTrace) -> bool:
    return matmul_sizes(operation) is not None and makes_weight_gradient(operation, step.storages)


def _end_of_passes(step: StepTrace) -> int:
    """Number of the first operation behind the last pass."""
    of_passes = [number for number, each in enumerate(step.operations) if each.micro_batch >= 0]
    last = of_passes[-1] + 1 if of_passes else 0
    updates = (n for n, each in enumerate(step.operations[last:], last) if each.phase == UPDATE)
    return next(updates, len(step.operations))


@dataclass
class Program:
    """Passes of one rank of the pipeline in a step."""

    trace: RankTrace  # its own, or of the rank that stands for it
    step: StepTrace
    cut: Cut
    order: list[tuple[Pass, list[int]]]  # passes with their operations, in order


def programs(
    traces: Sequence[RankTrace], layout: Layout, step: int, copies: Mapping[int, int]
) -> list[Program]:
    """The program of every rank of the pipeline, all micro-batches included.

    traces: of several with one index in the pipeline that of the lowest rank counts. step: 1 or 2. copies:
    index in the pipeline -> that of the rank whose trace runs there, where it is another one. Raises
    ValueError for a trace that is missing.
    """
    by_pp = {trace.coordinates.get("pp", 0): trace for trace in sorted(traces, key=lambda one: -one.rank)}
    source = [copies.get(rank, rank) for rank in range(layout.pp)]
    if missing := sorted({*source} - by_pp.keys()):
        raise ValueError(f"There is no trace of pipeline rank {', '.join(map(str, missing))}.")
    cuts = {
        rank: cut(step_of(by_pp[rank], step), _traced_order(layout, by_pp[rank], rank)) for rank in {*source}
    }
    made = []
    for rank, passes in enumerate(orders(layout)):
        like = source[rank]
        trace, found = by_pp[like], cuts[like]
        stages = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
        of_like = trace.stages or stages
        order = [
            (each, found.run(each.kind, of_like[stages.index(each.stage)], traced_number(trace, each)))
            for each in passes
        ]
        made.append(Program(trace, step_of(trace, step), found, order))
    return made


def step_of(trace: RankTrace, number: int) -> StepTrace:
    return trace.steps[min(number, len(trace.steps)) - 1]


def traced_number(trace: RankTrace, each: Pass) -> int:
    """Number in the trace of the micro-batch that stands for a pass's."""
    left_out = trace.of - trace.micro_batches
    if left_out <= 0 or trace.steady < 0 or each.micro_batch <= trace.steady:
        return each.micro_batch
    return max(trace.steady, each.micro_batch - left_out)


def _traced_order(layout: Layout, trace: RankTrace, rank: int) -> list[Pass]:
    steps = trace.micro_batches or layout.gradient_accumulation_steps
    return orders(replace(layout, gradient_accumulation_steps=steps))[rank]
