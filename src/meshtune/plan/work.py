"""The work of a model, as the planner counts it.

Every number may be a float or a numpy array, one element per layout or per published row: the formulas of
seconds.py and memory.py are written once and rank tens of thousands of layouts as they explain one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from meshtune.placement.census import Census, Parameter, document_pairs
from meshtune.units import Number


def attended(document_tokens: Number, window: Number) -> Number:
    """Keys that a query sees on average: (n + 1) / 2 in a document of n tokens, fewer with a window."""
    return document_pairs(document_tokens, window) / document_tokens


@dataclass(frozen=True)
class Gemm:
    """A matrix that every token is multiplied with: rows outputs, cols inputs, `count` of them in a block.

    cut: what tensor parallelism cuts, "rows" or "cols"; "": nothing. trainable, input_gradient: the share of
    these matrices whose weight, and whose input, needs a gradient.
    """

    rows: Number
    cols: Number
    count: Number = 1.0
    cut: str = ""
    trainable: Number = 1.0
    input_gradient: Number = 1.0


@dataclass(frozen=True)
class Core:
    """An attention core, `count` of them in a block. window: infinite where it attends to all before it.
    backward: of its backward's products, the share that some gradient needs.
    """

    query_heads: Number
    key_heads: Number
    qk_dim: Number
    v_dim: Number
    window: Number = np.inf
    count: Number = 1.0
    backward: Number = 1.0


@dataclass(frozen=True)
class Weight:
    """A parameter tensor [rows, cols], `count` of them; cols 1: a vector.

    cut: what tensor parallelism cuts, "rows" or "cols"; "": nothing. heads: key-value heads in its rows; more
    ranks than those hold all of it. trainable: the share of these that is trained.
    """

    rows: Number
    cols: Number
    count: Number = 1.0
    cut: str = ""
    heads: Number = 0.0
    trainable: Number = 1.0

    @property
    def elements(self) -> Number:
        return self.rows * self.cols * self.count


class Kept(NamedTuple):
    """Bytes per token that an average block's forward keeps for its backward, nothing recomputed.

    outside: of attention and MLP; sp splits it. entering: what goes into their first matrices. inside: them;
    tp splits it. core: queries, keys, values and output of the attention core, and of these the keys and
    values; statistics: what only a second run of the core gives again.
    """

    outside: Number
    entering: Number
    inside: Number
    core: Number
    keys: Number
    statistics: Number


@dataclass(frozen=True)
class Work:
    """A model as the planner counts it: its average block, times `blocks`, and its head.

    wide: features that widen in the MLP of a block (2·f with a gate, f without).
    block_weights: of an average block; first_weights, last_weights: before and after the blocks. tied: 1
    where the head is the embedding, so that a last pipeline stage of its own has a copy.
    trainable: the share of all parameters that is trained; head_trainable: 1 or 0.
    kept: by bytes of an element (2 or 4), where the model was traced.
    """

    blocks: Number
    hidden: Number
    vocabulary: Number
    wide: Number
    matrices: tuple[Gemm, ...]
    cores: tuple[Core, ...]
    block_weights: tuple[Weight, ...]
    first_weights: tuple[Weight, ...]
    last_weights: tuple[Weight, ...]
    tied: Number = 0.0
    trainable: Number = 1.0
    head_trainable: Number = 1.0
    kept: Mapping[int, Kept] = field(default_factory=dict)

    @classmethod
    def of(cls, census: Census) -> Work:
        """The work of a model whose numbers the census has."""
        n = len(census.blocks)
        cuts = {
            p.name: ("rows", "cols")[p.cut] for b in census.blocks for p in b.parameters if p.cut in (0, 1)
        }
        alike: dict[tuple, float] = {}
        for matrices in (census.outside, *(block.matrices for block in census.blocks)):
            for m in matrices:
                key = (m.rows, m.cols, cuts.get(m.name, ""), m.trainable, m.input_gradient)
                alike[key] = alike.get(key, 0) + m.count
        matrices = tuple(
            Gemm(rows, cols, count / n, cut, float(trainable), float(back))
            for (rows, cols, cut, trainable, back), count in alike.items()
        )
        cores = tuple(
            Core(
                a.query_heads,
                a.key_heads,
                a.qk_dim,
                a.v_dim,
                np.inf if a.window is None else a.window,
                k / n,
                a.backward(1) / (2 * a.forward(1)),
            )
            for a, k in census.attentions.items()
        )
        wide = sum(
            m.rows * m.count
            for b in census.blocks
            for m in b.matrices
            if m.kind == "mlp" and m.cols == census.hidden and cuts.get(m.name) != "cols"
        )
        return cls(
            blocks=n,
            hidden=census.hidden,
            vocabulary=census.vocabulary,
            wide=wide / n,
            matrices=matrices,
            cores=cores,
            block_weights=_weights((p for b in census.blocks for p in b.parameters), n),
            first_weights=_weights(p for p in census.parameters_outside if not p.last),
            last_weights=_weights(p for p in census.parameters_outside if p.last),
            tied=float(census.tied),
            trainable=census.trainable / census.total,
            head_trainable=float(census.head.trainable) if census.head else 1.0,
            kept=_kept(census),
        )

    @classmethod
    def of_shape(
        cls, *, layers: Number, hidden: Number, ffn: Number, heads: Number, kv_heads: Number,
        vocabulary: Number, gated: Number = 1.0, tied: Number = 0.0,
    ) -> Work:  # fmt: skip
        """The work of a plain decoder from shape numbers, as published tables give them.

        gated: 1 for SwiGLU (three matrices), 0 for two. Norms and biases are counted as 4·hidden a block.
        """
        head_dim = hidden / heads
        wide = (1 + gated) * ffn
        matrices = (
            Gemm(hidden + 2 * kv_heads * head_dim, hidden, 1.0, "rows"),
            Gemm(hidden, hidden, 1.0, "cols"),
            Gemm(ffn, hidden, 1 + gated, "rows"),
            Gemm(hidden, ffn, 1.0, "cols"),
        )
        weights = tuple(Weight(m.rows, m.cols, m.count, m.cut) for m in matrices)
        return cls(
            blocks=layers,
            hidden=hidden,
            vocabulary=vocabulary,
            wide=wide,
            matrices=matrices,
            cores=(Core(heads, kv_heads, head_dim, head_dim),),
            block_weights=(*weights, Weight(hidden, 1, 4.0)),
            first_weights=(Weight(vocabulary, hidden, 1.0, "rows"),),
            last_weights=(Weight(vocabulary, hidden, 1.0 - tied, "rows"),),
            tied=tied,
        )

    def adapted(self, lora_rank: int) -> Work:
        """The same frozen, with adapters of this rank beside every matrix of the blocks."""
        frozen = tuple(replace(m, trainable=0.0) for m in self.matrices)
        adapters = tuple(adapter for m in self.matrices for adapter in _adapters(m, lora_rank))
        added = tuple(Weight(a.rows, a.cols, a.count, a.cut) for a in adapters)
        in_blocks, first, last = (
            tuple(replace(w, trainable=0.0) for w in weights)
            for weights in (self.block_weights, self.first_weights, self.last_weights)
        )
        trained = self.blocks * sum(w.elements for w in added)
        return replace(
            self, matrices=(*frozen, *adapters), block_weights=(*in_blocks, *added), first_weights=first,
            last_weights=last, trainable=trained / (self.parameters + trained), head_trainable=0.0,
            kept={},
        )  # fmt: skip

    @property
    def block_parameters(self) -> Number:
        """Elements of an average block."""
        return sum(w.elements for w in self.block_weights)

    @property
    def trained_block_parameters(self) -> Number:
        """Trained elements of an average block."""
        return sum(w.elements * w.trainable for w in self.block_weights)

    @property
    def trained_outside(self) -> Number:
        """The trained share of what lies outside the blocks."""
        trained = sum(w.elements * w.trainable for w in (*self.first_weights, *self.last_weights))
        return trained / np.maximum(self.outside_parameters, 1.0)

    @property
    def outside_parameters(self) -> Number:
        return sum(w.elements for w in (*self.first_weights, *self.last_weights))

    @property
    def parameters(self) -> Number:
        return self.blocks * self.block_parameters + self.outside_parameters


def _adapters(matrix: Gemm, lora_rank: int) -> tuple[Gemm, Gemm]:
    """LoRA's A, with a matrix's inputs, and B, with its outputs; tp cuts each as that side of the matrix."""
    a = Gemm(lora_rank, matrix.cols, matrix.count, "cols" if matrix.cut == "cols" else "")
    return a, Gemm(matrix.rows, lora_rank, matrix.count, "rows" if matrix.cut == "rows" else "")


def _kept(census: Census) -> dict[int, Kept]:
    """Saved bytes of the average block, by bytes of an element; empty where the census does not know."""
    n, saved = len(census.blocks), {}
    cores = [(core, layers / n) for core, layers in census.attentions.items()]
    statistics = sum(4 * core.query_heads * count for core, count in cores)
    keys = sum(core.key_heads * (core.qk_dim + core.v_dim) * count for core, count in cores)
    for element in (2, 4):
        known = [entry for block in census.blocks if (entry := dict(block.saved).get(element)) is not None]
        if len(known) < n:
            return {}
        outside, entering, inside, core = (
            sum(getattr(entry, name) for entry in known) / n
            for name in ("outside", "entering", "inside", "core")
        )
        saved[element] = Kept(outside, entering, inside, core - statistics, element * keys, statistics)
    return saved | {8: Kept(*(2 * size for size in saved[4]))}


def _weights(parameters: Iterable[Parameter], blocks: int = 1) -> tuple[Weight, ...]:
    """These parameters, equal ones together, of one of `blocks` on average."""
    alike = Counter(
        (
            p.shape[0],
            math.prod(p.shape[1:]),
            ("rows", "cols")[p.cut] if p.cut in (0, 1) else "",
            p.heads,
            p.trainable,
        )
        for p in parameters
    )
    return tuple(
        Weight(rows, cols, count / blocks, cut, heads, float(trainable))
        for (rows, cols, cut, heads, trainable), count in alike.items()
    )
