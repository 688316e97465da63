"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from typing import Any

import torch


def adamw(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Make torch's fused AdamW, with learning rate 0: `Optimizer.step` sets it before each update.

    groups: torch.optim's parameter groups, each with its weight_decay.
    """
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
