"""One block and micro-batch on a rank: its computation with the collectives beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.collectives import context_messages, shard_messages, tensor_messages
from meshtune.plan.seconds.gpu import Passes, computed, launched
from meshtune.plan.work import Work


@dataclass(frozen=True)
class Block:
    """One block and micro-batch on a rank: forward and backward with the messages between its tensor and
    context ranks (of which `tensor` and `context` are there and back) and the host's `waiting`; `sharding` is
    what ZeRO-2 and -3 add to them.
    """

    passes: Passes
    forward: Number
    backward: Number
    waiting: Number
    tensor: Number
    context: Number
    sharding: Number

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.sharding


def block_of(work: Work, c: Columns, m: Machine, seq_len: Number, documents: Number) -> Block:
    passes = computed(work, c, m, seq_len, documents)
    again = c.recomputes("full") | c.recomputes("selective")  # the whole block is gone through again
    hosts = np.where(again, 3, 2) * m.host_block
    forward = launched(passes.forward, m.host_block, m)
    backward = launched(passes.backward + passes.again, hosts, m)
    tensor, context = tensor_messages(work, c, m, seq_len), context_messages(work, c, m, seq_len)
    told = (tensor + context) / 2
    return Block(
        passes=passes,
        forward=forward + told,
        backward=backward + told,
        waiting=forward + backward - passes.total,
        tensor=tensor,
        context=context,
        sharding=shard_messages(work, c, m, forward + told, backward + told),
    )
