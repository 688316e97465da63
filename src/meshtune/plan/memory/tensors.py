"""Tensors of a training step on a rank, a row each: bytes and the points between which it is alive.

    states.py                   `Step`: parameters, model states, sizes of a micro-batch ┐
    activations.py, stages.py   what one micro-batch saves, how many are in flight       ├─> rows ─┐
    flight.py                   `InFlight`: activations of all, and of a block's passes  ┘         │
    timeline.py                 events of a step, and its peak                         <───────────┘

A new technique is a row, or a term in one. Bytes of a row are a float or an array, one element per layout or
[RANKS, layouts]. Rows below 0 are the part of another row that is already freed, or not there yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.meter.trace import CATEGORIES
from meshtune.optimizers import BUCKET_ELEMENTS, SLICES, SMALLEST_SLICE
from meshtune.plan.memory.activations import kept_for_head, last_norm_bytes
from meshtune.plan.memory.stages import kept_input_gradients
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.memory.flight import InFlight
    from meshtune.plan.memory.stages import Stages
    from meshtune.plan.memory.states import Step
    from meshtune.plan.work import Weight

POINTS = {  # in the order in which a step comes to them -> event
    "between passes": "forward",
    "forward of the last block": "loss",
    "loss": "loss",
    "start of the head's backward": "backward of the head",  # no sum has taken the gradient of the loss yet
    "backward of the last norm": "backward of the head",
    "reduce-scatter of the head's gradient": "backward of the head",
    "backward of the last block": "backward of a block",
    "backward of the block before the last": "backward of a block",
    "backward of the second block": "backward of a block",
    "backward of the first block": "end of backward",
    "backward of the tied embedding": "end of backward",
    "last reduce-scatter": "end of backward",  # of the embedding's gradient
    "update": "update",
}
EVENTS = tuple(dict.fromkeys(POINTS.values()))[1:]
START, FORWARD, LOSS, HEAD, NORM, HEAD_REDUCE, LAST, BEFORE_LAST, SECOND, FIRST, TIED, LAST_REDUCE = range(12)
UPDATE = len(POINTS) - 1
WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY = CATEGORIES
OVERHEAD = "overhead"  # what no trace has: held by the allocator, CUDA and NCCL


class Tensor(NamedTuple):
    """One kind of tensor; its memory is used at all points from `born` to `dies`."""

    name: str
    category: str
    born: int  # index in POINTS
    dies: int  # the last one at which it is alive
    bytes: Number


def tensors(step: Step, flight: InFlight) -> Iterator[Tensor]:
    """Yield every kind of tensor of a step."""
    yield from state_tensors(step)
    yield from gathered_weights(step)
    yield from gradient_tensors(step, flight)
    if step.accounting.in_backward:
        yield from freed_gradients(step)
    yield from activation_tensors(step, flight)
    yield from head_tensors(step)
    yield from collective_buffers(step, flight)
    yield from idle_memory(step, flight)


def state_tensors(step: Step) -> Iterator[Tensor]:
    """Yield weights, optimizer state and temporaries of the update. FSDP's masters are the weights."""
    precision, total = step.accounting.precision, step.elements.total
    updated = np.where(step.layouts.zero > 0, total.trained_shard, total.trained)
    masters = np.where(step.sharded | step.accounting.offload, 0.0, updated * precision.master)
    optimizer = step.states.optimizer + updated * step.accounting.flat_shard_buffers
    before = masters if step.first_step else optimizer
    yield Tensor("weights", WEIGHTS, START, UPDATE, step.states.weights)
    yield Tensor("optimizer state", OPTIMIZER, START, LAST_REDUCE, before)
    yield Tensor("optimizer state", OPTIMIZER, UPDATE, UPDATE, optimizer)
    converted = 0.0 if step.accounting.in_backward else converted_gradients(step)
    yield Tensor("gradients in the masters' width", TEMPORARY, UPDATE, UPDATE, converted)
    if step.accounting.offload:
        yield from streamed_states(step, updated)
    if step.accounting.slice_bytes:
        yield from update_slices(step, updated)


class Updated(NamedTuple):
    """Elements of the largest parameters of a rank that are updated, after tp and ZeRO."""

    embedding: Number
    head: Number
    matrix: Number  # of a block
    most: Number  # of all


def largest_updated(step: Step) -> Updated:
    """The largest parameters of each rank."""
    shards = np.where(step.layouts.zero > 0, np.maximum(step.layouts.shard_ranks, 1.0), 1.0)
    layouts = step.layouts
    apart = np.where(layouts.ep > 1, layouts.ep * layouts.expert_shards, shards)

    def ranks(weight: Weight) -> Number:
        return apart if weight.of_experts else shards if weight.by_tokens else layouts.tp * shards

    weights = step.work.block_weights
    sizes = (weight.rows * weight.cols * weight.trainable / ranks(weight) for weight in weights)
    embedding = step.elements.before_blocks.trained * step.stages.has_embedding / shards
    head, matrix = step.head_gradient / shards, np.maximum.reduce(np.broadcast_arrays(0.0, *sizes))
    most = np.maximum.reduce(np.broadcast_arrays(embedding, head, matrix))
    return Updated(embedding, head, matrix, most)


def updates_in_backward(step: Step) -> Iterator[tuple[int, int, Number]]:
    """Yield (first point, last point, elements of a parameter) of the updates that a backward makes."""
    embedding, head, matrix, _ = largest_updated(step)
    together = step.replicated & (step.layouts.zero == 0)  # the head's comes with the embedding's
    apart = head * (1 - step.work.tied) * ~together
    yield HEAD, HEAD, np.where(step.sharded, 0.0, apart)
    yield HEAD_REDUCE, HEAD_REDUCE, np.where(step.sharded, apart, 0.0)
    yield LAST, FIRST, np.where(step.sharded, 0.0, matrix)
    yield LAST_REDUCE, LAST_REDUCE, np.where(together, np.maximum(embedding, head), embedding)


def streamed_states(step: Step, updated: Number) -> Iterator[Tensor]:
    """Yield the states that an update has copied from host memory: those of two buckets, and in the backward
    those of one parameter. updated: elements of the rank.
    """
    name, per_element = "states from host memory", step.states.host / np.maximum(updated, 1.0)
    if step.accounting.in_backward:
        *_, (_, _, last) = parts = [*updates_in_backward(step)]
        for born, dies, elements in (*parts, (UPDATE, UPDATE, np.where(step.sharded, 0.0, last))):
            yield Tensor(name, TEMPORARY, born, NORM if born == HEAD else dies, elements * per_element)
        return
    bucket = np.maximum(np.minimum(updated, BUCKET_ELEMENTS), largest_updated(step).most)
    both = bucket + np.minimum(updated - bucket, BUCKET_ELEMENTS)
    yield Tensor(name, TEMPORARY, UPDATE, UPDATE, both * per_element)
    # A parameter that is a bucket of its own: its gradient is there until it is converted.
    wider = np.where(bucket > BUCKET_ELEMENTS, bucket * step.accounting.precision.trained, 0.0)
    wider = np.where(converted_gradients(step) > 0, wider - converted_gradients(step), 0.0)
    yield Tensor("gradients in the masters' width", TEMPORARY, UPDATE, UPDATE, np.maximum(wider, 0.0))


def update_slices(step: Step, updated: Number) -> Iterator[Tensor]:
    """Yield what an update in one pass makes of a slice of a parameter where it is not compiled
    (optim/one_pass.py). updated: elements of the rank.
    """
    buckets = [(UPDATE, UPDATE, largest_updated(step).most)]
    for born, dies, elements in updates_in_backward(step) if step.accounting.in_backward else buckets:
        of_bucket = elements if step.accounting.in_backward else updated
        of_bucket = np.minimum(of_bucket, BUCKET_ELEMENTS) if step.accounting.offload else of_bucket
        size = np.minimum(elements, np.maximum(SMALLEST_SLICE, of_bucket // SLICES))
        yield Tensor("a slice of an update", TEMPORARY, born, dies, size * step.accounting.slice_bytes)


def converted_gradients(step: Step) -> Number:
    """Bytes that the update adds to convert gradients to the trained weights' width (optim/optimizer.py).

    One bucket at a time; 0 where gradients were summed over micro-batches or ranks as wide as that. Sums that
    are wider are converted one tensor at a time, each freed before the next: only the first one counts, the
    embedding. But replicas sum a block's in one buffer (parallel/replicas.py), which is there until the last
    of them is converted; the sum of the embedding has then been freed, and is taken off.
    """
    accounting, precision, elements = step.accounting, step.accounting.precision, step.elements
    before, narrows = elements.before_blocks, precision.trained < precision.accumulated
    narrows = narrows and accounting.bucket_elements > 0
    first = np.where(step.sharded, before.trained_shard, before.trained)
    narrowed = step.stages.has_embedding * first * precision.trained * narrows
    first_block = step.stages.has_embedding * before.trained * (precision.trained - precision.accumulated)
    first_block = first_block + step.all_reduced * precision.trained
    in_buffers = step.replicated & np.asarray(accounting.shards_masters)
    narrowed = np.where(in_buffers & narrows, np.maximum(narrowed, first_block), narrowed)
    missing = np.maximum(precision.trained - precision.gradient, 0.0)
    unsummed = elements.total.trained - step.only_experts
    bucket = np.minimum(unsummed, accounting.bucket_elements) * missing
    return np.where(step.sharded | step.accumulates | step.replicated, narrowed, bucket)


def gathered_weights(step: Step) -> Iterator[Tensor]:
    """Yield whole weights next to their shards."""
    block, outside, before = step.elements.block, step.elements.outside, step.elements.before_blocks
    weight, ends_apart = step.accounting.precision.weight, step.ends_apart
    whole, once = step.states.gathered, step.once & (step.layouts.zero < 3)
    name = "weights that ZeRO-1 and -2 gathered"
    yield Tensor(name, GATHERED, START, SECOND, whole)
    yield Tensor(name, GATHERED, FIRST, LAST_REDUCE, np.where(once, 0.0, whole))
    first_block = (block.whole + before.whole * step.stages.has_embedding) * weight
    yield Tensor(name, GATHERED, FIRST, FIRST, np.where(once, first_block, 0.0))
    yield Tensor(name, GATHERED, TIED, TIED, once * step.tied * weight)
    # Of the last micro-batch, or of the only one, what is reduced needs its weights no more.
    summed = (step.once | (step.sharded & step.sums_whole)) & ~(step.zero3 | step.reduced_after)
    freed = np.where(summed, weight, 0.0)
    yield Tensor(name, GATHERED, HEAD_REDUCE, SECOND, -step.reduced_head * freed)
    yield from behind(name, GATHERED, step, -block.whole * freed)

    # The loss made the head's gradient in the forward, and the last norm is gathered with the last block.
    name, in_loss = "weights outside the blocks", outside.whole - step.apart * before.whole
    gathered = np.where(step.zero3, in_loss * weight, 0.0)
    yield Tensor(name, GATHERED, START, LOSS, gathered)
    yield Tensor(name, GATHERED, HEAD, FIRST, (1 - ends_apart) * gathered)
    yield Tensor("a block's weights", GATHERED, FORWARD, FORWARD, step.gathered_block)
    yield Tensor("a block's weights", GATHERED, HEAD, HEAD_REDUCE, ends_apart * step.prefetched_block)
    yield Tensor("a block's weights", GATHERED, LAST, FIRST, step.gathered_block)
    for backward, born, dies in ((False, FORWARD, FORWARD), (True, LAST, FIRST)):
        matrix = step.work.dequantised(step.layouts, step.tokens, backward=backward)
        yield Tensor("a matrix out of 4 bits", ACTIVATIONS, born, dies, matrix * step.accounting.element)


def behind(name: str, category: str, step: Step, of_block: Number) -> Iterator[Tensor]:
    """Yield rows of what each block leaves, or frees, when its backward is over."""
    yield Tensor(name, category, BEFORE_LAST, SECOND, of_block)
    yield Tensor(name, category, SECOND, SECOND, (step.behind_second - 1) * of_block)


def gradient_tensors(step: Step, flight: InFlight) -> Iterator[Tensor]:
    """Yield gradients, whole and in shards, and their sums."""
    precision, elements, block = step.accounting.precision, step.elements, step.elements.block
    flat = elements.total.trained * step.accounting.flat_buffers
    flat = flat + (block.matrices + step.head_gradient) * step.accounting.shape_buffers
    yield Tensor("contiguous buffers of gradients", GRADIENTS, START, UPDATE, flat)

    at_loss, before_backward = flight.earlier_gradients
    name = "gradients of earlier micro-batches"
    yield Tensor(name, GRADIENTS, START, LOSS, flight.started * at_loss)
    yield Tensor(name, GRADIENTS, HEAD, SECOND, flight.started * before_backward)

    name = "the head's gradient"
    yield Tensor(name, GRADIENTS, START, SECOND, flight.started * flight.head_gradients)
    whole = np.where(step.sums_whole, 0.0, step.reduced_head * precision.gradient)  # else it is the sum
    yield Tensor(name, GRADIENTS, HEAD_REDUCE, HEAD_REDUCE, whole + step.head_shard * precision.trained)
    yield Tensor("shards of gradients", GRADIENTS, LAST, SECOND, step.new_head)
    yield from behind("shards of gradients", GRADIENTS, step, step.new_block)

    name, own = "a block's gradients", block.trained * precision.gradient
    leaves = step.leaves_gradients * own
    # Replicas sum a group when its last gradient is there: of the first block and the rest at the end.
    new_sums = step.own_sums & ~step.accumulates
    made = flight.made * np.where(new_sums, own, leaves)
    yield Tensor(name, GRADIENTS, LAST, LAST, flight.traced * made)
    yield Tensor(name, GRADIENTS, BEFORE_LAST, SECOND, np.where(step.sharded, made, flight.traced * made))
    share = np.where(leaves > 0, flight.made, 1.0)  # below 0: of those among the states, what is missing
    of_first = np.where(step.sharded, share * own, (share - 1) * leaves)
    yield Tensor(name, GRADIENTS, FIRST, FIRST, of_first)

    name, states = "gradients of all micro-batches", step.states.gradients
    yield Tensor(name, GRADIENTS, FIRST, LAST_REDUCE, states)
    yield Tensor(name, GRADIENTS, FIRST, FIRST, -step.new_block)
    yield Tensor(name, GRADIENTS, FIRST, TIED, -step.new_embedding)
    last = (step.leaves_gradients > 0) & ~step.sharded & np.asarray(step.accounting.shards_masters)
    embedding = (1 - step.work.tied) * step.stages.has_embedding * elements.before_blocks.trained
    yield Tensor(name, GRADIENTS, FIRST, FIRST, np.where(last, -embedding * precision.gradient, 0.0))
    missing = (block.trained + elements.outside.trained) * precision.accumulated
    missing = missing - step.head_gradient * precision.gradient - flight.made * own
    yield Tensor(name, GRADIENTS, FIRST, FIRST, np.where(new_sums, -missing, 0.0))
    copies = np.where(step.accumulates, precision.accumulated, precision.flattened) * elements.outside.trained
    copies = np.where(step.own_sums, copies, 0.0)
    yield Tensor("the last group's sum", GRADIENTS, LAST_REDUCE, LAST_REDUCE, copies)
    shards = np.where(step.frees, 0.0, elements.total.trained_shard * precision.sharded_gradient)
    reduced = np.where(step.sharded, shards, states)
    yield Tensor(name, GRADIENTS, UPDATE, UPDATE, reduced)
    # the head's, and the sum of both unless the states have it
    copies = np.where(step.sharded | step.accumulates | step.frees, 2.0, 1.0) * precision.gradient
    yield Tensor("the embedding's gradient", GRADIENTS, TIED, TIED, copies * step.tied)
    last = np.where(step.sharded & ~step.sums_whole, step.last_reduced * precision.gradient, 0.0)
    yield Tensor("the embedding's gradient", GRADIENTS, LAST_REDUCE, LAST_REDUCE, last)


def freed_gradients(step: Step) -> Iterator[Tensor]:
    """Yield gradients that an update in the backward frees, and their copies in the masters' width.

    Each matrix has its own; compiled blocks give all of a block at once. Replicas' all-reduces are one group
    behind, and the head is in the group of the embedding.
    """
    accounting, elements, outside = step.accounting, step.elements, step.elements.outside
    precision, replicated = accounting.precision, step.replicated & (step.layouts.zero == 0)
    by_parameter, block = ~step.sharded & ~step.replicated, elements.block
    traced = step.work.traced.get(int(accounting.element))
    wide = precision.trained * (precision.trained > precision.gradient and accounting.bucket_elements > 0)
    for born, dies, updated in updates_in_backward(step):
        # That of the head is in `head_tensors`.
        made = block.trained if born == LAST and traced and traced.fused else updated * (born >= LAST)
        if born == LAST:
            made = np.maximum(made, step.tiled * step.work.trained_mlp(step.layouts.tp))
        for name, category, size in (
            ("gradients of an update", GRADIENTS, made * precision.gradient),
            ("gradients in the masters' width", TEMPORARY, updated * wide),
        ):
            yield Tensor(name, category, born, dies, np.where(by_parameter, size, 0.0))
    in_flight = np.where(replicated, precision.accumulated, 0.0)
    yield Tensor(
        "gradients of the block before", GRADIENTS, BEFORE_LAST, LAST_REDUCE, block.trained * in_flight
    )
    yield Tensor("gradients of a block", GRADIENTS, FIRST, FIRST, block.trained * in_flight)
    last = 2 * np.maximum(outside.trained, block.trained) * in_flight  # sums, and their all-reduce's buffer
    shard = np.where(step.sharded, step.last_reduced / np.maximum(step.layouts.shard_ranks, 1.0), 0.0)
    last = last + shard * precision.sharded_gradient
    yield Tensor("gradients of the last group", GRADIENTS, LAST_REDUCE, LAST_REDUCE, last)


def activation_tensors(step: Step, flight: InFlight) -> Iterator[Tensor]:
    """Yield what forward and backward passes save and make, and the logits."""
    name = "activations of micro-batches in flight"
    yield Tensor(name, ACTIVATIONS, START, START, flight.total)
    yield Tensor(name, ACTIVATIONS, LOSS, HEAD_REDUCE, flight.at_loss)
    yield Tensor(name, ACTIVATIONS, LAST, SECOND, flight.total)
    yield from behind(name, ACTIVATIONS, step, -flight.of_block)

    earlier = np.minimum(flight.total, flight.in_block_forward)
    yield Tensor(name, ACTIVATIONS, FORWARD, FORWARD, earlier)
    yield Tensor("a block's forward", ACTIVATIONS, FORWARD, FORWARD, flight.in_block_forward - earlier)
    yield Tensor("a block's backward", ACTIVATIONS, LAST, SECOND, flight.in_block_backward)
    element, whole = step.accounting.element, step.accounting.whole_vocabulary_gradients
    embedding = step.stages.has_embedding * step.elements.before_blocks.trained * element
    first = np.maximum(flight.first_block, whole * (flight.others + embedding))
    yield Tensor("a block's backward", ACTIVATIONS, FIRST, FIRST, first)

    name, gradient = "other micro-batches in flight", step.accounting.precision.gradient
    yield Tensor(name, ACTIVATIONS, TIED, TIED, flight.others)
    yield Tensor("the embedding's gradient", ACTIVATIONS, TIED, TIED, step.tied * gradient)
    others = np.where(step.last_reduce > 0, flight.others, 0.0)
    yield Tensor(name, ACTIVATIONS, LAST_REDUCE, LAST_REDUCE, others)
    kept = kept_input_gradients(step.layouts, step.stages) * step.accounting.keeps_sent * step.messages
    yield Tensor("gradients of stages' inputs", ACTIVATIONS, UPDATE, UPDATE, kept)


def head_tensors(step: Step) -> Iterator[Tensor]:
    """Yield logits, and what the last norm, the loss and the head's backward make, on the rank with the head.

    With a finite `loss_chunk` the loss makes its gradients in the forward, a chunk of tokens at a time
    (train/loss.py): logits, a copy of their hidden states and its gradient, the head's gradient. sp gathers
    the last norm's output.
    """
    work, accounting, has_head = step.work, step.accounting, step.stages.has_head
    element, precision = accounting.element, accounting.precision
    gradient, labels = step.head * precision.gradient, step.tokens * work.labelled
    chunk = accounting.chunk_tokens(work, step.layouts)
    chunk_tokens = np.ceil(labels / np.maximum(np.ceil(labels / chunk), 1.0))
    one_copy = chunk_tokens * work.vocabulary / (1.0 if accounting.gathers_logits else step.layouts.tp)
    kept, changes = (ends.logit, ends.changes) if (ends := work.ends.get(int(element))) else (0.0, False)
    split = np.where(step.layouts.tp > 1, accounting.logit_split, 0.0)
    logits, hidden, gradients, hole = one_copy * (accounting.logit + split + kept), 0.0, 0.0, 0.0
    if math.isfinite(accounting.loss_chunk):
        copy = chunk_tokens * element * work.hidden
        # The logits, their gradient and, where the head changes its matrix's output, the gradient of that,
        # in the backward of what it does to logits and in that of the matrix, which makes its gradient.
        copies = 3 if changes else 2
        in_matmul = copies * element * one_copy
        logits = np.maximum(logits, in_matmul + 2 * kept * one_copy)
        ends = in_matmul + copy + gradient > logits
        logits = np.where(ends, in_matmul, logits)
        hidden = copy + step.whole_hidden + np.where(ends, copy, 0.0)
        head_sum = np.where(chunk_tokens < labels, 4.0 * step.head, 0.0)  # fp32, over chunks
        gradients = head_sum + np.where(ends, gradient, 0.0)
        wide = 2 * 4.0 * one_copy * (element < 4)  # the logits cast, and their softmax
        hole = np.where(ends & (head_sum > 0) & (gradient >= wide), wide, 0.0)
    held = one_copy * accounting.logit_head_backward
    yield Tensor("logits", LOGITS, LOSS, LOSS, has_head * logits)
    yield Tensor("logits", LOGITS, HEAD, HEAD_REDUCE, has_head * held)
    # The head's gradient is not smaller than a chunk's logits in fp32, so it does not lie where they were.
    hole = np.asarray(accounting.own_streams) * has_head * hole
    yield Tensor("place of a chunk's logits in fp32", OVERHEAD, START, LOSS, hole)

    name, (norm, norm_backward) = "last norm and hidden states of the loss", last_norm_bytes(step)
    kept, kept_gradients = kept_for_head(step)
    yield Tensor(name, ACTIVATIONS, LOSS, LOSS, has_head * (hidden + norm + step.whole_hidden))
    yield Tensor(name, ACTIVATIONS, HEAD, HEAD, has_head * kept)
    yield Tensor(name, ACTIVATIONS, NORM, NORM, has_head * norm_backward)
    yield Tensor(name, ACTIVATIONS, HEAD_REDUCE, HEAD_REDUCE, has_head * step.hidden)

    name, unsummed = "the head's gradient", np.where(step.sharded | ~step.summed, gradient, 0.0)
    in_backward = np.where(accounting.whole_vocabulary_gradients, gradient, unsummed)
    # Replicas that do not accumulate have no sum before this backward.
    makes_sum = step.replicated & ~step.accumulates & np.asarray(accounting.shards_masters)
    new_sum = np.where(makes_sum, step.head * precision.accumulated, 0.0)
    pending, in_backward = unsummed + new_sum, in_backward + new_sum
    yield Tensor(name, GRADIENTS, LOSS, LOSS, has_head * gradients)
    yield Tensor(name, GRADIENTS, HEAD, HEAD, has_head * np.maximum(in_backward, kept_gradients))
    # An update in the backward has freed it, unless it waits for that of the embedding.
    waits = np.where(step.frees & ~step.sharded & ~step.replicated, work.tied, 1.0)
    yield Tensor(name, GRADIENTS, NORM, NORM, has_head * in_backward * waits)
    pending = has_head * np.where(step.head_reduce > 0, 0.0, pending * waits)
    yield Tensor(name, GRADIENTS, LAST, SECOND, pending)
    at_end = step.sharded & ~step.sums_whole & ~(step.reduced_head > 0)  # reduced with the embedding's
    yield Tensor(name, GRADIENTS, FIRST, FIRST, at_end * pending)


def collective_buffers(step: Step, flight: InFlight) -> Iterator[Tensor]:
    """Yield inputs and outputs of collectives, as they were counted in FSDP2.

    FSDP2 keeps a reduce-scatter's input until the next one, and an all-gather's output likewise. Between
    replicas a block's sums are all-reduced when its backward is over (parallel/replicas.py).
    """
    accounting, block, reduce_bytes = step.accounting, step.elements.block, step.accounting.reduce_bytes
    layouts, stages = step.layouts, step.stages
    buffers = np.minimum(layouts.gradient_accumulation_steps, accounting.receive_buffers)
    neighbours = 2 * layouts.virtual_stages - stages.has_embedding - stages.has_head  # of all its stages
    yield Tensor("receive buffers", COMMUNICATION, START, UPDATE, step.messages * (buffers * neighbours))
    yield Tensor("output of the last all-gather", COMMUNICATION, START, LOSS, step.last_gather)
    yield Tensor("the next block's weights", COMMUNICATION, HEAD, HEAD_REDUCE, step.prefetched_block)
    prefetched = (accounting.gathered_groups - 1) * step.prefetched_block  # of a stage's first block nothing
    for first, last, blocks in ((LAST, LAST, 1), (BEFORE_LAST, SECOND, 2)):
        there = np.where(stages.blocks / layouts.virtual_stages > blocks, prefetched, 0.0)
        yield Tensor("the next block's weights", COMMUNICATION, first, last, there)

    name = "input of the reduce-scatter before"
    by_micro_batch = step.sharded & (layouts.zero >= 2) & step.accumulates
    own = block.trained - np.where(step.sharded, step.work.split_experts(layouts, True), 0.0)
    last_reduced = np.where(step.last_reduced > 0, step.last_reduced, own)
    earlier = np.where(by_micro_batch, last_reduced * reduce_bytes, 0.0)
    yield Tensor(name, COMMUNICATION, START, NORM, earlier)
    yield Tensor(name, COMMUNICATION, LAST, LAST, np.where(step.head_reduce > 0, 0.0, earlier))
    yield Tensor("input of the head's reduce-scatter", COMMUNICATION, HEAD_REDUCE, LAST, step.head_reduce)
    shard = step.head_shard * reduce_bytes * (reduce_bytes != accounting.precision.trained)  # else in place
    yield Tensor("output of the head's reduce-scatter", COMMUNICATION, HEAD_REDUCE, HEAD_REDUCE, shard)

    # Under ZeRO-3 experts' lies there when their weights, as large as their gradients, are freed.
    reduce_scatter = np.where(step.reduces, np.where(step.zero3, own, block.trained) * reduce_bytes, 0.0)
    yield Tensor("input of a block's reduce-scatter", COMMUNICATION, BEFORE_LAST, TIED, reduce_scatter)
    # Behind a block's backward, whose activations are then free: its gradients, their copies and the sum.
    unmade = accounting.precision.flattened - flight.made * accounting.precision.gradient
    flat = np.where(step.own_sums & ~step.accumulates, block.trained * np.maximum(unmade, 0.0), 0.0)
    name, needed = "a block's all-reduce", step.all_reduced * reduce_bytes + flat
    born, behind = LAST, needed
    if accounting.shards_masters:
        behind = np.where(layouts.pp > 1, 0.0, np.maximum(needed - flight.in_block_backward, 0.0))
        born = BEFORE_LAST
    behind_first = np.maximum(needed - flight.first_block, 0.0)
    for point, last, size in ((born, SECOND, behind), (FIRST, FIRST, behind_first)):
        yield Tensor(name, COMMUNICATION, point, last, np.where(step.frees, 0.0, size))
    name = "input of the last reduce-scatter"
    yield Tensor(name, COMMUNICATION, LAST_REDUCE, LAST_REDUCE, step.last_reduce)


def idle_memory(step: Step, flight: InFlight) -> Iterator[Tensor]:
    """Yield what torch's caching allocator holds for this engine's streams while no tensor uses it.

    What is freed on a stream stays that stream's. So the allocator holds the most that each stream ever had,
    all together, not the most that they had at one time. FSDP2 has two streams in addition to the one that
    computes (dryrun/requests.py):

        all-gather      flat buffers of gathered weights, the one before until the next is copied out, and the
                        shards in the compute dtype that a gather starts from
        reduce-scatter  shards of gradients, from the reduce-scatter to the update

    In the backward of a block the shards that it makes are still missing. What else is lost between tensors
    is a share, `Accounting.reserved`.
    """
    accounting, layouts, name = step.accounting, step.layouts, "idle memory of FSDP2's streams"
    gather, reduce = stream_bytes(step)
    by_micro_batch = layouts.zero >= 2  # ZeRO-1 sums whole gradients, on the stream that computes
    at_loss, before_backward = (by_micro_batch * size for size in flight.earlier_gradients)
    at_end = step.states.gradients - step.new_block - step.new_embedding
    at_end = (by_micro_batch | ~step.accumulates) * at_end
    prefetched = (accounting.gathered_groups - 1) * step.prefetched_block
    for born, dies, used in (
        (START, LOSS, step.last_gather + at_loss),
        (HEAD, HEAD_REDUCE, step.prefetched_block + before_backward),
        (LAST, SECOND, prefetched + before_backward),
        (FIRST, LAST_REDUCE, at_end),
        (UPDATE, UPDATE, reduce),
    ):
        yield Tensor(name, OVERHEAD, born, dies, np.maximum(gather + reduce - used, 0.0))
    own = np.asarray(accounting.own_streams)
    yield Tensor(name, OVERHEAD, LAST, SECOND, -own * step.new_head)
    yield from behind(name, OVERHEAD, step, -own * step.new_block)


def stream_bytes(step: Step) -> tuple[Number, Number]:
    """Most bytes of the streams of (all-gathers, reduce-scatters); 0 for what FSDP2 does not run."""
    precision, stages, elements, apart = step.accounting.precision, step.stages, step.elements, step.apart
    block, embedding, outside = elements.block, elements.before_blocks, elements.outside
    cast = np.where(precision.trained != precision.weight, precision.weight, 0.0)

    def gathered(whole: Number, shard: Number) -> tuple[Number, Number]:
        """(Bytes of the flat buffer, the same with the cast shards)."""
        flat = np.broadcast_to(whole * precision.weight, np.shape(outside.whole))
        return flat, np.where(flat > 0, flat + shard * cast, 0.0)

    of_block = gathered(block.whole, block.shard)
    of_embedding = gathered(apart * embedding.whole, apart * embedding.shard)
    norm = stages.has_head * step.ends_apart * precision.weight * step.work.last_norm_elements
    root = outside.whole - apart * embedding.whole, outside.shard - apart * embedding.shard
    of_root = gathered(*root)  # the head
    # Of a forward: the root, the embedding, the blocks; the last block's is there until the next root's.
    behind_root = np.where(of_root[0] > 0, of_root[0], of_block[0])
    behind_embedding = np.where(of_embedding[0] > 0, of_embedding[0], behind_root)
    gather = np.maximum.reduce([
        of_block[0] + of_root[1],
        np.where(of_embedding[1] > 0, behind_root + of_embedding[1], 0.0),
        behind_embedding + of_block[1],
        of_block[0] + of_block[1],
        gather_pool(of_root, of_embedding, of_block, stages, last_norm=norm),
    ])  # fmt: skip
    # A new shard exists next to the sums until it is added, and next to its cast.
    shards = [block.trained_shard, apart * embedding.trained_shard]
    shards.append(outside.trained_shard - shards[1])
    largest = np.maximum.reduce(np.broadcast_arrays(*shards))
    added = (step.layouts.zero >= 2) & step.accumulates
    reduce_bytes = step.accounting.reduce_bytes
    added_shard = largest * (precision.trained * added + reduce_bytes * (reduce_bytes != precision.trained))
    held = np.where(step.frees, largest, elements.total.trained_shard)
    reduce = held * precision.sharded_gradient + added_shard
    sharded = step.sharded * np.asarray(step.accounting.own_streams) > 0
    return np.where(sharded, gather, 0.0), np.where(sharded, reduce, 0.0)


def gather_pool(
    root: tuple[Number, Number],
    embedding: tuple[Number, Number],
    block: tuple[Number, Number],
    stages: Stages,
    *,
    last_norm: Number,
) -> Number:
    """Bytes of memory in which a forward's gathers find room one after the other.

    A gather takes its cast shards and its flat buffer, each in the smallest gap that has room, else at the
    end; the shards are freed behind it, the flat buffer once the next one has been gathered. So the root's,
    the embedding's and the first block's lie in a row, the latter in the root's place if it has room, and
    blocks from then on in turn in two places: the lower one ends where the upper one begins. A last
    block that comes to the lower place finds no room there, since it is gathered with the last norm.

    root, embedding, block: (bytes of the flat buffer, the same with the cast shards). last_norm: its bytes.
    """
    cast_root, cast_embedding, cast = (with_cast - flat for flat, with_cast in (root, embedding, block))
    next_cast = np.where(embedding[0] > 0, cast_embedding, cast)
    before = root[1] + embedding[0]
    before = before + np.where((before > 0) & (next_cast > cast_root), next_cast, 0.0)
    in_place_of_root = (embedding[0] > 0) & (root[0] > 0) & (block[1] <= root[1])
    behind = ~in_place_of_root & (before > 0)
    has_room = behind & (before < block[1])  # the lower place begins where the first block lay
    blocks = np.round(stages.blocks)
    third = (last_norm > 0) & ~has_room & (blocks > 2) & (blocks % 2 == np.where(behind, 0, 1))
    places = np.where(has_room, before, cast) + 2 * block[0] + np.where(third, block[0] + last_norm, 0.0)
    return np.maximum(before + np.where(behind, block[0], 0.0), places)
