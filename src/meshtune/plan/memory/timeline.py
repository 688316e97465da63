"""Bytes that a rank holds at each event of a step, in closed forms, and the peak of them all.

    model states (weights, gradients, optimizer)   states.py
    saved activations x micro-batches in flight    activations.py, stages.py
    last norm, logits, loss                        activations.py
    gradients, collectives, update                 here
                                                   ──> `step_timeline`: by event and category ──> `peak`

A stack's habits are data (`Accounting`, stacks.toml), not branches. Every number is a float or an array, one
element per layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from meshtune.layout import MODEL_AXES, ZERO_BUBBLE
from meshtune.meter.trace import ACTIVATIONS, COMMUNICATION, LOGITS, TEMPORARY
from meshtune.placement.columns import Columns, Number
from meshtune.placement.states import Elements, States, held_states
from meshtune.plan.accounting import EAGER, Accounting
from meshtune.plan.memory.activations import (
    LossBytes,
    MicroBatchSizes,
    block_backward,
    loss_bytes,
    output_gradients,
    saved_by_block,
)
from meshtune.plan.memory.stages import Stages, awaiting_weights, in_flight, kept_input_gradients
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


CATEGORIES = tuple(field.name for field in fields(Memory) if field.name not in ("event", "rank"))
TRANSIENT = (ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY)
CATEGORY_NAMES = {name: name.replace("_", " ") for name in CATEGORIES} | {
    "optimizer": "optimizer state",
    "communication": "communication buffers",
    "temporary": "temporaries of the update",
}


class DataParallelBuffers(NamedTuple):
    """Bytes that data parallelism holds beside the model states."""

    gathered_outside: Number  # whole parameters outside the blocks, under ZeRO-3, in the loss
    gathered_behind: Number  # the same in the backward of the blocks
    gathered_block: Number  # whole parameters of one block, under ZeRO-3
    last_gather: Number  # output of the last all-gather, which lasts until the next one
    previous_reduce: Number  # input of the last reduce-scatter of the micro-batch before (ZeRO-2, -3)
    first_block_whole: Number  # whole parameters of a block and of the embedding
    freed_head: Number  # the head's whole weights, once its gradient is reduced in a step of one micro-batch
    head_reduce: Number  # input of the head's reduce-scatter, while the backward of the last block runs
    head_shard: Number  # what that reduce-scatter made, where no micro-batch came before
    block_backward: Number  # a block's gradients and their collective, while its backward runs
    block_shard: Number  # what a block's reduce-scatter made, likewise
    embedding_shard: Number  # what that of the embedding made, likewise
    backward_end: Number  # the same when the backward is over


def data_parallel_buffers(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    elements: RankElements,
    stages: Stages,
    head_gradient: Number,
) -> DataParallelBuffers:
    """Bytes of gathered weights and of gradients in collectives, as they were counted in FSDP2.

    FSDP2 keeps a reduce-scatter's input until the next one, and an all-gather's output likewise. Between
    replicas a block's sums are all-reduced when its backward is over (parallel/replicas.py). elements: of the
    pipeline ranks, see `rank_elements`. head_gradient: elements of it, as in MicroBatchSizes.
    """
    precision, block = accounting.precision, elements.block
    sharded, accumulates = accounting.gathers_shards(layouts), layouts.gradient_accumulation_steps > 1
    zero3 = sharded & (layouts.zero == 3)
    after_all_passes = (layouts.zero == 1) & (layouts.pp > 1)  # when torch's stages reduce ZeRO-1's gradients
    reduced = np.where(after_all_passes, 0.0, accounting.reduce_bytes)
    reduce_scatter = np.where(sharded, block.trained * (precision.gradient + reduced), 0.0)
    has_replicas = accounting.gradient_replicas(layouts) > 1
    all_reduce = np.where(has_replicas, block.trained * accounting.reduce_bytes, 0.0)
    outside, ends_apart = elements.outside, np.asarray(accounting.ends_apart)
    own = (1 - work.tied) * ends_apart * stages.has_embedding  # the embedding has a group of its own
    in_loss = outside.whole - own * elements.before_blocks.whole
    gathers_once = sharded & ~zero3 & accumulates  # the fullest micro-batch is one that gathers nothing
    reduces_head = np.where(sharded & ends_apart & ~after_all_passes, stages.has_head * (1 - work.tied), 0.0)
    once = sharded & ~accumulates
    new_shard = np.where(once, precision.sharded_gradient, 0.0)  # else it was there before
    last_reduced = np.where(own > 0, elements.before_blocks.trained, outside.trained)
    return DataParallelBuffers(
        gathered_outside=np.where(zero3, in_loss * precision.weight, 0.0),
        gathered_behind=np.where(zero3 & ~ends_apart, outside.whole * precision.weight, 0.0),
        gathered_block=np.where(zero3, block.whole * precision.weight, 0.0),
        last_gather=np.where(sharded & ~gathers_once, block.whole * precision.weight, 0.0),
        previous_reduce=np.where(
            sharded & (layouts.zero >= 2) & accumulates, last_reduced * accounting.reduce_bytes, 0.0
        ),
        first_block_whole=(block.whole + elements.before_blocks.whole * stages.has_embedding)
        * precision.weight,
        freed_head=np.where(once & ~zero3, reduces_head * head_gradient * precision.weight, 0.0),
        head_reduce=reduces_head * head_gradient * accounting.reduce_bytes,
        head_shard=reduces_head * head_gradient / np.maximum(layouts.shard_ranks, 1.0) * new_shard,
        block_shard=block.trained_shard * new_shard,
        embedding_shard=elements.before_blocks.trained_shard * stages.has_embedding * new_shard,
        block_backward=reduce_scatter + (0.0 if accounting.shards_masters else all_reduce),
        backward_end=reduce_scatter + all_reduce,
    )


def gradients_before_backward(
    layouts: Columns, accounting: Accounting, states: States, flight: InFlight
) -> tuple[Number, Number]:
    """Bytes of gradients already allocated (in the last loss, when the fullest backward starts).

    If all micro-batches are in flight (GPipe), gradients appear only after the first backward, which has
    freed one micro-batch's activations: only what exceeds those counts. Without a pipeline, 0 for a step of
    one micro-batch. Where a sum lies beside the gradients (`Copies.beside`), it is there from the start.

    states: as `held_states` returns them.
    """
    precision, accumulates = accounting.precision, layouts.gradient_accumulation_steps > 1
    if precision.beside:
        both = precision.accumulated + precision.beside * precision.gradient
        sums = states.gradients * precision.accumulated / both
        earlier = sums if accounting.frees_added_gradients else np.where(accumulates, states.gradients, sums)
        return earlier + flight.head_gradients, earlier + flight.head_gradients
    all_in_flight = (layouts.pp > 1) & (flight.micro_batches >= layouts.gradient_accumulation_steps)
    exceeding = np.maximum(states.gradients - flight.per_micro_batch, 0.0)
    earlier = np.where(accumulates, states.gradients, 0.0)
    at_loss, before_backward = (np.where(all_in_flight, size, earlier) for size in (0.0, exceeding))
    return at_loss + flight.head_gradients, before_backward + flight.head_gradients


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
    embedding.
    """
    precision = accounting.precision
    before = elements.before_blocks
    first = np.where(accounting.gathers_shards(layouts), before.trained_shard, before.trained)
    narrowed = stages.has_embedding * first * precision.trained * (precision.trained < precision.accumulated)
    missing = np.maximum(precision.trained - precision.gradient, 0.0)
    bucket = np.minimum(elements.total.trained, accounting.bucket_elements) * missing
    summed = accounting.gathers_shards(layouts) | (layouts.gradient_accumulation_steps > 1)
    return np.where(summed | (accounting.gradient_replicas(layouts) > 1), narrowed, bucket)


class InFlight(NamedTuple):
    """Bytes of micro-batches between their forward and their backward, on each pipeline rank."""

    in_block_backward: Number  # that a block's backward has at once beside `total`
    of_block: Number  # that the last block of a stage saved, for one micro-batch
    first_block: Number  # that the backward of a stage's first block has, with nothing else in flight
    total: Number  # of all micro-batches in flight: saved by blocks, sent, held for the loss
    per_micro_batch: Number  # of one of them
    input_gradients: Number  # of stages' inputs that a split backward leaves until the next step
    head_gradients: Number  # of the head, of all micro-batches in flight but one
    received: Number  # buffers that hidden states and their gradients are received in
    micro_batches: Number  # in flight, at most


def activations_in_flight(
    work: Work, layouts: Columns, accounting: Accounting, seq_len: Number, stages: Stages, loss: LossBytes
) -> InFlight:
    """Bytes of activations of all micro-batches that a rank has in flight, and its receive buffers.

    A block saves as `accounting.saved` has it; without that, what was traced (`work.kept`). loss: of the rank
    with the head.
    """
    sizes = MicroBatchSizes.of(work, layouts, accounting, seq_len)
    traced = None if accounting.saved else work.kept.get(int(accounting.element))
    selective = None if accounting.selected is None else accounting.selected.per_token(work, seq_len)
    block = saved_by_block(
        traced or (accounting.saved or EAGER).per_token(work, seq_len), work, layouts, sizes.tokens,
        element=accounting.element, regathers_inputs=accounting.regathers(layouts),
        context=accounting.context_keys, selective=selective,
    )  # fmt: skip
    micro_batches = in_flight(layouts, stages.rank)
    virtual = layouts.virtual_stages
    hidden = np.where(layouts.pp > 1, sizes.hidden_bytes / sizes.sequence_shards, 0.0)
    received = hidden * np.minimum(layouts.gradient_accumulation_steps, accounting.receive_buffers)
    received = received * (2 * virtual - stages.has_embedding - stages.has_head)  # from both neighbours
    looped = layouts.runs("interleaved1f1b", "loopedbfs", *ZERO_BUBBLE)
    sent = accounting.keeps_sent * hidden * (virtual - stages.has_head)
    later = np.where(looped, layouts.gradient_accumulation_steps - micro_batches, 0.0)
    input_gradients = accounting.keeps_sent * hidden * (virtual - stages.has_embedding)
    recomputing = stages.recomputing(layouts)
    saving = stages.blocks - recomputing  # blocks that recompute nothing, behind those that do
    total = micro_batches * (recomputing * block.saved + saving * block.everything + sent)
    total = total + stages.has_head * (micro_batches - 1) * loss.per_extra_micro_batch
    total = total + later * (sent + input_gradients)
    waiting = stages.blocks * output_gradients(work, layouts, sizes.tokens, element=accounting.element)
    total = total + awaiting_weights(layouts, stages.rank) * waiting
    # Once the backward of a stage's input has ended; the first stage's input has none.
    norm = 5 * max(4 / accounting.element, 1.0) * hidden  # temporaries of a norm's backward, in fp32
    in_head = stages.has_head * (loss.per_extra_micro_batch + 2 * hidden)  # and its gradient, scaled
    of_stage = np.where(
        layouts.runs("zb", "zbv") & (virtual > stages.has_embedding), waiting / virtual + norm + in_head, 0.0
    )
    temporaries = block_backward(work, layouts, accounting, sizes)
    # The blocks that recompute nothing come first in the backward, and free what they saved.
    at_once = np.maximum(block.recomputed - saving / virtual * block.everything, 0.0)
    return InFlight(
        in_block_backward=np.maximum(temporaries + at_once, of_stage),
        of_block=np.where(saving > 0, block.everything, block.saved),
        first_block=block.saved + np.maximum(temporaries + block.recomputed, of_stage),
        total=total,
        per_micro_batch=total / np.maximum(micro_batches, 1.0),
        input_gradients=kept_input_gradients(layouts, stages) * accounting.keeps_sent * hidden,
        head_gradients=stages.has_head * (micro_batches - 1) * loss.gradients_per_extra,
        received=received,
        micro_batches=micro_batches,
    )


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
    of its own gradients and the block's behind it. steady: bytes that no event changes. sharded: True where
    FSDP shards.
    """
    gathered = states.gathered + buffers.gathered_behind + buffers.gathered_block
    prefetched = flight.received + (accounting.gathered_groups - 1) * buffers.gathered_block
    behind = np.where(buffers.head_reduce > 0, buffers.head_reduce, buffers.previous_reduce)
    last = {
        **steady,
        "gathered_weights": gathered - buffers.freed_head,
        "gradients": steady["gradients"] + buffers.head_shard,
        "activations": flight.total + flight.in_block_backward,
        "communication": prefetched + np.where(sharded, behind, buffers.block_backward),
    }
    earlier = last | {
        "gradients": last["gradients"] + buffers.block_shard,
        "activations": last["activations"] - flight.of_block,
        "communication": prefetched + buffers.block_backward,
    }
    fuller = sum(last.values()) >= sum(earlier.values())
    return {name: np.where(fuller, last[name], earlier[name]) for name in last}


def unreduced(layouts: Columns, accounting: Accounting, buffers: DataParallelBuffers) -> Number:
    """Bytes of sharded gradients that a step of one micro-batch still lacks at the end of its backward."""
    once = accounting.gathers_shards(layouts) & (layouts.gradient_accumulation_steps == 1)
    return np.where(once, buffers.block_shard + buffers.embedding_shard, 0.0)


def embedding_backward(
    accounting: Accounting, elements: RankElements, stages: Stages, flight: InFlight
) -> Number:
    """Bytes of activations in the backward of the embedding, with all other micro-batches still in flight.

    0 for a stack that never makes the embedding's gradient whole.
    """
    gradient = stages.has_embedding * elements.before_blocks.trained * accounting.element
    others = flight.total - flight.per_micro_batch
    return accounting.whole_vocabulary_gradients * (others + gradient)


def step_timeline(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    seq_len: Number,
    stages: Stages,
    *,
    first_step: bool = False,
) -> dict[str, dict[str, Number]]:
    """Bytes that each pipeline rank holds at each of EVENTS, by category but overhead: [RANKS, layouts] each.

    first_step: of a run's first step; before its update, of the optimizer state masters alone are allocated.
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
    gradients_at_loss, earlier_gradients = gradients_before_backward(layouts, accounting, states, flight)
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
    with_embedding = embedding_backward(accounting, elements, stages, flight)
    pending = stages.has_head * np.where(buffers.head_reduce > 0, 0.0, loss.gradients_pending)
    in_block = steady | {"gradients": steady["gradients"] + pending}
    return {
        "loss": steady | {
            "gradients": gradients_at_loss + flat + stages.has_head * loss.gradients,
            "activations": flight.total + stages.has_head * loss.activations,
            "logits": stages.has_head * loss.logits,
        },
        "backward of the head": steady | {
            "communication": flight.received + buffers.previous_reduce + buffers.gathered_block,
            "gradients": steady["gradients"] + stages.has_head * loss.gradients_in_backward,
            "activations": flight.total + stages.has_head * loss.norm_backward,
            "logits": stages.has_head * loss.logits_in_backward,
        },
        "backward of a block": block_backward_event(in_block, states, flight, buffers, accounting, sharded),
        "end of backward": steady | {
            "gradients": states.gradients - unreduced(layouts, accounting, buffers) + flat,
            "activations": np.maximum(flight.first_block, with_embedding),
            "gathered_weights": first_whole + buffers.gathered_behind + buffers.gathered_block,
            "communication": flight.received + buffers.backward_end,
        },
        "update": steady | {
            "gathered_weights": nothing,
            "gradients": reduced + flat,
            "optimizer": optimizer,
            "activations": flight.input_gradients,
            "communication": flight.received,
            "temporary": converted_gradients(layouts, accounting, elements, stages),
        },
    }  # fmt: skip


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
        parts["overhead"] = overhead(layouts, accounting, transient(parts, layouts))
        total = sum(parts.values())
        rank = np.argmax(total, 0)
        at_event = {category: _of_rank(values, rank) for category, values in parts.items()}
        at_event |= {"event": np.full(shape[1:], index), "rank": rank}
        higher = _of_rank(total, rank) > most
        fullest = {name: np.where(higher, value, fullest.get(name, 0)) for name, value in at_event.items()}
        most = np.where(higher, _of_rank(total, rank), most)
    return Memory(**fullest)


def transient(parts: Mapping[str, Number], layouts: Columns) -> Number:
    """Bytes that come and go within a step; weights that ZeRO-1 and -2 gather stay. parts: by category."""
    gathered = np.where(layouts.zero == 3, parts["gathered_weights"], 0.0)
    return gathered + sum(parts[name] for name in TRANSIENT)


def overhead(layouts: Columns, accounting: Accounting, moving: Number) -> Number:
    """Bytes of context, communicators and the allocator's reserve for `moving` bytes that come and go."""
    axes = (layouts.parameter_ranks, *(getattr(layouts, axis) for axis in MODEL_AXES))
    groups = sum((ranks > 1) * 1.0 for ranks in axes)
    groups = groups + (groups > 1)
    return accounting.reserved * moving + accounting.context + accounting.communicator * groups


def _of_rank(values: Number, rank: Number) -> Number:
    """Values [layouts] from values [RANKS, layouts]. rank: for each layout, the index to take."""
    return np.take_along_axis(values, rank[None], 0)[0]
