"""Long series are thinned before they are drawn, so that a page stays small and opens at once.

A chart a thousand pixels wide can't show 20,000 steps. Of every series the first and the last value are kept,
and the lowest and highest of each stretch of steps, so that no spike, minimum or maximum is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import lt
from typing import TYPE_CHECKING

from meshtune.report.draw.kinds import Series

if TYPE_CHECKING:
    import numpy as np

MOST_ROWS = 600  # steps of one chart: two or three pixels each on a page
THINNED = (
    f"Where there are more than {MOST_ROWS} steps, a chart shows the lowest and the highest value of each "
    "stretch of steps."
)


def merged(series: Sequence[Series]) -> tuple[list[float], list[list[float | None]]]:
    """(Every x of any series, ascending; for each series its y at each of these x, or None without one)."""
    first = series[0].x if series else ()
    if all(one.x is first or one.x == first for one in series) and all(map(lt, first, first[1:])):
        return list(first), [list(one.y) for one in series]  # such as a curve and its mean
    places = {x: place for place, x in enumerate(sorted({x for one in series for x in one.x}))}
    columns: list[list[float | None]] = [[None] * len(places) for _ in series]
    for column, one in zip(columns, series, strict=True):
        for x, y in zip(one.x, one.y, strict=True):
            column[places[x]] = y
    return list(places), columns


def thinned(columns: Sequence[Sequence[float | None]], most: int = MOST_ROWS) -> list[int]:
    """Indices of the rows to draw, ascending: all if there are at most `most`, else at most `most`.

    columns: of equal length; None: no value in this row. Each column gets an equal share of `most`: one with
    fewer values keeps all of them and leaves the rest to the others, another one keeps `extremes` of them.
    """
    import numpy as np  # only where something is drawn

    rows = max(map(len, columns), default=0)
    if rows <= most:
        return list(range(rows))
    drawn: set[int] = set()
    left = most
    known = [np.array(column, float) for column in columns]  # NaN without a value
    known = [(np.flatnonzero(~np.isnan(column)), column) for column in known]
    for place, (at, column) in enumerate(sorted(known, key=lambda one: len(one[0]))):
        share = left // (len(columns) - place)
        chosen = {*at.tolist()} if len(at) <= share else extremes(at, column[at], share)
        drawn |= chosen
        left -= len(chosen)
    return sorted(drawn)


def extremes(rows: np.ndarray, values: np.ndarray, most: int) -> set[int]:
    """Rows of the first and last value, and of the lowest and highest of each of most // 2 - 1 stretches.

    At most `most` rows, or 4 for a smaller `most`. rows: ascending, more than `most`. values: one a row. Of
    equal values the first counts as the lowest, the last as the highest.
    """
    places = {0, len(values) - 1}
    stretches = max(1, most // 2 - 1)
    for stretch in range(stretches):
        start, end = stretch * len(values) // stretches, (stretch + 1) * len(values) // stretches
        part = values[start:end]
        places |= {start + int(part.argmin()), end - 1 - int(part[::-1].argmax())}
    return {*rows[[*places]].tolist()}
