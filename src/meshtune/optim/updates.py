"""The optimizers of libraries: each a function that makes one; and the states of all before the first step.

groups: torch.optim's parameter groups, each with its weight_decay. All have learning rate 0 until
`Optimizer.step` sets it before an update. Another kind is a row of optimizers.OPTIMIZERS (its states and
their bytes), and a function and a line of UPDATES here, or a rule in one_pass.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshtune.optimizers import OPTIMIZERS


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


UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {  # by the name in OPTIMIZERS
    "adamw": adamw, "adafactor": adafactor, "muon": muon,
}  # fmt: skip
