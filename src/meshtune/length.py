"""Length of a run in optimizer steps: train.max_steps, train.total_tokens and train.num_epochs.

The planner and the trainer both read it here, so that a run is as long as it was planned. A step has the
tokens of a global batch, global_batch_size x seq_len: sequences are packed, so all but a small share of these
are trained on, and the number of steps is known before the data are read.
"""

import math
from typing import NamedTuple

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.units import counted


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
