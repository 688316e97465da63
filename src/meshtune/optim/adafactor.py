"""Adafactor: row and column sums instead of a second moment (Shazeer and Stern 2018, arXiv:1804.04235)."""

from typing import Any

import torch

from meshtune.optim.states import zeros


def adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make transformers' Adafactor as its Trainer does: with our learning rate, without a first moment.

    groups: torch.optim's parameter groups, each with its weight_decay.
    """
    from transformers import Adafactor  # imports peft where that is installed: two seconds

    made = Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)
    for group in made.param_groups:
        for parameter in group["params"]:  # before its first step, so that the number of steps is a tensor
            made.state[parameter].update(zeros("adafactor", parameter))
    return made
