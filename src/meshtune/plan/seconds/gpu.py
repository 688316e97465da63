"""Seconds of one GPU for a block and the head: rooflines of matmuls, attention and elementwise passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshtune.plan.work import Core, Gemm, Work, attended
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine

TILE = 128 * 128  # output elements of a matmul that one multiprocessor works on at a time
ALIGNED = 64  # elements (128 bytes of 16 bits) that tensor cores want the rows of operands to be multiples of
LOADED = 8  # elements (16 bytes) that they need; other matmuls run on slower kernels
SMALL_HEADS = 10  # over the head size: share by which a flash kernel is slower; assumed
WRITTEN_BACKWARD = 1.3  # traffic of written attention scores in the backward, over the forward's; assumed


def matmul(
    machine: Machine, rows: Number, cols: Number, inner: Number, *, contiguous: tuple[Number, ...] = ()
) -> Number:
    """Seconds of [rows, inner] @ [inner, cols]: the longer of computing and memory traffic.

    Computing reaches a share of the peak, less for short inner sizes, an incomplete last wave of tiles and
    unaligned rows of operands.

    contiguous: sizes of the dimensions along which the operands lie in memory; empty: cols and inner.
    """
    rate = machine.flops * machine.matmul * machine.stack_matmul
    tiled = rows * cols + machine.tiles * machine.multiprocessors * TILE
    slowdown = 1.0
    for size in contiguous or (cols, inner):
        unaligned = np.where(np.floor(size) % LOADED != 0, machine.unloaded, machine.misaligned)
        slowdown = np.maximum(slowdown, np.where(np.floor(size) % ALIGNED != 0, unaligned, 1.0))
    computing = 2 * tiled * (inner + machine.depth) / rate * slowdown
    elements = rows * inner + inner * cols + rows * cols
    traffic = machine.element * elements / (machine.bandwidth * machine.memory)
    return overlapped(computing, traffic)


def matrix_passes(machine: Machine, tokens: Number, gemm: Gemm, tp: Number) -> tuple[Number, Number, Number]:
    """Seconds of (forward, gradients of inputs, gradients of weights) of one kind of matrix in a block.

    All `gemm.count` of them, for `tokens` tokens; gradients count by the shares of them that are needed.
    """
    rows = gemm.rows / tp if gemm.cut == "rows" else gemm.rows
    cols = gemm.cols / tp if gemm.cut == "cols" else gemm.cols
    inputs = gemm.input_gradient * matmul(machine, tokens, cols, rows)
    weights = gemm.trainable * matmul(machine, rows, cols, tokens, contiguous=(rows, cols))
    return gemm.count * matmul(machine, tokens, rows, cols), gemm.count * inputs, gemm.count * weights


def attention_passes(
    machine: Machine, queries: Number, seq_len: Number, document_tokens: Number, core: Core, tp: Number
) -> tuple[Number, Number]:
    """Seconds of (forward, backward) of one kind of attention core in a block, all `core.count` of them.

    Flash kernels compute QKᵀ again in the backward: 5 matmuls against 2 (Dao 2023, arXiv:2307.08691).
    Without one, scores are all of [queries, seq_len], and pass through memory in softmax and dropout.

    queries: tokens of a micro-batch on this rank. document_tokens: mean length of the documents that tokens
    attend in; used with a flash kernel alone.
    """
    heads = core.query_heads / tp
    width = heads * (core.qk_dim + core.v_dim)
    pairs = queries * attended(document_tokens, core.window)
    rate = machine.core_flops * machine.attention * machine.stack_attention
    flash = 2 * pairs * width / rate * (1 + SMALL_HEADS / core.qk_dim)
    scores = queries * seq_len * heads
    matmuls = 2 * queries * seq_len * width / (machine.core_flops * machine.matmul * machine.batched)
    matmuls = matmuls * (1 + machine.depth / core.qk_dim)
    written = scores * machine.score_bytes / (machine.bandwidth * machine.memory)
    uses_flash = machine.flash > 0
    forward = np.where(uses_flash, flash, matmuls + written)
    flash_backward = 2.5 * machine.attention_backward * flash
    backward = np.where(uses_flash, flash_backward, 2 * matmuls + WRITTEN_BACKWARD * written)
    return core.count * forward, core.count * core.backward * backward


def elementwise(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> Number:
    """Seconds of norms, activation functions, residuals and dropout in a block's forward: memory traffic.

    sp splits those outside the matrices that tp cuts (Korthikanti et al. 2022, section 4.2.2). tokens: of a
    micro-batch on this rank, before sp.
    """
    outside = machine.elementwise_hidden * work.hidden / np.where(layouts.sp > 0, layouts.tp, 1.0)
    inside = machine.elementwise_wide * work.wide / layouts.tp
    return machine.element * tokens * (outside + inside) / (machine.bandwidth * machine.memory)


def head_and_loss(machine: Machine, tokens: Number, work: Work, tp: Number) -> Number:
    """Seconds of the logits and the loss of `tokens` tokens, forward and backward, on a rank with the head.

    A vocabulary that tp does not divide is padded.
    """
    rows = work.vocabulary / tp
    rows = np.where(rows % 1 > 0, np.ceil(rows / ALIGNED) * ALIGNED, rows)
    matmuls = matmul(machine, tokens, rows, work.hidden) + matmul(machine, tokens, work.hidden, rows)
    weights = matmul(machine, rows, work.hidden, tokens, contiguous=(rows, work.hidden))
    matmuls = matmuls + work.head_trainable * weights
    return matmuls + tokens * rows * machine.logit_bytes / (machine.bandwidth * machine.memory)


@dataclass(frozen=True)
class BlockCompute:
    """Seconds that a GPU computes for one block and one micro-batch, by kind."""

    matmul_forward: Number
    matmul_inputs: Number  # backward: gradients of inputs
    matmul_weights: Number  # backward: gradients of weights
    attention_forward: Number
    attention_backward: Number
    elementwise_forward: Number  # the backward's take twice as long
    accumulation: Number  # adding gradients to the step's sum
    recomputation: Number  # what the backward repeats of the forward

    @property
    def forward(self) -> Number:
        return self.matmul_forward + self.attention_forward + self.elementwise_forward

    @property
    def weights(self) -> Number:
        """Seconds of the part of the backward that makes gradients of weights."""
        return self.matmul_weights + self.accumulation

    @property
    def backward(self) -> Number:
        """Seconds of the backward without recomputation."""
        matmuls = self.matmul_inputs + self.weights
        return matmuls + self.attention_backward + 2 * self.elementwise_forward

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.recomputation


def block_compute(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number
) -> BlockCompute:
    """Seconds that a GPU computes for one block and one micro-batch.

    document_tokens: mean length of the documents that tokens attend in, at most seq_len.
    """
    tokens = layouts.rank_tokens(seq_len)
    matmuls = [matrix_passes(machine, tokens, gemm, layouts.tp) for gemm in work.matrices]
    context_factor = np.where(layouts.cp > 1, machine.context_attention, 1.0)
    cores = [
        attention_passes(machine, tokens, seq_len, document_tokens, core, layouts.tp) for core in work.cores
    ]
    matmul_forward = sum(forward for forward, _, _ in matmuls)
    attention_forward = sum(context_factor * forward for forward, _ in cores)
    elementwise_forward = elementwise(machine, tokens, work, layouts)

    matmuls_again = np.where(layouts.recomputation("by_operation"), machine.selective, 0.0)
    matmuls_again = np.where(layouts.recomputation("matmuls"), 1.0, matmuls_again)
    recomputation = matmuls_again * matmul_forward
    recomputation = recomputation + np.where(layouts.recomputation("attention"), attention_forward, 0.0)
    recomputation = recomputation + np.where(layouts.recomputation("block"), elementwise_forward, 0.0)
    return BlockCompute(
        matmul_forward=matmul_forward,
        matmul_inputs=sum(inputs for _, inputs, _ in matmuls),
        matmul_weights=sum(weights for _, _, weights in matmuls),
        attention_forward=attention_forward,
        attention_backward=sum(context_factor * backward for _, backward in cores),
        elementwise_forward=elementwise_forward,
        accumulation=gradient_accumulation(machine, work, layouts),
        recomputation=recomputation,
    )


def gradient_accumulation(machine: Machine, work: Work, layouts: Columns) -> Number:
    """Seconds to add a block's gradients of one micro-batch to the sum that waits for the step's end.

    0 where a micro-batch is the whole step, and under ZeRO-2 and -3, whose shards are summed.
    """
    gradients = work.trained_block_parameters / layouts.tp
    moved = (machine.element + 2 * machine.gradient_bytes) * gradients
    traffic = moved / (machine.bandwidth * machine.memory)
    return np.where((layouts.gradient_accumulation_steps > 1) & (layouts.zero < 2), traffic, 0.0)


def overlapped(seconds: Number, others: Number) -> Number:
    """Seconds of two things that run at the same time: the longer, up to 19 % more where equal (a 4-norm)."""
    return (seconds**4 + others**4) ** 0.25


def launched(computing: Number, host: Number, machine: Machine) -> Number:
    """Seconds of computation with the host's launches: their sum if launches block, else `overlapped`.

    computing, host: seconds of each alone.
    """
    return np.where(machine.launch_blocking > 0, computing + host, overlapped(computing, host))
