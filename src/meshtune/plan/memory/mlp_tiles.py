"""Bytes of a block's backward whose MLP runs in tiles (parallel/tiles.py).

The times of a traced backward are in the order of the gradients that it has made by then. Those with no more
than the MLP's are a tile's here; the others are without all that the MLP saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.memory.states import Step
    from meshtune.plan.work import Kept


def without_mlp(step: Step, kept: Kept) -> Kept:
    """Return what a block saves: of an MLP in tiles only this rank's part of its input."""
    return kept._replace(
        outside=kept.outside + step.tiled * step.accounting.element * step.work.hidden,
        entering=kept.entering - step.tiled * entering_mlp(step, kept),
        mlp=np.where(step.tiled, 0.0, kept.mlp),
    )


def entering_mlp(step: Step, kept: Kept) -> Number:
    """Bytes per token of an MLP's input, where it isn't that of attention."""
    width = step.accounting.element * step.work.hidden
    return np.clip(kept.entering - width, 0.0, width)


def tiled_times(
    step: Step,
    times: Sequence[tuple[Number, Number]],
    output_gradient: Number,
    norm_bytes: tuple[Number, Number],
) -> list[tuple[Number, Number]]:
    """(Bytes besides what was saved and recomputed, share of the block's gradients made) at the times of a
    backward that may be the fullest.

    times: the same of a block that runs its MLP on all tokens at once; none: nothing was traced. norm_bytes:
    as `last_norm_bytes` counts them.
    """
    work, layouts, accounting = step.work, step.layouts, step.accounting
    element, tp, shards = accounting.element, layouts.tp, step.sequence_shards
    kept = accounting.saved_per_token(work, layouts, step.seq_len)
    trained = work.trained_mlp(tp)
    share = work.trained_mlp(1) / np.maximum(work.trained_block_parameters, 1.0) + 1e-9
    split = np.where(accounting.regathers(layouts), shards, 1.0)
    freed = step.tokens * (kept.mlp / tp + entering_mlp(step, kept) * (1 / split - 1 / shards))
    in_mlp = [size + freed - output_gradient for size, made in times if made <= share]
    # Untraced: what it saves, two of the widest tensors, and what sp gathers of its input and output.
    widest = max((matrix.cols for matrix in work.matrices if matrix.mlp), default=0.0)
    closed = (kept.mlp + 2 * element * widest) / tp + 2 * element * work.hidden * (shards > 1)
    most = np.maximum.reduce(np.broadcast_arrays(-np.inf, *in_mlp))
    most = np.where(np.isfinite(most), most, step.tokens * closed)
    # Sums of weights' gradients, in fp32 or wider, and one tile's.
    sums = trained * (np.maximum(element, 4.0) + element)
    keeps, in_norm = norm_bytes
    input_freed = np.where(work.last_norm > 0, 0.0, step.hidden)
    return [
        (output_gradient + step.hidden + step.tile * shards / step.tokens * most + sums, 0.0),
        (output_gradient + in_norm - keeps - input_freed, share),
        *((size + freed, made) for size, made in times if made > share),
    ]
