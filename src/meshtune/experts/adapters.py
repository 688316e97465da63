"""Low-rank adapters of experts' weights, which are stacked in one parameter (LoRA; peft's target_parameters):

    y = W_e x + s · B_e A_e x    A [experts, r, in] random, B [experts, out, r] zero

A and B are parameters of the module that has W, `<W>_lora_A` and `<W>_lora_B`: whatever cuts, shards or moves
its weights by expert does the same to them. Both matmuls are `products.low_rank`. peft wraps the module once
for each parameter, the first innermost, and stores A as [experts · r, in] and B as [out, r · experts], where
the expert is the fastest index.
"""

import math
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshtune.experts.products import experts_of, stacked
from meshtune.quantised import nf4

TARGET = "experts"  # in lora.target_modules


class Stacked(NamedTuple):
    """A parameter with the weights of all experts of a module."""

    module: Any
    name: str  # of the parameter in the module
    in_peft: str = ""  # path of the adapter in peft's model; "": it has no adapter

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """A and B of its adapter."""
        return getattr(self.module, f"{self.name}_lora_A"), getattr(self.module, f"{self.name}_lora_B")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Experts, out, in) of the weights, which may be in 4 bits."""
        experts, rows, columns = getattr(self.module, self.name).shape
        columns *= 2 if nf4.codes_of_experts(self.module, self.name) else 1
        return (experts, columns, rows) if self.module.is_transposed else (experts, rows, columns)

    def adapt(self, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
        """Add an adapter, in place. The arguments are those of `model.lora.adapt`."""
        weights, (experts, rows, columns) = getattr(self.module, self.name), self.shape
        dtype = dtype or (weights.dtype if weights.dtype.itemsize >= 4 else torch.float32)
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            value = torch.zeros(experts, *shape, dtype=dtype, device=weights.device)
            setattr(self.module, f"{self.name}_lora_{which}", nn.Parameter(value))
        draw(self.pair[0])
        self.module.lora_scale = alpha / rank

    def merge(self, rounded: Callable[[Tensor], Tensor]) -> None:
        """Add the adapter, if there is one, to the weights, in at least fp32, and remove it, in place.

        Weights in 4 bits are restored: each expert's become what `rounded` makes of them in fp32.
        """
        expert = count()

        def merged(weight: Tensor) -> Tensor:
            if not self.in_peft:
                return weight
            wide, number = torch.promote_types(self.pair[0].dtype, torch.float32), next(expert)
            a, b = (factor[number].to(wide) for factor in self.pair)
            delta = b @ a * self.module.lora_scale
            return (weight.to(wide) + (delta.T if self.module.is_transposed else delta)).to(weight.dtype)

        if nf4.codes_of_experts(self.module, self.name):
            nf4.restore_experts(self.module, self.name, lambda weight: rounded(merged(weight)))
        elif self.in_peft:
            for weight in getattr(self.module, self.name):
                weight.copy_(merged(weight))
        for which in "AB" if self.in_peft else "":
            delattr(self.module, f"{self.name}_lora_{which}")


@torch.no_grad()
def draw(factor: Tensor) -> None:
    """Draw A, in place, as peft's one linear layer with the rows of all experts."""
    nn.init.kaiming_uniform_(factor.flatten(0, 1), a=math.sqrt(5))


def stacked_weights(model: nn.Module) -> dict[str, Stacked]:
    """Return the parameters of a model that can have an adapter, by name."""
    found: dict[str, Stacked] = {}
    paths = {module: path for path, module in model.named_modules()}
    for module in experts_of(model):
        names = [name for name in module._parameters if name in stacked(module)]
        adapted = [name for name in names if hasattr(module, f"{name}_lora_A")]
        wrappers = {name: paths[module] + ".base_layer" * place for place, name in enumerate(adapted[::-1])}
        for name in names:
            path = f"{paths[module]}.{name}".removeprefix(".")
            found[path] = Stacked(module, name, wrappers.get(name, ""))
    return found


def adapted_weights(model: nn.Module) -> dict[str, Stacked]:
    """Return those that have an adapter, by name."""
    return {path: weights for path, weights in stacked_weights(model).items() if weights.in_peft}


def peft_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return A as [experts · r, in] and B as [out, r, experts], views, by the names that peft gives them."""
    tensors: dict[str, Tensor] = {}
    for weights in adapted_weights(model).values():
        a, b = weights.pair
        tensors[f"{weights.in_peft}.lora_A.weight"] = a.flatten(0, 1)
        tensors[f"{weights.in_peft}.lora_B.weight"] = b.permute(1, 2, 0)
    return tensors
