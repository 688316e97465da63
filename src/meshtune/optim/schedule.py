"""Learning-rate schedules: transformers' `get_scheduler` formulas as one pure function of the step."""

import math
from collections.abc import Callable

from meshtune.errors import Table

# Share of the peak rate, from the share of the updates after warm-up that are done.
SCHEDULES: Table[Callable[[float], float]] = Table(
    "train.lr_scheduler",
    {
        "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": lambda progress: 1 - progress,
        "constant": lambda progress: 1.0,
    },
)


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of update `step` (1-based) out of `total_steps`.

    As in `transformers.get_scheduler`: it rises linearly from 0 at update 1 to `peak` at update
    `warmup_steps` + 1; then `kind` "cosine" falls along half a cosine, "linear" along a line, so that update
    `total_steps` + 1 would have 0, and "constant" stays at `peak`. Raises UserError for a `kind` that is not
    in SCHEDULES.
    """
    share_of_peak, updates_before = SCHEDULES[kind], step - 1
    if updates_before < warmup_steps:
        return peak * updates_before / max(1, warmup_steps)
    progress = (updates_before - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * max(0.0, share_of_peak(progress))


def warmup(total_steps: int, *, ratio: float, steps: int | None) -> int:
    """Number of warm-up steps: `steps` unless it is None, else total_steps · ratio, rounded up as in
    transformers.
    """
    return steps if steps is not None else math.ceil(total_steps * ratio)
