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
    """Every x of any series, ascending, and for each series its y there, or None."""
    places = {x: place for place, x in enumerate(sorted({x for one in series for x in one.x}))}
    columns: list[list[float | None]] = [[None] * len(places) for _ in series]
    for column, one in zip(columns, series, strict=True):
        for x, y in zip(one.x, one.y, strict=True):
            column[places[x]] = y
    return list(places), columns


def thinned(columns: Sequence[Sequence[float | None]], most: int = MOST_ROWS) -> list[int]:
    """Indices of the rows to draw, ascending: all of them, or at most `most` with every column's extremes."""
    rows = max(map(len, columns), default=0)
    if rows <= most:
        return list(range(rows))
    stretches = max(1, most // (2 * len(columns)) - 1)
    kept: set[int] = set()
    for column in columns:
        known = [(value, row) for row, value in enumerate(column) if value is not None]
        kept |= {row for _, row in (*known[:1], *known[-1:])}
        for stretch in range(stretches):
            part = known[stretch * len(known) // stretches : (stretch + 1) * len(known) // stretches]
            if part:
                kept |= {min(part)[1], max(part)[1]}
    return sorted(kept)
