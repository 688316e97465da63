"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from collections.abc import Callable
from typing import Any

import torch

SLICE_ELEMENTS = 2**24  # of a parameter that are updated at a time: the update isn't a copy of the whole


class Lion(torch.optim.Optimizer):
    """θ -= lr · (sign(β1 m + (1 - β1) g) + weight_decay · θ); then m = β2 m + (1 - β2) g."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                tensors = [torch.atleast_1d(t) for t in (parameter, parameter.grad, state["exp_avg"])]
                rows = max(1, SLICE_ELEMENTS * len(tensors[0]) // max(1, parameter.numel()))
                for values, gradient, momentum in zip(*(t.split(rows) for t in tensors), strict=True):
                    update = torch.lerp(gradient, momentum, first).sign_()
                    values.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                    momentum.lerp_(gradient, 1 - second)


def lion(groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Make Lion, with learning rate 0: `Optimizer.step` sets it before each update.

    groups: torch.optim's parameter groups, each with its weight_decay.
    """
    return Lion(groups, {"lr": 0.0, "betas": betas})
