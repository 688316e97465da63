"""The sentences that come first in a plan: what a fixed layout costs, whether the chosen one fits safely.

A layout fits safely if its predicted peak with the error bar of memory (accuracy.py) is in a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshtune.plan.phrases import device, longer
from meshtune.plan.search import Choice, Plan, best_fitting
from meshtune.plan.seconds.step import TIE
from meshtune.units import human


def verdict(plan: Plan, choice: Choice) -> list[str]:
    """At most one sentence on fixed fields of the layout, and one on a chosen layout that fits barely or
    stands in the place of one that does.

    choice: the chosen layout, one of the plan's.
    """
    return [*_of_fixed(plan, choice), *_of_safety(plan, choice)]


def barely(choice: Choice) -> str:
    """A clause on a peak that may exceed the memory: "fits barely: 75.9 GiB ± 3.8 GiB of 79.1"."""
    peak, cluster = choice.memory.peak, choice.cluster
    return (
        f"fits barely: {human(peak)} ± {human(peak * choice.accuracy.memory)} of a {device(cluster)}'s "
        f"{human(cluster.memory)}"
    )


def _of_fixed(plan: Plan, choice: Choice) -> Iterator[str]:
    """Yield how much faster the best layout is without the fixed fields, or less memory it needs."""
    if not plan.fixed or not (free := best_fitting(plan.workload, plan.cluster)):
        return
    more = choice.seconds.total / free.seconds.total - 1
    needs = f"{human(free.memory.peak)} instead of {human(choice.memory.peak)}"
    if not plan.cluster.timed:
        if free.layout != choice.layout:
            yield f"The layout is fixed, at least in part; without that {free.layout} is first: {needs}."
    elif more > TIE:
        yield (
            f"The layout is fixed, at least in part: a step takes {more:.0%} longer than in the best of all "
            f"layouts, {free.layout} ({needs}). layout=auto chooses it."
        )


def _of_safety(plan: Plan, choice: Choice) -> Iterator[str]:
    """Yield a sentence if the chosen layout fits barely, or a faster one that does was passed over."""
    seconds = plan.seconds.total
    if choice.safe:
        faster = np.flatnonzero(~plan.safe & (plan.uneven == plan.uneven[:1]))
        if len(faster) and plan.cluster.timed and len(plan):
            other = plan.choice(int(faster[seconds[faster].argmin()]))
            gain = 1 - other.seconds.total / choice.seconds.total
            if gain > TIE:
                yield f"{other.layout} would take {gain:.1%} less time, but {barely(other)}."
        return
    places = np.flatnonzero(plan.safe)
    if not len(places):
        yield f"{choice.layout} {barely(choice)}; no layout that was ranked fits safely."
        return
    safe = plan.choice(int(places[seconds[places].argmin()]))
    costs = f"; a step {longer(safe.seconds.total / choice.seconds.total)}" if plan.cluster.timed else ""
    needs = f"needs {human(safe.memory.peak)}{costs}"
    yield f"{choice.layout} {barely(choice)}. The nearest that is safe, {safe.layout}, {needs}."
