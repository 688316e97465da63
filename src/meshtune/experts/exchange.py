"""Bring rows to experts on other ranks and back, by all-to-all.

    sort by expert    rows for each rank are one run
    all-to-all        rows by sender, those of each sender by expert
    sort by expert    as from `dispatch.Local`

`back` undoes the three in reverse. A rank that sends or receives nothing takes part in every exchange,
forward and backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from meshtune.experts.dispatch import LOCAL, Dispatched, Sorted


class Sizes(NamedTuple):
    """Sizes of an exchange, as this rank sees it."""

    received: Tensor  # rows of each expert of this rank by sender: [ranks, experts of this rank]
    to: Sequence[int]  # rows sent to each rank
    of: Sequence[int]  # rows received of each rank


class Exchanged(NamedTuple):
    """Receipt of `Exchange`."""

    sent: Sorted
    arrived: Sorted
    sizes: Sizes


class Exchange:
    """Dispatcher for a module's experts that are split over the ranks of `group`: equally many consecutive
    ones on each. path: of the module in the whole model.

    With recomputation an index comes twice, the second time in a backward: its sizes are those of the first,
    neither exchanged nor read again.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: int, path: str = "") -> None:
        self.group, self.ranks, self.path = group, ranks, path
        self.known: Any = WeakTensorKeyDictionary()  # index -> Sizes

    def dispatch(self, hidden: Tensor, index: Tensor, experts: int) -> Dispatched:
        rows, counts, sent = LOCAL.dispatch(hidden, index, experts)
        if index not in self.known:
            received = _all_to_all(counts, None, None, self.group).unflatten(0, (self.ranks, -1))
            sent_to = counts.unflatten(0, (self.ranks, -1))
            self.known[index] = Sizes(received, *self.read_sizes(index, sent_to, received))
        sizes = self.known[index]
        rows = _AllToAll.apply(rows, sizes.to, sizes.of, self.group)
        arrived = by_expert(sizes.received, len(rows))
        rows, counts, receipt = LOCAL.dispatch(rows, arrived, experts // self.ranks)
        return Dispatched(rows, counts, Exchanged(sent, receipt, sizes))

    def read_sizes(self, index: Tensor, sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        """(Rows sent to each rank, rows received of each): the host waits for the device.

        index: of the rows sent [tokens, k]. sent, received: rows by rank and expert.
        """
        to, of = torch.stack([sent, received]).sum(-1).tolist()
        return to, of

    def back(self, rows: Tensor, receipt: Exchanged) -> Tensor:
        sent, arrived, sizes = receipt
        rows = LOCAL.back(rows, arrived).squeeze(1)
        return LOCAL.back(_AllToAll.apply(rows, sizes.of, sizes.to, self.group), sent)


def by_expert(received: Tensor, rows: int) -> Tensor:
    """Index [rows, 1] of rows that arrived by sender, those of each sender by expert.

    received: rows by sender and expert. rows: their number.
    """
    experts = torch.arange(received.shape[1], device=received.device).repeat(len(received))
    return experts.repeat_interleave(received.flatten(), output_size=rows).unsqueeze(1)


class _AllToAll(torch.autograd.Function):
    """Send `to[r]` rows to each rank r, in their order; receive `of[r]`. The gradient does the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: Any, of: Any, group: Any) -> Tensor:  # type: ignore[override]
        ctx.sizes, ctx.group = (of, to), group
        return _all_to_all(rows, to, of, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        of, to = ctx.sizes
        return _all_to_all(grad, of, to, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, to: list[int] | None, of: list[int] | None, group: dist.ProcessGroup | None
) -> Tensor:
    """Compute the forward of `_AllToAll`, without a gradient. to, of: None for equal ones."""
    received = torch.empty_like(rows) if of is None else rows.new_empty(sum(of), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), of, to, group=group)
    return received
