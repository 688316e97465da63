"""The numbers of a model as one value: its matrices, its attention, its parameters by kind, its FLOPs,
and what its blocks keep for the backward.

    config or model ──trace.py──> Census ──> step_flops, palm_flops (here), memory, plans …

Plain numbers and arithmetic, without torch. A multiplication that could not be named is in `unsupported`, and
then there are no FLOPs at all rather than wrong ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshtune.errors import UserError
from meshtune.units import Number


def takes_flash(qk_dim: Number, v_dim: Number, element: int) -> Number:
    """True if FlashAttention's variable-length calls take these heads, the smaller ones padded
    (attention/op.py). element: bytes of a number.
    """
    return (element == 2) & (qk_dim % 8 == 0) & (v_dim % 8 == 0) & (qk_dim <= 256) & (v_dim <= 256)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """True for a block's parameter that is a matrix to optimizers.OPTIMIZERS: 2 dimensions, no bias.

    Adapters are; the stacked tensors of experts and convolutions, with 3 dimensions, are not.
    """
    return len(shape) == 2 and not name.endswith("bias")


def adapter_name(matrix: str, which: str) -> str:
    """Name of the matrix A or B of the LoRA pair of a matrix, of a linear layer or of experts."""
    linear = matrix.endswith(".weight")
    return f"{matrix.removesuffix('weight') if linear else f'{matrix}_'}lora_{which}"


@dataclass(frozen=True)
class Matrix:
    """A parameter that every token is multiplied with, `count` times (of experts: those that are active).

    Sizes are those of the whole model, before tp.

    input_gradient: whether backward needs the gradient of this matrix's input (something before it is
    trainable).
    """

    name: str  # inside its block, such as self_attn.q_proj.weight
    kind: str  # attention | mlp | head | adapter | other
    rows: int  # output features
    cols: int  # input features
    count: float = 1
    trainable: bool = True
    input_gradient: bool = True

    @property
    def forward(self) -> float:
        """FLOPs per token: one multiply and one add per element."""
        return 2 * self.rows * self.cols * self.count

    @property
    def backward(self) -> float:
        """FLOPs per token: the forward's for the input's gradient and for the weight's, where needed."""
        return self.forward * (self.input_gradient + self.trainable)


@dataclass(frozen=True)
class Attention:
    """One layer's attention core.

    window: a token attends to itself and the window - 1 tokens before it; None: to all before it.
    """

    query_heads: int
    key_heads: int
    qk_dim: int  # features of a head of queries or keys
    v_dim: int  # features of a head of values
    window: int | None = None
    gradients: tuple[bool, bool, bool] = (True, True, True)  # whether queries, keys, values need theirs
    flash: bool = True  # False: a softcap changes the scores, which flash kernels don't know

    def on_rank(self, ranks: int) -> Attention:
        """One rank's part of the heads, which `ranks` share out; heads of keys are repeated where needed."""
        keys = self.key_heads // math.gcd(self.key_heads, ranks)
        return replace(self, query_heads=self.query_heads // ranks, key_heads=keys)

    def forward(self, pairs: int) -> float:
        """FLOPs of QKᵀ and PV over `pairs` (query, key) pairs."""
        return 2 * pairs * self.query_heads * (self.qk_dim + self.v_dim)

    def backward(self, pairs: int) -> float:
        """FLOPs of dQ, dK, dV and dP. Flash kernels compute QKᵀ again: recomputation, not counted."""
        q, k, v = self.gradients
        sizes = self.qk_dim * (q + k) + self.v_dim * (v + (q or k))
        return 2 * pairs * self.query_heads * sizes


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor.

    cut: the dimension that tensor parallelism cuts; None: each rank holds the whole tensor. heads: key-value
    heads along that dimension, 0: none; with tp > heads each rank holds the whole tensor. whole: its output
    (cut 0) or its input's gradient (cut 1) is all-gathered over the tp ranks, unless tp divides each of
    `fused`, if there are any: heads, or features, of the projections that are fused there. last: it lies
    after the blocks. linear: False for what has several dimensions in a block and is neither the weight of
    a linear layer nor of experts that run by our products, so that it is never held in 4 bits.
    """

    name: str  # inside its block, such as self_attn.q_proj.weight
    kind: str  # embedding | attention | mlp | norm | head | adapter | other
    shape: tuple[int, ...]  # before tp
    trainable: bool = True
    cut: int | None = None
    heads: int = 0
    whole: bool = False
    last: bool = False
    fused: tuple[int, ...] = ()
    linear: bool = True

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def by_tokens(self) -> bool:
        """True for a matrix of a block's mlp that tp does not cut: of routed experts, with their adapters, or
        of their router.
        """
        inside = self.kind == "mlp" or (self.kind == "adapter" and self.experts > 0)
        return inside and self.cut is None and len(self.shape) > 1

    @property
    def experts(self) -> int:
        """Experts that are stacked in it along the first dimension; 0: it is not one of theirs."""
        return self.shape[0] if self.name.split(".")[-2:-1] == ["experts"] else 0

    @property
    def in_4_bits(self) -> bool:
        """True if method=qlora holds it in 4 bits where it is a block's."""
        from meshtune.precision import SCALE_BLOCK  # here: chains of imports stay short

        matrix = self.linear and (is_matrix(self.name, self.shape) or len(self.shape) == 3)
        return matrix and not self.trainable and self.shape[-1] % SCALE_BLOCK == 0

    @property
    def fp8(self) -> bool:
        """True if train.precision=fp8 multiplies with it in 8-bit floats where it is a block's."""
        from meshtune.precision import takes_fp8  # here: chains of imports stay short

        linear = self.linear and self.kind != "adapter" and is_matrix(self.name, self.shape)
        return linear and takes_fp8(*self.shape)

    def gathered(self, tp: int) -> bool:
        """True if features are all-gathered over `tp` ranks for it."""
        return self.whole and not (self.fused and all(units % tp == 0 for units in self.fused))


@dataclass(frozen=True)
class Parameters:
    """Elements of all parameters of one kind."""

    kind: str  # one of those of Parameter
    count: int  # trainable and frozen
    trainable: int


class BackwardBytes(NamedTuple):
    """Bytes per token at one time of a block's backward, besides what its forward saved; the first four are
    divided by tp, sp or not as `model.watch.Size` says.
    """

    outside: float
    whole: float
    heads: float
    mlp: float
    keys: float  # per token and key
    made: float  # gradients of weights over those that the block leaves: above 1 where one is summed up


@dataclass(frozen=True)
class BlockPeaks:
    """Most bytes that a block's passes hold at once on one rank: (per token, per token and key)."""

    forward: tuple[float, float]  # of one that saves for a backward, besides what it saves and its input
    forward_again: tuple[
        float, float
    ]  # of one that runs again in the backward, besides the output's gradient too
    forward_alone: tuple[float, float]  # of one that saves nothing, with its input
    backward: tuple[BackwardBytes, ...]  # at each time that may be the fullest
    gathered: tuple[BackwardBytes, ...]  # the same under sp; (): what enters attention or MLP is not known
    masks: float  # per token and key, of a mask that all blocks share
    saves_input: bool  # True if the block's input is among what it saves


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token that a block's forward keeps for its backward: eager, a flash kernel as attention core
    or, where the family takes none, its own attention; nothing recomputed, one rank.

    Each tensor counts once, in the block that saves it first; what all blocks share (rotary tables, masks)
    in none. Dropout of attention saves nothing here.
    """

    outside: float  # norms and residuals: what lies outside attention and MLP, split by sp
    entering: float  # inputs of the first matrices of attention and of MLP: whole under tp
    attention: float  # everything else within attention but the core, split as the heads are
    mlp: float  # everything else within the MLP, split by tp
    core: float  # queries, keys and values as the attention core takes them, its output, its log-sums
    scores: float = 0.0  # bytes per token and key, by attention that writes its scores to memory
    whole: float = 0.0  # inputs of adapters as dropout leaves them, and its masks: whole under tp and sp
    peaks: BlockPeaks | None = None  # of the last block; None: not traced, as with recurrent layers
    # The matrix that is multiplied with when all is saved: torch's checkpoint repeats a block up to there
    last: str = ""
    # The same of a compiled block: kept without recomputation, and under selective; None: not traced
    compiled: SavedBytes | None = None
    selective: SavedBytes | None = None
    # The same on a processor, whose dropout's masks are as wide as its inputs; None: there are none
    wide_masks: SavedBytes | None = None

    @property
    def total(self) -> float:
        """Without `scores`."""
        return self.outside + self.entering + self.attention + self.mlp + self.whole + self.core


@dataclass(frozen=True)
class EndBytes:
    """Bytes outside the blocks that a forward keeps for its backward, on one rank."""

    logit: float  # per logit, that the head keeps besides its output
    norm: float = 0.0  # per token, that the last norm keeps; 0: there is none
    norm_backward: float = 0.0  # per token, the most in its backward, `norm` included
    tables: float = 0.0  # per token, that all blocks share: rotary tables
    changes: bool = False  # the logits are not the output of the head's matrix: softcap, cast, scale
    before: float = 0.0  # per token, before the first block, such as the input of a norm of embeddings


@dataclass(frozen=True)
class Block:
    """One transformer block.

    saved: (bytes of an element of activations, what is saved) for 2 and 4; a size that the model's forward
    refused is left out, so that it may be empty.
    """

    matrices: tuple[Matrix, ...]
    attention: tuple[Attention, ...]
    parameters: tuple[Parameter, ...]
    saved: tuple[tuple[int, SavedBytes], ...] = ()
    # The same with one row a micro-batch, where it differs: scores may need copies of several rows
    saved_of_one_row: tuple[tuple[int, SavedBytes], ...] = ()

    @property
    def mixture(self) -> bool:
        """True for a mixture of experts: each of tp's ranks has all of them, for a part of the tokens."""
        return any(p.by_tokens for p in self.parameters)

    @property
    def cuts_mlp(self) -> bool:
        """True if tp cuts the mlp, or in a mixture of experts its shared experts."""
        return any(p.kind == "mlp" and p.cut is not None for p in self.parameters)

    @property
    def leaves_last(self) -> bool:
        """True if all is saved once tp is to sum the outputs of the block's last matrix."""
        lasts = {saved.last for _, saved in self.saved}
        return not self.mixture or any(p.name in lasts and p.cut == 1 for p in self.parameters)

    @property
    def whole_heads(self) -> tuple[int, ...] | None:
        """None if tp cuts the attention heads. Else queries, keys and values are all-gathered and every rank
        computes all heads, unless tp divides each of these numbers of heads, those of fused projections.
        """
        plans = {
            p.fused if p.whole else None
            for p in self.parameters
            if p.kind == "attention" and p.cut == 0 and is_matrix(p.name, p.shape)
        }
        return plans.pop() if len(plans) == 1 else None


def head_shards(whole_heads: tuple[int, ...] | None, tp: Number) -> Number:
    """Ranks of `tp` that share out a block's attention heads; 1 if each computes all of them.

    whole_heads: see `Block.whole_heads`.
    """
    if whole_heads is None:
        return tp
    divided = [np.mod(heads, tp) == 0 for heads in whole_heads]
    return np.where(np.all(divided, axis=0), tp, 1) if divided else 1


@dataclass(frozen=True)
class Census:
    """The numbers of one model, before any parallelism."""

    family: str  # transformers' model_type
    hidden: int  # features of a hidden state
    vocabulary: int  # rows of the embedding
    blocks: tuple[Block, ...]
    outside: tuple[Matrix, ...]  # multiplied with every token, but in no block; without the head
    head: Matrix | None  # None: it has none that is known, and `unsupported` reports it
    parameters_outside: tuple[Parameter, ...]  # embedding, last norm, a head of its own …
    tied: bool  # head and embedding are one parameter, counted as embedding
    unsupported: str | None = None  # why the FLOPs of this model are unknown
    ends: tuple[tuple[int, EndBytes], ...] = ()  # by bytes of an element of activations, as Block.saved

    @cached_property
    def parameters(self) -> dict[str, Parameters]:
        """By kind, over the whole model."""
        count: Counter[str] = Counter()
        trainable: Counter[str] = Counter()
        for p in (*self.parameters_outside, *(p for block in self.blocks for p in block.parameters)):
            count[p.kind] += p.count
            trainable[p.kind] += p.count * p.trainable
        return {kind: Parameters(kind, count[kind], trainable[kind]) for kind in sorted(count)}

    @cached_property
    def total(self) -> int:
        return sum(p.count for p in self.parameters.values())

    @cached_property
    def trainable(self) -> int:
        return sum(p.trainable for p in self.parameters.values())

    @cached_property
    def idle(self) -> float:
        """Elements of the blocks' matrices that a token is not multiplied with: those of other experts."""
        stored = sum(p.count for block in self.blocks for p in block.parameters if len(p.shape) > 1)
        used = sum(m.rows * m.cols * m.count for block in self.blocks for m in block.matrices)
        return max(stored - used, 0.0)

    @property
    def sparse(self) -> bool:
        """True for a mixture of experts; the taps of convolutions are idle too, but few."""
        return self.idle > self.total / 10

    @cached_property
    def expert_share(self) -> float:
        """Share of the FLOPs of a token's matrices that is in stacked ones: those of experts."""
        experts = 0.0
        for block in self.blocks:
            stacked = {p.name for p in block.parameters if len(p.shape) == 3}
            experts += sum(m.forward + m.backward for m in block.matrices if m.name in stacked)
        head = self.head.forward + self.head.backward if self.head else 0.0
        return experts / (sum(self.matmul) + head) if experts else 0.0

    @cached_property
    def matmul(self) -> tuple[float, float]:
        """(forward, backward) FLOPs per token of every matrix but the head."""
        matrices = [*self.outside, *(m for block in self.blocks for m in block.matrices)]
        return sum(m.forward for m in matrices), sum(m.backward for m in matrices)

    @cached_property
    def fp8(self) -> tuple[int, int, float]:
        """(Matrices of the blocks' linear layers that train.precision=fp8 multiplies with in 8-bit floats,
        all matrices of blocks but adapters, share of the former in the FLOPs of all matmuls with parameters).
        """
        names = [{p.name for p in block.parameters if p.fp8} for block in self.blocks]
        own = [[m for m in b.matrices if m.kind != "adapter"] for b in self.blocks]
        narrow = [m for block, of_block in zip(own, names, strict=True) for m in block if m.name in of_block]
        head = [self.head] if self.head else []
        every = [*self.outside, *head, *(m for block in self.blocks for m in block.matrices)]
        flops, total = (sum(m.forward + m.backward for m in some) for some in (narrow, every))
        return len(narrow), sum(map(len, own)), flops / total if total else 0.0

    def check_fp8(self, name: str) -> None:
        """Raise UserError for a model without a matrix that is multiplied with in 8-bit floats.

        name: of the model.
        """
        from meshtune.precision import FP8_LEAST, FP8_MULTIPLE  # here: chains of imports stay short

        if not self.fp8[0]:
            sizes = [p.shape for b in self.blocks for p in b.parameters if p.linear and len(p.shape) == 2]
            largest = max(sizes, key=min, default=())
            raise UserError(
                "Linear layers of blocks multiply in 8-bit floats where their dimensions are multiples of "
                f"{FP8_MULTIPLE} from {FP8_LEAST:,} on. {name} has none: its largest is "
                f"{' x '.join(map(str, largest)) or 'in no linear layer'}. Use train.precision=bf16."
            )

    @cached_property
    def attentions(self) -> Counter[Attention]:
        """How many layers have each kind of attention core."""
        return Counter(attention for block in self.blocks for attention in block.attention)


# FLOPs #


@dataclass(frozen=True)
class StepFlops:
    """The FLOPs of one forward and backward pass without recomputation, by part."""

    matmul_forward: float
    matmul_backward: float
    attention_forward: float
    attention_backward: float
    head_forward: float
    head_backward: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def forward(self) -> float:
        return self.matmul_forward + self.attention_forward + self.head_forward


def document_pairs(tokens: Number, window: Number = np.inf) -> Number:
    """(query, key) pairs of causal attention in a document: n(n + 1)/2 for n tokens, fewer with a window.

    window: keys that a query sees at most, its own included; np.inf: no window.
    """
    seen = np.minimum(window, tokens)
    return seen * (seen + 1) / 2 + (tokens - seen) * seen


def attended_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """(query, key) pairs of causal attention in all these documents together.

    lengths: tokens of each document. window: as in `Attention`; None: no window.
    """
    seen = np.inf if window is None else window
    return sum(times * int(document_pairs(length, seen)) for length, times in Counter(lengths).items())


def step_flops(census: Census, documents: Collection[int], label_tokens: int) -> StepFlops | None:
    """The FLOPs of one forward and backward pass over documents; None where `census.unsupported` says why.

    The head counts only at labelled positions, attention once per attended pair, recomputation never
    (docs/mfu.md). documents: tokens of each. label_tokens: labelled positions of all documents together.
    """
    if census.unsupported or census.head is None:
        return None
    tokens = sum(documents)
    forward, backward = census.matmul
    lengths = Counter(documents)
    cores = [
        (attention, layers, attended_pairs(lengths.elements(), attention.window))
        for attention, layers in census.attentions.items()
    ]
    return StepFlops(
        matmul_forward=tokens * forward,
        matmul_backward=tokens * backward,
        attention_forward=sum(layers * attention.forward(pairs) for attention, layers, pairs in cores),
        attention_backward=sum(layers * attention.backward(pairs) for attention, layers, pairs in cores),
        head_forward=label_tokens * census.head.forward,
        head_backward=label_tokens * census.head.backward,
    )


def palm_flops(census: Census, tokens: int, seq_len: int) -> float:
    """FLOPs of `tokens` tokens by the common formula, 6N + 12·L·h·s each (Chowdhery et al. 2022, PaLM,
    appendix B).

    N: parameters without the input embedding (a tied head stays); L: layers; h: query heads × head size,
    which most models choose equal to the hidden size; s: `seq_len`. Attention counts without causality, every
    weight as trainable, the head at every position.
    """
    embedding = census.parameters["embedding"].count if "embedding" in census.parameters else 0
    head = census.vocabulary * census.hidden if census.tied else 0
    widths = sum(layers * a.query_heads * a.qk_dim for a, layers in census.attentions.items())
    return tokens * (6 * (census.total - embedding + head) + 12 * widths * seq_len)
