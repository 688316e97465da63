"""Matmuls of linear layers in 8-bit floats, by torchao: `train.precision: fp8` and `fp8-rowwise`.

    y = x Wᵀ    x, W in e4m3    gradient of x: dy W, of W: dyᵀ x    dy in e5m2, rowwise in e4m3

Each operand is divided by a scale, so that its largest magnitude is the format's, and cast as it is
multiplied (dynamic scaling); sums and results are wider. Parameters keep names, shapes and dtypes.

    tensorwise  one scale an operand. ZeRO gathers weights in 8 bits: each rank casts its shard by the largest
                magnitude of all shards, so that a scale is the whole matrix'; tp's is that of a rank's part
    rowwise     one for each row of x and W, a power of 2, and other ones where a matmul sums over other
                dimensions; ZeRO gathers weights in 16 bits

A processor has no such units: there the rounded operands are multiplied in fp32.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune import compat
from meshtune.errors import UserError

INSTALL = 'torchao multiplies 8-bit floats, and is not installed: pip install "torchao>=0.18".'


class Fp8Linear(nn.Linear):
    """nn.Linear that multiplies in 8-bit floats."""

    fp8_function: Any  # torchao's autograd function
    fp8_settings: tuple[Any, Any]  # its settings: for matmuls, for casts
    fp8_gathered: tuple[Tensor, Tensor] | None = None  # the weight in 8 bits and its scale, by ZeRO

    def forward(self, input: Tensor) -> Tensor:
        out = self.matmul(input)
        return out if self.bias is None else out + self.bias

    def matmul(self, x: Tensor) -> Tensor:
        """The matmul with the weight."""
        weight: Any = self.weight
        if self.fp8_gathered is not None:
            weight = _Cast.apply(weight, *self.fp8_gathered, self.fp8_settings[0])
        return self.fp8_function.apply(x, weight.t(), *self.fp8_settings)


@torch.compiler.allow_in_graph
class _Cast(torch.autograd.Function):
    """A weight that was cast before it was gathered, as torchao's tensor of 8-bit floats."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: Tensor, scale: Tensor, settings: Any) -> Tensor:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        return Float8TrainingTensor(bits, scale, weight.dtype, settings, GemmInputRole.WEIGHT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None, None, None


@cache
def _class_of(kind: Any) -> Any:
    return Fp8Linear if kind is nn.Linear else type(kind.__name__, (kind, Fp8Linear), {})


def convert(model: nn.Module, names: Iterable[str], recipe: str = "tensorwise", *, emulate: bool) -> None:
    """Let linear layers of a model multiply in 8-bit floats, in place.

    names: of the layers. recipe: of scales, "tensorwise" or "rowwise". emulate: True on a processor. Raises
    UserError without torchao.
    """
    if find_spec("torchao") is None:
        raise UserError(INSTALL)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as function

    # Where a micro-batch's tokens are not a multiple of 16, they are padded for the weights' gradients.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    theirs: Any = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.fp8_function, layer.fp8_settings = function, (theirs.linear_mm_config, config)
        if hasattr(layer, "lora_in_place"):
            layer.lora_in_place = False  # torch refuses to change what a function of Python returned
        layer.__class__ = _class_of(type(layer))


def gather_in_8_bits(groups: Iterable[Any], ranks: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Let ZeRO cast the weights of converted layers to 8 bits before it gathers them.

    groups: modules whose parameters are gathered together. ranks: that share them. dtype: of the passes.
    """
    for module in groups:
        compat.gather_otherwise(module, _is_cast, partial(cast, ranks=ranks, dtype=dtype), _receive)


def cast(shards: list[Tensor], ranks: dist.ProcessGroup, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return each matrix' shard in 8 bits, and its scale in 16 bytes, which keep the others aligned.

    A collective call. dtype: that the shards are rounded to first. Equal to torchao's cast of the whole:
    its clamp has no effect, since rounding moves no magnitude beyond the format's largest.
    """
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_utils import amax_to_scale

    norms = [torch.linalg.vector_norm(shard, math.inf, dtype=torch.float32) for shard in shards]
    largest = torch.stack(norms)
    dist.all_reduce(largest, dist.ReduceOp.MAX, ranks)
    scales = amax_to_scale(largest.to(dtype), e4m3_dtype).split(1)
    return [
        [(shard.to(dtype) * scale).to(e4m3_dtype), scale.repeat(4)]
        for shard, scale in zip(shards, scales, strict=True)
    ]


def _is_cast(layer: nn.Module) -> bool:
    # DoRA needs the norms of the weight's rows.
    return isinstance(layer, Fp8Linear) and getattr(layer, "lora_magnitude_vector", None) is None


def _receive(layer: Any, tensors: list[Tensor]) -> None:
    if layer.fp8_gathered is None:
        bits = tensors[0][: layer.weight.numel()].view(layer.weight.shape)
        torch._dynamo.mark_static_address(bits, guard=False)  # a compiled block saves it, not a copy
        layer.fp8_gathered = bits, tensors[1][0]
