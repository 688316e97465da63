"""What a rank holds at each moment of a step, in closed forms.

    states (weights, gradients, optimizer)   by precision and ZeRO stage            `states`, `held_states`
    saved activations                        by block, recompute, tp, sp, cp        `saved`, times `in_flight`
    the loss, messages, what software adds   by what the stack does                 `Accounting`
                                             ──> `peak`: the most of all moments and pipeline ranks

What a stack keeps is data (`Accounting`, stacks.toml), not branches. Bytes throughout; floats or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.hardware import memory_of
from meshtune.plan.work import Kept, Weight, Work

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "overhead")
MOMENTS = ("loss", "backward of the head", "backward of a block", "end of backward", "update")
BUCKET = 64 * 2**20  # elements that the optimizer turns into fp32 at a time (train/optim.py)
RANKS = ("first", "middle", "last")  # pipeline ranks that a peak can be on

# model states #


class Precision(NamedTuple):
    """Bytes per parameter of each copy.

    weight: as forward and backward compute with it; gradient: as a backward makes it. accumulated: of the
    sum over micro-batches and ranks; beside: 1: that sum stands beside the gradients, in memory that it has
    from the start, 0: in their place. master: a second, wider copy of the weights. moments: AdamW's two.
    """

    weight: float
    gradient: float
    accumulated: float
    master: float
    moments: float
    beside: float = 0.0

    @property
    def trained(self) -> float:
        """Of the weights as the optimizer has them."""
        return self.master or self.weight


PRECISIONS = {
    "fp32": Precision(4, 4, 4, 0, 8),
    "fp64": Precision(8, 8, 8, 0, 16),
    "bf16": Precision(2, 2, 4, 4, 8),
    "bf16-pure": Precision(2, 2, 4, 0, 4),
}
# Rajbhandari et al. 2020: 2 + 2 + 12; and with micro-batches that add up in fp32 beside the gradients
MIXED = Precision(2, 2, 2, 4, 8)
MIXED_BESIDE = Precision(2, 2, 4, 4, 8, beside=1)


class States(NamedTuple):
    """In bytes. gathered: whole weights beside a shard of them."""

    weights: Number
    gradients: Number
    optimizer: Number
    gathered: Number = 0.0

    @property
    def total(self) -> Number:
        return sum(self)


def states(precision: Precision, parameters: Number, zero: Number = 0, shards: Number = 1) -> States:
    """Of a rank that has `parameters`, of which ZeRO leaves it one of `shards` from its stage on: optimizer
    state from 1, gradients from 2, weights from 3 (Rajbhandari et al. 2020, arXiv:1910.02054, figure 1).
    """
    p, n = precision, parameters
    gradient = p.gradient + p.accumulated if p.beside else p.accumulated
    return States(
        weights=n * p.weight / np.where(zero >= 3, shards, 1),
        gradients=n * gradient / np.where(zero >= 2, shards, 1),
        optimizer=n * (p.master + p.moments) / np.where(zero >= 1, shards, 1),
    )


def gpt_parameters(layers: Number, hidden: Number, vocabulary: Number, seq_len: Number) -> Number:
    """L(12h² + 13h) + (V + s)h + 2h: matrices, biases and norms of L blocks, both embeddings, last norm
    (Narayanan et al. 2021, arXiv:2104.04473, equation 2, with the last norm).
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + seq_len) * hidden + 2 * hidden


class Elements(NamedTuple):
    """Of parameters on a rank: all after tp and pp, those that are trained, and its ZeRO shards of both."""

    whole: Number
    trained: Number
    shard: Number
    trained_shard: Number


def elements(weights: Sequence[Weight], c: Columns) -> Elements:
    """Of the rank that has most: the first shard, cut along the rows, and the first piece of each matrix
    (partition.piece's rule).
    """
    shards = np.where(c.zero > 0, c.dp_shard * c.cp, 1.0)
    found = []
    for w in weights:
        splits = np.where((w.heads > 0) & (w.heads < c.tp), 1.0, c.tp)
        rows = np.ceil(w.rows / splits) if w.cut == "rows" else w.rows
        cols = np.ceil(w.cols / splits) if w.cut == "cols" else w.cols
        whole, shard = w.count * rows * cols, w.count * np.ceil(rows / shards) * cols
        found.append((whole, whole * w.trainable, shard, shard * w.trainable))
    return Elements(*(sum(each) for each in zip(*found, strict=True))) if found else Elements(0, 0, 0, 0)


def held_states(a: Accounting, n: Elements, c: Columns) -> States:
    """Of a rank while the last backward of a step ends, by what the stack does (partition.Bytes is the same
    for ours, tested equal).
    """
    p = a.precision
    several = (c.gradient_accumulation_steps > 1) | (
        np.where(c.zero > 0, c.dp_replicate, c.data_ranks * c.cp) > 1
    )
    sharded = c.zero > 0
    frozen_shard = n.shard - n.trained_shard
    summed = np.where(several | (p.beside > 0), p.accumulated, p.gradient) + p.beside * p.gradient
    kept_whole = (c.zero < 2) & (c.gradient_accumulation_steps > 1)
    if (
        a.shards_masters
    ):  # FSDP: the shard is the master, and the passes compute with what is gathered from it
        return States(
            weights=np.where(
                sharded, n.trained_shard * p.trained + frozen_shard * p.weight, n.whole * p.weight
            ),
            gathered=np.where(sharded & (c.zero < 3), n.whole * p.weight, 0.0),
            gradients=np.where(
                sharded,
                np.where(kept_whole, n.trained * p.accumulated, n.trained_shard * p.trained),
                n.trained * summed,
            ),
            optimizer=np.where(sharded, n.trained_shard * p.moments, n.trained * (p.master + p.moments)),
        )
    return States(
        weights=np.where(c.zero == 3, n.shard, n.whole) * p.weight,
        gradients=np.where(c.zero >= 2, n.trained_shard, n.trained) * summed,
        optimizer=np.where(sharded, n.trained_shard, n.trained) * (p.master + p.moments),
    )


# saved activations #


class Saved(NamedTuple):
    """What a block's forward keeps for its backward, in bytes per token and feature of each kind.

    outside: per hidden feature, outside what tp cuts (sp splits it).
    entering: per hidden feature of what goes into the cut matrices.
    queries, keys, heads: per feature of queries and of keys and values, and per head.
    output: per feature of the core's output. wide: per widened feature of the MLP.
    scores: per head and key, where scores are written out. constant: per token.
    """

    outside: float
    entering: float
    queries: float
    keys: float
    heads: float
    output: float
    wide: float
    scores: float
    constant: float = 0

    def of(self, work: Work, seq_len: Number) -> Kept:
        """In bytes per token of an average block of a plain decoder."""
        queries = sum(k.count * k.query_heads * k.qk_dim for k in work.cores)
        outputs = sum(k.count * k.query_heads * k.v_dim for k in work.cores)
        keys = sum(k.count * k.key_heads * (k.qk_dim + k.v_dim) for k in work.cores)
        heads = sum(k.count * k.query_heads for k in work.cores)
        return Kept(
            outside=self.outside * work.hidden + self.constant,
            entering=self.entering * work.hidden,
            inside=self.wide * work.wide,
            core=self.queries * queries + self.keys * keys + self.output * outputs,
            keys=self.keys * keys,
            statistics=self.heads * heads + self.scores * heads * seq_len,
        )


# Korthikanti et al. 2022 (arXiv:2205.05198), table 2, 16-bit with dropout: 10 + 24/t + 5as/(ht)
MEGATRON = Saved(outside=6, entering=4, queries=2, keys=2, heads=0, output=2, wide=4, scores=5)
# Hugging Face's Llama with a flash kernel, bf16, measured to the byte: 20h + 4·h_kv + 8f + 4a + 8
EAGER = Saved(outside=12, entering=4, queries=2, keys=2, heads=4, output=2, wide=4, scores=0, constant=8)


def saved(
    kept: Kept,
    work: Work,
    c: Columns,
    tokens: Number,
    *,
    element: float = 2,
    regathers: bool = False,
    selected: Kept | None = None,
) -> tuple[Number, Number]:
    """(kept, at work): bytes that a micro-batch of `tokens` on a rank keeps in an average block until its
    backward, and what that backward has at once when it has computed the rest again.

    regathers: what enters cut matrices is gathered again under sp, so that its split is what is kept.
    selected: what selective recomputation keeps; None: all products and the core's output.
    """
    sequence = np.where(c.sp > 0, c.tp, 1.0)
    core = (kept.core + kept.statistics) / c.tp
    outputs = sum(k.count * k.query_heads * k.v_dim for k in work.cores)
    gathered = np.where(c.ulysses > 0, element * outputs, (c.cp - 1) * kept.keys) / c.tp
    core = core + np.where(
        c.cp > 1, gathered, 0.0
    )  # keys and values of all; or the output as it came and as it left

    def split(k: Kept, core: Number) -> Number:
        entering = k.entering / (sequence if regathers else 1.0)
        return tokens * (k.outside / sequence + entering + k.inside / c.tp + core)

    whole = split(kept, core)
    boundary = tokens * element * work.hidden / sequence
    cut = sum(m.count * m.rows for m in work.matrices if m.cut == "rows") + outputs
    uncut = sum(m.count * m.rows for m in work.matrices if m.cut != "rows")
    products = tokens * (element * (cut / c.tp + uncut / sequence) + kept.statistics / c.tp) + boundary
    if selected is not None:
        products = split(selected, (selected.core + selected.statistics) / c.tp)
    found = np.where(c.recomputes("attention"), whole - tokens * kept.statistics / c.tp, whole)
    found = np.where(c.recomputes("selective"), products, found)
    found = np.where(c.recomputes("full"), boundary, found)
    rest = np.maximum(whole - products, 0.0)  # with adapters all products are more than what is needed
    again = np.where(c.recomputes("selective"), rest, np.where(c.recomputes("full"), whole, 0.0))
    return found, again


def compiled(kept: Kept) -> Kept:
    """What torch.compile's partitioner leaves of it: a norm's fp32 copies and the MLP's activation are
    computed again. Measured on a Llama: 12h + 4·h_kv + 6f + 4a + 8 of 20h + 4·h_kv + 8f + 4a + 8.
    """
    return kept._replace(outside=kept.outside / 3, inside=kept.inside * 3 / 4)


# pipelines #


@dataclass(frozen=True)
class Stages:
    """What the first, a middle and the last pipeline rank have: arrays [RANKS, layouts].

    blocks: on the rank. first, last: 1 on the rank with the embedding, with the head. place: its index.
    """

    blocks: Number
    first: Number
    last: Number
    place: Number

    @classmethod
    def even(cls, blocks: Number, c: Columns) -> Stages:
        """Equal stages, the larger ones first."""
        most = np.ceil(blocks / c.pp - 1e-9)
        place = np.stack([0 * c.pp, np.minimum(1.0, c.pp - 1), c.pp - 1])
        v_shaped = c.runs("zbv", "dualpipev")
        return cls(
            blocks=np.broadcast_to(most, place.shape),
            first=(place == 0) * 1.0,
            last=np.where(v_shaped, place == 0, place == c.pp - 1) * 1.0,
            place=place,
        )

    @classmethod
    def dealt(cls, work: Work, c: Columns, by: str) -> Stages:
        """As a stack deals the blocks out: by "blocks" evenly; by "slots", which embedding and head take too;
        by "products", the head's counted, each rank taking blocks until it has passed its part.
        """
        even, n = cls.even(work.blocks, c), work.blocks + 0 * c.pp
        if by == "blocks":
            return even
        first, last = even.first, even.last
        if by == "slots":
            slots = np.ceil((n + 2) / c.pp - 1e-9)
            blocks = np.where(c.pp > 1, slots - first - last, n)
        else:
            head = work.vocabulary * work.hidden / work.block_parameters
            part = (n + head) / c.pp
            least = np.minimum(np.floor(part + 1e-9) + 1, n)
            before = np.minimum(np.floor(part * (c.pp - 1) + 1e-9) + 1, n)
            blocks = np.where(last > 0, n - before, np.where(first > 0, least, np.ceil(part)))
            blocks = np.where(c.pp > 1, blocks, n)
        return cls(blocks, first, last, even.place)


def in_flight(c: Columns, place: Number = 0.0) -> Number:
    """Micro-batches whose activations pipeline rank `place` holds at most, in whole stages of this rank.

    GPipe and looped BFS: all of them; 1F1B: as many as there are ranks from it on; interleaved: the warm-up
    of (v - 1)·p + 2·(p - 1 - i) stages and one more, on the first rank 1 + (p - 1)/(p·v) times p
    (Korthikanti et al. 2022, section 4.2.3); zero-bubble schedules, whose backward of weights comes later: as
    many as there are ranks; DualPipeV half a stage more.
    """
    m, v = c.gradient_accumulation_steps, c.virtual_stages
    behind = c.pp - place
    held = np.where(c.runs("interleaved1f1b"), ((v - 1) * c.pp + 2 * (behind - 1) + 1) / v, behind)
    held = np.where(c.runs("zb", "zbv"), c.pp, np.where(c.runs("dualpipev"), c.pp + 0.5, held))
    held = np.where(c.runs("gpipe", "loopedbfs"), m, np.minimum(held, m))
    return np.where(c.pp > 1, held, 1.0)


# a step #


@dataclass(frozen=True)
class Accounting:
    """How software keeps things, in bytes (stacks.toml; `ours` for this engine).

    element: of activations. shards_masters: ZeRO's shards are the masters, and weights are gathered from them
    (FSDP). cleared: gradients beside their sum go once they are added, else they stay until the next ones.
    tables: the gradients of embedding and head are made whole before they are added to a sum.
    flat, flat_shard: for each parameter, and each one in ZeRO's shard, what messages and updates make in one
    piece, for which no freed activation has room: the allocator has it beside them from the first step on.

    regathers: see `saved`. saved: where a model was not traced; selected: of it, what selective recomputation
    keeps (None: all products). chunk: tokens whose logits exist at a time (inf: all, and nothing is copied).
    logit: what is held for each of them, logit_split: and more where tp splits the vocabulary; logit_left:
    while the head's gradients are made.

    ahead: groups of parameters that ZeRO-3 gathers at a time. message: of an element of a gradient message.
    buffers: micro-batches that a pipeline rank has buffers to receive in, at most (torch's stages: all).
    outputs: 1: what a stage sent stays until its backward. dealt: see `Stages.dealt`.

    reserved: what the allocator keeps beyond what is in use, as a share of what comes and goes. context:
    outside the allocator; communicator: for each kind of group that a rank talks to, and for that of
    all ranks where it is another.
    """

    precision: Precision
    element: float = 2
    shards_masters: bool = True
    cleared: bool = False
    tables: bool = False
    flat: float = 0.0
    flat_shard: float = 0.0
    regathers: bool = False
    saved: Saved = EAGER
    selected: Saved | None = None
    chunk: float = 1024
    logit: float = 8
    logit_split: float = 0.0
    logit_left: float = 0.0
    ahead: float = 2
    message: float = 4
    buffers: float = math.inf
    outputs: float = 1.0
    dealt: str = "blocks"
    reserved: float = 0.0
    context: float = 0.0
    communicator: float = 0.0


@dataclass(frozen=True)
class Memory:
    """The fullest rank at the fullest moment of a step, by category, in bytes."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    logits: Number
    communication: Number
    overhead: Number
    moment: Number  # index in MOMENTS
    rank: Number  # index in RANKS

    @property
    def peak(self) -> Number:
        return sum(getattr(self, name) for name in CATEGORIES)


class OnRank(NamedTuple):
    """Elements of parameters: of an average block, outside the blocks, of the first stage's own, of all."""

    block: Elements
    outside: Elements
    first: Elements
    all: Elements


def on_ranks(work: Work, c: Columns, s: Stages) -> OnRank:
    """What each pipeline rank has. Of a tied table, the first of the first weights, the last stage of a
    pipeline has a copy.
    """
    block, first, last = (
        elements(each, c) for each in (work.block_weights, work.first_weights, work.last_weights)
    )
    copy = elements([replace(table, count=1.0) for table in work.first_weights[:1]], c)
    tied = work.tied * (c.pp > 1)
    outside = Elements(
        *(f * s.first + (e + tied * k) * s.last for f, e, k in zip(first, last, copy, strict=True))
    )
    every = Elements(*(s.blocks * b + o for b, o in zip(block, outside, strict=True)))
    return OnRank(block, outside, first, every)


class Sizes(NamedTuple):
    """Of a micro-batch on a rank. tokens: of its part of the sequences; sequence: into how many sp splits
    them; hidden: bytes of all their hidden states; head: elements of the head's gradient.
    """

    tokens: Number
    sequence: Number
    hidden: Number
    head: Number

    @classmethod
    def of(cls, work: Work, c: Columns, a: Accounting, seq_len: Number) -> Sizes:
        tokens = c.micro_batch_size * seq_len / c.cp
        head = work.vocabulary * work.hidden / c.tp * work.head_trainable
        return cls(tokens, np.where(c.sp > 0, c.tp, 1.0), a.element * work.hidden * tokens, head)


class Loss(NamedTuple):
    """What the rank with the head holds for it, in bytes.

    at: in the loss. kept: for each other micro-batch in flight. norm, normed: of the last norm's forward and
    backward. waiting: the head's gradients while the blocks' backward runs; left: and with what else the loss
    has not let go of in the head's own.
    """

    at: Number
    kept: Number
    norm: Number
    normed: Number
    waiting: Number
    left: Number


def loss_held(work: Work, c: Columns, a: Accounting, z: Sizes) -> Loss:
    """Logits, a copy of their hidden states and those states' gradient, the head's gradient (train/loss.py:
    a chunk at a time, gradients in the forward); the last norm's input in fp32, what it made of it and its
    output, which sp gathers.
    """
    p = a.precision
    rows = np.ceil(z.tokens / np.maximum(np.ceil(z.tokens / a.chunk), 1.0))
    logits = rows * work.vocabulary / c.tp
    at, kept = logits * (a.logit + np.where(c.tp > 1, a.logit_split, 0.0)), 0.0
    if math.isfinite(a.chunk):  # at the logarithms of a chunk, or at the gradients of logits, states and head
        copy, summed = rows * a.element * work.hidden, np.where(rows < z.tokens, 4.0 * z.head, 0.0)
        gradients = 3 * a.element * logits + copy + z.head * p.gradient
        at = np.maximum(at, gradients) + copy + z.hidden + summed
        kept = z.hidden + z.head * p.gradient  # each loss has made its gradients already
    wide = work.hidden * z.tokens / z.sequence * max(4, a.element)
    sharded, several = _sharded(a, c), c.gradient_accumulation_steps > 1
    alone = ~(several | (_copies(a, c) > 1))
    waiting = np.where(sharded | alone, z.head * p.gradient, 0.0)  # until it is added up
    left = np.where(sharded | alone | a.tables, z.head * p.gradient, 0.0) + logits * a.logit_left
    if a.shards_masters:  # and a sum that no micro-batch has made before
        first_sum = np.where(sharded | alone | several, 0.0, z.head * p.accumulated)
        waiting, left = waiting + first_sum, left + first_sum
    return Loss(
        at=at,
        kept=kept + wide + z.hidden / z.sequence,
        norm=wide + z.hidden / z.sequence + z.hidden,
        normed=wide * (6 if a.element < 4 else 7),  # tensors that its backward has at once
        waiting=waiting,
        left=left,
    )


class Messages(NamedTuple):
    """What data parallelism holds beside the states, in bytes.

    root, gathered: whole parameters outside the blocks, and of one block, under ZeRO-3. left: the last
    message of the micro-batch before, which ZeRO-2 and -3 have until they send the next one. made, ended: a
    block's gradients and their message, at its fullest moment and when its backward is over.
    """

    root: Number
    gathered: Number
    left: Number
    made: Number
    ended: Number


def messages(c: Columns, a: Accounting, on: OnRank) -> Messages:
    """FSDP2's buffers as they were counted (torch.distributed.fsdp); between replicas a message is made of a
    block's sums when its backward is over (parallel/replicas.py).
    """
    p, sharded, several = a.precision, _sharded(a, c), c.gradient_accumulation_steps > 1
    third = sharded & (c.zero == 3)
    late = (c.zero == 1) & (c.pp > 1)  # torch's stages send ZeRO-1's after all passes
    made = np.where(sharded, on.block.trained * (p.gradient + np.where(late, 0.0, a.message)), 0.0)
    joined = np.where(_copies(a, c) > 1, on.block.trained * a.message, 0.0)
    return Messages(
        root=np.where(third, on.outside.whole * p.weight, 0.0),
        gathered=np.where(third, on.block.whole * p.weight, 0.0),
        left=np.where(sharded & (c.zero >= 2) & several, on.outside.trained * a.message, 0.0),
        made=made + (0.0 if a.shards_masters else joined),
        ended=made + joined,
    )


def block_backward(work: Work, c: Columns, a: Accounting, z: Sizes) -> Number:
    """At work in a block's backward: the gradient of what it gave, and two features as wide as the MLP is
    inside; what selective recomputation ran last.
    """
    inner = np.max([np.broadcast_to(m.cols, np.shape(z.tokens)) for m in work.matrices], axis=0)
    own = z.hidden / z.sequence
    again = np.where(c.recomputes("selective"), 2 * own, 0.0)
    return own + 2 * a.element * z.tokens * inner / c.tp + again


def held_before(c: Columns, a: Accounting, state: States, one: Number, held: Number) -> Number:
    """Gradients that a backward finds: of the micro-batches before. Where all are in flight at once, the
    first ones come when one of them, and with it `one` of what is kept, is through.
    """
    p, several = a.precision, c.gradient_accumulation_steps > 1
    if p.beside:
        added = state.gradients * p.accumulated / (p.accumulated + p.beside * p.gradient)
        return added if a.cleared else np.where(several, state.gradients, added)
    together = (c.pp > 1) & (held >= c.gradient_accumulation_steps)
    return np.where(together, np.maximum(state.gradients - one, 0.0), np.where(several, state.gradients, 0.0))


def updating(c: Columns, a: Accounting, on: OnRank) -> Number:
    """What the update makes of gradients that are not as wide as what is trained, a bucket at a time
    (train/optim.py); sums are.
    """
    p = a.precision
    wider = np.minimum(on.all.trained, BUCKET) * np.maximum(p.trained - p.gradient, 0.0)
    summed = _sharded(a, c) | (c.gradient_accumulation_steps > 1) | (_copies(a, c) > 1)
    return np.where(summed, 0.0, wider)


def _sharded(a: Accounting, c: Columns) -> Number:
    """Whether weights are gathered from shards."""
    return (c.zero > 0) & a.shards_masters


def _copies(a: Accounting, c: Columns) -> Number:
    """Ranks that all-reduce the gradients of a micro-batch's blocks."""
    return np.where(_sharded(a, c), 1.0, c.data_ranks * c.cp)


def moments(
    work: Work, c: Columns, a: Accounting, seq_len: Number, stages: Stages, *, first_step: bool = False
) -> dict[str, dict[str, Number]]:
    """What each pipeline rank holds at each of MOMENTS, by category but overhead; [RANKS, layouts] each.

    first_step: before there is optimizer state but masters, up to the update.
    """
    s, p, z = stages, a.precision, Sizes.of(work, c, a, seq_len)
    on = on_ranks(work, c, s)
    state, loss, sent = held_states(a, on.all, c), loss_held(work, c, a, z), messages(c, a, on)
    kept_in, again = saved(
        work.kept.get(int(a.element)) or a.saved.of(work, seq_len), work, c, z.tokens, element=a.element,
        regathers=a.regathers, selected=None if a.selected is None else a.selected.of(work, seq_len),
    )  # fmt: skip
    again = again + block_backward(work, c, a, z)

    # micro-batches in flight: what blocks keep, what was sent and received, what their losses have made
    held = in_flight(c, s.place)
    travelling = np.where(c.pp > 1, z.hidden / z.sequence, 0.0)
    received = travelling * np.minimum(c.gradient_accumulation_steps, a.buffers)
    received = received * (2 * c.virtual_stages - s.first - s.last)  # from the stage before and the one after
    kept = held * (s.blocks * kept_in + a.outputs * travelling * (c.virtual_stages - s.last))
    kept = kept + s.last * (held - 1) * loss.kept
    one = kept / np.maximum(held, 1.0)

    none, flat = np.zeros_like(kept), on.all.trained * a.flat
    sharded = _sharded(a, c)
    masters = np.where(sharded, 0.0, state.optimizer * p.master / (p.master + p.moments))
    optimizer = state.optimizer + np.where(c.zero > 0, on.all.trained_shard, on.all.trained) * a.flat_shard
    last_sums = np.where(sharded, on.all.trained_shard * p.trained, state.gradients)
    # the embedding's gradient ends a micro-batch's backward, with all others still in flight
    embedding = s.first * a.tables * on.first.trained * p.gradient
    steady = {
        "weights": state.weights + state.gathered,
        "gradients": held_before(c, a, state, one, held) + flat,
        "optimizer": masters if first_step else optimizer,
        "activations": kept, "logits": none, "communication": sent.root + received,
    }  # fmt: skip
    return {
        "loss": steady | {
            "activations": kept + s.last * loss.norm, "logits": s.last * loss.at,
            "communication": steady["communication"] + sent.gathered + sent.left,
        },
        "backward of the head": steady | {
            "activations": kept + s.last * loss.normed, "logits": s.last * loss.left,
            "communication": steady["communication"] + sent.gathered + sent.left,
        },
        "backward of a block": steady | {
            "activations": kept + again, "logits": s.last * loss.waiting,
            "communication": steady["communication"] + a.ahead * sent.gathered + sent.made,
        },
        "end of backward": steady | {
            "gradients": state.gradients + flat,
            "activations": np.maximum(kept_in + again, a.tables * (kept - one + embedding)),
            "communication": steady["communication"] + sent.gathered + sent.ended,
        },
        "update": steady | {
            "weights": state.weights, "gradients": last_sums + flat, "optimizer": optimizer,
            "activations": none, "communication": received + updating(c, a, on),
        },
    }  # fmt: skip


def peak(
    work: Work,
    c: Columns,
    a: Accounting,
    seq_len: Number,
    stages: Stages | None = None,
    *,
    first_step: bool = False,
) -> Memory:
    """The most that any rank holds at any moment of a step.

    stages: of each pipeline rank; None: as the stack deals the blocks out. first_step: the first step instead
    of all later ones.
    """
    found = moments(work, c, a, seq_len, stages or Stages.dealt(work, c, a.dealt), first_step=first_step)
    groups = sum((each > 1) * 1.0 for each in (c.data_ranks * c.cp, c.cp, c.tp, c.pp))
    groups = groups + (groups > 1)
    shape = np.shape(found["loss"]["activations"])
    held: dict[str, Number] = {}
    most = np.full(shape[1:], -np.inf)
    for index, name in enumerate(MOMENTS):
        parts = {category: np.broadcast_to(found[name][category], shape) for category in CATEGORIES[:-1]}
        transient = parts["activations"] + parts["logits"] + parts["communication"]
        parts["overhead"] = a.reserved * transient + a.context + a.communicator * groups
        total = sum(parts.values())
        rank = np.argmax(total, 0)
        own = {category: _picked(each, rank) for category, each in parts.items()}
        own |= {"moment": np.full(shape[1:], index), "rank": rank}
        higher = _picked(total, rank) > most
        held = {key: np.where(higher, each, held.get(key, 0)) for key, each in own.items()}
        most = np.where(higher, _picked(total, rank), most)
    return Memory(**held)


def _picked(each: Number, rank: Number) -> Number:
    """Of [RANKS, layouts], the rank named for each layout."""
    return np.take_along_axis(each, rank[None], 0)[0]


def ours(precision: str, reduce_dtype: str = "fp32", **others: Any) -> Accounting:
    """How this engine keeps things (train/optim.py, train/loss.py, parallel/). The settings' values."""
    p = PRECISIONS[precision]
    if reduce_dtype == "bf16" and p.weight == 2:
        p = p._replace(accumulated=2)
    return Accounting(p, element=p.weight, message=p.accumulated, **others)


def accounting(stack: str, precision: str, reduce_dtype: str = "fp32") -> Accounting:
    """How a stack of stacks.toml keeps things in this precision (fp32, fp16, bf16 …); 8-bit products keep
    what bf16 keeps. What its tables leave out is as `ours`.
    """
    return _accounting(stack, "bf16" if precision in ("fp8", "mxfp8") else precision, reduce_dtype)


@cache
def _accounting(stack: str, precision: str, reduce_dtype: str) -> Accounting:
    said = memory_of(stack)
    fields: dict[str, Any] = {key: value for key, value in said.items() if not isinstance(value, dict)}
    fields |= said.get(precision, {})
    for name in ("saved", "selected"):
        if name in said:
            fields[name] = Saved(**{key: float(value) for key, value in said[name].items()})
    own = fields.pop("precision", None)
    return ours(precision, reduce_dtype, **fields) if own is None else Accounting(Precision(*own), **fields)
