"""Bytes that data parallelism holds beside the model states: gathered weights, gradients in collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Accounting
    from meshtune.plan.memory.stages import Stages
    from meshtune.plan.memory.states import RankElements
    from meshtune.plan.work import Work


class TiedEmbedding(NamedTuple):
    """Bytes in the backward of an embedding that is the head too; 0 for others."""

    gradient: Number  # that this backward makes
    gradients: Number  # the head's, and the sum of both, unless the states have it
    weights: Number  # its whole weights
    block_reduce: Number  # input of the first block's reduce-scatter


class DataParallelBuffers(NamedTuple):
    """Bytes that data parallelism holds beside the model states."""

    gathered_outside: Number  # whole parameters outside the blocks, under ZeRO-3, in the loss
    gathered_in_head: Number  # in the head's backward: the last block, or what lies outside the blocks
    gathered_behind: Number  # the latter in the backward of the blocks
    gathered_block: Number  # whole parameters of one block, under ZeRO-3
    last_gather: Number  # output of the last all-gather, which lasts until the next one
    previous_reduce: Number  # input of the last reduce-scatter of the micro-batch before (ZeRO-2, -3)
    first_block_whole: Number  # whole parameters of a block and of the embedding
    freed_head: Number  # the head's whole weights, once its gradient is reduced in the last micro-batch
    freed_block: Number  # a block's, likewise
    head_reduce: Number  # input of the head's reduce-scatter, while the backward of the last block runs
    head_output: Number  # output of that reduce-scatter, where the gradient's shard is a cast of it
    head_whole: Number  # the head's gradient beside its sum, in that reduce-scatter
    head_reduced: Number  # that shard, before it is added to those of earlier micro-batches
    head_shard: Number  # what that reduce-scatter made, where no micro-batch came before
    block_gradients: Number  # that a block's backward leaves, whole; 0 where a sum takes them
    block_backward: Number  # their collective, while the next block's backward runs
    block_shard: Number  # what a block's reduce-scatter made, likewise
    embedding_shard: Number  # what that of the embedding made, likewise
    end_gradients: Number  # those that the first block's leaves
    backward_end: Number  # their collective, when the backward is over
    last_whole: Number  # gradient, beside sums, of the last reduce-scatter: the embedding's, or all outside
    tied_head: Number  # 1 where the head's gradient is reduced with the embedding's, at the end; else 0
    last_reduce: Number  # its input
    tied: TiedEmbedding  # in whose backward a step may hold most


def data_parallel_buffers(
    work: Work,
    layouts: Columns,
    accounting: Accounting,
    elements: RankElements,
    stages: Stages,
    head_gradient: Number,
) -> DataParallelBuffers:
    """Bytes of gathered weights and of gradients in collectives, as they were counted in FSDP2.

    FSDP2 keeps a reduce-scatter's input until the next one, and an all-gather's output likewise. Between
    replicas a block's sums are all-reduced when its backward is over (parallel/replicas.py). elements: of the
    pipeline ranks, see `rank_elements`. head_gradient: elements of it, as in MicroBatchSizes.
    """
    precision, block = accounting.precision, elements.block
    sharded, accumulates = accounting.gathers_shards(layouts), layouts.gradient_accumulation_steps > 1
    zero3 = sharded & (layouts.zero == 3)
    after_all_passes = reduced_after(layouts)
    reduce_scatter = np.where(sharded & ~after_all_passes, block.trained * accounting.reduce_bytes, 0.0)
    gradients = block.trained * precision.gradient
    has_replicas = accounting.gradient_replicas(layouts) > 1
    all_reduce = np.where(has_replicas, block.trained * accounting.reduce_bytes, 0.0)
    outside, ends_apart = elements.outside, np.asarray(accounting.ends_apart)
    own = (1 - work.tied) * ends_apart * stages.has_embedding  # the embedding has a group of its own
    in_loss = outside.whole - own * elements.before_blocks.whole
    gathers_once = sharded & ~zero3 & accumulates  # the fullest micro-batch is one that gathers nothing
    reduces_head = np.where(sharded & ends_apart & ~after_all_passes, stages.has_head * (1 - work.tied), 0.0)
    tied = head_gradient * work.tied * accounting.shards_masters * stages.has_embedding * stages.has_head
    head_shard = reduces_head * head_gradient / np.maximum(layouts.shard_ranks, 1.0)
    once = sharded & ~accumulates
    sums_whole = (layouts.zero == 1) & accumulates  # what is reduced is the sum itself
    keeps_weights = zero3 | after_all_passes  # those that it has, until the last pass
    freed = np.where((once | (sharded & sums_whole)) & ~keeps_weights, precision.weight, 0.0)
    new_shard = np.where(once, precision.sharded_gradient, 0.0)  # else it was there before
    last_reduced = np.where(own > 0, elements.before_blocks.trained, outside.trained)
    return DataParallelBuffers(
        gathered_outside=np.where(zero3, in_loss * precision.weight, 0.0),
        # The loss made the head's gradient in the forward, and the last norm is gathered with the last block.
        gathered_in_head=np.where(zero3, np.where(ends_apart, block.whole, in_loss) * precision.weight, 0.0),
        gathered_behind=np.where(zero3 & ~ends_apart, outside.whole * precision.weight, 0.0),
        gathered_block=np.where(zero3, block.whole * precision.weight, 0.0),
        last_gather=np.where(sharded & ~gathers_once, block.whole * precision.weight, 0.0),
        previous_reduce=np.where(
            sharded & (layouts.zero >= 2) & accumulates, last_reduced * accounting.reduce_bytes, 0.0
        ),
        first_block_whole=(block.whole + elements.before_blocks.whole * stages.has_embedding)
        * precision.weight,
        freed_head=reduces_head * head_gradient * freed,
        freed_block=block.whole * freed,
        head_reduce=reduces_head * head_gradient * accounting.reduce_bytes,
        head_output=head_shard * accounting.reduce_bytes * (accounting.reduce_bytes != precision.trained),
        head_whole=np.where(sums_whole, 0.0, reduces_head * head_gradient * precision.gradient),
        head_reduced=head_shard * precision.trained,
        head_shard=head_shard * new_shard,
        block_shard=block.trained_shard * new_shard,
        embedding_shard=elements.before_blocks.trained_shard * stages.has_embedding * new_shard,
        block_gradients=leaves_gradients(layouts, accounting) * gradients,
        block_backward=reduce_scatter + (0.0 if accounting.shards_masters else all_reduce),
        end_gradients=sharded * gradients,
        backward_end=reduce_scatter + all_reduce,
        last_whole=np.where(sharded & ~sums_whole, last_reduced * precision.gradient, 0.0),
        tied_head=sharded & ~sums_whole & ~(reduces_head > 0),
        last_reduce=np.where(sharded & ~after_all_passes, last_reduced * accounting.reduce_bytes, 0.0),
        tied=TiedEmbedding(
            gradient=tied * precision.gradient,
            gradients=tied * precision.gradient * np.where(sharded | accumulates, 2.0, 1.0),
            weights=tied * precision.weight,
            block_reduce=reduce_scatter,
        ),
    )


def leaves_gradients(layouts: Columns, accounting: Accounting) -> Number:
    """True where a block's backward leaves its gradients whole; else a sum over micro-batches or replicas
    takes them while the block's activations go.
    """
    summed = (layouts.gradient_accumulation_steps > 1) | (accounting.gradient_replicas(layouts) > 1)
    return np.where(accounting.gathers_shards(layouts), ~reduced_after(layouts), ~summed)


def reduced_after(layouts: Columns) -> Number:
    """True where torch's stages reduce gradients when all passes are over: ZeRO-1's."""
    return (layouts.zero == 1) & (layouts.pp > 1)


def unreduced(layouts: Columns, accounting: Accounting, buffers: DataParallelBuffers) -> Number:
    """Bytes of sharded gradients that a step of one micro-batch still lacks at the end of its backward."""
    once = accounting.gathers_shards(layouts) & (layouts.gradient_accumulation_steps == 1)
    return np.where(once, buffers.block_shard + buffers.embedding_shard, 0.0)
