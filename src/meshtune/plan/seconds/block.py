"""Seconds of one block and one micro-batch on a rank: computation, and the collectives during it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from meshtune.plan.seconds.collectives import (
    context_collectives,
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
    forward: Number  # with launches and the collectives of tp and cp
    backward: Number  # with recomputation, launches and the collectives of tp and cp
    # What the host's launches add to the computation of each pass, to recomputation apart
    forward_launches: Number
    backward_launches: Number
    repeated_launches: Number
    tensor: Number  # collectives of tp, forward and backward
    context: Number  # collectives of cp, forward and backward
    sharding: Number  # collectives of ZeRO-2 and -3, not in `forward` and `backward`

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
    those of `sp_regather` to the backward.

    document_tokens: mean length of the documents that tokens attend in, at most seq_len.
    """
    compute = block_compute(work, layouts, machine, seq_len, document_tokens)
    launches = launch_seconds(machine, work)
    repeats = layouts.recomputation("block")
    backward_launches = np.where(repeats, 3, 2) * launches
    tensor = tensor_collectives(work, layouts, machine, seq_len)
    context = context_collectives(work, layouts, machine, seq_len, compute.attention_forward)
    per_pass = (tensor + context) / 2
    again = regathering(work, layouts, machine, seq_len)
    # The host runs ahead of collectives as of kernels; other tools' constants were fitted as if it did not.
    ahead = np.where(machine.counted > 0, 1.0, 0.0)
    on_gpu = compute.forward + per_pass, compute.backward + compute.recomputation + per_pass + again
    behind = (1 - ahead) * per_pass, (1 - ahead) * (per_pass + again)
    forward, backward = (
        launched(gpu - after, host, machine) + after
        for gpu, after, host in zip(on_gpu, behind, (launches, backward_launches), strict=True)
    )
    in_backward = backward - on_gpu[1]
    repeated = np.where(repeats, in_backward / 3, 0.0)
    return Block(
        compute=compute,
        forward=forward,
        backward=backward,
        forward_launches=forward - on_gpu[0],
        backward_launches=in_backward - repeated,
        repeated_launches=repeated,
        tensor=tensor + again,
        context=context,
        sharding=shard_collectives(work, layouts, machine, forward, backward),
    )


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
