"""Seconds of one GPU for a block and the head: rooflines of matmuls, attention and elementwise passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.machine import Machine
from meshtune.plan.work import Core, Gemm, Work
from meshtune.plan.workload import attended

TILE = 128 * 128  # elements of a product that one multiprocessor works on at a time
ALIGNED = 64  # elements (128 bytes of 16 bits): what tensor cores want rows to be multiples of
LOADED = 8  # elements (16 bytes): what they need, or the product runs on slower kernels
SMALL_HEADS = (
    10  # a flash kernel's time grows by this over the head size; assumed, with the fitted share of the peak
)
WRITTEN_BACKWARD = 1.3  # traffic of written-out scores there and back over there; assumed


def product(m: Machine, rows: Number, cols: Number, inner: Number, along: tuple[Number, ...] = ()) -> Number:
    """[rows, inner] @ [inner, cols]: at the peak's share, less what short inner sizes, an incomplete wave of
    tiles and unaligned sizes cost; or as long as its operands take to be read and written.

    along: the sizes that memory runs along, where they are not cols and inner.
    """
    rate = m.flops * m.matmul * m.stack_matmul
    tiled = rows * cols + m.tiles * m.multiprocessors * TILE
    slower = 1.0
    for size in along or (cols, inner):
        off = np.where(np.floor(size) % LOADED != 0, m.unloaded, m.misaligned)
        slower = np.maximum(slower, np.where(np.floor(size) % ALIGNED != 0, off, 1.0))
    busy = 2 * tiled * (inner + m.depth) / rate * slower
    moved = m.element * (rows * inner + inner * cols + rows * cols) / (m.bandwidth * m.memory)
    return overlapped(busy, moved)


def matrix(m: Machine, tokens: Number, gemm: Gemm, tp: Number) -> tuple[Number, Number, Number]:
    """(forward, backward of inputs, of weights) of one kind of matrix in a block, cut by tp."""
    rows = gemm.rows / tp if gemm.cut == "rows" else gemm.rows
    cols = gemm.cols / tp if gemm.cut == "cols" else gemm.cols
    inputs = gemm.input_gradient * product(m, tokens, cols, rows)
    weights = gemm.trainable * product(m, rows, cols, tokens, (rows, cols))
    return gemm.count * product(m, tokens, rows, cols), gemm.count * inputs, gemm.count * weights


def attention(
    m: Machine, queries: Number, seq_len: Number, document_tokens: Number, core: Core, tp: Number
) -> tuple[Number, Number]:
    """(forward, backward) of one kind of attention core in a block. Flash kernels compute QKᵀ once more in
    backward: 5 products against 2 (Dao 2023, arXiv:2307.08691). Scores that are written out are all of
    [queries, seq_len], and pass through memory in softmax and dropout.
    """
    heads = core.query_heads / tp
    width = heads * (core.qk_dim + core.v_dim)
    pairs = queries * attended(document_tokens, core.window)
    small_heads = 1 + SMALL_HEADS / core.qk_dim
    flash = 2 * pairs * width / (m.core_flops * m.attention * m.stack_attention) * small_heads
    scores = queries * seq_len * heads
    products = 2 * queries * seq_len * width / (m.core_flops * m.matmul * m.batched)
    products = products * (1 + m.depth / core.qk_dim)
    written = scores * m.score_bytes / (m.bandwidth * m.memory)
    forward = np.where(m.flash > 0, flash, products + written)
    backward = np.where(
        m.flash > 0, 2.5 * m.attention_backward * flash, 2 * products + WRITTEN_BACKWARD * written
    )
    return core.count * forward, core.count * core.backward * backward


def elementwise(m: Machine, tokens: Number, work: Work, c: Columns) -> Number:
    """Norms, activations, residuals, dropout of a block's forward: memory traffic. sp splits what is outside
    the matrices that tp cuts.
    """
    outside = m.elementwise_hidden * work.hidden / np.where(c.sp > 0, c.tp, 1.0)
    inside = m.elementwise_wide * work.wide / c.tp
    return m.element * tokens * (outside + inside) / (m.bandwidth * m.memory)


def head(m: Machine, tokens: Number, work: Work, tp: Number) -> Number:
    """Logits and loss of all tokens, there and back. A vocabulary that tp does not divide is padded."""
    rows = work.vocabulary / tp
    rows = np.where(rows % 1 > 0, np.ceil(rows / ALIGNED) * ALIGNED, rows)
    products = product(m, tokens, rows, work.hidden) + product(m, tokens, work.hidden, rows)
    products = products + work.head_trainable * product(m, rows, work.hidden, tokens, (rows, work.hidden))
    return products + tokens * rows * m.logit_bytes / (m.bandwidth * m.memory)


@dataclass(frozen=True)
class Passes:
    """What a GPU computes of one block for one micro-batch. again: what backward repeats of forward. weights:
    the part of backward that makes the gradients of weights.
    """

    forward: Number
    backward: Number
    again: Number
    weights: Number

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.again


def computed(work: Work, c: Columns, m: Machine, seq_len: Number, documents: Number) -> Passes:
    tokens = rank_tokens(c, seq_len)
    products = [matrix(m, tokens, gemm, c.tp) for gemm in work.matrices]
    slower = np.where(c.cp > 1, m.context_attention, 1.0)
    cores = [
        (slower * ahead, slower * back)
        for core in work.cores
        for ahead, back in [attention(m, tokens, seq_len, documents, core, c.tp)]
    ]
    passes = elementwise(m, tokens, work, c)
    core_forward = sum(ahead for ahead, _ in cores)
    product_forward = sum(ahead for ahead, _, _ in products)
    weights = sum(weights for _, _, weights in products) + accumulated(m, work, c)
    forward = product_forward + core_forward + passes
    backward = sum(inputs for _, inputs, _ in products) + weights
    backward = backward + sum(back for _, back in cores) + 2 * passes
    again = np.where(c.recomputes("full"), forward, 0.0)
    again = again + np.where(c.recomputes("attention"), core_forward, 0.0)
    again = again + np.where(c.recomputes("selective"), m.selective * product_forward + passes, 0.0)
    return Passes(forward, backward, again, weights)


def accumulated(m: Machine, work: Work, c: Columns) -> Number:
    """Gradients that each micro-batch makes (in 16 bits) are added to those that wait for the step's end."""
    gradients = work.trained_block_parameters / c.tp
    moved = (m.element + 2 * m.gradient_bytes) * gradients / (m.bandwidth * m.memory)
    return np.where((c.gradient_accumulation_steps > 1) & (c.zero < 2), moved, 0.0)


def rank_tokens(c: Columns, seq_len: Number) -> Number:
    """Of a micro-batch, on a rank."""
    return c.micro_batch_size * seq_len / c.cp


def overlapped(a: Number, b: Number) -> Number:
    """The longer of two times that run side by side, a little more where they are alike."""
    return (a**4 + b**4) ** 0.25


def launched(computing: Number, host: Number, m: Machine) -> Number:
    """Computing that the host launches: side by side, or one after the other."""
    return np.where(m.launch_blocking > 0, computing + host, overlapped(computing, host))
