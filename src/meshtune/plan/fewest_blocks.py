"""Recomputation of no more blocks than the memory asks for: `full8` where `full` leaves memory unused.

A search predicts recomputation of all blocks or of none. Of the layouts that recompute all and fit, the most
promising ones are predicted again with fewer blocks: by bisection, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshtune.layout import RECOMPUTE
from meshtune.placement.columns import Columns, Number, rows

MOST = 256  # layouts to bisect
SLOWEST = 1.5  # times the quickest step: no recomputation makes one longer than that (4 + 2 all-reduces to 4)

Predicted = Callable[[Columns], Number]


def with_fewest_blocks(
    fitting: Columns, seconds: Number, blocks: Number, *, total: Predicted, fits: Predicted, gain: float
) -> Columns:
    """Layouts of `fitting` that recompute every block, with the fewest recomputed blocks that fit.

    Only `promising` ones; none that fits only with every block recomputed, or with none of them, or that is
    not quicker by `gain`, a share of a step's time, than with every one.

    seconds: of their steps. blocks: of the model. total: predicts seconds of steps. fits: predicts a mask.
    """
    places = promising(fitting, seconds, total)
    layouts = rows(fitting, places)
    most = np.ceil(blocks / (layouts.pp * layouts.virtual_stages)) - 1
    some = fits(layouts.replace(recompute_blocks=most)) & ~fits(layouts.replace(recompute_blocks=0 * most))
    layouts, most, seconds = rows(layouts, some), most[some], seconds[places][some]
    fewer = layouts.replace(
        recompute_blocks=fewest(most, lambda number: fits(layouts.replace(recompute_blocks=number)))
    )
    return rows(fewer, total(fewer) < seconds * math.exp(-gain))


def promising(fitting: Columns, seconds: Number, total: Predicted) -> Number:
    """Places of layouts that recompute every block: those that would be quickest without recomputation, MOST
    at most, and the quickest of each kind (`kind_of`), so that kinds are compared as fairly.

    The arguments are those of `with_fewest_blocks`.
    """
    every = np.flatnonzero(fitting.recomputation("block") & np.isinf(fitting.recompute_blocks))
    every = every[np.argsort(seconds[every], kind="stable")]
    _, firsts = np.unique(kind_of(rows(fitting, every)), return_index=True)
    near = every[seconds[every] <= SLOWEST * seconds.min(initial=np.inf)]
    without = rows(fitting, near).replace(recompute=np.full(len(near), RECOMPUTE.index("none")))
    return np.union1d(near[np.argsort(total(without), kind="stable")[:MOST]], every[firsts])


def kind_of(layouts: Columns) -> Number:
    """A number for each mode, ZeRO stage, degree of tp, and whether there are replicas, cp and pp."""
    number = layouts.tp
    for several in (layouts.dp_replicate, layouts.cp, layouts.pp):
        number = 2 * number + (several > 1)
    return (number * len(RECOMPUTE) + layouts.recompute) * 4 + layouts.zero


def fewest(most: Number, fits: Predicted) -> Number:
    """The least number above 0 that fits, for each element, of which `most` fits and 0 does not.

    fits: numbers, one for each element -> mask. A number above one that fits is taken to fit.
    """
    too_few, enough = 0 * most, most
    while np.any(enough - too_few > 1):
        middle = np.ceil((too_few + enough) / 2)
        fitting = fits(middle)
        too_few, enough = np.where(fitting, too_few, middle), np.where(fitting, middle, enough)
    return enough
