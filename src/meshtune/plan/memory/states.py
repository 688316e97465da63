"""Elements of parameters on a rank, by where they are; placement/states.py has their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.placement.states import Elements, held_states
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Accounting
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
    (the rule of share.piece). Experts are cut by ep, then by whole experts or, if these are fewer than the
    shards, inside each. A weight in 4 bits counts by its bytes, in elements of the passes' dtype;
    whole ones that ZeRO gathers in 8 bits likewise.
    Pipeline stages are not regarded.
    """
    shards = np.where(layouts.zero > 0, layouts.shard_ranks, 1.0)
    sizes = []
    for weight in weights:
        slices = np.where((weight.heads > 0) & (weight.heads < layouts.tp), 1.0, layouts.tp)
        rows = np.ceil(weight.rows / slices) if weight.cut == "rows" else weight.rows
        cols = np.ceil(weight.cols / slices) if weight.cut == "cols" else weight.cols
        shard_rows = np.ceil(rows / shards)
        if weight.of_experts:
            rows, several = rows / layouts.ep, layouts.expert_shards
            inside = np.where(rows < several, rows / several, np.ceil(rows / several))
            shard_rows = np.where(layouts.ep > 1, inside, shard_rows)
        whole, shard = weight.count * rows * cols, weight.count * shard_rows * cols
        trained = whole * weight.trainable
        sizes.append(
            (
                whole * weight.held * np.where(layouts.zero > 0, weight.gathered, 1.0),
                trained,
                shard * weight.held,
                shard * weight.trainable,
                trained * weight.matrix,
            )
        )
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


class Step:
    """A step of each layout, and the sizes that its tensors are made of: elements, bytes, or a mask.

    first_step: of a run; before its update, of the optimizer state only masters are allocated.
    """

    def __init__(
        self,
        work: Work,
        layouts: Columns,
        accounting: Accounting,
        seq_len: Number,
        stages: Stages,
        *,
        first_step: bool = False,
    ) -> None:
        self.work, self.layouts, self.accounting, self.stages = work, layouts, accounting, stages
        # Of blocks; None: nothing was traced, or the stack saves by its own rule.
        self.traced_block = None if accounting.saved else work.traced.get(int(accounting.element))
        self.seq_len, self.first_step = seq_len, first_step
        precision, has_embedding, has_head = accounting.precision, stages.has_embedding, stages.has_head
        self.elements = elements = rank_elements(work, layouts, stages)
        masters = accounting.shards_masters
        self.states = held_states(precision, elements.total, layouts, shards_masters=masters)
        self.states = self.states.offloaded() if accounting.offload else self.states
        self.frees = np.asarray(accounting.in_backward)  # each gradient, behind its update in the backward
        self.tokens = layouts.rank_tokens(seq_len)  # of a micro-batch, after cp
        self.sequence_shards = np.where(layouts.sp > 0, layouts.tp, 1.0)
        self.whole_hidden = accounting.element * work.hidden * self.tokens  # bytes, not split by sp
        self.hidden = self.whole_hidden / self.sequence_shards
        # Tokens of a rank that an MLP runs on at a time, and whether these are not all.
        tiles = layouts.mlp_tiles(self.tokens, accounting.mlp_tile)
        self.tile, self.tiled = self.tokens / self.sequence_shards / tiles, tiles > 1
        self.messages = np.where(layouts.pp > 1, self.hidden, 0.0)  # bytes of hidden states between stages
        # Blocks that recompute, those behind them that do not, and those behind the second block: at least 1;
        # 1 in pipelines, or if blocks differ.
        self.recomputing = stages.recomputing(layouts)
        self.saving = stages.blocks - self.recomputing
        differ = (layouts.pp > 1) | (self.saving * self.recomputing > 0)
        self.behind_second = np.where(differ, 1.0, np.maximum(stages.blocks - 2, 1.0))

        self.sharded = sharded = accounting.gathers_shards(layouts)  # by FSDP
        self.accumulates = layouts.gradient_accumulation_steps > 1
        self.replicated = accounting.gradient_replicas(layouts) > 1  # gradients are all-reduced
        # Sums of parallel/replicas.py
        self.own_sums = self.replicated & ~sharded & ~self.frees & np.asarray(masters)
        self.once = sharded & ~self.accumulates  # sharded gradients are made late
        self.zero3 = sharded & (layouts.zero == 3)
        self.sums_whole = (layouts.zero == 1) & self.accumulates  # a sum of whole gradients is reduced
        # torch's stages reduce gradients of ZeRO-1 when all passes are over; else each backward does.
        self.reduced_after = (layouts.zero == 1) & (layouts.pp > 1)
        self.reduces = sharded & ~self.reduced_after
        self._sum_gradients()
        # A block's backward leaves its gradients whole, unless a sum takes them while its activations go.
        self.summed = self.accumulates | self.replicated
        self.leaves_gradients = np.where(sharded, self.reduces, ~self.summed & ~self.frees)
        # Whether embedding and head are gathered and reduced separately; 1 on a rank with such an embedding.
        self.ends_apart = ends_apart = np.asarray(accounting.ends_apart)
        self.apart = (1 - work.tied) * ends_apart * has_embedding
        self._gather_blocks()

        # Elements of gradients: the head's, its part that is reduced before the last block's backward, the
        # shard of that, what is reduced last, and the head's where it is the rank's embedding too.
        self.head = work.vocabulary * work.hidden / layouts.tp * work.head_trainable  # on any rank
        self.head_gradient = has_head * self.head
        self.reduced_head = np.where(self.reduces & ends_apart, (1 - work.tied) * self.head_gradient, 0.0)
        self.head_reduce = self.reduced_head * accounting.reduce_bytes  # bytes of its input
        self.head_shard = self.reduced_head / np.maximum(layouts.shard_ranks, 1.0)
        embedding, outside = elements.before_blocks, elements.outside
        self.last_reduced = np.where(self.apart > 0, embedding.trained, outside.trained)
        self.tied = work.tied * masters * has_embedding * self.head_gradient
        self.last_reduce = np.where(self.reduces, self.last_reduced * accounting.reduce_bytes, 0.0)
        # Bytes of shards that only a step of one micro-batch makes: others add to those that are there.
        width = np.where(self.once & ~self.frees, precision.sharded_gradient, 0.0)
        self.new_head, self.new_block = self.head_shard * width, elements.block.trained_shard * width
        self.new_embedding = embedding.trained_shard * has_embedding * width

    def _gather_blocks(self) -> None:
        """Count the whole weights that FSDP gathers. Experts that `ep` splits are a group apart, behind the
        others of their block in a forward: neither is prefetched with the other, and those of one rank are
        copied without a buffer.
        """
        layouts, weight, block = self.layouts, self.accounting.precision.weight, self.elements.block.whole
        experts = np.where(self.sharded, self.work.split_experts(layouts), 0.0)
        self.gathered_block = np.where(self.zero3, block * weight, 0.0)
        self.prefetched_block = np.where(self.zero3, (block - experts) * weight, 0.0)
        last = np.where(layouts.ep > 1, experts * (layouts.expert_shards > 1), block)
        # Of several micro-batches, the fullest one of ZeRO-1 and -2 gathers nothing.
        self.last_gather = np.where(self.zero3 | self.once, last * weight, 0.0)

    def _sum_gradients(self) -> None:
        """Count the gradients that ranks all-reduce: of experts that `ep` splits, those that have copies."""
        layouts, precision = self.layouts, self.accounting.precision
        experts, copies = self.work.split_experts(layouts, True), layouts.token_ranks / layouts.ep > 1
        others = self.elements.block.trained - experts
        copied = np.where(self.sharded, 0.0, copies * experts)
        self.all_reduced = copied + np.where(self.replicated, others, 0.0)  # trained elements of a block
        # Of the rank, where micro-batches and copies of other weights sum nothing
        only_experts = np.where(self.accumulates | self.replicated, 0.0, copied)
        self.only_experts = only_experts * self.stages.blocks
        widened = (precision.accumulated - precision.gradient) * self.only_experts
        gradients = np.where(self.frees, 0.0, self.states.gradients + widened)
        self.states = self.states._replace(gradients=gradients)
