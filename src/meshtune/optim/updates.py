"""The kinds of optimizers: each a function that makes torch's, and their states before the first step.

groups: torch.optim's parameter groups, each with its weight_decay. All have learning rate 0 until
`Optimizer.step` sets it before an update. Another kind is a row of optimizers.OPTIMIZERS (its states and
their bytes), a function here and a line of UPDATES.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshtune.optimizers import OPTIMIZERS

SLICE_ELEMENTS = 2**24  # of a parameter that are updated at a time: the update isn't a copy of the whole


def zeros(optimizer: str, trained: Tensor) -> dict[str, Tensor]:
    """Make the state of one trained tensor, all zeros, by name. optimizer: a row of OPTIMIZERS."""
    made = {}
    for row in OPTIMIZERS[optimizer].states:
        if (shape := row.shape_for(tuple(trained.shape))) is None:
            continue
        dtype = getattr(torch, row.dtype) if row.dtype else trained.dtype
        if row.kind == "element":
            made[row.name] = torch.zeros_like(trained, dtype=dtype, memory_format=torch.preserve_format)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            made[row.name] = torch.zeros(shape, dtype=wide, device="cpu" if row.on_host else trained.device)
    return made


def adamw(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Make torch's fused AdamW: decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make torch's Muon: momentum made orthogonal, for the matrices of the blocks (Jordan et al. 2024).

    Updates are scaled by 0.2 √max(rows, columns), so that their RMS is about AdamW's and its learning rate
    and weight decay fit (Liu et al. 2025, arXiv:2502.16982, section 2.2). All parameters have 2 dimensions.
    """
    steps = OPTIMIZERS["muon"].newton_schulz_steps
    return torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=steps)


def adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make transformers' Adafactor as its Trainer does: with our learning rate, without a first moment.

    Sums of rows and columns stand for the second (Shazeer and Stern 2018, arXiv:1804.04235).
    """
    from transformers import Adafactor  # imports peft where that is installed: two seconds

    made = Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)
    for group in made.param_groups:
        for parameter in group["params"]:  # before its first step, so that the number of steps is a tensor
            made.state[parameter].update(zeros("adafactor", parameter))
    return made


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2).

    θ -= lr · (sign(β1 m + (1 - β1) g) + weight_decay · θ); then m = β2 m + (1 - β2) g.
    """

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
    """Make Lion."""
    return Lion(groups, {"lr": 0.0, "betas": betas})


UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {  # by the name in OPTIMIZERS
    "adamw": adamw, "lion": lion, "adafactor": adafactor, "muon": muon,
}  # fmt: skip
