"""Bytes of a block's backward whose MLP runs in tiles (parallel/tiles.py).

The trace of a whole block has its times in their order by the gradients that it has made: those of the MLP
come first, and are a tile's here; the others lack all that the MLP saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.plan.memory.activations import last_norm_bytes
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.memory.states import Step
    from meshtune.plan.work import Kept


def without_mlp(step: Step, kept: Kept) -> Kept:
    """Return what a block saves: of an MLP in tiles only this rank's part of its input."""
    width = step.accounting.element * step.work.hidden
    of_input = step.tiled * np.clip(kept.entering - width, 0.0, width)
    return kept._replace(
        outside=kept.outside + of_input,
        entering=kept.entering - of_input,
        mlp=np.where(step.tiled, 0.0, kept.mlp),
    )


def tiled_times(
    step: Step, traced: Sequence[tuple[Number, Number]], output_gradient: Number
) -> list[tuple[Number, Number]]:
    """(Bytes besides what was saved and recomputed, share of the block's gradients made) at the times of a
    backward that may be the fullest.

    traced: bytes per token and share, as of Peaks.backward; none: nothing was traced.
    """
    work, layouts, accounting = step.work, step.layouts, step.accounting
    element, tp, shards = accounting.element, layouts.tp, step.sequence_shards
    inner = accounting.saved_per_token(work, layouts, step.seq_len).mlp
    trained = work.trained_mlp(tp)
    share = trained * tp / np.maximum(work.trained_block_parameters, 1.0)
    later = [(size, made) for size, made in traced if np.all(made > share + 1e-9)]
    own = [size - element * work.hidden for size, made in traced if not np.all(made > share + 1e-9)]
    wide = element * max((matrix.cols for matrix in work.matrices if matrix.mlp), default=0.0)
    backward = np.maximum.reduce(np.broadcast_arrays(*own)) if own else 2 * wide
    # Inner tensors of a tile and what sp gathers of it: its input with the gradient of its output, only the
    # input, and the input with the gradients that two matrices give it.
    gathered = element * work.hidden * (shards > 1)
    times = (
        (inner + wide) / tp + 2 * gathered,
        (inner + backward) / tp + gathered,
        2 * wide / tp + 3 * gathered,
    )
    tile = step.tile * shards * np.maximum.reduce(np.broadcast_arrays(*times))
    # Sums of weights' gradients, in fp32 or wider, and one tile's.
    sums = trained * (np.maximum(element, 4.0) + element)
    keeps, most = last_norm_bytes(step)
    input_freed = np.where(work.last_norm > 0, 0.0, step.hidden)
    tokens = step.tokens / tp
    return [
        (output_gradient + step.hidden + tile + sums, 0.0),
        (output_gradient + most - keeps - input_freed, share),
        *((tokens * (size + inner) - step.hidden + output_gradient, made) for size, made in later),
    ]
