"""Bytes that torch's caching allocator holds for this engine while no tensor uses them.

What is freed on a stream stays that stream's. So the allocator holds the most that each stream ever had, all
together, not the most that they had at one time. FSDP2 has two streams beside the one that computes
(dryrun/requests.py):

    all-gather      flat buffers of gathered weights, the one before until the next is copied out, and the
                    shards in the compute dtype that a gather starts from
    reduce-scatter  shards of gradients, from the reduce-scatter to the update

And the chunked loss leaves a hole: the head's gradient is not smaller than a chunk's logits in fp32, so it
does not lie where they were. What else is lost between tensors is a share, `Accounting.reserved`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.memory.stages import Stages
    from meshtune.plan.memory.states import Step


class StreamBytes(NamedTuple):
    """Bytes of each stream at most; 0 for what FSDP2 does not run."""

    gather: Number
    reduce: Number


def stream_bytes(step: Step) -> StreamBytes:
    """Return the most bytes of each stream."""
    precision, stages, elements, apart = step.accounting.precision, step.stages, step.elements, step.apart
    block, embedding, outside = elements.block, elements.before_blocks, elements.outside
    cast = np.where(precision.trained != precision.weight, precision.weight, 0.0)

    def gathered(whole: Number, shard: Number) -> tuple[Number, Number]:
        """(Bytes of the flat buffer, the same with the cast shards)."""
        flat = np.broadcast_to(whole * precision.weight, np.shape(outside.whole))
        return flat, np.where(flat > 0, flat + shard * cast, 0.0)

    of_block = gathered(block.whole, block.shard)
    of_embedding = gathered(apart * embedding.whole, apart * embedding.shard)
    norm = stages.has_head * step.ends_apart * precision.weight * step.work.last_norm_elements
    of_root = gathered(
        outside.whole - apart * embedding.whole, outside.shard - apart * embedding.shard
    )  # the head
    # Of a forward: the root, the embedding, the blocks; the last block's is there until the next root's.
    behind_root = np.where(of_root[0] > 0, of_root[0], of_block[0])
    behind_embedding = np.where(of_embedding[0] > 0, of_embedding[0], behind_root)
    gather = np.maximum.reduce([
        of_block[0] + of_root[1],
        np.where(of_embedding[1] > 0, behind_root + of_embedding[1], 0.0),
        behind_embedding + of_block[1],
        of_block[0] + of_block[1],
        gather_pool(of_root, of_embedding, of_block, stages, last_norm=norm),
    ])  # fmt: skip
    # A new shard lies beside the sums until it is added, and beside its cast.
    shards = [block.trained_shard, apart * embedding.trained_shard]
    shards.append(outside.trained_shard - shards[1])
    largest = np.maximum.reduce(np.broadcast_arrays(*shards))
    added = (step.layouts.zero >= 2) & step.accumulates
    reduce_bytes = step.accounting.reduce_bytes
    beside = largest * (precision.trained * added + reduce_bytes * (reduce_bytes != precision.trained))
    reduce = elements.total.trained_shard * precision.sharded_gradient + beside
    sharded = step.sharded * np.asarray(step.accounting.own_streams) > 0
    return StreamBytes(np.where(sharded, gather, 0.0), np.where(sharded, reduce, 0.0))


def gather_pool(
    root: tuple[Number, Number],
    embedding: tuple[Number, Number],
    block: tuple[Number, Number],
    stages: Stages,
    *,
    last_norm: Number,
) -> Number:
    """Bytes of memory in which a forward's gathers find room one after the other.

    A gather takes its cast shards and its flat buffer, each in the smallest gap that has room, else at the
    end; the shards are freed behind it, the flat buffer once the next one has been gathered. So the root's,
    the embedding's and the first block's lie in a row, the latter in the root's place if it has room, and
    blocks from then on in turn in two places, of which the lower one ends where the upper one begins. A last
    block that comes to the lower place finds no room there, since it is gathered with the last norm.

    root, embedding, block: (bytes of the flat buffer, the same with the cast shards). last_norm: its bytes.
    """
    cast_root, cast_embedding, cast = (with_cast - flat for flat, with_cast in (root, embedding, block))
    next_cast = np.where(embedding[0] > 0, cast_embedding, cast)
    before = root[1] + embedding[0]
    before = before + np.where((before > 0) & (next_cast > cast_root), next_cast, 0.0)
    in_place_of_root = (embedding[0] > 0) & (root[0] > 0) & (block[1] <= root[1])
    behind = ~in_place_of_root & (before > 0)
    has_room = behind & (before < block[1])  # the lower place begins where the first block lay
    blocks = np.round(stages.blocks)
    third = (last_norm > 0) & ~has_room & (blocks > 2) & (blocks % 2 == np.where(behind, 0, 1))
    places = np.where(has_room, before, cast) + 2 * block[0] + np.where(third, block[0] + last_norm, 0.0)
    return np.maximum(before + np.where(behind, block[0], 0.0), places)
