"""The time of an optimizer step under a layout: closed forms, part by part.

    a block's products, attention, elementwise passes  ->  roofline on one GPU
    + what its ranks say to each other (tp, cp, ZeRO)   ->  rings, on the link or the network
    x blocks x micro-batches, + the pipeline's fill, + gradients, + the optimizer

Efficiencies are of a GPU kind, a software stack or a cluster (hardware.toml, stacks.toml), never of a layout.
All functions take floats or arrays; seconds, bytes, FLOPs and their rates per second throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.block import Block, block_of
from meshtune.plan.seconds.collectives import gathered, ranks_in_node, zero_shards
from meshtune.plan.seconds.gpu import head, rank_tokens
from meshtune.plan.seconds.pipeline import pipeline_of
from meshtune.plan.work import Work

PARTS = ("compute", "tensor", "context", "pipeline", "data", "optimizer", "bubble", "host")


@dataclass(frozen=True)
class Seconds:
    """One step; exposed time, so that the parts add up to the total."""

    compute: Number
    tensor: Number
    context: Number
    pipeline: Number
    data: Number
    optimizer: Number
    bubble: Number
    host: Number

    @property
    def total(self) -> Number:
        return sum(getattr(self, part.name) for part in fields(self))


def gradients_and_update(work: Work, c: Columns, m: Machine, block: Block) -> tuple[Number, Number]:
    """(messages of gradients and parameters that are not each block's own, the optimizer's update)."""
    shards = zero_shards(c)
    local_shards = ranks_in_node(shards, c.tp, m)
    outside = np.where(c.pp > 1, work.vocabulary * work.hidden, work.outside_parameters)
    own = (work.blocks * work.block_parameters / c.pp + outside) / c.tp
    blocks = work.blocks / c.pp * work.trained_block_parameters
    trained = (blocks + outside * work.trained_outside) / c.tp
    copies = np.where(c.zero > 0, c.dp_replicate, c.data_ranks * c.cp)
    local_copies = ranks_in_node(copies, c.tp * np.where(c.zero > 0, shards, 1.0), m)
    kept = np.where(c.zero > 0, trained / shards, trained)
    messages = np.where(m.data_overlap > 0, work.blocks / c.pp, 1.0)  # each block's own, or all at once
    summed = 2 * gathered(m, m.gradient_bytes * kept, copies, local_copies, messages)
    scattered = gathered(m, m.gradient_bytes * trained, shards, local_shards, messages)
    summed = summed + np.where(c.zero == 1, scattered, 0.0)
    hidden = np.minimum(summed * m.data_overlap, block.backward * work.blocks / c.pp)
    whole = (c.zero == 1) | (c.zero == 2)  # weights are gathered once, before the first forward
    once = np.where(whole, gathered(m, m.weight_bytes * own, shards, local_shards, messages), 0.0)

    # what ZeRO-2 and -3 say of what is outside the blocks, with nothing beside it to hide behind
    root = outside / c.tp / m.shard_share
    root_gather = gathered(m, 2 * m.weight_bytes * root, shards, local_shards)
    root_scatter = gathered(m, m.scatter_bytes * root * work.trained_outside, shards, local_shards)
    rooted = np.where(c.zero == 3, root_gather, 0.0) + np.where(c.zero >= 2, root_scatter, 0.0)
    told = summed - hidden + once + c.gradient_accumulation_steps * rooted
    return told, kept * m.optimizer_bytes / (m.bandwidth * m.memory)


def step(
    work: Work, c: Columns, m: Machine, seq_len: Number, document_tokens: Number | None = None
) -> Seconds:
    """The time of one optimizer step.

    document_tokens: mean length of what a token attends in (the sum of the squared lengths over the sum of
    the lengths); None: whole sequences.
    """
    documents = seq_len if document_tokens is None else np.minimum(document_tokens, seq_len)
    block = block_of(work, c, m, seq_len, documents)
    last = head(m, rank_tokens(c, seq_len), work, c.tp)
    pipeline = pipeline_of(work, c, m, seq_len, block, last)
    messages, update = gradients_and_update(work, c, m, block)
    micro_batches = c.gradient_accumulation_steps
    blocks = micro_batches * work.blocks / c.pp
    return Seconds(
        compute=blocks * block.passes.total
        + micro_batches * last / c.pp,  # the head's, shared out over ranks
        tensor=blocks * block.tensor,
        context=blocks * block.context,
        pipeline=micro_batches * pipeline.sends,
        data=blocks * block.sharding + messages,
        optimizer=update,
        bubble=pipeline.bubble - np.where(c.pp > 1, micro_batches * last / c.pp, 0.0),
        host=blocks * block.waiting + micro_batches * m.host_micro_batch + m.host_step,
    )
