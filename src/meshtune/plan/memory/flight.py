"""Bytes of the micro-batches that a pipeline rank has in flight, and of the passes of one block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.layout import V_SCHEDULES, ZERO_BUBBLE
from meshtune.placement.states import pinned_bytes
from meshtune.plan.memory.activations import (
    attention_made_later,
    block_backward,
    exchanged_rows,
    kept_for_head,
    last_norm_bytes,
    norm_gradient,
    output_gradients,
    recomputation_start,
    saved_by_block,
)
from meshtune.plan.memory.mlp_tiles import tiled_times, without_mlp
from meshtune.plan.memory.stages import fullest, in_flight, in_flight_in_head
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.census import BackwardBytes
    from meshtune.plan.memory.activations import BlockBytes
    from meshtune.plan.memory.states import Step


class InFlight(NamedTuple):
    """Bytes of micro-batches between their forward and their backward, on each pipeline rank."""

    in_block_forward: Number  # in a block's last forward, all micro-batches included; 0: not traced
    in_block_backward: Number  # that a block's backward has in addition to `total`
    made: Number  # by then, of the gradients that the block leaves, a share
    traced: bool  # False: `made` is not known, and 1
    of_block: Number  # that the last block of a stage saved, for one micro-batch
    first_block: Number  # that the backward of a stage's first block has, with nothing else in flight
    host: Number  # in host memory, of all micro-batches in flight
    total: Number  # of all micro-batches in flight: saved by blocks, sent, held for the loss
    at_loss: Number  # the same in the loss, and in the backward of the head
    per_micro_batch: Number  # of one of them
    others: Number  # of all but one
    head_gradients: Number  # of the head, of all micro-batches in flight but one
    earlier_gradients: tuple[Number, Number]  # allocated (in the last loss, when the fullest backward starts)
    started: Number = 1  # 0 before the first backward of a step, so without gradients of earlier ones

    def holding(self, micro_batches: Number, started: Number) -> InFlight:
        """The same with other numbers of micro-batches in flight, or left at the end of a backward.

        started: 0 before the first backward of a step.
        """
        total = micro_batches * self.per_micro_batch
        added = total - self.total
        return self._replace(
            total=total,
            others=total,
            at_loss=self.at_loss + added,
            in_block_forward=np.where(self.in_block_forward > 0, self.in_block_forward + added, 0.0),
            started=started,
        )


def sent_messages(step: Step, micro_batches: Number, keeps_input: Number) -> Number:
    """Count the hidden states, or gradients of them, that a rank sent and still holds, less what blocks keep
    that lies in a receive buffer.

    micro_batches: in flight. keeps_input: True where the first block of a stage keeps its input as it is:
    what was received.
    """
    layouts, accounting, stages = step.layouts, step.accounting, step.stages
    virtual, steps = layouts.virtual_stages, layouts.gradient_accumulation_steps
    # Hidden states that a V schedule's last rank hands to itself lie in a receive buffer.
    to_itself = layouts.runs(*V_SCHEDULES) & (stages.rank == layouts.pp - 1)
    sent = accounting.keeps_sent * (virtual - stages.has_head - to_itself)
    gradients = accounting.keeps_sent * (virtual - stages.has_embedding - to_itself)
    kept = micro_batches * sent
    if math.isinf(accounting.receive_buffers):  # torch's stages
        looped = layouts.runs("interleaved1f1b", "loopedbfs", *ZERO_BUBBLE)
        kept = kept + np.where(looped, steps - micro_batches, 0.0) * (sent + gradients)
        # Fewer are used again, while blocks keep what was received.
        kept = kept - np.where(keeps_input, micro_batches * (virtual - stages.has_embedding), 0.0)
        kept = kept + layouts.runs("1f1b")  # the one sent a pass ago
    return kept


def activations_in_flight(step: Step) -> InFlight:
    """Bytes of activations of all micro-batches that a rank has in flight, and of a block's passes."""
    work, layouts, accounting, stages = step.work, step.layouts, step.accounting, step.stages
    block, virtual = block_bytes(step), layouts.virtual_stages
    recomputing, saving = step.recomputing, step.saving
    offloaded = offloaded_blocks(step)
    # The experts of each token, int64, that a block keeps to run again (experts/choices.py), also offloaded
    choices = 8 * work.routed * step.tokens / layouts.tp * layouts.recomputation("block")
    of_micro_batch = (recomputing - offloaded) * block.saved + saving * block.everything
    of_micro_batch = of_micro_batch + recomputing * choices
    waiting = stages.blocks * output_gradients(step)
    most = in_flight(layouts, stages.rank)
    micro_batches, without_weights = fullest(layouts, stages.rank, of_micro_batch, waiting)
    of_blocks = micro_batches * of_micro_batch
    unequal = layouts.runs("interleaved1f1b") & (micro_batches < layouts.gradient_accumulation_steps)
    fuller = np.where(unequal, stages.interleaved, 1.0)
    less_at_loss = of_blocks * (fuller - np.where(unequal, stages.interleaved_at_loss, 1.0))
    ends = None if accounting.saved else work.ends.get(int(accounting.element))
    tables = step.tokens * ends.tables if ends else 0.0  # of each stage
    before = stages.has_embedding * step.tokens / step.sequence_shards * (ends.before if ends else 0.0)
    keeps_input = (recomputing > 0) & layouts.recomputation("block") | (accounting.element >= 4)
    sent = step.messages * sent_messages(step, micro_batches, keeps_input)
    in_head = stages.has_head * in_flight_in_head(layouts, micro_batches)
    kept_activations, kept_gradients = kept_for_head(step)
    total = of_blocks * fuller + micro_batches * (virtual * tables + before) + sent
    total = total + in_head * kept_activations + without_weights * waiting
    lies_in_buffer = (layouts.pp > 1) & (stages.has_head == 0) & math.isinf(accounting.receive_buffers)
    output_gradient = np.where(lies_in_buffer, 0.0, step.hidden)
    passes = block_passes(step, block, output_gradient)
    masks = np.where(layouts.recomputation("block"), passes.masks, 0.0)  # held for the second forward
    total = total + micro_batches * masks
    # The blocks that recompute nothing come first in the backward, and free what they saved.
    brought = np.where(offloaded > 0, block.saved, 0.0)  # for the block whose backward comes next
    at_once = np.maximum(passes.recomputed + brought - saving / virtual * block.everything, 0.0)
    starts = layouts.recomputation("keeps_matmuls") & (saving <= 0) & (accounting.selected is None)
    start = np.where(starts, output_gradient + recomputation_start(step), 0.0)
    of_stage = np.maximum(input_backward(step), start)
    of_first = np.maximum(passes.backward + passes.recomputed, of_stage)
    per_micro_batch = total / np.maximum(most, 1.0)
    return InFlight(
        in_block_forward=np.where(passes.traced, total + passes.forward + passes.masks - masks, 0.0),
        in_block_backward=np.maximum(passes.backward + at_once, of_stage),
        made=passes.made,
        traced=passes.traced,
        # In place of an input that a backward has freed, one of host memory comes.
        of_block=np.where(saving > 0, block.everything, block.saved - brought + choices),
        first_block=block.saved + choices + tables + masks + of_first,
        host=micro_batches * fuller * offloaded * pinned_bytes(block.saved),
        total=total,
        at_loss=total - less_at_loss,
        per_micro_batch=per_micro_batch,
        others=total - per_micro_batch,
        head_gradients=in_head * kept_gradients,
        earlier_gradients=earlier_gradients(step, most, per_micro_batch),
    )


def offloaded_blocks(step: Step) -> Number:
    """Blocks of each pipeline rank whose inputs go to host memory: of a stage's recomputed ones all but the
    last, and the first if the stage receives its input.
    """
    stages, virtual = step.stages, step.layouts.virtual_stages
    stay = 2 * virtual - stages.has_embedding
    return np.where(step.layouts.recomputation("host"), np.maximum(step.recomputing - stay, 0.0), 0.0)


def earlier_gradients(step: Step, in_flight: Number, per_micro_batch: Number) -> tuple[Number, Number]:
    """Bytes of gradients already allocated (in the last loss, when the fullest backward starts), without
    those of the head in flight.

    If all micro-batches are in flight (GPipe), gradients appear only after the first backward, which has
    freed one micro-batch's activations: only what exceeds those counts, and the head's, which are there
    before a block's. Without a pipeline, 0 for a step of one micro-batch. Where a sum lies next to the
    gradients (`Copies.beside`), it is there from the start.

    in_flight: micro-batches, at most. per_micro_batch: bytes of one of them.
    """
    precision, gradients = step.accounting.precision, step.states.gradients
    if precision.beside:
        both = precision.accumulated + precision.beside * precision.gradient
        sums = gradients * precision.accumulated / both
        frees = step.accounting.frees_added_gradients
        earlier = sums if frees else np.where(step.accumulates, gradients, sums)
        return earlier, earlier
    layouts, elements, micro_batches = step.layouts, step.elements, step.layouts.gradient_accumulation_steps
    # Under DualPipeV the first rank's first stage has its first backward behind the fullest loss, if a step
    # has no more micro-batches than it needs.
    late = layouts.runs("dualpipev") & (micro_batches <= 2 * layouts.pp) & (step.stages.rank == 0)
    blocks = elements.block.trained * step.stages.blocks / layouts.virtual_stages
    share = (elements.before_blocks.trained + blocks) / np.maximum(elements.total.trained, 1.0)
    missing = np.where(late, share, 0.0) * gradients
    freed = np.minimum(missing, per_micro_batch / layouts.virtual_stages)
    earlier = np.where(step.accumulates, gradients, 0.0)
    exceeding = np.maximum(gradients - per_micro_batch, step.head_gradient * precision.accumulated)
    at_once = (layouts.pp > 1) & (in_flight >= micro_batches)
    return np.where(at_once, 0.0, earlier - missing), np.where(at_once, exceeding, earlier - freed)


def block_bytes(step: Step) -> BlockBytes:
    """Bytes of an average block's activations; of what runs again, those of the block that saves most."""
    work, layouts, accounting, seq_len = step.work, step.layouts, step.accounting, step.seq_len
    traced = step.traced_block
    selective = accounting.selected.per_token(work, seq_len) if accounting.selected else None
    selective = traced.selective if traced else selective
    saved = [accounting.saved_per_token(work, layouts, seq_len)]
    if traced and traced.fullest != traced.kept:  # else all blocks save the same
        saved.append(accounting.saved_per_token(work, layouts, seq_len, fullest=True))
    blocks = [
        saved_by_block(
            without_mlp(step, per_token), work, layouts, step.tokens, element=accounting.element,
            regathers_inputs=accounting.regathers(layouts), context=accounting.context_keys,
            selective=selective, compiled=traced is not None and traced.fused, flex=accounting.flex,
            tiled=step.tiled,
        )
        for per_token in saved
    ]  # fmt: skip
    return blocks[0]._replace(recomputed=blocks[-1].recomputed)


def input_backward(step: Step) -> Number:
    """Bytes at the end of a backward for an input only, without what was saved: gradients that wait for
    those of weights, and temporaries of the first norm's backward. 0 for schedules without such backwards,
    and for a rank that has but the first stage, whose input has no gradient.
    """
    layouts, stages, element = step.layouts, step.stages, step.accounting.element
    waiting = stages.blocks / layouts.virtual_stages * output_gradients(step)
    norm = 5 * max(4 / element, 1.0) * step.hidden  # in fp32
    # The last norm waits too, and a second backward keeps the first one's gradient of hidden states.
    last_norm = step.tokens / step.sequence_shards * norm_gradient(step.work, element)
    of_head = stages.has_head * (kept_for_head(step)[0] + last_norm)
    split = layouts.runs("zb", "zbv") & (layouts.virtual_stages > stages.has_embedding)
    return np.where(split, waiting + norm + of_head, 0.0)


class BlockPasses(NamedTuple):
    """Bytes that the passes of an average block have at once for one micro-batch."""

    traced: bool  # False: the forwards and masks are not known, and 0
    forward: Number  # without what it saves, of a rank's last block
    recomputed: Number  # BlockBytes.recomputed, without the input of a block that is saved anyway
    backward: Number  # without what was saved and recomputed, when that and the block's gradients are most
    made: Number  # of the gradients that the block leaves, a share by then; above 1 where one is summed up
    masks: Number  # of attention, which all blocks share


def block_passes(step: Step, block: BlockBytes, output_gradient: Number) -> BlockPasses:
    """Bytes of a block's passes. The traced times of its backward always count; the closed form too under cp,
    under selective, and under sp if sp was not traced: the larger one.

    Forwards are divided by tp as a whole. output_gradient: bytes of the gradient that a backward
    starts from; 0 where it lies in a receive buffer.
    """
    layouts, accounting = step.layouts, step.accounting
    made_again = step.tokens / layouts.tp * step.traced_block.made_again if step.traced_block else 0.0
    exchanged = exchanged_rows(step)
    made_again = made_again + exchanged
    backward = output_gradient + block_backward(step) + made_again
    peaks = accounting.traced_peaks(step.work, layouts, step.seq_len)
    saves_input = peaks.saves_input if peaks else accounting.element >= 4  # as a norm in fp32 does
    saved_anyway = np.where(layouts.recomputation("matmuls"), saves_input * step.hidden, 0.0)
    recomputed = block.recomputed - saved_anyway
    if peaks is None:
        tiled = [size for size, _ in tiled_times(step, (), output_gradient, last_norm_bytes(step))]
        backward = np.where(step.tiled, np.maximum.reduce(np.broadcast_arrays(backward, *tiled)), backward)
        return BlockPasses(False, 0.0, recomputed, backward, 1.0, 0.0)
    tokens, sp = step.tokens / layouts.tp, layouts.sp > 0
    recomputes = layouts.recomputation("block")
    whole = layouts.recomputation("matmuls") | ~(recomputes > 0)
    traced = whole & (layouts.cp == 1) & (~sp | bool(peaks.gathered))
    heads = step.work.head_shards(layouts.tp)

    def of_rank(time: BackwardBytes) -> Number:
        inside = (time.heads + time.keys) / heads + time.mlp * step.work.most_rows(layouts) / layouts.tp
        size = step.tokens * (time.outside / step.sequence_shards + time.whole + inside)
        return size - step.hidden + output_gradient + made_again

    own = step.work.shared_block(layouts, True) / layouts.tp + step.work.split_experts(layouts, True)
    own = own * accounting.precision.gradient
    left, later = step.leaves_gradients * own, attention_made_later(step)
    fullest: list[tuple[Number, Number]] = []  # without sp, and with it
    for some in (peaks.backward, peaks.gathered or peaks.backward):
        after_mlp = min(time.mlp for time in some)
        times = [(of_rank(time) - later * (time.mlp > after_mlp), time.made) for time in some]
        if np.any(step.tiled):
            tiled = tiled_times(step, times, output_gradient, last_norm_bytes(step))
            times = [(np.where(step.tiled, -np.inf, size), made) for size, made in times]
            times += [(np.where(step.tiled, size, -np.inf), made) for size, made in tiled]
        fullest.append(fullest_time(times, left))
    size, made = (np.where(sp, *of_both) for of_both in zip(*reversed(fullest), strict=True))
    # What sp gathers for the MLP's first matrices is there until the last of their gradients is made.
    closed = np.where(traced, 0.0, backward - later), np.where(sp, 1.0, made)
    second_forward = tokens * peaks.forward_again + output_gradient
    again = np.where(recomputes & ~step.tiled, second_forward, 0.0), 0.0
    size, made = fullest_time([(size, made), closed, again], left)
    forward = tokens * peaks.forward + exchanged
    # Under linear a forward is fullest in its MLP, and attention's output, which it saves, is in addition.
    least = np.where(layouts.recomputation("matmuls"), np.minimum(step.hidden, block.saved), block.saved)
    recomputing_forward = np.where(recomputes, tokens * peaks.forward_alone - least, forward)
    saving_forward = forward + (1 - peaks.saves_input) * step.hidden
    # With tiles both are below the backward.
    recomputing_forward = np.where(
        step.tiled, np.minimum(recomputing_forward, size + recomputed), recomputing_forward
    )
    saving_forward = np.where(step.tiled, np.minimum(saving_forward, size), saving_forward)
    return BlockPasses(
        traced=True,
        forward=np.where(step.saving > 0, saving_forward, recomputing_forward),
        recomputed=recomputed,
        backward=size,
        made=made,
        masks=tokens * peaks.masks,
    )


def fullest_time(times: Sequence[tuple[Number, Number]], gradients: Number) -> tuple[Number, Number]:
    """The one of `times`, each (bytes, share of `gradients`), with most bytes and gradients together."""
    size, made = times[0]
    most = size + made * gradients
    for other, other_made in times[1:]:
        together = other + other_made * gradients
        more = together > most
        most = np.maximum(together, most)
        size, made = np.where(more, other, size), np.where(more, other_made, made)
    return size, made
