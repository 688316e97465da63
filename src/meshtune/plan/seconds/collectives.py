"""Seconds of collectives: rings on the link or the network, and those of tp, cp and ZeRO for one block."""

from __future__ import annotations

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.gpu import rank_tokens
from meshtune.plan.work import Work


def ring_bandwidth(m: Machine, ranks: Number, local: Number) -> Number:
    """Bytes per second that a ring of `ranks` with `local` of them in each node moves past each: the link's
    inside a node; between nodes the part of a node's network that falls to the group, its other GPUs being in
    rings of their own.
    """
    inside = m.link * m.link_share
    across = m.network * m.network_share * local / m.node
    return np.where(ranks > local, np.minimum(inside, across), inside)


def moved(m: Machine, size: Number, ranks: Number, local: Number) -> Number:
    """(n-1)/n of a tensor of `size` bytes past each rank of a ring (Chan et al. 2007)."""
    return np.where(ranks > 1, size * (ranks - 1) / ranks / ring_bandwidth(m, ranks, local), 0.0)


def gathered(m: Machine, size: Number, ranks: Number, local: Number, messages: Number = 1.0) -> Number:
    """All-gathers or reduce-scatters of tensors that have `size` bytes together as they are whole. Each of
    the messages goes once around a ring, whose steps between nodes and inside them wait for one another.
    """
    nodes = ranks / local
    turn = (nodes - 1) * m.network_latency + (ranks - nodes) * m.link_latency
    return moved(m, size, ranks, local) + np.where(ranks > 1, messages * turn, 0.0)


def all_reduced(m: Machine, size: Number, ranks: Number, local: Number) -> Number:
    """The sum of a small tensor: the traffic of two all-gathers, but along a tree."""
    each = np.where(ranks > local, m.network_latency, m.link_latency)
    tree = np.where(ranks > 1, each * (1 + np.log2(ranks)), 0.0)
    return 2 * moved(m, size, ranks, local) + tree


def tensor_messages(work: Work, c: Columns, m: Machine, seq_len: Number) -> Number:
    """Two sums of hidden states in forward, two in backward, two more where a forward is repeated."""
    hidden_bytes = m.element * rank_tokens(c, seq_len) * work.hidden
    reduced = all_reduced(m, hidden_bytes, c.tp, ranks_in_node(c.tp, 1.0, m))
    repeated = c.recomputes("full") | (c.recomputes("selective") & (m.selective > 0))
    return 2 * reduced * (2 + repeated) * (1 - m.tensor_overlap)


def context_messages(work: Work, c: Columns, m: Machine, seq_len: Number) -> Number:
    """Keys and values of the whole sequence gathered, or (Ulysses) sequences exchanged for heads."""
    tokens = rank_tokens(c, seq_len)
    local = ranks_in_node(c.cp, c.tp, m)
    widths = sum(k.count * k.key_heads * (k.qk_dim + k.v_dim) for k in work.cores) / c.tp
    heads = sum(k.count * (k.query_heads + k.key_heads) * (k.qk_dim + k.v_dim) for k in work.cores) / c.tp
    keys = gathered(m, m.element * tokens * c.cp * widths, c.cp, local)
    exchanged = gathered(m, m.element * tokens * heads, c.cp, local)
    times = np.where(c.recomputes("none"), 2, 3)
    return np.where(c.ulysses > 0, exchanged, keys) * times * (c.cp > 1)


def shard_messages(work: Work, c: Columns, m: Machine, forward: Number, backward: Number) -> Number:
    """What ZeRO's gathered parameters (3) and scattered gradients (2, 3) add to the passes beside which they
    travel.
    """
    shards = zero_shards(c)
    local = ranks_in_node(shards, c.tp, m)
    weights = work.block_parameters / c.tp / m.shard_share
    gather = gathered(m, m.weight_bytes * weights, shards, local)
    trained = work.trained_block_parameters / c.tp / m.shard_share
    scatter = gathered(m, m.scatter_bytes * trained, shards, local)
    arriving = np.where(c.zero == 3, gather + scatter, np.where(c.zero == 2, scatter, 0.0))
    ahead = np.where(c.zero == 3, _exposed(forward, gather, m.shard_overlap), 0.0)
    return ahead + _exposed(backward, arriving, m.shard_overlap)


def zero_shards(c: Columns) -> Number:
    """Ranks that ZeRO cuts its state over."""
    return c.dp_shard * c.cp


def ranks_in_node(ranks: Number, inside: Number, m: Machine) -> Number:
    """How many of a group's ranks are in one node, where each stands for `inside` neighbours."""
    return np.minimum(ranks, np.maximum(1.0, m.node / inside))


def _exposed(computing: Number, message: Number, overlap: Number) -> Number:
    """What a message beside a computation adds to it."""
    return np.maximum(message - computing, 0.0) + (1 - overlap) * np.minimum(computing, message)
