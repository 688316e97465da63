"""Bytes that a rank holds at each event of a step, in closed forms, and the peak of them all.

    model states (weights, gradients, optimizer)   states.py
    saved activations x micro-batches in flight    activations.py, stages.py, flight.py
    last norm, logits, loss                        activations.py
    whole weights and gradients in collectives     buffers.py
    gradients, update                              here
    what torch's allocator holds on top            reserved.py
                                                   ──> `step_timeline`: by event and category ──> `peak`

A stack's habits are data (`Accounting`, stacks.toml), not branches. Every number is a float or an array, one
element per layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.placement.states import Elements, States, held_states
from meshtune.plan.accounting import Accounting
from meshtune.plan.memory.activations import LossBytes, MicroBatchSizes, loss_bytes
from meshtune.plan.memory.buffers import DataParallelBuffers, data_parallel_buffers, unreduced
from meshtune.plan.memory.flight import InFlight, activations_in_flight
from meshtune.plan.memory.reserved import stream_bytes, with_overhead
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import RankElements, rank_elements
from meshtune.plan.work import Work

EVENTS = ("loss", "backward of the head", "backward of a block", "end of backward", "update")


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


def gradients_before_backward(
    layouts: Columns,
    accounting: Accounting,
    states: States,
    flight: InFlight,
    stages: Stages,
    elements: RankElements,
    *,
    head_gradient: Number,
) -> tuple[Number, Number]:
    """Bytes of gradients already allocated (in the last loss, when the fullest backward starts).

    If all micro-batches are in flight (GPipe), gradients appear only after the first backward, which has
    freed one micro-batch's activations: only what exceeds those counts, and the head's, which are there
    before a block's. Without a pipeline, 0 for a step of one micro-batch. Where a sum lies beside the
    gradients (`Copies.beside`), it is there from the start.

    states: as `held_states` returns them. head_gradient: elements of it, as in MicroBatchSizes.
    """
    precision, accumulates = accounting.precision, layouts.gradient_accumulation_steps > 1
    if precision.beside:
        both = precision.accumulated + precision.beside * precision.gradient
        sums = states.gradients * precision.accumulated / both
        earlier = sums if accounting.frees_added_gradients else np.where(accumulates, states.gradients, sums)
        return earlier + flight.head_gradients, earlier + flight.head_gradients
    all_in_flight = (layouts.pp > 1) & (flight.micro_batches >= layouts.gradient_accumulation_steps)
    head = stages.has_head * head_gradient * precision.accumulated
    exceeding = np.maximum(states.gradients - flight.per_micro_batch, head)
    missing = late_gradients(layouts, elements, stages) * states.gradients
    freed = np.minimum(missing, flight.per_micro_batch / layouts.virtual_stages)
    earlier = np.where(accumulates, states.gradients, 0.0)
    at_loss = np.where(all_in_flight, 0.0, earlier - missing)
    before_backward = np.where(all_in_flight, exceeding, earlier - freed)
    return at_loss + flight.head_gradients, before_backward + flight.head_gradients


def late_gradients(layouts: Columns, elements: RankElements, stages: Stages) -> Number:
    """Share of a rank's gradients whose first backward comes behind the fullest loss.

    In DualPipeV that is the first rank's first stage, if a step has no more micro-batches than it needs.
    """
    late = layouts.runs("dualpipev") & (layouts.gradient_accumulation_steps <= 2 * layouts.pp)
    of_stage = (
        elements.before_blocks.trained + elements.block.trained * stages.blocks / layouts.virtual_stages
    )
    return np.where(late & (stages.rank == 0), of_stage / np.maximum(elements.total.trained, 1.0), 0.0)


def gradient_buffers(accounting: Accounting, elements: RankElements, head_gradient: Number) -> Number:
    """Bytes of contiguous buffers of gradients, and of the tensors that have their shapes.

    head_gradient: elements of the head's gradient on each pipeline rank.
    """
    flat = elements.total.trained * accounting.flat_buffers
    return flat + (elements.block.matrices + head_gradient) * accounting.shape_buffers


def converted_gradients(
    layouts: Columns, accounting: Accounting, elements: RankElements, stages: Stages
) -> Number:
    """Bytes that the update adds to convert gradients to the trained weights' width (optim/optimizer.py).

    One bucket at a time; 0 where gradients were summed over micro-batches or ranks as wide as that. Sums that
    are wider are converted one tensor at a time, each freed before the next: only the first one counts, the
    embedding. But replicas sum a block's in one buffer (parallel/replicas.py), which is there until the last
    of them is converted; the sum of the embedding has then been freed, and is taken off.
    """
    precision = accounting.precision
    before = elements.before_blocks
    first = np.where(accounting.gathers_shards(layouts), before.trained_shard, before.trained)
    narrows = precision.trained < precision.accumulated
    narrowed = stages.has_embedding * first * precision.trained * narrows
    first_block = stages.has_embedding * before.trained * (precision.trained - precision.accumulated)
    first_block = first_block + elements.block.trained * precision.trained
    in_buffers = (accounting.gradient_replicas(layouts) > 1) & np.asarray(accounting.shards_masters)
    narrowed = np.where(in_buffers & narrows, np.maximum(narrowed, first_block), narrowed)
    missing = np.maximum(precision.trained - precision.gradient, 0.0)
    bucket = np.minimum(elements.total.trained, accounting.bucket_elements) * missing
    summed = accounting.gathers_shards(layouts) | (layouts.gradient_accumulation_steps > 1)
    return np.where(summed | (accounting.gradient_replicas(layouts) > 1), narrowed, bucket)


def optimizer_state(
    layouts: Columns, accounting: Accounting, states: States, total: Elements
) -> tuple[Number, Number]:
    """Bytes of (masters alone, all optimizer state with its flat buffers) on a rank.

    FSDP's masters are the weights: they are not counted here. total: elements of the rank's parameters.
    """
    precision = accounting.precision
    updated = np.where(layouts.zero > 0, total.trained_shard, total.trained)
    masters = updated * precision.master
    optimizer = states.optimizer + updated * accounting.flat_shard_buffers
    return np.where(accounting.gathers_shards(layouts), 0.0, masters), optimizer


def loss_event(
    in_forward: Mapping[str, Number],
    flight: InFlight,
    buffers: DataParallelBuffers,
    loss: LossBytes,
    stages: Stages,
) -> dict[str, Number]:
    """Bytes by category in the loss, or in the last block's forward before it.

    in_forward: bytes that the two share.
    """
    in_loss = {
        **in_forward,
        "gradients": in_forward["gradients"] + stages.has_head * loss.gradients,
        "activations": flight.at_loss + stages.has_head * loss.activations,
        "logits": stages.has_head * loss.logits,
    }
    in_block = {
        **in_forward,
        "gathered_weights": in_forward["gathered_weights"] + buffers.gathered_block,
        "activations": flight.in_block_forward,
    }
    return fuller(in_loss, in_block)


def head_backward_event(
    steady: Mapping[str, Number],
    states: States,
    flight: InFlight,
    buffers: DataParallelBuffers,
    loss: LossBytes,
    stages: Stages,
) -> dict[str, Number]:
    """Bytes by category in the backward of the last norm, or in FSDP's reduce-scatter of the head's gradient,
    which follows it. steady: bytes that no event changes.
    """
    norm = {
        **steady,
        "gathered_weights": states.gathered + buffers.gathered_in_head,
        "communication": flight.received + buffers.previous_reduce + buffers.gathered_block,
        "gradients": steady["gradients"] + stages.has_head * loss.gradients_in_backward,
        "activations": flight.at_loss + stages.has_head * loss.norm_backward,
        "logits": stages.has_head * loss.logits_in_backward,
    }
    reduce = norm | {
        "gathered_weights": norm["gathered_weights"] - buffers.freed_head,
        "communication": flight.received + buffers.gathered_block + buffers.head_reduce + buffers.head_output,
        "gradients": steady["gradients"] + buffers.head_whole + buffers.head_reduced,
        "activations": flight.at_loss + stages.has_head * loss.hidden_gradient,
    }
    reduce = {name: np.where(buffers.head_reduce > 0, reduce[name], norm[name]) for name in norm}
    # Before it, the gradient that the loss made has not been added to the sum.
    handed = np.maximum(loss.gradients_in_backward, loss.gradients_per_extra)
    start = norm | {
        "gradients": steady["gradients"] + stages.has_head * handed,
        "activations": flight.at_loss + stages.has_head * loss.per_extra_micro_batch,
    }
    return fuller(fuller(norm, reduce), start)


def block_backward_event(
    steady: Mapping[str, Number],
    states: States,
    flight: InFlight,
    buffers: DataParallelBuffers,
    accounting: Accounting,
    sharded: Number,
) -> dict[str, Number]:
    """Bytes by category in the fullest backward of a block.

    With FSDP that is the last block's, beside the head's reduce-scatter, or that of one before, beside those
    of its own gradients and the block's behind it: of the next to last, or, where blocks leave more shards of
    gradients than they free activations, the second. steady: bytes that no event changes. sharded: True where
    FSDP shards.
    """
    gathered = states.gathered + buffers.gathered_behind + buffers.gathered_block
    # But for a stage's first block, which has none before it.
    prefetched = flight.received + (accounting.gathered_groups - 1) * buffers.gathered_block
    made = flight.made * buffers.block_gradients
    behind = np.where(buffers.head_reduce > 0, buffers.head_reduce, buffers.previous_reduce)
    last = {
        **steady,
        "gathered_weights": gathered - buffers.freed_head,
        "gradients": steady["gradients"] + buffers.head_shard + flight.traced * made,
        "activations": flight.total + flight.in_block_backward,
        "communication": np.where(flight.stage_blocks > 1, prefetched, flight.received)
        + np.where(sharded, behind, buffers.block_backward),
        "overhead": steady["overhead"] - accounting.own_streams * buffers.head_shard,
    }
    fullest = last
    for behind in (1.0, flight.behind_second):
        earlier = last | {
            "gathered_weights": last["gathered_weights"] - behind * buffers.freed_block,
            "gradients": steady["gradients"]
            + buffers.head_shard
            + np.where(sharded, made, flight.traced * made)
            + behind * buffers.block_shard,
            "activations": flight.total - behind * flight.of_block + flight.in_block_backward,
            "communication": np.where(flight.stage_blocks > behind + 1, prefetched, flight.received)
            + buffers.block_backward,
            "overhead": last["overhead"] - accounting.own_streams * behind * buffers.block_shard,
        }
        fullest = fuller(fullest, earlier)
    return fullest


def gradients_of_first(flight: InFlight, buffers: DataParallelBuffers, sharded: Number) -> Number:
    """Bytes of its own gradients in the backward of the first block, beside those of the states: of those
    that are among the states the part that it lacks, below 0. sharded: True where FSDP shards.
    """
    made = np.where(buffers.block_gradients > 0, flight.made, 1.0)
    return np.where(sharded, made * buffers.end_gradients, (made - 1) * buffers.block_gradients)


def backward_end_event(
    first_block: Mapping[str, Number],
    states: States,
    flight: InFlight,
    buffers: DataParallelBuffers,
    flat: Number,
    once: Number,
) -> dict[str, Number]:
    """Bytes by category at the end of a backward: in that of the first block, in that of an embedding that is
    the head too, or in FSDP's last reduce-scatter, that of the embedding's gradient.

    first_block: bytes in its backward. flat: of `gradient_buffers`. once: True where ZeRO-1 and -2 shard
    and a step has one micro-batch, after which they hold no whole weights.
    """
    tied = buffers.tied
    tied_embedding = {
        **first_block,
        "gradients": states.gradients - buffers.embedding_shard + flat + tied.gradients,
        "activations": flight.others + tied.gradient,
        "gathered_weights": np.where(once, tied.weights, states.gathered),
        "communication": flight.received + tied.block_reduce,
    }
    tied_embedding = {
        name: np.where(tied.gradient > 0, tied_embedding[name], size) for name, size in first_block.items()
    }
    last_reduce = {
        **first_block,
        "gradients": states.gradients + flat + buffers.last_whole,
        "activations": np.where(buffers.last_reduce > 0, flight.others, 0.0),
        "gathered_weights": np.where(once, 0.0, states.gathered),
        "communication": flight.received + buffers.last_reduce,
    }
    return fuller(fuller(first_block, tied_embedding), last_reduce)


def fuller(first: Mapping[str, Number], second: Mapping[str, Number]) -> dict[str, Number]:
    """Return, for each rank and layout, the one with more bytes in all categories together."""
    higher = sum(first.values()) >= sum(second.values())
    return {name: np.where(higher, first[name], second[name]) for name in first}


def embedding_backward(
    accounting: Accounting, elements: RankElements, stages: Stages, flight: InFlight
) -> Number:
    """Bytes of activations in the backward of the embedding, with all other micro-batches still in flight.

    0 for a stack that never makes the embedding's gradient whole.
    """
    gradient = stages.has_embedding * elements.before_blocks.trained * accounting.element
    return accounting.whole_vocabulary_gradients * (flight.others + gradient)


def step_timeline(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    seq_len: Number,
    stages: Stages,
    *,
    first_step: bool = False,
    last_backward: bool = False,
) -> dict[str, dict[str, Number]]:
    """Bytes that each pipeline rank holds at each of EVENTS, by category: [RANKS, layouts] each.

    first_step: of a run's first step; before its update, of the optimizer state masters alone are allocated.
    last_backward: True for an end of backward that is the step's last: no other micro-batch is in flight.
    """
    precision, elements = accounting.precision, rank_elements(work, layouts, stages)
    states = held_states(precision, elements.total, layouts, shards_masters=accounting.shards_masters)
    sizes = MicroBatchSizes.of(work, layouts, accounting, seq_len)
    buffers = data_parallel_buffers(work, layouts, accounting, elements, stages, sizes.head_gradient)
    loss = loss_bytes(work, layouts, accounting, sizes)
    flight = activations_in_flight(work, layouts, accounting, seq_len, stages, loss)
    total, sharded, nothing = elements.total, accounting.gathers_shards(layouts), np.zeros_like(flight.total)
    flat = gradient_buffers(accounting, elements, stages.has_head * sizes.head_gradient)
    masters, optimizer = optimizer_state(layouts, accounting, states, total)
    reduced = np.where(sharded, total.trained_shard * precision.sharded_gradient, states.gradients)
    gradients_at_loss, earlier_gradients = gradients_before_backward(
        layouts, accounting, states, flight, stages, elements, head_gradient=sizes.head_gradient
    )
    steady = {
        "weights": states.weights,
        "gathered_weights": states.gathered + buffers.gathered_outside,
        "gradients": earlier_gradients + flat,
        "optimizer": masters if first_step else optimizer,
        "activations": flight.total,
        "logits": nothing,
        "communication": flight.received + buffers.previous_reduce + buffers.last_gather,
        "temporary": nothing,
    }
    once = sharded & (layouts.gradient_accumulation_steps == 1) & (layouts.zero < 3)
    first_whole = np.where(once, buffers.first_block_whole, states.gathered)
    at_end = flight._replace(total=flight.per_micro_batch) if last_backward else flight
    with_embedding = embedding_backward(accounting, elements, stages, at_end)
    pending = stages.has_head * np.where(buffers.head_reduce > 0, 0.0, loss.gradients_pending)
    at_end_gradients = states.gradients - unreduced(layouts, accounting, buffers)
    of_first = gradients_of_first(flight, buffers, sharded)
    first_block = steady | {
        "gradients": at_end_gradients + flat + buffers.tied_head * pending + of_first,
        "activations": np.maximum(flight.first_block, with_embedding),
        "gathered_weights": first_whole + buffers.gathered_behind + buffers.gathered_block,
        "communication": flight.received + buffers.backward_end,
    }
    in_forward = steady | {"gradients": gradients_at_loss + flat}
    idle = stream_bytes(work, layouts, accounting, elements, stages).idle(
        layouts, accounting, buffers, at_loss=gradients_at_loss - flight.head_gradients,
        before_backward=earlier_gradients - flight.head_gradients,
        at_end=at_end_gradients, hole=stages.has_head * loss.hole,
    )  # fmt: skip
    in_block = steady | {"gradients": steady["gradients"] + pending, "overhead": idle["backward of a block"]}
    events = {
        "loss": loss_event(in_forward, flight, buffers, loss, stages),
        "backward of the head": head_backward_event(steady, states, flight, buffers, loss, stages),
        "backward of a block": block_backward_event(in_block, states, flight, buffers, accounting, sharded),
        "end of backward": backward_end_event(first_block, states, at_end, buffers, flat, once),
        "update": steady | {
            "gathered_weights": nothing, "gradients": reduced + flat, "optimizer": optimizer,
            "activations": flight.input_gradients, "communication": flight.received,
            "temporary": converted_gradients(layouts, accounting, elements, stages),
        },
    }  # fmt: skip
    return with_overhead(events, idle, layouts, accounting)


def peak(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    seq_len: Number,
    stages: Stages | None = None,
    *,
    first_step: bool = False,
) -> Memory:
    """The most that any pipeline rank holds at any event of a step, overhead included.

    stages: blocks of each pipeline rank; None: as the stack cuts them. first_step: as in `step_timeline`.
    """
    stages = stages or Stages.cut(work, layouts, accounting.stage_cut)
    timeline = step_timeline(work, layouts, accounting, seq_len, stages, first_step=first_step)
    shape = np.shape(timeline["loss"]["activations"])
    fullest: dict[str, Number] = {}
    most = np.full(shape[1:], -np.inf)
    for index, event in enumerate(EVENTS):
        parts = {name: np.broadcast_to(values, shape) for name, values in timeline[event].items()}
        total = sum(parts.values())
        rank = np.argmax(total, 0)
        at_event = {category: _of_rank(values, rank) for category, values in parts.items()}
        at_event |= {"event": np.full(shape[1:], index), "rank": rank}
        higher = _of_rank(total, rank) > most
        fullest = {name: np.where(higher, value, fullest.get(name, 0)) for name, value in at_event.items()}
        most = np.where(higher, _of_rank(total, rank), most)
    return Memory(**fullest)


def _of_rank(values: Number, rank: Number) -> Number:
    """Values [layouts] from values [RANKS, layouts]. rank: for each layout, the index to take."""
    return np.take_along_axis(values, rank[None], 0)[0]
