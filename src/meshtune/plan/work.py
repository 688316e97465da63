"""The work of a model, as the planner counts it.

Every number may be a float or a numpy array, one element per layout or per published row: the formulas of
seconds/ and memory/ are written once and rank tens of thousands of layouts as they explain one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.placement.census import (
    BackwardBytes,
    Block,
    BlockPeaks,
    Census,
    EndBytes,
    Matrix,
    Parameter,
    SavedBytes,
    adapter_name,
    document_pairs,
    head_shards,
    is_matrix,
)
from meshtune.precision import NF4_BYTES
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns

# In transformers' blocks, the norm of what the MLP returns: Gemma 2 and 3, OLMo 2 and 3; GLM-4
LAST_NORMS = ("post_feedforward_layernorm.", "post_mlp_layernorm.")


def attended(document_tokens: Number, window: Number) -> Number:
    """Keys that a query sees on average: (n + 1) / 2 in a document of n tokens, fewer with a window.

    window: keys that a query sees at most, its own included; np.inf: no window.
    """
    return document_pairs(document_tokens, window) / document_tokens


@dataclass(frozen=True)
class Gemm:
    """Equal matrices that every token is multiplied with; sizes before tp."""

    rows: Number  # output features
    cols: Number  # input features
    count: Number = 1.0  # of them in an average block
    cut: str = ""  # what tensor parallelism cuts, "rows", "cols", of experts "tokens"; "": nothing
    trainable: Number = 1.0  # share of them whose weight needs a gradient, 0 to 1
    input_gradient: Number = 1.0  # share of them whose input needs a gradient, 0 to 1
    adapter: str = ""  # which matrix of a LoRA pair: "A", "B"; "": none
    in_4_bits: bool = False  # as in Parameter
    last: bool = False  # a block multiplies with them when all is saved, see `SavedBytes.last`
    quantised: bool = False  # they are held in 4 bits, and dequantised in each pass
    fp8: bool = False  # as in Parameter
    mlp: bool = False  # in the MLP, adapters included
    adapted_last: bool = False  # their adapter's B is: a compiled block runs neither again
    # Experts that tokens are sent to, in an average block: each has such a matrix, and `count` is of a token
    experts: Number = 0.0


@dataclass(frozen=True)
class Core:
    """Equal attention cores; heads before tp."""

    query_heads: Number
    key_heads: Number
    qk_dim: Number  # features of a head of queries or keys
    v_dim: Number  # features of a head of values
    window: Number = np.inf  # keys that a query sees at most, its own included; np.inf: no window
    count: Number = 1.0  # of them in an average block
    backward: Number = 1.0  # share of the backward's FLOPs that some gradient needs, 0 to 1
    flash: bool = True  # as in Attention

    @property
    def keys(self) -> Number:
        """Features of its keys and values."""
        return self.key_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class Weight:
    """Equal parameter tensors [rows, cols]; sizes before tp."""

    rows: Number
    cols: Number  # 1: a vector
    count: Number = 1.0  # of them; in an average block where it is a block's
    cut: str = ""  # what tensor parallelism cuts, "rows" or "cols"; "": nothing
    heads: Number = 0.0  # key-value heads along `cut`, 0: none; with tp > heads each rank holds all of it
    trainable: Number = 1.0  # share of them that is trained, 0 to 1
    matrix: bool = False  # in a block, and census.is_matrix
    in_4_bits: bool = False  # as in Parameter
    held: Number = 1.0  # its bytes over those that it has in the dtype of the passes
    gathered: Number = 1.0  # the same of what ZeRO gathers, over `held`
    fp8: bool = False  # as in Parameter
    by_tokens: bool = False  # as in Parameter
    of_experts: bool = False  # its rows are experts, which `ep` splits

    @property
    def elements(self) -> Number:
        return self.rows * self.cols * self.count


class Kept(NamedTuple):
    """Bytes per token that an average block's forward saves for its backward, nothing recomputed.

    The sizes are those on one rank, before tp, sp or cp splits them.
    """

    outside: Number  # outside attention and MLP (norms, residuals); sp splits it
    entering: Number  # inputs of the first matrices of attention and of MLP
    attention: Number  # inside attention, but not in its core; split as the heads are (Work.head_shards)
    mlp: Number  # inside the MLP; tp splits it
    core: Number  # queries, keys, values and output of the attention core; split as the heads are
    keys: Number  # the part of `core` that keys and values take
    statistics: Number  # log-sums or scores, which only a second run of the core gives again; as the heads
    scores: Number = 0.0  # bytes per token and key, by a family that writes attention's scores to memory
    whole: Number = 0.0  # of adapters, see `SavedBytes`; neither tp nor sp splits it

    def twice(self) -> Kept:
        return Kept(*(2 * size for size in self))

    def with_keys(self, seq_len: Number) -> Kept:
        """The same with the scores of `seq_len` keys a token, in `attention`."""
        return self._replace(attention=self.attention + self.scores * seq_len, scores=0.0)


class Traced(NamedTuple):
    """Saved bytes and peaks of a trace of the blocks, for one size of an element."""

    kept: Kept  # by an average block
    fullest: Kept  # by the block that keeps most
    peaks: BlockPeaks | None = None  # of the last block's passes
    compiled: Traced | None = None  # the same of compiled blocks
    fused: bool = False  # they are compiled
    made_again: Number = (
        0.0  # bytes of its MLP that a compiled block's backward makes, and an eager one saves
    )
    # By an average compiled block under selective recomputation; None: all outputs of matmuls
    selective: Kept | None = None
    wide_masks: Traced | None = None  # of eager blocks on a processor, where dropout's masks differ

    def of_outputs(self) -> Traced:
        """The same of compiled blocks that save no inputs of matmuls, as under selective recomputation."""
        return self._replace(kept=self.selective, fullest=self.selective) if self.selective else self

    def twice(self) -> Traced:
        """The same of elements of twice the size; passes are not known."""
        return Traced(
            self.kept.twice(),
            self.fullest.twice(),
            compiled=self.compiled and self.compiled.twice(),
            selective=self.selective and self.selective.twice(),
            fused=self.fused,
            made_again=2 * self.made_again,
            wide_masks=self.wide_masks and self.wide_masks.twice(),
        )


@dataclass(frozen=True)
class Work:
    """A model as the planner counts it: its average block, times `blocks`, and its head."""

    blocks: Number  # how many
    hidden: Number  # features of a hidden state
    vocabulary: Number
    wide: Number  # output features of the first matrices of a block's MLP (2·f with a gate, f without)
    matrices: tuple[Gemm, ...]  # of an average block; those outside the blocks, but the head, are shared out
    cores: tuple[Core, ...]  # of an average block
    block_weights: tuple[Weight, ...]  # of an average block
    first_weights: tuple[Weight, ...]  # before the blocks
    last_weights: tuple[Weight, ...]  # after the blocks
    norms: Number = 2.0  # of hidden states, in an average block
    # Hidden states in fp32 that its backward adds where the MLP's output goes through a norm; 0: it does not.
    last_norm: Number = 0.0
    tied: Number = 0.0  # 1: the head is the embedding; a last pipeline stage of its own then has a copy
    trainable: Number = 1.0  # share of all parameters that is trained
    head_trainable: Number = 1.0  # 1 or 0
    labelled: Number = 1.0  # share of a micro-batch's columns that have a label, for which there are logits
    traced: Mapping[int, Traced] = field(default_factory=dict)  # by element size: 2, 4, 8; or not traced
    # the same with one row a micro-batch, where that differs
    traced_of_one_row: Mapping[int, Traced] = field(default_factory=dict)
    ends: Mapping[int, EndBytes] = field(default_factory=dict)  # by element size; without it: not traced
    whole_heads: tuple[int, ...] | None = None  # of a block with attention, see census.Block
    backward: Number = 1.0  # share of the blocks that have one: frozen ones before all that is trained do not
    # Of preferences (objectives.py):
    embedded: Number = 0.0  # rows of the embedding where the head's outputs are others; 0: `vocabulary`
    head_forwards: float = 1.0  # of a labelled token; 2: a loss of whole documents needs all logits first
    entered: Number = (
        2.0  # parts of an average block whose matrices tp cuts: attention, mlp or shared experts
    )
    mixtures: Number = 0.0  # share of the blocks that are mixtures of experts
    mismatched: float = 0.0  # forwards without gradients over a step's micro-batches before its backwards
    dropped: bool = False  # the inputs of adapters go through dropout
    imbalance: Number = 1.0  # rows of the rank with most of an ep group, over their mean

    @classmethod
    def of(cls, census: Census) -> Work:
        """The work of a model whose numbers the census has."""
        n, cuts = len(census.blocks), _cuts(census)
        matrices = _gemms(census, cuts)
        cores = tuple(
            Core(
                a.query_heads, a.key_heads, a.qk_dim, a.v_dim, np.inf if a.window is None else a.window,
                k / n, a.backward(1) / (2 * a.forward(1)), a.flash,
            )
            for a, k in census.attentions.items()
        )  # fmt: skip
        # A run gives a mask to a family's own attention only, which `saved_of_one_row` tells; a trace may
        # have given one to others.
        masked = bool(census.blocks[-1].saved_of_one_row)
        wide = sum(
            m.rows * m.count
            for b in census.blocks
            for m in b.matrices
            if m.kind == "mlp" and m.cols == census.hidden and cuts.get(m.name) != "cols"
        )
        return cls(
            blocks=n,
            hidden=census.hidden,
            vocabulary=census.head.rows if census.head else census.vocabulary,
            embedded=census.vocabulary,
            wide=wide / n,
            matrices=matrices,
            cores=cores,
            block_weights=_weights((p for b in census.blocks for p in b.parameters), in_blocks=n),
            first_weights=_weights(p for p in census.parameters_outside if not p.last),
            last_weights=_weights(p for p in census.parameters_outside if p.last),
            norms=sum(_is_norm(p, census.hidden) for b in census.blocks for p in b.parameters) / n or 2.0,
            last_norm=sum(_last_norm(p) for b in census.blocks for p in b.parameters) / n,
            tied=float(census.tied),
            trainable=census.trainable / census.total,
            head_trainable=float(census.head.trainable) if census.head else 1.0,
            traced=_traced(census.blocks, [block.saved for block in census.blocks], masked=masked),
            traced_of_one_row=_traced(census.blocks, [block.saved_of_one_row for block in census.blocks]),
            backward=sum(_has_backward(block) for block in census.blocks) / n,
            entered=1 + sum(block.cuts_mlp or not block.mixture for block in census.blocks) / n,
            mixtures=sum(block.mixture for block in census.blocks) / n,
            ends=dict(census.ends),
            whole_heads=next((b.whole_heads for b in census.blocks if b.attention), None),
        )

    def compiled(self, *, fp8: str = "") -> Work:
        """The same with compiled blocks; those that were not traced so stay as they are.

        fp8: recipe of matmuls in 8-bit floats; "": none. Casting makes their inputs cheap to compute again,
        from the outputs of matmuls, and the compiler saves those only (with scales, 0.2 % more). With one
        scale a matrix, ZeRO gathers weights in 8 bits.
        """
        several, one = (
            {element: each.compiled or each for element, each in traced.items()}
            for traced in (self.traced, self.traced_of_one_row)
        )
        if fp8 and all(gemm.fp8 for gemm in self.matrices):
            several, one = (
                {element: each.of_outputs() for element, each in traced.items()} for traced in (several, one)
            )
        matrices = tuple(replace(gemm, last=gemm.last or gemm.adapted_last) for gemm in self.matrices)
        weights = self.block_weights
        if fp8 == "tensorwise":
            weights = tuple(replace(weight, gathered=0.5 if weight.fp8 else 1.0) for weight in weights)
        return replace(self, traced=several, traced_of_one_row=one, matrices=matrices, block_weights=weights)

    def quantised(self, element: float) -> Work:
        """The same with frozen matrices of blocks in 4 bits. element: bytes of one that is computed with."""

        weights = tuple(
            replace(weight, held=NF4_BYTES / element) if weight.in_4_bits else weight
            for weight in self.block_weights
        )
        matrices = tuple(replace(gemm, quantised=gemm.in_4_bits) for gemm in self.matrices)
        return replace(self, block_weights=weights, matrices=matrices)

    def trained_mlp(self, tp: Number) -> Number:
        """Trained elements of an average block's MLP on a tensor-parallel rank; vectors are left out."""
        return sum(
            gemm.rows * gemm.cols * gemm.count * gemm.trainable / (tp if gemm.cut in ("rows", "cols") else 1)
            for gemm in self.matrices
            if gemm.mlp
        )

    def head_shards(self, tp: Number) -> Number:
        """Ranks of `tp` that share out a block's attention heads; 1 where each computes all of them."""
        return head_shards(self.whole_heads, tp)

    def by_tokens(self, layouts: Columns, trainable: bool = False) -> Number:
        """Elements of an average block that every tensor-parallel rank has for its own tokens: of routers and
        of experts that `ep` does not split. trainable: as in `split_experts`.
        """
        whole = np.where(layouts.ep > 1, 0.0, 1.0)  # experts that are not split
        return sum(
            w.elements * (w.trainable if trainable else w.held) * (whole if w.of_experts else 1.0)
            for w in self.block_weights
            if w.by_tokens
        )

    @property
    def routed(self) -> Number:
        """Experts that an average block sends a token to. Two matrices, adapters left out, are of each."""
        return sum(gemm.count for gemm in self.matrices if np.any(gemm.experts) and not gemm.adapter) / 2

    @property
    def adapts_experts(self) -> bool:
        """Whether experts have adapters."""
        return any(gemm.adapter and np.any(gemm.experts) for gemm in self.matrices)

    @property
    def expert_features(self) -> Number:
        """Features that the experts of an average block save of a token: their rows, both halves of the
        first matrix's output and their product, and what A of their adapters makes.
        """
        of_experts = [gemm for gemm in self.matrices if np.any(gemm.experts)]
        both = sum(gemm.count * (gemm.rows + gemm.cols) for gemm in of_experts if not gemm.adapter)
        ranks = sum(gemm.count * gemm.rows for gemm in of_experts if gemm.adapter == "A")
        return both + ranks - self.routed * self.hidden  # the output goes back

    def random_inputs(self, layouts: Columns) -> Number:
        """Elements per token on a rank of the dropped inputs of adapters whose random numbers wait, in the
        backward of a block that runs again, for their gradients: not the MLP's wide ones, which are dropped
        and have their gradients in one kernel, nor attention's where only the MLP has run again by then.
        """
        again = layouts.recomputation("attention")
        read = (a for a in self.matrices if a.adapter == "A" and not (a.mlp and a.cols != self.hidden))
        return self.dropped * sum(
            (1.0 if a.mlp else again) * a.count * a.cols / (layouts.tp if a.cut else 1.0) for a in read
        )

    def most_rows(self, layouts: Columns) -> Number:
        """Rows of the experts' rank that has most, over the mean: 1 where a rank has all experts."""
        return np.where(layouts.ep > 1, self.imbalance, 1.0)

    def split_experts(self, layouts: Columns, trainable: bool = False) -> Number:
        """Elements of an average block's experts on a rank, before ZeRO, where `ep` splits them; else 0.

        trainable: True to count the trained ones only, else all, by their bytes.
        """
        sizes = (
            w.elements * (w.trainable if trainable else w.held) for w in self.block_weights if w.of_experts
        )
        return np.where(layouts.ep > 1, sum(sizes), 0.0) / layouts.ep

    def shared_block(self, layouts: Columns, trainable: bool = False) -> Number:
        """Elements of an average block on a tensor-parallel rank, before ZeRO, times tp; without experts that
        `ep` splits. trainable: as there.
        """
        whole = sum(
            w.elements * (w.trainable if trainable else w.held * w.gathered) for w in self.block_weights
        )
        apart = layouts.ep * self.split_experts(layouts, trainable)
        return whole - apart + (layouts.tp - 1) * self.by_tokens(layouts, trainable)

    @property
    def block_parameters(self) -> Number:
        """Elements of an average block."""
        return sum(w.elements for w in self.block_weights)

    @property
    def held_block_parameters(self) -> Number:
        """Elements of an average block by the bytes that they take: those in 4 bits count less."""
        return sum(w.elements * w.held for w in self.block_weights)

    def dequantised(self, layouts: Columns, tokens: Number, *, backward: bool) -> Number:
        """Elements that the largest matrix in 4 bits on a rank, or its experts' of one projection, adds to a
        block's passes: one exists at a time. tokens: of a micro-batch, after cp.

        A forward is fullest when experts' rows, their outputs and these by token exist: the first product has
        rows and its output, the second has no outputs by token. A backward starts with two such tensors, that
        the second product still has, and the first has not.
        """
        rows = self.routed * self.hidden
        of_experts = [gemm for gemm in self.matrices if np.any(gemm.experts) and not gemm.adapter]
        outputs = sum(gemm.count * gemm.rows for gemm in of_experts)
        absent = (2 * rows, 0.0) if backward else (np.maximum(3 * rows - outputs, 0.0), rows)
        held = [weight for weight in self.block_weights if weight.in_4_bits and weight.held != 1]
        sizes = [w.rows * w.cols / (layouts.tp if w.cut else 1) for w in held if not w.of_experts]
        if stacks := [w.rows * w.cols / layouts.ep for w in held if w.of_experts]:
            first, second = np.max(stacks, axis=0), np.min(stacks, axis=0)
            sizes += [first - tokens / layouts.tp * absent[0], second - tokens / layouts.tp * absent[1]]
        return np.max(np.broadcast_arrays(0.0, *sizes), axis=0)

    @property
    def trained_block_parameters(self) -> Number:
        """Trained elements of an average block."""
        return sum(w.elements * w.trainable for w in self.block_weights)

    @property
    def trained_parameters(self) -> Number:
        """Trained elements of the model."""
        return self.blocks * self.trained_block_parameters + self.outside_parameters * self.trained_outside

    @property
    def rotary(self) -> Number:
        """Features of queries and keys in an average block."""
        return sum(core.count * (core.query_heads + core.key_heads) * core.qk_dim for core in self.cores)

    @property
    def normed_heads(self) -> Number:
        """Features of queries and keys that have norms of their own: two vectors as long as a head."""
        sizes = [core.qk_dim for core in self.cores]
        vectors = [w for w in self.block_weights if w.matrix is False and np.all(w.cols == 1)]
        norms = sum(w.count * any(np.all(w.rows == size) for size in sizes) for w in vectors)
        return self.rotary * np.minimum(norms / 2, 1.0)

    @property
    def trained_matrices(self) -> tuple[Weight, ...]:
        """The matrices of an average block with a trained weight."""
        return tuple(w for w in self.block_weights if w.matrix and w.trainable)

    @property
    def trained_outside(self) -> Number:
        """The trained share of what lies outside the blocks."""
        trained = sum(w.elements * w.trainable for w in (*self.first_weights, *self.last_weights))
        return trained / np.maximum(self.outside_parameters, 1.0)

    @property
    def last_norm_elements(self) -> Number:
        """Elements of the vectors after the blocks; of a model whose ends were not traced, a Llama's norm."""
        vectors = sum(w.elements for w in self.last_weights if np.all(w.cols == 1))
        return vectors if self.ends else np.maximum(vectors, self.hidden)

    @property
    def outside_parameters(self) -> Number:
        return sum(w.elements for w in (*self.first_weights, *self.last_weights))

    @property
    def parameters(self) -> Number:
        return self.blocks * self.block_parameters + self.outside_parameters


def with_score(census: Census) -> Census:
    """The model with one trained output in place of its vocabulary; a tied embedding stays."""
    shape = 1, census.hidden
    outside = (p for p in census.parameters_outside if p.kind != "head")
    return replace(
        census,
        head=Matrix("score.weight", "head", *shape),
        parameters_outside=(*outside, Parameter("score.weight", "head", shape, last=True)),
        tied=False,
        ends=tuple((size, replace(saved, logit=0.0, changes=False)) for size, saved in census.ends),
    )


def _cuts(census: Census) -> dict[str, str]:
    """Return `Gemm.cut` of the matrices of blocks that have one, by name."""
    return {
        p.name: "tokens" if p.by_tokens else ("rows", "cols")[p.cut or 0]
        for b in census.blocks
        for p in b.parameters
        if p.cut in (0, 1) or p.by_tokens
    }


def _gemms(census: Census, cuts: Mapping[str, str]) -> tuple[Gemm, ...]:
    """Return the matrices of an average block; those outside the blocks, but the head, are shared out."""
    n = len(census.blocks)
    fitting = {p.name for b in census.blocks for p in b.parameters if p.in_4_bits}
    fp8 = {p.name for b in census.blocks for p in b.parameters if p.fp8}
    in_mlp = {m.name.rpartition(".")[0] for b in census.blocks for m in b.matrices if m.kind == "mlp"}
    experts = {p.name: p.experts for b in census.blocks for p in b.parameters}
    alike: dict[Gemm, float] = {}
    ends = [saved.last for block in census.blocks for _, saved in block.saved[:1]]
    lasts = ["", *(ends if len(ends) == n else [""] * n)]
    for matrices, last in zip((census.outside, *(b.matrices for b in census.blocks)), lasts, strict=True):
        for m in matrices:
            if not m.count:  # of an expert, run in a loop, that no token of the trace chose
                continue
            inside = m.kind == "mlp" or m.name.rpartition(".")[0] in in_mlp
            adapter = m.name[-1] if m.kind == "adapter" else ""
            gemm = Gemm(
                m.rows, m.cols, 0.0, cuts.get(m.name, ""), float(m.trainable), float(m.input_gradient),
                adapter, in_4_bits=m.name in fitting and not m.trainable, last=m.name == last,
                fp8=m.name in fp8, mlp=inside,
                adapted_last=adapter_name(m.name, "B") == last,
                experts=experts.get(m.name, 0) / m.count,
            )  # fmt: skip
            alike[gemm] = alike.get(gemm, 0) + m.count
    return tuple(
        replace(gemm, count=count / n, experts=gemm.experts * count / n) for gemm, count in alike.items()
    )


def _traced(
    blocks: Sequence[Block], saved: Sequence[Iterable[tuple[int, SavedBytes]]], *, masked: bool = True
) -> dict[int, Traced]:
    """Saved bytes and peaks of the traced blocks, by bytes of an element (2, 4 and 8).

    Without a size that a block lacks; saved bytes of 8 are twice those of 4. saved: of each block, by bytes
    of an element. masked: whether a run gives a mask to attention.
    """
    by_size, found = [dict(of_block) for of_block in saved], {}
    for element in (2, 4):
        if all(element in of_block for of_block in by_size):
            sizes = [of_block[element] for of_block in by_size]
            peaks = sizes[-1].peaks and replace(sizes[-1].peaks, masks=masked * sizes[-1].peaks.masks)
            found[element] = _blocks_of(blocks, sizes, element, peaks)
            if any(size.wide_masks for size in sizes):
                wide = _blocks_of(blocks, [size.wide_masks or size for size in sizes], element, peaks)
                found[element] = found[element]._replace(wide_masks=wide)
            compiled = [size.compiled for size in sizes if size.compiled]
            selective = [size.selective for size in sizes if size.selective]
            if len(compiled) == len(selective) == len(sizes):
                # The block's input is what a compiled block starts from, or reads as it is. Its matmuls for
                # gradients of weights come behind a fused pass, which frees nothing that they read.
                same = groupby(peaks.gathered if peaks else (), key=lambda time: time.made)
                together = tuple(BackwardBytes(*map(max, zip(*times, strict=True))) for _, times in same)
                peaks = peaks and replace(peaks, saves_input=True, gathered=together)
                outputs = _blocks_of(blocks, selective, element, None).kept
                of_compiled = _blocks_of(blocks, compiled, element, peaks)
                again = found[element].kept.mlp - of_compiled.kept.mlp
                # A compiled block never holds what lies between two operations that are fused, as in GPT-2's
                # activation: the temporaries of eager ones stand for it.
                widest = max((m.cols * m.count for m in blocks[-1].matrices if m.kind == "mlp"), default=0)
                of_compiled = of_compiled._replace(
                    fused=True, selective=outputs, made_again=again if again <= element * widest else 0.0
                )
                found[element] = found[element]._replace(compiled=of_compiled)
    if 4 in found:
        found[8] = found[4].twice()
    return found


def _blocks_of(
    blocks: Sequence[Block], saved: Sequence[SavedBytes], element: int, peaks: BlockPeaks | None
) -> Traced:
    """Average and fullest of the blocks, which save `saved`. peaks: of the last one's passes."""
    kept = [_kept(block, each, element) for block, each in zip(blocks, saved, strict=True)]
    mean = Kept(*(sum(part) / len(kept) for part in zip(*kept, strict=True)))
    return Traced(mean, max(kept, key=sum), peaks)


def _has_backward(block: Block) -> bool:
    """False for a frozen block before all that is trained, which saves nothing; True if none was traced."""
    return not block.saved or any(saved.total + saved.scores for _, saved in block.saved)


def _kept(block: Block, saved: SavedBytes, element: int) -> Kept:
    """The bytes that one block saves, split as the ranks of tp and cp split them."""
    parts = {name: getattr(saved, name) for name in ("attention", "mlp", "whole")}
    kinds = {m.name.rpartition(".")[0]: m.kind for m in block.matrices if m.kind in parts}
    row_split = {p.name.rpartition(".")[0] for p in block.parameters if p.cut == 1 and p.kind != "adapter"}
    for p in block.parameters if saved.total else ():
        module, _, leaf = p.name.rpartition(".")
        # What A makes, and what DoRA multiplies with m before tp's sum: whole on each rank
        before_sum = leaf == "lora_magnitude_vector" and module in row_split
        if module in kinds and (leaf == "lora_A" or before_sum):
            size = element * p.shape[0]
            parts[kinds[module]] -= size
            parts["whole"] += size
    # Its own attention, that writes scores, has no core that other ranks or a second run would share.
    cores = block.attention if saved.core and not saved.scores else ()
    statistics = sum(4 * core.query_heads for core in cores)
    return Kept(
        outside=saved.outside, entering=saved.entering, **parts, core=saved.core - statistics,
        keys=element * sum(core.key_heads * (core.qk_dim + core.v_dim) for core in cores),
        statistics=statistics, scores=saved.scores,
    )  # fmt: skip


def _is_norm(parameter: Parameter, hidden: int) -> bool:
    """Whether it is the weight of a norm of hidden states."""
    return parameter.kind == "norm" and parameter.shape == (hidden,) and not parameter.name.endswith(".bias")


def _last_norm(parameter: Parameter) -> int:
    """Hidden states in fp32 that the backward of a block's last norm adds: five, but if its weight is trained
    the normalised ones have been freed. 0 for parameters of others.
    """
    return 5 - parameter.trainable if parameter.name.startswith(LAST_NORMS) else 0


def _weights(parameters: Iterable[Parameter], in_blocks: int = 0) -> tuple[Weight, ...]:
    """These parameters, equal ones as one Weight.

    in_blocks: number of blocks that they are in, by which each `count` is divided; 0: they are outside.
    """
    inside = in_blocks > 0
    alike = Counter(
        Weight(
            p.shape[0], math.prod(p.shape[1:]), 1.0, ("rows", "cols")[p.cut] if p.cut in (0, 1) else "",
            p.heads, float(p.trainable), inside and is_matrix(p.name, p.shape), inside and p.in_4_bits,
            fp8=inside and p.fp8, by_tokens=inside and p.by_tokens, of_experts=p.experts > 0,
        )
        for p in parameters
    )  # fmt: skip
    return tuple(replace(weight, count=count / (in_blocks or 1)) for weight, count in alike.items())
