"""Bytes that the passes of one block have at once, in closed form and as they were traced on meta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.plan.memory.activations import block_backward
from meshtune.plan.memory.buffers import leaves_gradients
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
    backward: Number  # beside what was saved and recomputed, when that and the block's gradients are most
    made: Number  # of the gradients that the block leaves, a share by then; above 1 where one is summed up
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
    """Bytes of a block's passes: of the backward as it was traced. Its closed form counts where it has more
    and tp, cp or a recomputation of parts, which the trace does not have, and where there is none.

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
        return BlockPasses(False, 0.0, 0.0, recomputed, backward, 1.0, 0.0)
    in_forward, again, alone, masks = (
        sizes.tokens * size / layouts.tp
        for size in (peaks.forward, peaks.forward_again, peaks.forward_alone, peaks.masks)
    )
    recomputes = layouts.recomputation("block")
    whole = layouts.recomputation("matmuls") | ~(recomputes > 0)
    traced = whole & (layouts.tp == 1) & (layouts.cp == 1)
    times: list[tuple[Number, Number]] = [
        (sizes.tokens * size / layouts.tp - block_input + output_gradient, made)
        for size, made in peaks.backward
    ]
    _, made_when_fullest = fullest_time(times, 0.0)
    # What sp gathers for the MLP's first matrices is there until the last of their gradients is made.
    made_by_then = np.where(layouts.sp > 0, 1.0, made_when_fullest)
    times.append((np.where(traced, 0.0, backward), made_by_then))
    times.append((np.where(recomputes, again + output_gradient, 0.0), 0.0))  # the second forward
    own = work.trained_block_parameters / layouts.tp * accounting.precision.gradient
    size, made = fullest_time(times, leaves_gradients(layouts, accounting) * own)
    return BlockPasses(
        traced=True,
        forward=in_forward + (1 - peaks.saves_input) * block_input,
        recomputed_forward=np.where(recomputes, alone - block.saved, in_forward),
        recomputed=recomputed,
        backward=size,
        made=made,
        masks=masks,
    )


def fullest_time(times: Sequence[tuple[Number, Number]], gradients: Number) -> tuple[Number, Number]:
    """The one of `times`, each (bytes, share of `gradients`), with most bytes and gradients together."""
    size, made = times[0]
    for other, other_made in times[1:]:
        more = other + other_made * gradients > size + made * gradients
        size, made = np.where(more, other, size), np.where(more, other_made, made)
    return size, made
