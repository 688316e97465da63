"""Areas on top of each other over a common x, with bands above them, and dashed marks across."""

from collections.abc import Sequence

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
from meshtune.report.draw.kinds import Areas, Mark, Point

STRIP, TEXTS = 9, 16  # px of height of the bands, and of the sections' names below them
EDGE = 0.05  # share of the width next to the end of a section in which a peak's text is not centred
DASHED = {"strokeDash": [5, 3], "strokeWidth": 1.3}


def areas(panel: Areas, *, narrow: bool = False, pointed: bool = True) -> alt.LayerChart:
    """Chart of stacked areas with a legend of their parts.

    narrow: for the screen of a phone. pointed: with tooltips, which a picture has no use for.
    """
    rows, below = _rows(panel)
    data = table(dict(zip(("x", "part", "start", "end"), zip(*rows, strict=True), strict=True)))
    above = (STRIP + TEXTS) / panel.height if panel.bands or panel.sections else 0.0
    room = 1.08 + above + 0.08 * bool(panel.peaks)
    highest = max(*below, panel.mark.value if panel.mark else 0.0, panel.y_end)
    up = alt.Scale(domain=[0, room * highest], nice=False)
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
    parts = list(dict.fromkeys([*panel.parts, *(band.name for band in panel.bands)]))
    legend = alt.Legend(columns=NARROW_LEGEND_COLUMNS if narrow else LEGEND_COLUMNS, symbolType="square")
    colour = alt.Color("part:N", scale=alt.Scale(domain=parts, range=colours_of(parts)), legend=legend)
    joined = "step-after" if panel.joined == "steps" else "linear"
    stacked = alt.Chart(data).mark_area(orient="vertical", opacity=1, interpolate=joined)
    layers: list[alt.Chart | alt.LayerChart] = [stacked.encode(x=x, y=y, y2="end:Q", color=colour)]
    if panel.bands:
        layers.append(_strip(panel).encode(x=x, color=colour))
    if pointed:
        layers.append(_tips(panel, below).encode(x=x, y=alt.Y("top:Q", scale=up)))
    if panel.mark:
        layers += _across(panel.mark, alt.Y("top:Q", scale=up))
    for section in panel.sections:
        layers += _section(section, x)
    for point in panel.peaks:
        layers += _peak(point, panel, x, alt.Y("top:Q", scale=up))
    return layered(layers).properties(height=panel.height)


def _rows(panel: Areas) -> tuple[list[tuple[float, str, float, float]], list[float]]:
    """(Rows (x, part, lower edge, upper edge) part by part, height of the whole stack at each x).

    Of steps, a row that is like the one before it, or as empty, is left out: it stays until the next.
    """
    rows: list[tuple[float, str, float, float]] = []
    below = [0.0] * len(panel.x)
    last = len(panel.x) - 1
    for part, sizes in panel.parts.items():
        before: tuple[float, float] | None = None  # lower and upper edge
        for place, (x, size) in enumerate(zip(panel.x, sizes, strict=True)):
            edges = below[place], below[place] + size
            same = before is not None and (edges == before or (size == 0 and before[0] == before[1]))
            if not same or place == last or panel.joined == "line":
                rows.append((x, part, *edges))
                before = edges
            below[place] = edges[1]
    return rows, below


def _tips(panel: Areas, tops: Sequence[float]) -> alt.Chart:
    """Dots that can't be seen and have tooltips, without the encodings of "x" and "top"."""
    dots = alt.Chart(table({"x": panel.x, "top": tops, "text": panel.texts}))
    return dots.mark_circle(size=40, opacity=0.001).encode(
        tooltip=[
            tooltip("text:N", "event"),
            tooltip("x:Q", panel.x_title, format=",.4~g"),
            tooltip("top:Q", panel.unit, format=",.4~g"),
        ]
    )


def _strip(panel: Areas) -> alt.Chart:
    """The bands along the upper edge, without the encodings of "x" and "part"."""
    columns = {
        "x": [float(band.start) for band in panel.bands],
        "end": [float(band.end) for band in panel.bands],
        "part": [band.name for band in panel.bands],
    }
    bars = alt.Chart(table(columns)).mark_rect().encode(x2="end:Q", y=alt.value(0), y2=alt.value(STRIP))
    ends = [tooltip("x:Q", "from", format=",.4~g"), tooltip("end:Q", "to", format=",.4~g")]
    return bars.encode(tooltip=[tooltip("part:N", "phase"), *ends])


def _across(mark: Mark, up: alt.Y) -> list[alt.Chart]:
    """A dashed horizontal line with its text at the right end. up: encoding of field "top"."""
    line = alt.Chart(table({"top": [float(mark.value)], "text": [mark.text]})).encode(y=up)
    text = line.mark_text(align="right", baseline="bottom", dy=-4)
    return [line.mark_rule(**DASHED), text.encode(x=alt.value("width"), text="text:N")]


def _section(mark: Mark, across: alt.X) -> list[alt.Chart]:
    """A dashed vertical line with its text to the right, below the bands. across: encoding of field "x"."""
    line = alt.Chart(table({"x": [float(mark.value)], "text": [mark.text]})).encode(x=across)
    text = line.mark_text(align="left", baseline="top", dx=5, fontWeight="bold")
    return [line.mark_rule(**DASHED), text.encode(y=alt.value(STRIP + 3), text="text:N")]


def _peak(point: Point, panel: Areas, across: alt.X, up: alt.Y) -> list[alt.Chart]:
    """A dot with its text above it, inside its section. across, up: encodings of fields "x" and "top"."""
    columns = {"x": [float(point.x)], "top": [float(point.y)], "text": [point.text]}
    base = alt.Chart(table(columns)).encode(x=across, y=up)
    ends = [section.value for section in panel.sections] + [panel.x[0], panel.x[-1]]
    near = [point.x - end for end in ends if abs(point.x - end) <= EDGE * (panel.x[-1] - panel.x[0])]
    align = "center" if not near else "left" if min(near, key=abs) >= 0 else "right"
    text = base.mark_text(align=align, baseline="bottom", dy=-6).encode(text="text:N")
    return [base.mark_circle(size=44, opacity=1, color=alt.ExprRef("ink")), text]
