"""Schedules against transformers' own."""

import inspect

import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from meshtune.errors import UserError
from meshtune.optim.schedule import learning_rates
from meshtune.schedules import SCHEDULES, warmup

TOTAL, PEAK = 40, 3e-4
CASES = {  # (our schedule, min_lr_ratio, lr_scheduler_kwargs) -> (transformers' name, its arguments)
    ("linear", None, ()): ("linear", {}),
    ("cosine", None, ()): ("cosine", {}),
    ("cosine", None, (("num_cycles", 1.5),)): ("cosine", {"num_cycles": 1.5}),
    ("constant", None, ()): ("constant", {}),
    ("constant_with_warmup", None, ()): ("constant_with_warmup", {}),
    ("cosine_with_restarts", None, (("num_cycles", 3),)): ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", None, (("power", 2.0),)): ("polynomial", {"power": 2.0}),
    ("inverse_sqrt", None, ()): ("inverse_sqrt", {}),
    ("inverse_sqrt", None, (("timescale", 11),)): ("inverse_sqrt", {"timescale": 11}),
    ("cosine_with_min_lr", 0.1, ()): ("cosine_with_min_lr", {"min_lr": 0.1 * PEAK}),
    ("cosine_warmup_with_min_lr", 0.1, ()): ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("warmup_stable_decay", None, ()): ("warmup_stable_decay", {"num_decay_steps": 4}),
    ("warmup_stable_decay", 0.2, (("num_decay_steps", 20), ("decay_type", "1-sqrt"))): (
        "warmup_stable_decay",
        {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
    ),
    # A floor makes these of schedules that have none by that name.
    ("cosine", 0.1, ()): ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("linear", 0.1, ()): ("polynomial", {"lr_end": 0.1 * PEAK}),
    ("polynomial", 0.25, (("power", 2.0),)): ("polynomial", {"power": 2.0, "lr_end": 0.25 * PEAK}),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_every_step_has_the_rate_of_transformers(case: tuple, warmup_steps: int) -> None:
    kind, min_ratio, arguments = case
    name, theirs = CASES[case]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup_steps, TOTAL, scheduler_specific_kwargs=theirs)
    ours, resumed = (
        learning_rates(
            kind, peak=PEAK, warmup_steps=warmup_steps, total_steps=TOTAL, min_ratio=min_ratio,
            arguments=dict(arguments),
        )
        for _ in range(2)
    )  # fmt: skip
    late = resumed(TOTAL)
    for step in range(1, TOTAL + 1):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18)
        optimizer.step()
        scheduler.step()
    assert ours(TOTAL) == late  # by the step alone: a resumed run has the rates of an unbroken one


def test_every_schedule_of_transformers_is_in_the_table_and_tested() -> None:
    special = {"reduce_lr_on_plateau", "greedy"}  # they need the losses, and change no rate by the step
    assert {str(name.value) for name in TYPE_TO_SCHEDULER_FUNCTION} - special == SCHEDULES.keys()
    assert {kind for kind, _, _ in CASES} == SCHEDULES.keys()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_table_names_the_arguments_of_transformers(kind: str) -> None:
    functions = {str(name.value): made for name, made in TYPE_TO_SCHEDULER_FUNCTION.items()}
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    floors = {"min_lr", "min_lr_rate", "min_lr_ratio", "lr_end"}
    theirs = set(inspect.signature(functions[kind]).parameters)
    row = SCHEDULES[kind]
    assert theirs - ours - floors == set(row.arguments)
    assert row.warmup == ("num_warmup_steps" in theirs)
    assert bool(theirs & floors) <= bool(row.floor)


def test_arguments_that_transformers_refuses_are_a_sentence() -> None:
    with pytest.raises(UserError, match=r"train\.lr_scheduler = warmup_stable_decay.*Unknown decay type"):
        learning_rates("warmup_stable_decay", peak=1.0, warmup_steps=1, total_steps=9,
                       arguments={"decay_type": "cubic"})  # fmt: skip
    with pytest.raises(UserError, match=r"lr_end \(1e-07\) must be smaller.*lr_scheduler_kwargs"):
        learning_rates("polynomial", peak=1e-8, warmup_steps=1, total_steps=9)


def test_warm_up_is_the_ratio_rounded_up_unless_steps_are_given() -> None:
    assert warmup(101, ratio=0.03, steps=None) == 4
    assert warmup(101, ratio=0.03, steps=0) == 0
