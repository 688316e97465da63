"""Long series are thinned before they are drawn, so that a page stays small and opens at once.

A chart a thousand pixels wide can't show 20,000 steps. Of every series the first and the last value are kept,
and the lowest and highest of each stretch of steps, so that no spike, minimum or maximum is lost.
"""

from collections.abc import Sequence

from meshtune.report.draw.kinds import Series

MOST_ROWS = 600  # steps of one chart: two or three pixels each on a page
THINNED = (
    f"Where there are more than {MOST_ROWS} steps, a chart shows the lowest and the highest value of each "
    "stretch of steps."
)


def merged(series: Sequence[Series]) -> tuple[list[float], list[list[float | None]]]:
    """(Every x of any series, ascending; for each series its y at each of these x, or None without one)."""
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
    rows = max(map(len, columns), default=0)
    if rows <= most:
        return list(range(rows))
    drawn: set[int] = set()
    left = most
    known = [[(value, row) for row, value in enumerate(column) if value is not None] for column in columns]
    for place, values in enumerate(sorted(known, key=len)):
        share = left // (len(columns) - place)
        chosen = {row for _, row in values} if len(values) <= share else extremes(values, share)
        drawn |= chosen
        left -= len(chosen)
    return sorted(drawn)


def extremes(values: Sequence[tuple[float, int]], most: int) -> set[int]:
    """Rows of the first and last value, and of the lowest and highest of each of most // 2 - 1 stretches.

    At most `most` rows, or 4 for a smaller `most`. values: (value, row), ascending by row, more than `most`.
    """
    chosen = {values[0][1], values[-1][1]}
    stretches = max(1, most // 2 - 1)
    for stretch in range(stretches):
        part = values[stretch * len(values) // stretches : (stretch + 1) * len(values) // stretches]
        chosen |= {min(part)[1], max(part)[1]}
    return chosen
