"""How a software stack keeps things in memory, as data: bytes per parameter, per activation, per logit.

stacks.toml has a `memory` table for each stack; `ours` is this engine. The formulas of memory/ read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshtune.plan.hardware import memory_of
from meshtune.plan.work import Columns, Kept, Number, Work

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload


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

    def gathers_shards(self, c: Columns) -> Number:
        """Whether weights are gathered from shards."""
        return (c.zero > 0) & self.shards_masters

    def gradient_replicas(self, c: Columns) -> Number:
        """Ranks that all-reduce the gradients of a micro-batch's blocks."""
        return np.where(self.gathers_shards(c), 1.0, c.data_ranks * c.cp)


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


def accounting_of(workload: Workload, cluster: Cluster) -> Accounting:
    """How our engine keeps things there; a processor has no context, and its allocator is the system's."""
    stack = "meshtune-compiled" if workload.compile else "meshtune"
    found = accounting(stack, workload.precision, workload.reduce_dtype)
    if cluster.gpu.name == "cpu":
        return replace(found, reserved=0.0, context=0.0, communicator=0.0)
    return found
