"""A grid of cells in shades of one colour, each with its texts."""

from collections.abc import Sequence

import altair as alt

from meshtune.report.draw.encode import layered, plain, table, tooltip
from meshtune.report.draw.kinds import HeatMap
from meshtune.report.draw.theme import ON_SHADE, SHADES

ROW, NARROW_ROW = 64, 40  # px of height for each row of cells
LINES, LINE = 3, 14  # texts of a cell that a row has room for, and px for each more
NAME, NARROW_NAME = 240, 110  # px of a row's name at most
NARROW_CELLS = 190  # px of all cells of a row on a phone
TEXT, LEAST_TEXT = 12, 8  # px of the height of a cell's first text, and of one that can still be read
CHARACTER = 0.62  # of a text's height, that a character is wide
LEAST_SPAN = 0.5  # of the highest value, that the shades span at least


def heat_map(panel: HeatMap, *, narrow: bool = False) -> alt.LayerChart:
    """Chart of cells in shades of one colour, each with its texts; without a value grey, with the first text.

    narrow: for a phone, where the first text is drawn alone.
    """
    rows = [
        {
            "column": column,
            "row": row,
            "value": cell.value,
            "first": cell.texts[0] if cell.texts else "",
            "others": "\n".join(cell.texts[1:]),
            "detail": cell.detail,
        }
        for row, cells in zip(panel.rows, panel.cells, strict=True)
        for column, cell in zip(panel.columns, cells, strict=True)
        if cell is not None
    ]
    known = [row["value"] for row in rows if row["value"] is not None]
    high = max(known, default=0.0) or 1.0
    low = min(min(known, default=0.0), (1 - LEAST_SPAN) * high)
    base = alt.Chart(table({name: [row[name] for row in rows] for name in rows[0]})).encode(
        x=alt.X(
            "column:N",
            sort=None,
            scale=alt.Scale(domain=list(panel.columns)),
            axis=alt.Axis(orient="bottom", labelAngle=0, grid=False, title=plain(panel.x_title)),
        ),
        y=alt.Y(
            "row:N",
            sort=None,
            scale=alt.Scale(domain=list(panel.rows)),
            axis=alt.Axis(grid=False, title=plain(panel.y_title), labelLimit=NARROW_NAME if narrow else NAME),
        ),
        tooltip=[
            tooltip("column:N", panel.x_title or "on"),
            tooltip("row:N", panel.y_title or "with"),
            tooltip("value:Q", panel.unit, format=panel.form),
            tooltip("detail:N", panel.item),
        ],
    )
    shade = alt.Color("value:Q", scale=alt.Scale(domain=[low, high], range=list(SHADES)), legend=None)
    missing = base.transform_filter("!isValid(datum.value)")
    filled = base.transform_filter("isValid(datum.value)")
    cell = {"stroke": alt.ExprRef("paper"), "strokeWidth": 3}
    more = LINE * max(0, max(row["others"].count("\n") + 2 for row in rows) - LINES)
    sizes = [
        _narrow_size(panel, [row["first"] for row in rows if (row["value"] is None) == none])
        if narrow
        else TEXT
        for none in (True, False)
    ]
    first = filled.mark_text(dy=0 if narrow else -14 - more / 2, fontWeight=600, fontSize=sizes[1])
    others = filled.mark_text(dy=2 - more / 2, lineBreak="\n", lineHeight=LINE)
    layers = [
        missing.mark_rect(color=alt.ExprRef("grid"), **cell),
        filled.mark_rect(**cell).encode(color=shade),
        missing.mark_text(fontSize=min(sizes[0], TEXT - 1)).encode(text="first:N"),
        first.encode(text="first:N", color=alt.value(ON_SHADE)),
    ]
    if not narrow:
        layers.append(others.encode(text="others:N", color=alt.value(ON_SHADE)))
    return layered(layers).properties(height=len(panel.rows) * (NARROW_ROW if narrow else ROW + more))


def _narrow_size(panel: HeatMap, texts: Sequence[str]) -> float:
    """Px of height at which all texts fit a cell on a phone, at most TEXT; 0 where they can't be read."""
    longest = max(map(len, texts), default=1) or 1
    size = NARROW_CELLS / len(panel.columns) / longest / CHARACTER
    return 0.0 if size < LEAST_TEXT else min(float(TEXT), round(size, 1))
