"""Ranks that a collective is of: those in one node, and those that ZeRO shards a part of a block over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.work import Work


def ranks_in_node(ranks: Number, stride: Number, machine: Machine) -> Number:
    """Ranks of a group of `ranks` that are in one node, at least 1.

    stride: GPUs from one rank of the group to its next; 1: they are adjacent.
    """
    return np.minimum(ranks, np.maximum(1.0, machine.node / stride))


class ShardGroup(NamedTuple):
    """Parameters of an average block that the same ranks shard."""

    ranks: Number
    in_node: Number  # of the ranks
    cut: Number  # ranks that they are cut over before
    weights: Number  # elements of all, by their bytes
    trained: Number  # elements
    cast: Number = 0.0  # elements that are cast to 8 bits for a gather


def expert_shards(layouts: Columns, machine: Machine) -> tuple[Number, Number]:
    """(Ranks that ZeRO shards a rank's experts over where ep splits them, else 1; those in one node)."""
    ranks = np.where(layouts.ep > 1, layouts.expert_shards, 1.0)
    return ranks, ranks_in_node(ranks, layouts.ep, machine)


def shard_groups(work: Work, layouts: Columns, machine: Machine) -> Iterator[ShardGroup]:
    """Yield what all shards have, then experts that ep splits."""
    ranks = layouts.shard_ranks, ranks_in_node(layouts.shard_ranks, layouts.tp, machine)
    cast = sum(weight.elements for weight in work.block_weights if weight.gathered != 1)
    yield ShardGroup(*ranks, layouts.tp, work.shared_block(layouts), work.shared_block(layouts, True), cast)
    if np.any(layouts.ep > 1):
        experts = (layouts.ep * work.split_experts(layouts, trainable) for trainable in (False, True))
        yield ShardGroup(*expert_shards(layouts, machine), layouts.ep, *experts)
