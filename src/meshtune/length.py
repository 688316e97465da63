"""Length of a run in optimizer steps: train.max_steps, train.total_tokens and train.num_epochs.

The planner and the trainer both read it here, so that a run is as long as it was planned. A step has the
tokens of a global batch, global_batch_size x seq_len: sequences are packed, so all but a small share of these
are trained on, and the number of steps is known before the data are read.
"""

import math
from typing import NamedTuple

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.setting import epochs_of
from meshtune.units import counted

FEW_UPDATES = 20  # with fewer, a run ends before its learning rate has done much


class Limit(NamedTuple):
    """A setting that ends the run."""

    setting: str  # dotted
    value: float  # in the setting's unit
    steps: int  # optimizer steps after which it ends the run
    per_step: float  # the setting's unit in one step

    def __str__(self) -> str:
        """The setting as on the command line."""
        return f"{self.setting}={self.value:.15g}"


def step_tokens(config: Config) -> int:
    """Tokens of a global batch. Raises UserError as Config.global_batch_size."""
    return config.global_batch_size * config.data.seq_len


def limits(config: Config, sequences: int | None) -> list[Limit]:
    """The settings that limit the run, first the one that ends it; one epoch where none is set.

    sequences: of one epoch; None: unknown, and limits in epochs are left out. Raises UserError for fewer
    train.total_tokens than one step has.
    """
    train, batch, tokens = config.train, config.global_batch_size, step_tokens(config)
    every = [Limit("train.max_steps", train.max_steps, train.max_steps, 1)] if train.max_steps else []
    if total := train.total_tokens:
        if total < tokens:
            raise UserError(
                f"train.total_tokens={total} is less than one step has: {batch} x {config.data.seq_len} = "
                f"{tokens} tokens; give at least {tokens}, or a smaller train.global_batch_size."
            )
        every.append(Limit("train.total_tokens", total, -(-total // tokens), tokens))
    if sequences is not None and (train.num_epochs or not every):
        epochs = train.num_epochs or 1
        steps = math.ceil(epochs * sequences / batch)
        every.append(Limit("train.num_epochs", epochs, steps, batch / sequences))
    return sorted(every, key=lambda limit: limit.steps)


def steps_of(config: Config, sequences: int | None) -> int:
    """Updates in the whole run, by the limit that ends it first. sequences: as `limits` takes it.

    Raises UserError for a stream without train.max_steps and train.total_tokens.
    """
    ends = limits(config, sequences)
    if not ends:
        raise UserError(
            "data.streaming = true: the length of an epoch is unknown; set train.max_steps or "
            "train.total_tokens."
        )
    return ends[0].steps


def steps_between(every: int | str, config: Config, sequences: int | None) -> int:
    """Steps of the Interval `every`, a part of one rounded up; 0 for 0. sequences: as `limits` takes it."""
    epochs = epochs_of(every)
    if epochs is None:
        return int(every)
    assert sequences is not None  # refused with the settings: a stream has no known length
    return math.ceil(epochs * sequences / config.global_batch_size)


def ending(limits: list[Limit]) -> str:
    """Sentence on the number of steps and the limits that give it; "" only for steps or epochs.

    limits: as the function `limits` returns them, at least one.
    """
    first, *others = limits
    run = f"The run has {counted(first.steps, 'step')}: "
    tokens = f" (a step has {first.per_step:,} tokens)" if first.setting == "train.total_tokens" else ""
    if others:
        return f"{run}{first}{tokens} ends it before {' and '.join(map(str, others))}."
    return f"{run}{first}{tokens}." if tokens else ""


def in_steps(config: Config) -> Config:
    """The config with train.total_tokens as train.max_steps, for tools that count steps."""
    if not config.train.total_tokens:
        return config
    changed = {"max_steps": limits(config, None)[0].steps, "total_tokens": None}
    return config.model_copy(update={"train": config.train.model_copy(update=changed)})


# Sentences on the length of a run that begins #


def length_sentences(config: Config, sequences: int | None, steps: int, resumed: int | None) -> list[str]:
    """Sentences on the length of a run. sequences: as `limits` takes it. steps: updates of the whole run.
    resumed: step of the checkpoint that it resumes from, None for a new run.
    """
    if resumed is not None and (done := nothing_left(config, resumed, steps)):
        return [done]
    few = few_updates(config, sequences, steps, resumed=resumed is not None)
    return [*filter(None, [ending(limits(config, sequences)), few])]


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


def few_updates(config: Config, sequences: int | None, steps: int, *, resumed: bool = False) -> str:
    """Sentence if the data and the global batch leave the run under FEW_UPDATES of its `steps`; else "".

    resumed: True for a run that continues, with the global batch that it has.
    """
    asked_for = any(limit.steps == steps for limit in limits(config, None))
    if sequences is None or steps >= FEW_UPDATES or asked_for:
        return ""
    size, epochs = config.global_batch_size, config.train.num_epochs or 1
    smaller = math.floor(sequences * epochs / FEW_UPDATES)  # 0: no global batch gives enough
    remedy = f"Set train.global_batch_size={smaller}, or " if smaller and size > 1 and not resumed else "Set "
    fewer = "; a smaller train.global_batch_size needs fewer epochs" if size > 1 and not smaller else ""
    longer = math.ceil(FEW_UPDATES * size / sequences)
    return (
        f"The run has only {counted(steps, 'update')}: {counted(sequences, 'sequence')} x {epochs:g} "
        f"epoch{'s' * (epochs != 1)} in global batches of {size}. {remedy}train.num_epochs={longer}, for "
        f"{FEW_UPDATES} or more{fewer}."
    )
