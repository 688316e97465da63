"""Model states of a rank: weights, gradients and optimizer state, by precision and ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshtune.plan.accounting import Accounting, Precision
from meshtune.plan.memory.stages import Stages
from meshtune.plan.work import Columns, Number, Weight, Work


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
