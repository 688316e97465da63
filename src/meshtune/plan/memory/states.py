"""Model states of a rank in bytes: weights, gradients and optimizer state, by precision and ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshtune.plan.accounting import Accounting, Precision
from meshtune.plan.memory.stages import Stages
from meshtune.plan.work import Columns, Number, Weight, Work


class States(NamedTuple):
    """Bytes of model states on a rank."""

    weights: Number  # that stay on the rank: all of them, or its ZeRO shard
    gradients: Number
    optimizer: Number  # masters and moments
    gathered: Number = 0.0  # whole weights that ZeRO-1 and -2 of FSDP hold beside the shard

    @property
    def total(self) -> Number:
        return sum(self)


def states(precision: Precision, parameters: Number, zero: Number = 0, shards: Number = 1) -> States:
    """Bytes of model states of `parameters`, where ZeRO stage `zero` cuts over `shards` ranks.

    Stage 1 cuts optimizer state, 2 gradients too, 3 weights too (Rajbhandari et al. 2020, arXiv:1910.02054,
    figure 1).
    """
    gradient = precision.gradient + precision.accumulated if precision.beside else precision.accumulated
    return States(
        weights=parameters * precision.weight / np.where(zero >= 3, shards, 1),
        gradients=parameters * gradient / np.where(zero >= 2, shards, 1),
        optimizer=parameters * (precision.master + precision.moments) / np.where(zero >= 1, shards, 1),
    )


def gpt_parameters(layers: Number, hidden: Number, vocabulary: Number, seq_len: Number) -> Number:
    """Parameters of a GPT: L(12h² + 13h) + (V + s)h + 2h.

    Matrices, biases and norms of L blocks, both embeddings, last norm (Narayanan et al. 2021,
    arXiv:2104.04473, equation 2, with the last norm).
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + seq_len) * hidden + 2 * hidden


class Elements(NamedTuple):
    """Parameters on a rank after tp and pp, as numbers of elements."""

    whole: Number  # all of them
    trained: Number  # those that are trained
    shard: Number  # in the rank's ZeRO shard
    trained_shard: Number  # in the shard and trained


def weight_elements(weights: Sequence[Weight], layouts: Columns) -> Elements:
    """Elements of these weights on the rank that has most.

    That is the first tensor-parallel slice of each matrix, and of it the first shard, cut along the rows
    (the rule of partition.piece).
    """
    shards = np.where(layouts.zero > 0, layouts.dp_shard * layouts.cp, 1.0)
    sizes = []
    for weight in weights:
        slices = np.where((weight.heads > 0) & (weight.heads < layouts.tp), 1.0, layouts.tp)
        rows = np.ceil(weight.rows / slices) if weight.cut == "rows" else weight.rows
        cols = np.ceil(weight.cols / slices) if weight.cut == "cols" else weight.cols
        whole, shard = weight.count * rows * cols, weight.count * np.ceil(rows / shards) * cols
        sizes.append((whole, whole * weight.trainable, shard, shard * weight.trainable))
    return Elements(*(sum(column) for column in zip(*sizes, strict=True))) if sizes else Elements(0, 0, 0, 0)


class RankElements(NamedTuple):
    """Parameters of each pipeline rank, by where they are."""

    block: Elements  # in an average block
    outside: Elements  # outside the blocks, on this rank
    before_blocks: Elements  # before the blocks, whichever rank has them: the embedding
    total: Elements  # on this rank


def rank_elements(work: Work, layouts: Columns, stages: Stages) -> RankElements:
    """Elements on each of the stages' ranks.

    Where the head is the embedding (tied), the last stage of a pipeline has a copy of its own.
    """
    block, before, after = (
        weight_elements(weights, layouts)
        for weights in (work.block_weights, work.first_weights, work.last_weights)
    )
    copy = weight_elements([replace(embedding, count=1.0) for embedding in work.first_weights[:1]], layouts)
    tied = work.tied * (layouts.pp > 1)
    outside = Elements(
        *(
            first * stages.has_embedding + (last + tied * tied_copy) * stages.has_head
            for first, last, tied_copy in zip(before, after, copy, strict=True)
        )
    )
    total = Elements(*(stages.blocks * inside + rest for inside, rest in zip(block, outside, strict=True)))
    return RankElements(block, outside, before, total)


def held_states(accounting: Accounting, elements: Elements, layouts: Columns) -> States:
    """Bytes of model states at the end of a step's last backward, by how the stack keeps them.

    For this engine equal to `partition.Bytes`, to the byte.
    """
    precision, zero = accounting.precision, layouts.zero
    sharded, accumulates = zero > 0, layouts.gradient_accumulation_steps > 1
    replicas = np.where(sharded, layouts.dp_replicate, layouts.data_ranks * layouts.cp)
    is_sum = accumulates | (replicas > 1) | (precision.beside > 0)
    gradient = np.where(is_sum, precision.accumulated, precision.gradient)
    gradient = gradient + precision.beside * precision.gradient
    master_and_moments = precision.master + precision.moments
    if not accounting.shards_masters:
        return States(
            weights=np.where(zero == 3, elements.shard, elements.whole) * precision.weight,
            gradients=np.where(zero >= 2, elements.trained_shard, elements.trained) * gradient,
            optimizer=np.where(sharded, elements.trained_shard, elements.trained) * master_and_moments,
        )
    # FSDP: the shard is the master, and forward and backward compute with what is gathered from it
    frozen_shard = elements.shard - elements.trained_shard
    whole_sums = (zero < 2) & accumulates  # ZeRO-1 sums whole gradients, and shards the sum at the end
    return States(
        weights=np.where(
            sharded,
            elements.trained_shard * precision.trained + frozen_shard * precision.weight,
            elements.whole * precision.weight,
        ),
        gathered=np.where(sharded & (zero < 3), elements.whole * precision.weight, 0.0),
        gradients=np.where(
            sharded,
            np.where(
                whole_sums,
                elements.trained * precision.accumulated,
                elements.trained_shard * precision.trained,
            ),
            elements.trained * gradient,
        ),
        optimizer=np.where(
            sharded,
            elements.trained_shard * precision.moments,
            elements.trained * master_and_moments,
        ),
    )
