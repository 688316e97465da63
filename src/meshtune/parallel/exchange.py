"""What the ranks of one axis say to each other inside a model, with gradients.

    forward        gradient       what for
    same           total          a copy that each rank uses for its own part (Megatron's f)
    total          same           the sum of the ranks' addends, which all use alike (Megatron's g)
    gather         own_of_total   pieces made whole, and each rank uses the whole for its own part
    own_of_total   gather         the sum of the ranks' addends, of which each keeps its own piece
    gather         own            pieces made whole, which all use alike
    own            gather         a piece of what all have alike

Each line is `exchange(x, axis, dim, forward, gradient)`. Tensors are plain, pieces of equal size; x is never
changed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshtune.compat import all_gather_single, reduce_scatter_single
from meshtune.parallel.mesh import Axis

Exchange = Callable[[Tensor, Axis, int], Tensor]


def same(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.view_as(x)


def total(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The sum over the ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=axis.group)
    return out


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' pieces, one after the other along `dim`."""
    pieces = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    all_gather_single(pieces, x.contiguous(), axis.group)
    return pieces.unflatten(0, (axis.size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def own_of_total(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece along `dim` of the sum over the ranks."""
    pieces = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(pieces[0])
    reduce_scatter_single(own, pieces.flatten(0, 1), axis.group)
    return own


def own(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's piece along `dim`."""
    return x.chunk(axis.size, dim)[axis.index].contiguous()


def exchange(x: Tensor, axis: Axis, dim: int, ahead: Exchange, back: Exchange) -> Tensor:
    """`ahead` of x; its gradient is `back` of the incoming one."""
    return _Exchange.apply(x, axis, dim, ahead, back)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, axis: Axis, dim: int, ahead: Exchange, back: Exchange
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.back = axis, dim, back
        return ahead(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return ctx.back(grad, ctx.axis, ctx.dim), None, None, None, None
