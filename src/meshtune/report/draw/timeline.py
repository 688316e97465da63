"""Intervals of time in lanes, coloured by name."""

import altair as alt

from meshtune.report.draw.colours import colours_of
from meshtune.report.draw.encode import (
    LEGEND_COLUMNS,
    NARROW_LEGEND_COLUMNS,
    NUMBER,
    layered,
    plain,
    table,
    tooltip,
)
from meshtune.report.draw.kinds import Timeline

LANE, THIN_LANE = 28, 18  # px of height for each lane
FEW_LANES = 6  # that are not thin
FEW_INTERVALS = 400  # that have a line around them, which would hide short ones


def timeline(panel: Timeline, *, narrow: bool = False) -> alt.LayerChart:
    """Intervals in lanes, coloured by name; many lanes are thin. narrow: for the screen of a phone."""
    lane = LANE if len(panel.lanes) <= FEW_LANES else THIN_LANE
    names = list(dict.fromkeys(interval.name for interval in panel.intervals))
    columns = {
        "lane": [interval.lane for interval in panel.intervals],
        "start": [float(interval.start) for interval in panel.intervals],
        "end": [float(interval.end) for interval in panel.intervals],
        "name": [interval.name for interval in panel.intervals],
        "detail": [interval.detail for interval in panel.intervals],
    }
    bars = alt.Chart(table(columns)).transform_calculate(length="datum.end - datum.start")
    apart = 0.5 if len(panel.intervals) <= FEW_INTERVALS else 0.0
    bars = bars.mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=apart).encode(
        y=alt.Y("lane:N", sort=None, scale=alt.Scale(domain=list(panel.lanes), paddingInner=0.2)),
        x=alt.X(
            "start:Q",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(labelExpr=NUMBER, tickCount=4 if narrow else 8, title=plain(panel.unit)),
        ),
        x2="end:Q",
        color=alt.Color(
            "name:N",
            scale=alt.Scale(domain=names, range=colours_of(names)),
            legend=alt.Legend(
                columns=NARROW_LEGEND_COLUMNS if narrow else LEGEND_COLUMNS, symbolType="square"
            ),
        ),
        tooltip=[
            tooltip("lane:N", "lane"),
            tooltip("name:N", "interval"),
            tooltip("start:Q", f"start, {panel.unit}", format=",.4~g"),
            tooltip("length:Q", f"length, {panel.unit}", format=",.4~g"),
            tooltip("detail:N", "detail"),
        ],
    )
    return layered([bars]).properties(height=lane * len(panel.lanes))
