"""Low-rank adapters of experts' weights, which are stacked in one parameter (LoRA; peft's target_parameters):

    y = W_e x + s · B_e A_e x    A [experts, r, in] random, B [experts, out, r] zero

A and B are parameters of the module that has W, `<W>_lora_A` and `<W>_lora_B`: whatever cuts, shards or moves
its weights by expert does the same to them. Both matmuls are `products.low_rank`. peft wraps the module once
for each parameter, the first innermost, and stores A as [experts · r, in] and B as [out, r · experts], where
the expert is the fastest index.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshtune.experts.products import entry
from meshtune.experts.register import experts_of

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

    def weights(self) -> Tensor:
        """The weights as [experts, out, in], a view."""
        weights = getattr(self.module, self.name)
        return weights.transpose(1, 2) if self.module.is_transposed else weights

    def adapt(self, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
        """Add an adapter, in place. The arguments are those of `model.lora.adapt`."""
        weights = self.weights()
        dtype = dtype or (weights.dtype if weights.dtype.itemsize >= 4 else torch.float32)
        experts, rows, columns = weights.shape
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            value = torch.zeros(experts, *shape, dtype=dtype, device=weights.device)
            setattr(self.module, f"{self.name}_lora_{which}", nn.Parameter(value))
        draw(self.pair[0])
        self.module.lora_scale = alpha / rank

    def merge(self) -> None:
        """Add the adapter to the weights, in at least fp32, and remove it, in place."""
        wide = torch.promote_types(self.pair[0].dtype, torch.float32)
        for weight, a, b in zip(self.weights(), *self.pair, strict=True):
            delta = b.to(wide) @ a.to(wide) * self.module.lora_scale
            weight.copy_((weight.to(wide) + delta).to(weight.dtype))
        delattr(self.module, f"{self.name}_lora_A")
        delattr(self.module, f"{self.name}_lora_B")


@torch.no_grad()
def draw(factor: Tensor) -> None:
    """Draw A, in place, as peft's one linear layer with the rows of all experts."""
    nn.init.kaiming_uniform_(factor.flatten(0, 1), a=math.sqrt(5))


def stacked_weights(model: nn.Module) -> dict[str, Stacked]:
    """Return the parameters of a model that can have an adapter, by name."""
    found: dict[str, Stacked] = {}
    paths = {module: path for path, module in model.named_modules()}
    for module in experts_of(model):
        names = [name for name in module._parameters if name in (entry(module), "down_proj")]
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
