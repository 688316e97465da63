"""Muon: momentum made orthogonal, for the matrices of the blocks (Jordan et al. 2024)."""

from typing import Any

import torch

from meshtune.optimizers import OPTIMIZERS


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make torch's Muon, with learning rate 0: `Optimizer.step` sets it before each update.

    Updates are scaled by 0.2 √max(rows, columns), so that their RMS is about AdamW's and its learning rate
    and weight decay fit (Liu et al. 2025, arXiv:2502.16982, section 2.2). groups: torch.optim's parameter
    groups, each with its weight_decay; all parameters have 2 dimensions.
    """
    steps = OPTIMIZERS["muon"].newton_schulz_steps
    return torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=steps)
