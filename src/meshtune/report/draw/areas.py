"""Areas on top of each other over a common x, with a dashed mark across."""

import altair as alt

from meshtune.report.draw.colours import colours_of
from meshtune.report.draw.encode import (
    LABELS,
    LEGEND_COLUMNS,
    NARROW_LEGEND_COLUMNS,
    NUMBER,
    layered,
    plain,
    table,
    tooltip,
)
from meshtune.report.draw.kinds import Areas


def areas(panel: Areas, *, narrow: bool = False) -> alt.LayerChart:
    """Chart of stacked areas with a legend of their parts. narrow: for the screen of a phone."""
    rows = []
    below = [0.0] * len(panel.x)
    for part, sizes in panel.parts.items():
        for place, (x, size) in enumerate(zip(panel.x, sizes, strict=True)):
            rows.append((place, x, part, below[place], below[place] + size))
            below[place] += size
    data = table(dict(zip(("place", "x", "part", "start", "end"), zip(*rows, strict=True), strict=True)))
    up = alt.Scale(domain=[0, 1.08 * max(*below, panel.mark.value if panel.mark else 0.0)], nice=False)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[0, panel.x[-1]], nice=False),
        axis=alt.Axis(labelExpr=NUMBER, tickCount=4 if narrow else 8, title=plain(panel.x_title)),
    )
    y = alt.Y(
        "start:Q",
        scale=up,
        axis=alt.Axis(labelExpr=NUMBER, tickCount=5, minExtent=LABELS, title=plain(panel.unit)),
    )
    parts = list(panel.parts)
    legend = alt.Legend(columns=NARROW_LEGEND_COLUMNS if narrow else LEGEND_COLUMNS, symbolType="square")
    colour = alt.Color("part:N", scale=alt.Scale(domain=parts, range=colours_of(parts)), legend=legend)
    base = alt.Chart(data).encode(x=x, color=colour)
    layers: list[alt.Chart | alt.LayerChart] = [
        base.mark_area(orient="vertical", opacity=1).encode(y=y, y2="end:Q")
    ]
    dots = alt.Chart(table({"x": panel.x, "top": below, "text": panel.texts}))
    layers.append(
        dots.mark_circle(size=40, opacity=0.001).encode(
            x=x,
            y=alt.Y("top:Q", scale=up),
            tooltip=[
                tooltip("text:N", "event"),
                tooltip("x:Q", panel.x_title, format=",.4~g"),
                tooltip("top:Q", panel.unit, format=",.4~g"),
            ],
        )
    )
    if panel.mark:
        line = alt.Chart(table({"top": [float(panel.mark.value)], "text": [panel.mark.text]}))
        at = alt.Y("top:Q", scale=up)
        layers.append(line.mark_rule(strokeDash=[5, 3], strokeWidth=1.3).encode(y=at))
        text = line.mark_text(align="right", baseline="bottom", dy=-4)
        layers.append(text.encode(y=at, x=alt.value("width"), text="text:N"))
    return layered(layers).properties(height=panel.height)
