"""Elements of parameters on a rank, by where they are; placement/states.py has their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.placement.states import Elements
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.memory.stages import Stages
    from meshtune.plan.work import Weight, Work


def gpt_parameters(layers: Number, hidden: Number, vocabulary: Number, seq_len: Number) -> Number:
    """Parameters of a GPT: L(12h² + 13h) + (V + s)h + 2h.

    Matrices, biases and norms of L blocks, both embeddings, last norm (Narayanan et al. 2021,
    arXiv:2104.04473, equation 2, with the last norm).
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + seq_len) * hidden + 2 * hidden


def weight_elements(weights: Sequence[Weight], layouts: Columns) -> Elements:
    """Elements of these weights on the tensor-parallel and ZeRO rank that has most; zeros for no weights.

    That is the first tensor-parallel slice of each matrix, and of it the first shard, cut along the rows
    (the rule of share.piece). Pipeline stages are not regarded.
    """
    shards = np.where(layouts.zero > 0, layouts.shard_ranks, 1.0)
    sizes = []
    for weight in weights:
        slices = np.where((weight.heads > 0) & (weight.heads < layouts.tp), 1.0, layouts.tp)
        rows = np.ceil(weight.rows / slices) if weight.cut == "rows" else weight.rows
        cols = np.ceil(weight.cols / slices) if weight.cut == "cols" else weight.cols
        whole, shard = weight.count * rows * cols, weight.count * np.ceil(rows / shards) * cols
        trained = whole * weight.trainable
        sizes.append((whole, trained, shard, shard * weight.trainable, trained * weight.matrix))
    return Elements(*(sum(column) for column in zip(*sizes, strict=True))) if sizes else Elements(0, 0, 0, 0)


class RankElements(NamedTuple):
    """Elements of parameters, after tp, by where they are."""

    block: Elements  # in an average block: one number per layout
    outside: Elements  # outside the blocks, on each pipeline rank: [RANKS, layouts]
    before_blocks: Elements  # before the blocks, whichever rank has them (the embedding): one per layout
    total: Elements  # on each pipeline rank: [RANKS, layouts]


def rank_elements(work: Work, layouts: Columns, stages: Stages) -> RankElements:
    """Elements on each of the stages' ranks, after tp and before and after ZeRO.

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
