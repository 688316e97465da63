"""Bytes of the micro-batches that a pipeline rank has in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.layout import ZERO_BUBBLE
from meshtune.plan.memory.activations import MicroBatchSizes, block_backward, output_gradients, saved_by_block
from meshtune.plan.memory.stages import Stages, awaiting_weights, in_flight, kept_input_gradients
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Accounting
    from meshtune.plan.memory.activations import LossBytes
    from meshtune.plan.work import Work


class InFlight(NamedTuple):
    """Bytes of micro-batches between their forward and their backward, on each pipeline rank."""

    in_block_forward: Number  # in a block's last forward, all micro-batches included; 0: not traced
    in_block_backward: Number  # that a block's backward has at once beside `total`
    of_block: Number  # that the last block of a stage saved, for one micro-batch
    first_block: Number  # that the backward of a stage's first block has, with nothing else in flight
    total: Number  # of all micro-batches in flight: saved by blocks, sent, held for the loss
    at_loss: Number  # the same in the loss, and in the backward of the head
    per_micro_batch: Number  # of one of them
    input_gradients: Number  # of stages' inputs that a split backward leaves until the next step
    head_gradients: Number  # of the head, of all micro-batches in flight but one
    received: Number  # buffers that hidden states and their gradients are received in
    micro_batches: Number  # in flight, at most

    @property
    def others(self) -> Number:
        """Bytes of all micro-batches in flight but one."""
        return self.total - self.per_micro_batch


def activations_in_flight(
    work: Work, layouts: Columns, accounting: Accounting, seq_len: Number, stages: Stages, loss: LossBytes
) -> InFlight:
    """Bytes of activations of all micro-batches that a rank has in flight, and its receive buffers.

    loss: of the rank with the head.
    """
    sizes = MicroBatchSizes.of(work, layouts, accounting, seq_len)
    selective = None if accounting.selected is None else accounting.selected.per_token(work, seq_len)
    block = saved_by_block(
        accounting.saved_per_token(work, seq_len), work, layouts, sizes.tokens,
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
    of_blocks = micro_batches * (recomputing * block.saved + saving * block.everything)
    unequal = layouts.runs("interleaved1f1b") & (micro_batches < layouts.gradient_accumulation_steps)
    fuller = np.where(unequal, stages.interleaved, 1.0)
    less_at_loss = of_blocks * (fuller - np.where(unequal, stages.interleaved_at_loss, 1.0))
    total = of_blocks * fuller + micro_batches * sent
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
    forward = np.zeros_like(total)
    if peaks := accounting.traced_peaks(work):
        of_backward, saving_pass, pass_alone = (
            sizes.tokens * (per_token + per_key * seq_len)
            for per_token, per_key in (peaks.backward, peaks.forward, peaks.forward_alone)
        )
        temporaries = np.maximum(temporaries, of_backward - block.everything)
        recomputes = layouts.recomputation("block") & (saving <= 0)
        in_forward = np.where(recomputes, pass_alone, saving_pass)
        forward = total + in_forward - np.where(saving > 0, block.everything, block.saved)
    # The blocks that recompute nothing come first in the backward, and free what they saved.
    at_once = np.maximum(block.recomputed - saving / virtual * block.everything, 0.0)
    return InFlight(
        in_block_forward=forward,
        in_block_backward=np.maximum(temporaries + at_once, of_stage),
        of_block=np.where(saving > 0, block.everything, block.saved),
        first_block=block.saved + np.maximum(temporaries + block.recomputed, of_stage),
        total=total,
        at_loss=total - less_at_loss,
        per_micro_batch=total / np.maximum(micro_batches, 1.0),
        input_gradients=kept_input_gradients(layouts, stages) * accounting.keeps_sent * hidden,
        head_gradients=stages.has_head * (micro_batches - 1) * loss.gradients_per_extra,
        received=received,
        micro_batches=micro_batches,
    )
