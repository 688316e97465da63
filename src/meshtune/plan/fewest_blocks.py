"""Recomputation of no more blocks than the memory asks for: `full8` where `full` leaves memory unused.

A search predicts recomputation of all blocks or of none. Of the layouts that recompute all and fit, the most
promising ones are predicted again with fewer blocks: by bisection, all at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshtune.layout import RECOMPUTE
from meshtune.placement.columns import Columns, Number, rows

MOST = 256  # layouts to bisect
SLOWEST = 1.5  # times the quickest step: no recomputation makes one longer than that (4 + 2 all-reduces to 4)

Predicted = Callable[[Columns], Number]


def with_fewest_blocks(
    fitting: Columns, seconds: Number, blocks: Number, *, total: Predicted, fits: Predicted
) -> Columns:
    """Layouts of `fitting` that recompute every block, with the fewest recomputed blocks that fit.

    Of those that would be quickest without recomputation, MOST at most; not those that fit only with every
    block recomputed, or with none.

    seconds: of their steps. blocks: of the model. total: predicts seconds of steps. fits: predicts a mask.
    """
    every = fitting.recomputation("block") & np.isinf(fitting.recompute_blocks)
    if not np.any(every):
        return rows(fitting, every)
    promising = rows(fitting, every & (seconds <= SLOWEST * seconds.min()))
    none = total(promising.replace(recompute=np.full(len(promising.tp), RECOMPUTE.index("none"))))
    promising = rows(promising, np.argsort(none, kind="stable")[:MOST])

    def fits_with(number: Number) -> Number:
        return fits(promising.replace(recompute_blocks=number))

    most = np.ceil(blocks / (promising.pp * promising.virtual_stages)) - 1
    some = fits_with(most) & ~fits_with(0 * most)
    promising, most = rows(promising, some), most[some]
    return promising.replace(recompute_blocks=fewest(most, fits_with))


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
