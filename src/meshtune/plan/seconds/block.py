"""Seconds of one block and one micro-batch on a rank: computation, and the collectives during it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from meshtune.plan.seconds.collectives import (
    context_collectives,
    exchange_seconds,
    exposed,
    regathering,
    shard_collectives,
    tensor_collectives,
)
from meshtune.plan.seconds.gpu import BlockCompute, block_compute, launch_seconds, launched
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.work import Work


Part = TypeVar("Part")  # a number, or a dataclass of them


@dataclass(frozen=True)
class Block:
    """Seconds of one block and one micro-batch on a rank; collectives by what they add (exposed)."""

    compute: BlockCompute
    forward: Number  # with launches, copies to the host and the collectives of tp, cp and ep
    backward: Number  # with recomputation, launches, copies and the collectives of tp, cp and ep
    # What the host's launches, and copies to and from its memory, add to the computation of each pass, to
    # recomputation apart
    forward_launches: Number
    backward_launches: Number
    repeated_launches: Number
    tensor: Number  # collectives of tp, forward and backward
    context: Number  # collectives of cp, forward and backward
    experts: Number  # exchanges of rows between ranks with experts, forward and backward
    experts_forward: Number  # of it, in the forward
    sharding: Number  # collectives of ZeRO-2 and -3, not in `forward` and `backward`
    sharding_forward: Number  # of it, in the forward

    @property
    def launches(self) -> Number:
        """Seconds that all launches add to the computation."""
        return self.forward_launches + self.backward_launches + self.repeated_launches

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.sharding


def block_seconds(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number
) -> Block:
    """Seconds of one block and one micro-batch; half of the tp and cp collectives fall to each pass,
    inputs are gathered again in the backward. tp's collectives run during a pass's computation, as far as
    the stack lets them.

    document_tokens: mean length of the documents that tokens attend in, at most seq_len.
    """
    compute = block_compute(work, layouts, machine, seq_len, document_tokens)
    launches = launch_seconds(machine, work)
    repeats = layouts.recomputation("block")
    backward_launches = np.where(repeats, 3, 2) * launches
    tensor = tensor_collectives(work, layouts, machine, seq_len) / 2
    context = context_collectives(work, layouts, machine, seq_len, compute.attention_forward)
    again = regathering(work, layouts, machine, seq_len)
    computing = compute.forward, compute.backward + compute.recomputation
    of_tensor = [
        exposed(machine, busy, collectives, machine.tensor_overlap)
        for busy, collectives in zip(computing, (tensor, tensor + again), strict=True)
    ]
    of_experts = [
        exposed(machine, busy, exchange, machine.expert_overlap)
        for busy, exchange in zip(
            computing,
            exchange_seconds(work, layouts, machine, layouts.rank_tokens(seq_len)),
            strict=True,
        )
    ]
    on_gpu = [
        busy + own + context / 2 + exchange
        for busy, own, exchange in zip(computing, of_tensor, of_experts, strict=True)
    ]
    held = held_seconds(layouts, machine)
    # The host runs ahead of kernels, in some stacks also of collectives
    after = [
        np.where(machine.ahead > 0, 0.0, gpu - busy) for gpu, busy in zip(on_gpu, computing, strict=True)
    ]
    forward, backward = (
        np.maximum(launched(gpu - last, host, machine) + last, host + held)
        for gpu, last, host in zip(on_gpu, after, (launches, backward_launches), strict=True)
    )
    copies, share = host_copies(work, layouts, machine, seq_len)
    forward, backward = (busy + share * np.maximum(copies - busy, 0.0) for busy in (forward, backward))
    in_backward = backward - on_gpu[1]
    repeated = np.where(repeats, in_backward / 3, 0.0)
    in_passes = shard_collectives(work, layouts, machine, forward, backward)
    return Block(
        compute=compute,
        forward=forward,
        backward=backward,
        forward_launches=forward - on_gpu[0],
        backward_launches=in_backward - repeated,
        repeated_launches=repeated,
        tensor=sum(of_tensor),
        context=context,
        experts=sum(of_experts),
        experts_forward=of_experts[0],
        sharding=sum(in_passes),
        sharding_forward=in_passes[0],
    )


def host_copies(work: Work, layouts: Columns, machine: Machine, seq_len: Number) -> tuple[Number, Number]:
    """(Seconds in which a block's input goes to host memory or back, share of the recomputed blocks of a mean
    stage whose input does): (0, 0) unless recompute is offload. A copy runs during one pass of a block.
    """
    hidden = machine.element * layouts.rank_tokens(seq_len) * work.hidden
    hidden = hidden / np.where(layouts.sp > 0, layouts.tp, 1.0)
    stages = layouts.pp * layouts.virtual_stages
    recomputing = np.minimum(layouts.recompute_blocks, work.blocks / stages)
    share = np.maximum(1 - (2 - 1 / stages) / recomputing, 0.0)  # but the last, and what a stage receives
    offloads = layouts.recomputation("host")
    return offloads * hidden / machine.host_bandwidth, offloads * share


def held_seconds(layouts: Columns, machine: Machine) -> Number:
    """Seconds that tp's ranks hold up the host in each pass of a block, where a pipeline spans nodes.

    Nothing that a pass computes makes it shorter. Of nanotron's runs (validation/data/playbook.csv) a block's
    passes take at least 10, 16, 26, 55 and 130 ms with 2, 4, 8, 16 and 32 ranks, for all sizes of models and
    micro-batches; without a pipeline, or with one inside a node, 4.5 ms.
    """
    nodes = np.maximum(1.0, layouts.tp / machine.node)
    spanning = (layouts.pp > 1) & (layouts.tp > 1) & (layouts.world > machine.node)
    return np.where(spanning, machine.tensor_hold * layouts.tp * np.cbrt(nodes), 0.0)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model where the first `recompute_blocks` of each stage recompute."""

    recomputing: Block
    saving: Block  # one that recomputes nothing
    most: Number  # most blocks of a pipeline rank that recompute

    @classmethod
    def of(
        cls, work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number
    ) -> Blocks:
        """Return both kinds of block; the arguments are those of `block_seconds`."""
        most = layouts.recompute_blocks * layouts.virtual_stages
        recomputing = saving = block_seconds(work, layouts, machine, seq_len, document_tokens)
        if not np.all(np.isinf(most)):
            nothing = layouts.replace(recompute=0.0 * layouts.recompute)
            saving = block_seconds(work, nothing, machine, seq_len, document_tokens)
        return cls(recomputing, saving, most)

    def total(self, blocks: Number) -> Number:
        """Seconds of a pipeline rank's blocks, `blocks` of them, for one micro-batch."""
        recomputing = np.minimum(self.most, blocks)
        return recomputing * self.recomputing.total + (blocks - recomputing) * self.saving.total

    def forward(self, blocks: Number) -> Number:
        """Seconds of their forward; none recomputes there."""
        return blocks * self.saving.forward

    def mean(self, blocks: Number) -> Block:
        """The mean block of a pipeline rank with `blocks` of them."""
        if self.recomputing is self.saving:
            return self.saving
        return mean(self.recomputing, self.saving, np.minimum(self.most / blocks, 1.0))


def mean(one: Part, other: Part, share: Number) -> Part:
    """Each number of `one` times `share`, and of `other` times the rest."""
    if not is_dataclass(one):
        return share * one + (1 - share) * other
    return type(one)(*(mean(getattr(one, f.name), getattr(other, f.name), share) for f in fields(one)))
