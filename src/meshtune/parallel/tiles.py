"""Tiles of the MLP: it runs on `train.mlp_tile` tokens of a rank at a time, and so does its backward.

    forward     hidden ─ split along the sequence ─> enter, gate, up, down, leave: of a tile, without a graph
    saved       hidden, this rank's own tokens
    backward    each tile's forward again, and its backward; gradients of weights are summed over the tiles

(TiledMLP of Arctic Long Sequence Training, Bekman et al. 2025, arXiv:2506.13996.) An MLP computes each token
separately, so that its inner tensors and their gradients, and what sp gathers for it, exist for one tile.
autograd gets one gradient of each parameter, with which hooks of ZeRO and of updates run once.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from meshtune.meter.clock import recomputing
from meshtune.model.anatomy import Anatomy, draws_random_numbers
from meshtune.parallel.recompute import in_tile, inside_tile
from meshtune.parallel.tensor import SEQUENCE, generator_states, restore_generators


def tile_mlps(model: nn.Module, anatomy: Anatomy, tokens: int) -> None:
    """Make the MLP of each block run on `tokens` of a rank at a time, in place.

    Call it when tp has cut the model, so that its hooks run for each tile, and before blocks are recomputed.
    """
    for block in model.get_submodule(anatomy.blocks).children():
        mlp: Any = block.get_submodule(anatomy.mlp)
        mlp.mlp_tile, mlp.tiles_draw = tokens, draws_random_numbers(mlp.modules())
        mlp.__class__ = _tiled_class(type(mlp))


@cache
def _tiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Tiled, kind), {})


class _Tiled(nn.Module):
    """Base of an MLP's class in tiles: its call, with hooks and all, is one of each tile."""

    mlp_tile: int
    tiles_draw: bool  # random numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())
        rows, columns, _ = hidden.shape
        width = math.ceil(columns / math.ceil(columns / max(self.mlp_tile // rows, 1)))
        if width >= columns or inside_tile():
            return super().__call__(hidden)
        if not torch.is_grad_enabled():
            return _forward(self, hidden, width)
        # The tensor, and not its node only, which torch 2.11 empties with it.
        saver = (_Save.apply(torch.empty(0, requires_grad=True), hidden),)
        return _Tiles.apply(self, width, saver, hidden, *_trained(self).values())


def _trained(mlp: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in mlp.named_parameters() if parameter.requires_grad}


def _forward(mlp: _Tiled, hidden: Tensor, width: int) -> Tensor:
    """Return the output of all tokens, `width` columns at a time."""
    out, start = None, 0
    with in_tile():
        for part in hidden.split(width, SEQUENCE):
            of_part = mlp(part.contiguous())  # a family's layers may view it
            out = of_part.new_empty(hidden.shape) if out is None else out
            out.narrow(SEQUENCE, start, part.shape[SEQUENCE]).copy_(of_part)
            start += part.shape[SEQUENCE]
    assert out is not None
    return out


class _Save(torch.autograd.Function):
    """Save a tensor before `_Tiles` runs: a checkpoint that has come to its last saved tensor stops there,
    and a block that runs again does not run its MLP's forward for nothing.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.clone()


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: _Tiled, width: int, saver: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.mlp, ctx.width, ctx.saver = mlp, width, saver
        ctx.states = generator_states() if mlp.tiles_draw and mlp.training else []
        return _forward(mlp, hidden, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden,), ctx.saver = ctx.saver[0].grad_fn.saved_tensors, None  # which frees it with this backward
        states = generator_states() if ctx.states else []
        restore_generators(ctx.states)
        gradients = _backward(ctx.mlp, ctx.width, hidden, gradient, inputs=ctx.needs_input_grad[3])
        restore_generators(states)
        return None, None, None, *gradients


def _backward(
    mlp: _Tiled, width: int, hidden: Tensor, gradient: Tensor, *, inputs: bool
) -> list[Tensor | None]:
    """Return the gradients of the input, None unless `inputs`, and of each trained parameter.

    Those of parameters are summed in fp32 or wider: in bf16 each tile would round the sum.
    """
    # Aliases: hooks of the parameters are for whole gradients.
    trained = {name: parameter.detach().requires_grad_() for name, parameter in _trained(mlp).items()}
    sums: list[Tensor | None] = [None] * len(trained)
    of_input, start = torch.empty_like(hidden) if inputs else None, 0
    for part, of_out in zip(hidden.split(width, SEQUENCE), gradient.split(width, SEQUENCE), strict=True):
        own = part.detach().contiguous().requires_grad_(inputs)
        with torch.enable_grad(), recomputing(), in_tile():
            out = functional_call(mlp, trained, own)
        wanted = [*trained.values(), *[own] * inputs]
        found = [*torch.autograd.grad(out, wanted, of_out, allow_unused=True)]
        del out
        if of_input is not None:
            of_input.narrow(SEQUENCE, start, part.shape[SEQUENCE]).copy_(found.pop())
            start += part.shape[SEQUENCE]
        while found:
            _add(sums, len(found) - 1, found.pop())
    for index, parameter in enumerate(trained.values()):
        sums[index] = None if (total := sums[index]) is None else total.to(parameter.dtype)
    return [of_input, *sums]


def _add(sums: list[Tensor | None], index: int, addend: Tensor | None) -> None:
    total = sums[index]
    if addend is not None and total is not None:
        total.add_(addend)
    elif addend is not None:
        sums[index] = addend.to(torch.promote_types(addend.dtype, torch.float32))
