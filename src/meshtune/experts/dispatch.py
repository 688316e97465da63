"""Bring rows to their experts and back: a stable sort by expert, for experts that are all on this rank.

    order [tokens · k]      the pair (token, choice) in each place, by expert, those of an expert by token
    inverse [tokens · k]    the place of each pair

Both ways are gathers, also backward: no sum depends on the order in which threads add.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Dispatched(NamedTuple):
    """Rows of tokens at their experts."""

    rows: Tensor  # [rows, hidden]: those of this rank's first expert, of its second, ...
    counts: Tensor  # [experts of this rank], int64: rows of each
    receipt: Any  # what `Dispatcher.back` needs


class Dispatcher(Protocol):
    """Brings rows to experts and back."""

    def dispatch(self, hidden: Tensor, index: Tensor, experts: int) -> Dispatched:
        """Send each token to its experts. hidden [tokens, hidden], index [tokens, k]: numbers below
        `experts`, the number of all experts.
        """
        ...

    def back(self, rows: Tensor, receipt: Any) -> Tensor:
        """Return the experts' outputs, `rows` as dispatched, in the order of tokens: [tokens, k, hidden]."""
        ...


class Gather(torch.autograd.Function):
    """Rows of a tensor by their numbers, where each number stands `times` times.

    The gradient of row n is the sum of those at inverse[n · times], ..., inverse[n · times + times - 1].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, inverse: Tensor, times: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x.index_select(0, numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.times > 1:
            grad = grad.unflatten(0, (len(grad) // ctx.times, ctx.times)).sum(1)
        return grad, None, None, None


class Sorted(NamedTuple):
    """Receipt of `Local`."""

    order: Tensor
    inverse: Tensor
    k: int


class Local:
    """Dispatcher for experts that are all on this rank."""

    def dispatch(self, hidden: Tensor, index: Tensor, experts: int) -> Dispatched:
        k = index.shape[-1]
        numbers, order = index.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        bounds = torch.searchsorted(numbers, torch.arange(experts + 1, device=order.device))
        rows = Gather.apply(hidden, order // k, inverse, k)
        return Dispatched(rows, bounds.diff(), Sorted(order, inverse, k))

    def back(self, rows: Tensor, receipt: Sorted) -> Tensor:
        order, inverse, k = receipt
        return Gather.apply(rows, inverse, order, 1).unflatten(0, (len(order) // k, k))


LOCAL = Local()
