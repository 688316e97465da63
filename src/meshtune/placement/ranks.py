"""Ranks and their coordinates on the axes of a layout. Needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtune.layout import AXES, Layout

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns, Number


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """The index of `rank` on each of AXES, by name; consecutive ranks differ in tp first, in pp last."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(layout, axis))
    return {axis: place[axis] for axis in AXES}


def rank_at(layout: Layout, place: Mapping[str, int]) -> int:
    """The rank with these coordinates: `place` has an index on each of AXES."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(layout, axis) + place[axis]
    return rank


def group(layout: Layout, rank: int, *axes: str) -> tuple[int, ...]:
    """The process group of `rank` along these axes, ascending: itself, and the ranks that differ from it on
    no other axis.
    """
    here = coordinates(layout, rank)
    fixed = [axis for axis in AXES if axis not in axes]
    others = ((other, coordinates(layout, other)) for other in range(layout.world))
    return tuple(other for other, place in others if all(place[axis] == here[axis] for axis in fixed))


def process_groups(layouts: Layout | Columns) -> Number:
    """Number of process groups on which a rank issues collectives in a step.

    One for each axis of several ranks; the group of replicas, or under ZeRO of shards, has the context ranks
    too. With ep one of the ranks that exchange rows, and those of shards and of replicas of the same experts.
    One of all ranks, for the norm of the gradients, unless one of these has all.
    """
    axes = sum(getattr(layouts, axis) > 1 for axis in AXES)
    shards = layouts.expert_shards
    axes = axes + (layouts.ep > 1) * (1 + (shards > 1) + (layouts.token_ranks > layouts.ep * shards))
    hybrid = (layouts.dp_replicate > 1) & (layouts.dp_shard > 1)
    return axes + ((axes > 1) & (hybrid | (layouts.tp > 1) | (layouts.pp > 1)))
