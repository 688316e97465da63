"""Seconds of an optimizer step under a layout: closed forms, part by part.

    a block's matmuls, attention, elementwise passes   gpu.py          roofline on one GPU
    embedding, head and loss                           ends.py         the same
    + collectives of tp, cp, ZeRO with it              collectives.py  rings, on the link or the network
    x blocks x micro-batches + sends and bubble        pipeline.py
    + gradients of data parallelism, + the optimizer   collectives.py

Efficiencies belong to a GPU kind, a software stack or a cluster (hardware.toml, stacks.toml), never to a
layout. Every number is a float or an array, one element per layout; seconds, bytes, FLOP/s throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.seconds.block import Blocks
from meshtune.plan.seconds.collectives import gradient_collectives, optimizer_update
from meshtune.plan.seconds.ends import end_seconds
from meshtune.plan.seconds.gpu import block_compute, host_seconds
from meshtune.plan.seconds.pipeline import pipeline_seconds

if TYPE_CHECKING:
    from meshtune.plan.machine import Machine
    from meshtune.plan.work import Work

TIE = 0.005  # relative difference of two step times up to which they count as equal


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step on a rank, by part: exposed time, so that the parts add up to the step."""

    compute: Number  # with recomputation, and a pipeline's mean share of the head
    tensor: Number  # collectives between tensor-parallel ranks
    context: Number  # collectives between context-parallel ranks
    pipeline: Number  # sends between stages
    data: Number  # collectives on weights and gradients
    optimizer: Number  # the update
    bubble: Number  # waiting for a pipeline's first micro-batches to come and its last ones to return
    imbalance: Number  # waiting for the slowest stage of a pipeline, micro-batch by micro-batch
    host: Number  # launches, and the host's work for each micro-batch and step

    @property
    def total(self) -> Number:
        return sum(getattr(self, part) for part in PARTS)


PARTS = tuple(field.name for field in fields(Seconds))


def step(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number | None = None
) -> Seconds:
    """Seconds of one optimizer step.

    document_tokens: mean length of the documents that tokens attend in (the sum of their squared lengths over
    the sum of their lengths), counted as at most seq_len; None: whole sequences.
    """
    document_tokens = _within(seq_len, document_tokens)
    every = Blocks.of(work, layouts, machine, seq_len, document_tokens)
    block = every.mean(work.blocks / layouts.pp)
    ends = end_seconds(work, layouts, machine, seq_len)
    pipeline = pipeline_seconds(work, layouts, machine, seq_len, blocks=every, ends=ends)
    micro_batches = layouts.gradient_accumulation_steps
    blocks = micro_batches * work.blocks / layouts.pp
    share = micro_batches / layouts.pp  # of what the first and the last stage have, shared out over ranks
    return Seconds(
        compute=blocks * block.compute.total + share * ends.compute,
        tensor=blocks * block.tensor + share * ends.tensor,
        context=blocks * block.context,
        pipeline=micro_batches * pipeline.sends,
        data=blocks * block.sharding + gradient_collectives(work, layouts, machine, block),
        optimizer=optimizer_update(work, layouts, machine),
        bubble=pipeline.bubble,
        imbalance=np.where(layouts.pp > 1, micro_batches * pipeline.behind - share * ends.total, 0.0),
        host=blocks * block.launches + micro_batches * pipeline.host + pipeline.host_step,
    )


def compute_parts(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number | None = None
) -> dict[str, Number]:
    """Seconds per step of `Seconds.compute`, by kind of work; they add up to it.

    document_tokens: as in `step`. The head's, with the embedding's, are a pipeline's mean over ranks.
    """
    block = block_compute(work, layouts, machine, seq_len, _within(seq_len, document_tokens))
    ends = end_seconds(work, layouts, machine, seq_len)
    micro_batches = layouts.gradient_accumulation_steps
    on_rank = work.blocks / layouts.pp
    recomputing = np.minimum(layouts.recompute_blocks * layouts.virtual_stages, on_rank)
    blocks = micro_batches * on_rank
    return {
        "matmuls": blocks * (block.matmul_forward + block.matmul_inputs + block.matmul_weights),
        "attention": blocks * (block.attention_forward + block.attention_backward),
        "elementwise": blocks * (block.elementwise_forward + block.elementwise_backward),
        "accumulation": blocks * block.accumulation,
        "copies": blocks * (block.copies_forward + block.copies_backward),
        "recomputation": micro_batches * recomputing * block.recomputation,
        "head": micro_batches * ends.compute / layouts.pp,
    }


def passes(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number | None = None
) -> dict[str, Number]:
    """Seconds per step of forward, backward and recomputation: `Seconds.compute`, and of `Seconds.host` the
    launches and, in the forward, the work for each micro-batch.

    document_tokens: as in `step`.
    """
    every = Blocks.of(work, layouts, machine, seq_len, _within(seq_len, document_tokens))
    on_rank = work.blocks / layouts.pp
    block = every.mean(on_rank)
    compute, host = block.compute, host_seconds(every.total(on_rank), machine)[0]
    ends = end_seconds(work, layouts, machine, seq_len)
    micro_batches = layouts.gradient_accumulation_steps
    blocks, share = micro_batches * on_rank, micro_batches / layouts.pp
    return {
        "forward": blocks * (compute.forward + block.forward_launches)
        + share * ends.loss
        + micro_batches * host,
        "backward": blocks * (compute.backward + block.backward_launches)
        + share * (ends.compute - ends.loss),
        "recomputation": blocks * (compute.recomputation + block.repeated_launches),
    }


def _within(seq_len: Number, document_tokens: Number | None) -> Number:
    """Mean document length in tokens, at most `seq_len`; None: `seq_len`."""
    return seq_len if document_tokens is None else np.minimum(document_tokens, seq_len)
