"""Bytes that the passes of one block have at once, in closed form and as they were traced on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.plan.memory.activations import block_backward
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Accounting
    from meshtune.plan.memory.activations import BlockBytes, MicroBatchSizes
    from meshtune.plan.work import Work


class BlockPasses(NamedTuple):
    """Bytes that the passes of an average block have at once for one micro-batch."""

    traced: bool  # False: the forwards and masks are not known, and 0
    forward: Number  # beside what it saves
    recomputed_forward: Number  # beside what it saves, by a block that recomputes all
    recomputed: Number  # BlockBytes.recomputed, without the input of a block that is saved anyway
    backward: Number  # beside what was saved and recomputed
    backward_beside_gradients: Number  # the same, less what the block's gradients lack by then
    masks: Number  # of attention, which all blocks share


def block_passes(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    seq_len: Number,
    sizes: MicroBatchSizes,
    block: BlockBytes,
    *,
    output_gradient: Number,
) -> BlockPasses:
    """Bytes of a block's passes: of the backward by the closed form, or as it was traced if that is more.

    tp is taken to split all of what was traced. output_gradient: bytes of the gradient that a backward
    starts from; 0 where it lies in a receive buffer.
    """
    backward = output_gradient + block_backward(work, layouts, accounting, sizes)
    peaks = accounting.traced_peaks(work, layouts, seq_len)
    block_input = sizes.hidden_bytes / sizes.sequence_shards
    saves_input = peaks.saves_input if peaks else accounting.element >= 4  # as a norm in fp32 does
    saved_anyway = np.where(layouts.recomputation("matmuls"), saves_input * block_input, 0.0)
    recomputed = block.recomputed - saved_anyway
    if peaks is None:
        return BlockPasses(False, 0.0, 0.0, recomputed, backward, backward, 0.0)
    in_forward, in_backward, alone, masks = (
        sizes.tokens * size / layouts.tp
        for size in (peaks.forward, peaks.backward, peaks.forward_alone, peaks.masks)
    )
    in_backward = in_backward - block_input + output_gradient
    recomputes = layouts.recomputation("block")
    second_forward = np.where(recomputes, in_forward + output_gradient, 0.0)
    block_gradients = work.trained_block_parameters / layouts.tp * accounting.precision.gradient
    summed = (layouts.gradient_accumulation_steps > 1) | (accounting.gradient_replicas(layouts) > 1)
    counted = accounting.gathers_shards(layouts) | ~summed  # the block's own, whole, by the timeline
    missing = np.where(counted, (1 - peaks.made) * block_gradients, 0.0)
    return BlockPasses(
        traced=True,
        forward=in_forward + (1 - peaks.saves_input) * block_input,
        recomputed_forward=np.where(recomputes, alone - block.saved, in_forward),
        recomputed=recomputed,
        backward=np.maximum.reduce(np.broadcast_arrays(backward, in_backward, second_forward)),
        backward_beside_gradients=np.maximum.reduce(
            np.broadcast_arrays(backward, in_backward - missing, second_forward - block_gradients * counted)
        ),
        masks=masks,
    )
