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
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.seconds.block import Blocks, block_seconds
from meshtune.plan.seconds.collectives import (
    expert_gradients,
    gradient_collectives,
    optimizer_update,
    root_gather,
)
from meshtune.plan.seconds.ends import end_seconds
from meshtune.plan.seconds.gpu import host_seconds
from meshtune.plan.seconds.pipeline import pipeline_seconds, slowest_forward

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
    experts: Number  # exchanges of rows between ranks that split the experts
    pipeline: Number  # sends between stages
    data: Number  # collectives on weights and gradients
    optimizer: Number  # the update
    bubble: Number  # waiting for a pipeline's first micro-batches to come and its last ones to return
    imbalance: Number  # waiting for the slowest stage of a pipeline, micro-batch by micro-batch
    host: Number  # launches, the host's work for each micro-batch and step, copies to and from its memory

    @property
    def total(self) -> Number:
        return sum(getattr(self, part) for part in PARTS)


PARTS = tuple(field.name for field in fields(Seconds))


class StepTime:
    """One optimizer step under each layout: its parts, and three breakdowns of its seconds.

    document_tokens: mean length of the documents that tokens attend in (the sum of their squared lengths over
    the sum of their lengths), counted as at most seq_len; None: whole sequences.
    """

    def __init__(
        self,
        work: Work,
        layouts: Columns,
        machine: Machine,
        seq_len: Number,
        document_tokens: Number | None = None,
    ) -> None:
        documents = seq_len if document_tokens is None else np.minimum(document_tokens, seq_len)
        self.work, self.layouts, self.machine = work, layouts, machine
        self.seq_len, self.documents = seq_len, documents
        on_rank = work.blocks / layouts.pp
        self.every = every = Blocks.of(work, layouts, machine, seq_len, documents)
        self.block = every.mean(on_rank)
        self.ends = end_seconds(work, layouts, machine, seq_len)
        self.pipeline = pipeline_seconds(work, layouts, machine, seq_len, blocks=every, ends=self.ends)
        self.gradients = gradient_collectives(work, layouts, machine, self.block)
        self.gradients = self.gradients + expert_gradients(work, layouts, machine)
        self.micro_batches = layouts.gradient_accumulation_steps
        self.blocks = self.micro_batches * on_rank  # passes of a block
        self.share = self.micro_batches / layouts.pp  # of what a pipeline's ends have, shared out over ranks

    @property
    def seconds(self) -> Seconds:
        """Exposed time by what a rank waits for; with the pass over mismatched answers, if there is one."""
        if not self.work.mismatched:
            return self._of_documents
        both = vars(self._of_documents).items()
        return Seconds(
            **{part: own + self.work.mismatched * getattr(self.without_gradients, part) for part, own in both}
        )

    @property
    def _of_documents(self) -> Seconds:
        """Exposed time of forward and backward over the step's own documents, and of the update."""
        block, ends, pipeline, micro_batches = self.block, self.ends, self.pipeline, self.micro_batches
        behind = micro_batches * pipeline.behind - self.share * ends.total
        return Seconds(
            compute=self.blocks * block.compute.total + self.share * ends.compute,
            tensor=self.blocks * block.tensor + self.share * ends.tensor,
            context=self.blocks * block.context,
            experts=self.blocks * block.experts,
            pipeline=micro_batches * pipeline.sends,
            data=self.blocks * block.sharding + self.gradients,
            optimizer=optimizer_update(self.work, self.layouts, self.machine),
            bubble=pipeline.bubble,
            imbalance=np.where(self.layouts.pp > 1, behind, 0.0),
            host=self.blocks * block.launches + micro_batches * pipeline.host + pipeline.host_step,
        )

    @cached_property
    def without_gradients(self) -> Seconds:
        """Exposed time of one forward over a step's documents that saves nothing (`Pipeline.forward_only`).

        ZeRO-3 gathers for it, ZeRO-1 and -2 keep what they gather for the step. Whatever the schedule, a
        pipeline waits for a whole forward of each rank but one.
        """
        work, layouts, machine, ends = self.work, self.layouts, self.machine, self.ends
        nothing = layouts.replace(recompute=0.0 * layouts.recompute)
        block = block_seconds(work, nothing, machine, self.seq_len, self.documents)
        sharded = np.where(layouts.zero == 3, 0.0, block.compute.copies_forward)
        of_block = block.forward + block.sharding_forward - sharded
        on_rank, micro_batches = work.blocks / layouts.pp, self.micro_batches
        sends = self.pipeline.sends / 2
        host, _ = host_seconds(on_rank * of_block, machine)
        slowest = slowest_forward(work, layouts, machine, blocks=self.every, ends=ends, forward=of_block)
        of_ends = ends.scoring, 2 * ends.exchange + ends.sums
        behind = micro_batches * (slowest - on_rank * of_block) - self.share * sum(of_ends)
        exchanges = block.context / 2 + block.experts_forward
        of_tensor = block.forward - block.forward_launches - block.compute.forward - exchanges
        return Seconds(
            compute=self.blocks * (block.compute.forward - sharded) + self.share * of_ends[0],
            tensor=self.blocks * of_tensor + self.share * of_ends[1],
            context=self.blocks * block.context / 2,
            experts=self.blocks * block.experts_forward,
            pipeline=micro_batches * sends,
            data=self.blocks * block.sharding_forward + micro_batches * root_gather(work, layouts, machine),
            optimizer=0.0,
            bubble=np.where(layouts.pp > 1, (layouts.pp - 1) * (on_rank * of_block + sends + host), 0.0),
            imbalance=np.where(layouts.pp > 1, behind, 0.0),
            host=self.blocks * block.forward_launches + micro_batches * host,
        )

    @property
    def compute_parts(self) -> dict[str, Number]:
        """`Seconds.compute` by kind of work; head and embedding are a pipeline's mean over ranks."""
        compute, blocks, mismatched = self.block.compute, self.blocks, self.work.mismatched
        others = {"mismatched": mismatched * self.without_gradients.compute} if mismatched else {}
        return {
            "matmuls": blocks * (compute.matmul_forward + compute.matmul_inputs + compute.matmul_weights),
            "attention": blocks * (compute.attention_forward + compute.attention_backward),
            "elementwise": blocks * (compute.elementwise_forward + compute.elementwise_backward),
            "accumulation": blocks * compute.accumulation,
            "copies": blocks * (compute.copies_forward + compute.copies_backward),
            "recomputation": blocks * compute.recomputation,
            "head": self.share * self.ends.compute,
            **others,
        }

    @property
    def passes(self) -> dict[str, Number]:
        """Seconds of forward, backward and recomputation: `Seconds.compute`, and from `Seconds.host` the
        launches and, in the forward, the work for each micro-batch.
        """
        block, compute, ends, blocks = self.block, self.block.compute, self.ends, self.blocks
        of_ends = self.share * ends.loss, self.share * (ends.compute - ends.loss)
        host = self.micro_batches * self.pipeline.host
        if mismatched := self.work.mismatched:
            host = host + mismatched * (self.without_gradients.compute + self.without_gradients.host)
        return {
            "forward": blocks * (compute.forward + block.forward_launches) + of_ends[0] + host,
            "backward": blocks * (compute.backward + block.backward_launches) + of_ends[1],
            "recomputation": blocks * (compute.recomputation + block.repeated_launches),
        }


def step(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number | None = None
) -> Seconds:
    """Seconds of one optimizer step; the arguments are those of `StepTime`."""
    return StepTime(work, layouts, machine, seq_len, document_tokens).seconds
