"""Collectives as they were dispatched: torch's c10d operators -> `Collective`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshtune.layout import AXES, Layout
from meshtune.meter.trace import Collective
from meshtune.placement.ranks import coordinates

# Operator -> (name, position of the argument with the whole tensor, or all that is sent).
OPERATORS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}
PEER = {"send": "dst", "recv_": "src"}  # argument with the other rank's number in the group


class Groups:
    """The process groups of a layout's ranks, as axes. layout: of all ranks."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.members: dict[str, tuple[str, list[int], int]] = {}  # see `_members`, by the group's name

    def collective(self, func: Any, args: Any, kwargs: Any) -> Collective | None:
        """The collective that a c10d operator runs with these arguments; None: it sends no tensor.

        Raises KeyError for an operator that is not known.
        """
        given = bound(func, args, kwargs)
        if func._opname == "barrier":
            return None
        op, position = OPERATORS[func._opname]
        group = dist.ProcessGroup.unbox(given["process_group"])
        if group.group_name not in self.members:
            self.members[group.group_name] = self._members(group)
        axis, ranks, stride = self.members[group.group_name]
        peer = PEER.get(func._opname)
        return Collective(
            op=op,
            axis=axis,
            ranks=len(ranks),
            bytes=tensor_bytes(args[position]),
            stride=stride,
            peer=None if peer is None else ranks[given[peer]],
            waits=not given.get("async_op", peer is not None),
        )

    def _members(self, group: dist.ProcessGroup) -> tuple[str, list[int], int]:
        """(Axes along which a group's ranks differ, its ranks in the world, distance of the first two)."""
        ranks = dist.get_process_group_ranks(group)
        places = [coordinates(self.layout, rank) for rank in ranks]
        axes = [name for name in AXES if len({place[name] for place in places}) > 1]
        return "+".join(axes), ranks, ranks[1] - ranks[0] if len(ranks) > 1 else 1


def bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of an operator's call by name, those that were left out with their defaults."""
    given = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            given[argument.name] = args[position]
        else:
            given[argument.name] = kwargs.get(argument.name, argument.default_value)
    return given


def tensor_bytes(values: Any) -> int:
    """Bytes of a tensor, or of all in a nest of lists of them."""
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    return sum(tensor_bytes(value) for value in values)


def is_collective(func: Any) -> bool:
    return func.namespace == torch.ops.c10d.name
