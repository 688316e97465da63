"""Learning-rate schedules by the name in `train.lr_scheduler`: those of transformers' `get_scheduler`.

The formulas are transformers' own (optim/schedule.py calls them). Here is which settings each one uses, for
the settings, and its name and arguments there, for the trainer and the exporters. Torch-free.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshtune.errors import Table

# Decay of warmup_stable_decay where lr_scheduler_kwargs has no num_decay_steps, as a share of the updates.
DECAY_SHARE = 0.1


@dataclass(frozen=True)
class Schedule:
    """One schedule; the fields say which settings have an effect on it."""

    arguments: tuple[str, ...] = ()  # of transformers' function, that train.lr_scheduler_kwargs may set
    floor: str | None = None  # transformers' schedule that ends at train.min_lr_ratio; None: there is none
    needs_floor: bool = False  # True: train.min_lr_ratio must be set
    warmup: bool = True  # False: it begins at the full rate


SCHEDULES = Table(
    "train.lr_scheduler",
    {
        "cosine": Schedule(("num_cycles",), floor="cosine_with_min_lr"),
        "linear": Schedule(floor="polynomial"),
        "constant": Schedule(warmup=False),
        "constant_with_warmup": Schedule(),
        "cosine_with_restarts": Schedule(("num_cycles",)),
        "polynomial": Schedule(("power",), floor="polynomial"),
        "inverse_sqrt": Schedule(("timescale",)),
        "cosine_with_min_lr": Schedule(("num_cycles",), floor="cosine_with_min_lr", needs_floor=True),
        "cosine_warmup_with_min_lr": Schedule(
            ("num_cycles", "warmup_lr_rate"), floor="cosine_warmup_with_min_lr", needs_floor=True
        ),
        "warmup_stable_decay": Schedule(
            ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "num_cycles"),
            floor="warmup_stable_decay",
        ),
    },
)
ARGUMENTS = sorted({name for row in SCHEDULES.values() for name in row.arguments})


def schedule_problems(kind: str, min_ratio: float | None, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for a setting that the schedule `kind` needs and lacks, and one for arguments that no
    schedule takes.

    min_ratio, arguments: as `transformers_schedule` takes them. An argument of another schedule has no effect
    (config.schedule).
    """
    row = SCHEDULES[kind]
    if row.needs_floor and min_ratio is None:
        yield f"train.lr_scheduler={kind} needs train.min_lr_ratio; set it, such as train.min_lr_ratio=0.1."
    if unknown := [name for name in arguments if name not in ARGUMENTS]:
        yield (
            f"train.lr_scheduler_kwargs: {kind} takes no {', '.join(unknown)}; it takes "
            f"{', '.join(row.arguments) or 'none'}."
        )


def warmup(total_steps: int, *, ratio: float, steps: int | None) -> int:
    """Number of warm-up steps: `steps` unless it is None, else total_steps · ratio, rounded up as in
    transformers.
    """
    return steps if steps is not None else math.ceil(total_steps * ratio)


def transformers_schedule(
    kind: str, *, peak: float, total_steps: int, min_ratio: float | None, arguments: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """(name, arguments besides warm-up and length) of a schedule for `get_scheduler`.

    kind: a key of SCHEDULES. min_ratio: the last rate as a share of `peak`; None: transformers' default.
    arguments: of train.lr_scheduler_kwargs.
    """
    if min_ratio is None:
        name, floor = kind, {}
    else:
        name = SCHEDULES[kind].floor or kind
        floors = {"polynomial": ("lr_end", peak), "warmup_stable_decay": ("min_lr_ratio", 1.0)}
        argument, unit = floors.get(name, ("min_lr_rate", 1.0))
        if name == "polynomial" and min_ratio == 1:  # which transformers refuses: its rate would not fall
            return "constant_with_warmup", {}
        floor = {argument: min_ratio * unit}
    decay = {"num_decay_steps": math.ceil(DECAY_SHARE * total_steps)} if kind == "warmup_stable_decay" else {}
    return name, decay | floor | dict(arguments)
