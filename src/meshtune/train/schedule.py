"""Learning-rate schedules: transformers' `get_scheduler` formulas as one pure function of the step."""

import math


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, total_steps: int) -> float:
    """The rate of update `step` (1-based) out of `total_steps`.

    As `transformers.get_scheduler`: the first of `warmup_steps` has rate 0, then a linear rise to `peak`;
    after it `cosine` falls along half a cosine to 0, `linear` along a line to 0, and `constant` stays.
    """
    done = step - 1
    if done < warmup_steps:
        return peak * done / max(1, warmup_steps)
    if kind == "constant":
        return peak
    progress = (done - warmup_steps) / max(1, total_steps - warmup_steps)
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * max(0.0, factor)


def warmup(total_steps: int, *, ratio: float, steps: int | None) -> int:
    """Warm-up steps: `steps` when given, else `ratio` of the run, rounded up as transformers does."""
    return steps if steps is not None else math.ceil(total_steps * ratio)
