"""A grid of cells in shades of one colour, each with its texts."""

import altair as alt

from meshtune.report.draw.encode import layered, table, tooltip
from meshtune.report.draw.kinds import HeatMap
from meshtune.report.draw.theme import ON_DARK_SHADE, ON_LIGHT_SHADE, SHADES

ROW = 64  # px of height for each row of cells


def heat_map(panel: HeatMap) -> alt.LayerChart:
    """Chart of cells in shades of blue, each with its texts; without a value grey, with the first text."""
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
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = (low, high) if high > low else (0.0, 2 * high or 1.0)
    base = alt.Chart(table({name: [row[name] for row in rows] for name in rows[0]})).encode(
        x=alt.X(
            "column:N",
            sort=None,
            scale=alt.Scale(domain=list(panel.columns)),
            axis=alt.Axis(orient="bottom", labelAngle=0, grid=False),
        ),
        y=alt.Y("row:N", sort=None, scale=alt.Scale(domain=list(panel.rows)), axis=alt.Axis(grid=False)),
        tooltip=[
            tooltip("column:N", "on"),
            tooltip("row:N", "with"),
            tooltip("value:Q", panel.unit, format=panel.form),
            tooltip("detail:N", panel.item),
        ],
    )
    shade = alt.Color("value:Q", scale=alt.Scale(domain=[low, high], range=list(SHADES)), legend=None)
    missing = base.transform_filter("!isValid(datum.value)")
    filled = base.transform_filter("isValid(datum.value)")
    dark = f"datum.value > {(low + high) / 2:.6g}"
    on_shade = alt.condition(dark, alt.value(ON_DARK_SHADE), alt.value(ON_LIGHT_SHADE))
    cell = {"stroke": alt.ExprRef("paper"), "strokeWidth": 3}
    return layered(
        [
            missing.mark_rect(color=alt.ExprRef("grid"), **cell),
            filled.mark_rect(**cell).encode(color=shade),
            missing.mark_text().encode(text="first:N"),
            filled.mark_text(dy=-14, fontWeight=600, fontSize=12).encode(text="first:N", color=on_shade),
            filled.mark_text(dy=2, lineBreak="\n", lineHeight=14).encode(text="others:N", color=on_shade),
        ]
    ).properties(height=alt.Step(ROW))
