"""Optimizer state before the first step."""

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
