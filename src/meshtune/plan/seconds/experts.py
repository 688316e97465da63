"""Seconds of a block's experts on a rank: grouped matmuls, permutations of rows, exchanges between ranks.

    tokens ─> router ─> rows by expert ─> exchange ─> grouped matmuls ─> exchange ─> weighted sum

Under ep all ranks wait for the one with most rows (`Work.imbalance`): its matmuls, and its messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshtune.precision import NF4_BYTES
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.work import Gemm, Work

# Rows of a tile. A grouped kernel fills up each expert's rows to a multiple, by half a tile on average: 28,
# 56 and 113 rows a group take 67, 67 and 72 µs (flashinfer-ai/flashinfer#2503).
TILE_ROWS = 128


def rows_of(work: Work, layouts: Columns, tokens: Number) -> Number:
    """Rows that a rank has for the experts of an average block. tokens: of a micro-batch, before tp, whose
    ranks each route their own part of them.
    """
    return tokens * work.routed / layouts.tp


def grouped_passes(
    machine: Machine, tokens: Number, gemm: Gemm, work: Work, layouts: Columns
) -> tuple[Number, Number, Number]:
    """Seconds of (forward, gradients of inputs, gradients of weights) of one kind of experts' matrix in a
    block: one kernel for all experts of the rank, each with its own rows.

    Computing has the efficiency of a dense matmul with the same sizes (`gpu.matmul`) times `grouped`, for
    rows that fill tiles; gradients of weights sum over the few rows of an expert. tokens: as in `rows_of`.
    """
    groups = gemm.experts / layouts.ep
    rows = rows_of(work, layouts, tokens) * gemm.count / work.routed * work.most_rows(layouts)
    filled, of_expert = rows + groups * TILE_ROWS / 2, rows / groups
    size = gemm.rows * gemm.cols

    def seconds(flops: Number, inner: Number, weight_bytes: Number) -> Number:
        rate = machine.matmul_max * machine.clock * machine.matmul * machine.stack_matmul * machine.grouped
        traffic = machine.element * rows * (gemm.rows + gemm.cols) + weight_bytes
        computing = flops / rate * (1 + machine.depth / inner)
        return (computing**4 + (traffic / (machine.bandwidth * machine.memory)) ** 4) ** 0.25

    weights = machine.element * groups * size
    # read in 4 bits, and written for the kernel to read
    written = groups * size * (NF4_BYTES + machine.element) / (machine.bandwidth * machine.memory)
    written = written * gemm.quantised
    return (
        seconds(2 * filled * size, gemm.cols, weights) + written,
        gemm.input_gradient * (seconds(2 * filled * size, gemm.rows, weights) + written),
        gemm.trainable * seconds(2 * rows * size, of_expert, weights),
    )


def permutations(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> Number:
    """Seconds in which a pass of a block orders rows by expert and back, and weights them: memory traffic.
    Under ep rows are also put in the order of the rank's experts and back. tokens: as in `rows_of`.
    """
    rows = rows_of(work, layouts, tokens) * work.hidden
    moved = machine.expert_passes + np.where(layouts.ep > 1, 4.0, 0.0) * work.most_rows(layouts)
    return machine.element * rows * moved / (machine.bandwidth * machine.memory)
