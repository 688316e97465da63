"""Collectives over one axis inside a model, with gradients.

    forward          gradient         what for
    identity         all_reduce       a copy that each rank uses for its own part (Megatron's f)
    all_reduce       identity         the sum of the ranks' addends, which all use alike (Megatron's g)
    all_gather       reduce_scatter   shards made whole, and each rank uses the whole for its own part
    reduce_scatter   all_gather       the sum of the ranks' addends; each keeps its own shard
    all_gather       take_shard       shards made whole, which all use alike
    take_shard       all_gather       this rank's shard of what all have alike

Each line is `exchange(x, axis, dim, forward, gradient)`. Tensors are plain, shards of equal size; x is never
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

Collective = Callable[
    [Tensor, Axis, int], Tensor
]  # x, axis, dimension along which shards are cut -> its result


def identity(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """A view of x; nothing is communicated, `axis` and `dim` are not used."""
    return x.view_as(x)


def all_reduce(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The sum of the ranks' x, a new tensor in x's dtype; `dim` is not used."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=axis.group)
    return out


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' x, joined along `dim` in the order of the ranks; a new tensor."""
    shards = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    all_gather_single(shards, x.contiguous(), axis.group)
    return shards.unflatten(0, (axis.size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's shard of the sum of the ranks' x; `dim`, cut into equal shards, must divide evenly."""
    shards = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(shards[0])
    reduce_scatter_single(out, shards.flatten(0, 1), axis.group)
    return out


def take_shard(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's shard of x, `dim` cut into equal ones; contiguous, nothing is communicated."""
    return x.chunk(axis.size, dim)[axis.index].contiguous()


def exchange(x: Tensor, axis: Axis, dim: int, forward: Collective, backward: Collective) -> Tensor:
    """Return forward(x, axis, dim), whose gradient is backward(incoming gradient, axis, dim)."""
    return _Exchange.apply(x, axis, dim, forward, backward)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, axis: Axis, dim: int, forward_op: Collective, backward_op: Collective
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.backward_op = axis, dim, backward_op
        return forward_op(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return ctx.backward_op(grad, ctx.axis, ctx.dim), None, None, None, None
