"""How many updates a run makes and with which learning rates, from the settings and the data's length."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtune.config import Config
from meshtune.data.pack import Dataset
from meshtune.data.recipe import Stream
from meshtune.length import ending, limits
from meshtune.optim.schedule import learning_rates
from meshtune.schedules import warmup
from meshtune.setting import epochs_of
from meshtune.train.console import Course
from meshtune.units import counted, scientific

if TYPE_CHECKING:
    from meshtune.data.prepare import Prepared

FEW_UPDATES = 20  # with fewer, a run ends before its learning rate has done much


def schedule_of(config: Config, steps: int) -> Callable[[int], float]:
    """Function: number of an update, from 1 -> its learning rate. steps: updates of the whole run."""
    train = config.train
    spanned = train.lr_decay_steps or steps
    rate = learning_rates(
        train.lr_scheduler,
        peak=config.learning_rate,
        warmup_steps=warmup(spanned, ratio=train.warmup_ratio, steps=train.warmup_steps),
        total_steps=spanned,
        min_ratio=train.min_lr_ratio,
        arguments=train.lr_scheduler_kwargs,
    )
    return lambda step: rate(min(step, spanned))


def rate_in_words(config: Config) -> str:
    """The peak learning rate and its schedule, as "2e-4 (default for method=lora), cosine"."""
    default = f" (default for method={config.method})" if config.train.learning_rate is None else ""
    return f"{scientific(config.learning_rate)}{default}, {config.train.lr_scheduler}"


def length_sentences(config: Config, train: Dataset | Stream, steps: int, resumed: int | None) -> list[str]:
    """Sentences on the length of a run. steps: updates of the whole run; resumed: step of the checkpoint that
    it resumes from, None for a new run.
    """
    if resumed is not None and (done := nothing_left(config, resumed, steps)):
        return [done]
    few = few_updates(config, train, steps, resumed=resumed is not None)
    return [*filter(None, [which_ends(config, train), few])]


def which_ends(config: Config, train: Dataset | Stream) -> str:
    """Sentence on which of train.max_steps, train.total_tokens and train.num_epochs ends the run; "" where
    only one of the first and the last is set.
    """
    return ending(limits(config, None if isinstance(train, Stream) else len(train)))


def steps_between(every: int | str, config: Config, train: Dataset | Stream) -> int:
    """Steps of the Interval `every`, a part of one rounded up; 0 for 0."""
    epochs = epochs_of(every)
    if epochs is None:
        return int(every)
    assert isinstance(train, Dataset)  # refused with the settings: a stream has no known length
    return math.ceil(epochs * len(train) / config.global_batch_size)


def course_of(config: Config, prepared: "Prepared", steps: int, start: int) -> Course:
    """The steps to come, for the time left. steps: of the whole run; start: resumed from, 0 for a new run."""
    held_out = prepared.eval
    return Course(
        steps=steps,
        start=start,
        evaluate_every=steps_between(config.eval.every, config, prepared.train),
        save_every=steps_between(config.checkpoint.every, config, prepared.train),
        held_out_tokens=held_out.token_count if held_out is not None else 0,
    )


def nothing_left(config: Config, resumed: int, steps: int) -> str:
    """Sentence if the checkpoint that the run resumes from is of its last step or a later one; else "".

    resumed: step of the checkpoint; steps: updates of the whole run.
    """
    if resumed < steps:
        return ""
    known = [each.setting for each in limits(config, None) if each.steps == steps]
    limit = known[0] if known else "train.num_epochs"
    return (
        f"Nothing is left to train: the checkpoint is of step {resumed}, and {limit} ends the run after "
        f"{counted(steps, 'step')}. The model of step {resumed} is written."
    )


def few_updates(config: Config, train: Dataset | Stream, steps: int, *, resumed: bool = False) -> str:
    """Sentence if the data and the global batch leave the run under FEW_UPDATES of its `steps`; else "".

    resumed: True for a run that continues, with the global batch that it has.
    """
    asked_for = any(limit.steps == steps for limit in limits(config, None))
    if isinstance(train, Stream) or steps >= FEW_UPDATES or asked_for:
        return ""
    sequences, size, epochs = len(train), config.global_batch_size, config.train.num_epochs or 1
    if size > 1 and not resumed:
        smaller = max(1, math.floor(sequences * epochs / FEW_UPDATES))
        remedy = f"Set train.global_batch_size={smaller}, or "
    else:
        remedy = "Set "
    longer = math.ceil(FEW_UPDATES * size / sequences)
    return (
        f"The run has only {counted(steps, 'update')}: {counted(sequences, 'sequence')} x {epochs:g} "
        f"epoch{'s' * (epochs != 1)} in global batches of {size}. {remedy}train.num_epochs={longer}, for "
        f"{FEW_UPDATES} or more."
    )
