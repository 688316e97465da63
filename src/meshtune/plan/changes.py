"""Settings and layouts to change first, in sentences; each was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from meshtune.plan.phrases import longer, spent
from meshtune.plan.search import Choice, Plan, best_fitting
from meshtune.plan.seconds.step import PARTS
from meshtune.plan.workload import Workload
from meshtune.precision import PRECISIONS, narrower
from meshtune.units import duration, human

NOTABLE_COST, NOTABLE_GAIN, NOTABLE_SAVING = 0.01, 0.02, 0.05  # shares of a step, of speed, of the peak
MOST_LIGHTER = 2  # layouts that need less memory


def changes(
    plan: Plan, best: Choice | None = None, *, faster: bool = True, double_batch: bool = True
) -> list[str]:
    """A caution of the precision, the largest cost beside compute, then settings that are faster and layouts
    that need less memory.

    best: the chosen layout, which all are compared with; None: the plan's first. faster: whether to try
    settings that may be faster, double_batch: also twice the global batch. Nothing on
    speed where predicted times mean nothing.
    """
    if not len(plan):
        return []
    best = best or plan.choice(0)
    caution = PRECISIONS[plan.workload.precision].caution
    timed = plan.cluster.timed
    return [
        *([caution] if caution else []),
        *(_largest_cost(best) if timed else []),
        *(_faster(plan, best, double_batch) if timed and faster else []),
        *islice(_lighter(plan, best), MOST_LIGHTER),
    ]


def _largest_cost(best: Choice) -> Iterator[str]:
    """Yield a sentence on the part of a step, but compute, that takes longest, if it is notable."""
    beside_compute = (part for part in PARTS if part != "compute")
    largest = max(beside_compute, key=lambda part: getattr(best.seconds, part))
    seconds = getattr(best.seconds, largest)
    share = seconds / best.seconds.total
    if share >= NOTABLE_COST:
        what = spent(largest, best.layout)
        yield f"Largest cost besides compute: {what}, {duration(seconds)} a step ({share:.0%})."


def _faster(plan: Plan, best: Choice, double_batch: bool) -> Iterator[str]:
    """Yield settings with which the best layout is notably faster than `best`."""
    for setting, workload in variations(plan.workload, double_batch=double_batch):
        if choice := best_fitting(workload, plan.cluster, plan.fixed_of_batches):
            gain = choice.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
            if gain > NOTABLE_GAIN:
                yield (
                    f"{setting}, layout={choice.layout}: {gain:.0%} more tokens per second than the chosen "
                    "layout."
                )


def _lighter(plan: Plan, best: Choice) -> Iterator[str]:
    """Yield layouts that need notably less memory than `best`, the fastest first.

    None whose step takes longer by a larger factor than its peak is smaller. Of those whose times
    print as the same, the one with least memory.
    """
    smaller: dict[str, Choice] = {}  # by the clause on its time
    for place in plan.pareto():
        lower = best.memory.peak / plan.memory.peak[place]
        ratio = plan.seconds.total[place] / best.seconds.total
        if lower > 1 / (1 - NOTABLE_SAVING) and (ratio < lower or not plan.cluster.timed):
            choice, time = plan.choice(place), longer(ratio)
            smaller[f"; a step {time}" if plan.cluster.timed else ""] = choice
    for time, choice in smaller.items():
        needs = f"{human(choice.memory.peak)} instead of {human(best.memory.peak)}"
        yield f"Less memory: {choice.layout} needs {needs}{time}."


def variations(workload: Workload, *, double_batch: bool = True) -> Iterator[tuple[str, Workload]]:
    """(setting, workload with it) of settings that may be faster.

    double_batch: whether twice the global batch is one of them.
    """
    if double_batch:
        size = 2 * workload.global_batch_size
        yield f"train.global_batch_size={size}", workload.of_batch(size)
    if not workload.compile:
        yield "train.compile=true", workload.compiled()
    trained = PRECISIONS[workload.precision].trained
    for precision in narrower(workload.precision):
        if PRECISIONS[precision].trained == trained:  # updates stay as exact
            yield f"train.precision={precision}", replace(workload, precision=precision)
