"""Seconds of a block's experts on a rank: grouped matmuls, permutations of rows, exchanges between ranks.

    tokens ─> router ─> rows by expert ─> exchange ─> grouped matmuls ─> exchange ─> weighted sum

Under ep all ranks wait for the one with most rows (`Work.imbalance`): its matmuls, and its messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.plan.seconds.collectives import message_latency, ranks_in_node
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
    return (
        seconds(2 * filled * size, gemm.cols, weights),
        gemm.input_gradient * seconds(2 * filled * size, gemm.rows, weights),
        gemm.trainable * seconds(2 * rows * size, of_expert, weights),
    )


def permutations(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> Number:
    """Seconds in which a pass of a block orders rows by expert and back, and weights them: memory traffic.
    Under ep rows are also put in the order of the rank's experts and back. tokens: as in `rows_of`.
    """
    rows = rows_of(work, layouts, tokens) * work.hidden
    moved = machine.expert_passes + np.where(layouts.ep > 1, 4.0, 0.0) * work.most_rows(layouts)
    return machine.element * rows * moved / (machine.bandwidth * machine.memory)


class Exchange(NamedTuple):
    """Seconds of a block's exchanges of rows for one micro-batch; 0 without ep."""

    forward: Number  # there and back
    backward: Number  # gradients there and back, and the forward's where it runs again


def exchange_seconds(work: Work, layouts: Columns, machine: Machine, tokens: Number) -> Exchange:
    """Seconds of all-to-alls inside a node and between nodes, which run at the same time.

    A rank has its part of the node's network. A dispatcher with `expert_once` sends a token once to each rank
    with an expert of it, and once to each other node; another one a copy for each expert. tokens: as in
    `rows_of`.
    """
    inside = ranks_in_node(layouts.ep, 1.0, machine)
    nodes, once = layouts.ep / inside, machine.expert_once
    size = machine.element * rows_of(work, layouts, tokens) * work.hidden * work.most_rows(layouts)

    def sent(places: Number) -> Number:
        """Bytes for other places, of `places` among which the experts are divided."""
        several = places * (1 - (1 - 1 / places) ** work.routed) / np.maximum(work.routed, 1e-9)
        return size * (places - 1) / places * np.where(once > 0, several, 1.0)

    link = machine.link * machine.link_share * machine.expert_share
    network = machine.network * machine.network_share / machine.node * machine.expert_share
    in_node = np.where(once > 0, sent(layouts.ep), sent(layouts.ep) - sent(nodes)) / link
    one = np.maximum(in_node, sent(nodes) / network)
    one = np.where(layouts.ep > 1, one + message_latency(machine, layouts.ep, inside), 0.0)
    again = layouts.recomputation("matmuls") | (layouts.recomputation("block") & (machine.counted > 0))
    # Such a dispatcher weights rows before they return: a second forward ends at the experts.
    return Exchange(2 * one, one * (2 + again * np.where(once > 0, 1.0, 2.0)))
