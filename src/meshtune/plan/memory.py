"""What the memory of a rank is made of, in closed forms.

    states (weights, gradients, optimizer)   by precision and ZeRO stage       `states`
    saved activations                        by block, recompute, tp, sp, cp   `saved`, times `in_flight`

What a stack saves and keeps is data (`Saved`, `Precision`), not branches. Bytes throughout; floats or arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshtune.plan.work import Columns, Number, Work

# model states #


class Precision(NamedTuple):
    """Bytes per parameter of each copy. accumulated: a sum of gradients beside them; master: a second, wider
    copy of the weights.
    """

    weight: float
    gradient: float
    accumulated: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return sum(self)


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 0, 8),
    "mixed": Precision(2, 2, 0, 4, 8),  # Rajbhandari et al. 2020: 2 + 2 + 12
    "mixed, fp32 gradients beside": Precision(2, 2, 4, 4, 8),  # several micro-batches add up in fp32
    "bf16-pure": Precision(2, 2, 0, 0, 4),
}


class States(NamedTuple):
    weights: Number
    gradients: Number
    optimizer: Number

    @property
    def total(self) -> Number:
        return self.weights + self.gradients + self.optimizer


def states(precision: Precision, parameters: Number, zero: Number = 0, shards: Number = 1) -> States:
    """Of a rank that has `parameters`, of which ZeRO leaves it one of `shards` from its stage on: optimizer
    state from 1, gradients from 2, weights from 3 (Rajbhandari et al. 2020, arXiv:1910.02054, figure 1).
    """
    p, n = precision, parameters
    return States(
        weights=n * p.weight / np.where(zero >= 3, shards, 1),
        gradients=n * (p.gradient + p.accumulated) / np.where(zero >= 2, shards, 1),
        optimizer=n * (p.master + p.moments) / np.where(zero >= 1, shards, 1),
    )


def gpt_parameters(layers: Number, hidden: Number, vocabulary: Number, seq_len: Number) -> Number:
    """L(12h² + 13h) + (V + s)h + 2h: matrices, biases and norms of L blocks, both embeddings, last norm
    (Narayanan et al. 2021, arXiv:2104.04473, equation 2, with the last norm).
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + seq_len) * hidden + 2 * hidden


# saved activations #


class Saved(NamedTuple):
    """What a block's forward keeps for its backward, in bytes per token and feature of each kind.

    outside: per hidden feature, outside what tp cuts (sp splits it).
    entering: per hidden feature of what goes into the cut matrices; sp splits it only where the stack gathers
    it again (`regathers`).
    queries, keys, heads: per feature of queries and of keys and values, and per head.
    output: per feature of the core's output. wide: per widened feature of the MLP.
    scores: per head and key, where scores are written out.
    matrices: per output feature of a matrix, where "selective" keeps those alone. constant: per token.
    """

    outside: float
    entering: float
    queries: float
    keys: float
    heads: float
    output: float
    wide: float
    scores: float
    matrices: float = 2
    constant: float = 0
    regathers: float = 1


# Korthikanti et al. 2022 (arXiv:2205.05198), table 2, 16-bit with dropout: 10 + 24/t + 5as/(ht)
MEGATRON = Saved(outside=6, entering=4, queries=2, keys=2, heads=0, output=2, wide=4, scores=5)
# Hugging Face's Llama with a flash kernel, bf16, measured to the byte: 20h + 4·h_kv + 8f + 4a + 8
EAGER = Saved(
    outside=12, entering=4, queries=2, keys=2, heads=4, output=2, wide=4, scores=0, constant=8, regathers=0
)


def saved(
    s: Saved, work: Work, c: Columns, seq_len: Number, hidden_bytes: float = 2
) -> tuple[Number, Number]:
    """(kept, at work): bytes that a micro-batch keeps in an average block until its backward, and what that
    backward has at once when it has computed the rest again.
    """
    tokens = c.micro_batch_size * seq_len / c.cp
    sequence = np.where(c.sp > 0, c.tp, 1.0)
    outside = s.outside * work.hidden / sequence + s.constant
    entering = s.entering * work.hidden / np.where(s.regathers > 0, sequence, 1.0)
    queries = sum(k.count * k.query_heads * k.qk_dim for k in work.cores)
    outputs = sum(k.count * k.query_heads * k.v_dim for k in work.cores)
    keys = sum(k.count * k.key_heads * (k.qk_dim + k.v_dim) for k in work.cores)
    heads = sum(k.count * k.query_heads for k in work.cores)
    core = s.heads * heads + s.scores * heads * seq_len  # its output is what the next matrix keeps
    inside = (s.queries * queries + s.keys * keys + s.output * outputs + core + s.wide * work.wide) / c.tp
    whole = tokens * (outside + entering + inside)
    cut = sum(m.count * m.rows for m in work.matrices if m.cut == "rows") + outputs
    uncut = sum(m.count * m.rows for m in work.matrices if m.cut != "rows")
    matrices = s.matrices * (cut / c.tp + uncut / sequence)
    by_selective = tokens * (matrices + s.heads * heads / c.tp + hidden_bytes * work.hidden / sequence)
    by_full = tokens * hidden_bytes * work.hidden / sequence
    kept = np.where(c.recomputes("attention"), whole - tokens * core / c.tp, whole)
    kept = np.where(c.recomputes("selective"), np.minimum(by_selective, whole), kept)
    kept = np.where(c.recomputes("full"), by_full, kept)
    return kept, np.where(c.recomputes("none"), 0.0, whole - np.where(c.recomputes("full"), 0.0, kept))


def in_flight(c: Columns) -> Number:
    """Micro-batches whose activations the first pipeline rank holds at most, in whole stages of this rank.

    GPipe and looped BFS: all of them; 1F1B, zero-bubble and ZBV: as many as there are ranks; interleaved
    (1 + (p - 1)/(p·v)) times that (Korthikanti et al. 2022, section 4.2.3); DualPipeV half a stage more.
    """
    m = c.gradient_accumulation_steps
    ranks = np.where(c.runs("interleaved1f1b"), c.pp * (1 + (c.pp - 1) / (c.pp * c.virtual_stages)), c.pp)
    ranks = np.where(c.runs("dualpipev"), c.pp + 0.5, ranks)
    held = np.where(c.runs("gpipe", "loopedbfs"), m, np.minimum(ranks, m))
    return np.where(c.pp > 1, held, 1.0)
