"""Schedules against transformers' own."""

from typing import get_args

import pytest
import torch
from transformers import get_scheduler

from meshtune.config import TrainConfig
from meshtune.errors import UserError
from meshtune.optim.schedule import SCHEDULES, learning_rate, warmup


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_every_step_has_the_rate_of_transformers(kind: str, warmup_steps: int) -> None:
    total, peak = 40, 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total)
    for step in range(1, total + 1):
        ours = learning_rate(step, peak=peak, kind=kind, warmup_steps=warmup_steps, total_steps=total)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18)
        optimizer.step()
        theirs.step()


def test_the_setting_takes_the_schedules_of_the_table() -> None:
    assert set(get_args(TrainConfig.model_fields["lr_scheduler"].annotation)) == SCHEDULES.keys()


@pytest.mark.parametrize("step", [1, 9])
def test_an_unknown_schedule_is_refused_in_and_after_warm_up(step: int) -> None:
    with pytest.raises(UserError, match=r"train\.lr_scheduler = 'cosin'.*did you mean cosine"):
        learning_rate(step, peak=1.0, kind="cosin", warmup_steps=4, total_steps=10)


def test_warm_up_is_the_ratio_rounded_up_unless_steps_are_given() -> None:
    assert warmup(101, ratio=0.03, steps=None) == 4
    assert warmup(101, ratio=0.03, steps=0) == 0
