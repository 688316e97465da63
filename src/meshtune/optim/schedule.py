"""The learning rate of each update: transformers' `get_scheduler` as a pure function of the step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from meshtune.errors import explained
from meshtune.schedules import transformers_schedule


def learning_rates(
    kind: str,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    min_ratio: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """Function: number of an update, from 1 -> its learning rate; a resumed run needs no more than the step.

    kind: a key of schedules.SCHEDULES. peak: the rate after warm-up. min_ratio, arguments: see
    `transformers_schedule`. Raises UserError for arguments that transformers can't compute with.
    """
    from transformers import get_scheduler  # imports peft where that is installed: two seconds

    name, options = transformers_schedule(
        kind, peak=peak, total_steps=total_steps, min_ratio=min_ratio, arguments=arguments or {}
    )
    with explained(f"train.lr_scheduler = {kind} with {options}", "Change train.lr_scheduler_kwargs."):
        scheduler = get_scheduler(
            name,
            torch.optim.SGD([torch.zeros(1)], lr=peak),  # only its rate is read
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=options,
        )
        assert isinstance(scheduler, LambdaLR)
        share_of_peak = scheduler.lr_lambdas[0]
        for step in {0, min(warmup_steps, total_steps - 1), total_steps - 1}:
            float(share_of_peak(step))
    return lambda step: peak * share_of_peak(step - 1)
