"""Panels as Vega-Lite specifications without a theme; curves and points are drawn by curves.py.

Importing this module imports Altair: import it inside the function that draws, after `vega.require()`.
"""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import altair as alt
from altair.utils.schemapi import debug_mode

from meshtune.report.draw.curves import APART, dotted, end_of, lines, multiples, points, round_values, scatter
from meshtune.report.draw.encode import (
    LABELS,
    NUMBER,
    ROUNDED,
    across,
    chart_of,
    colours,
    dashed,
    layered,
    plain,
    table,
    tooltip,
)
from meshtune.report.draw.kinds import (
    Areas,
    HeatMap,
    Lines,
    Mark,
    Multiples,
    Panel,
    Point,
    Scatter,
    Series,
    Stacks,
    Timeline,
)
from meshtune.report.draw.theme import MONO, ON_SHADE, SHADES
from meshtune.report.draw.words import longest_line, name_lines

NO_UNIT = "\u00a0"  # keeps titles side by side in line
Width = int | Literal["container"]
Layers = list[alt.Chart | alt.LayerChart]


def specification(
    panel: Panel,
    *,
    width: Width,
    title_offset: int | None = None,
    named: bool = True,
    narrow: bool = False,
) -> dict[str, Any]:
    """A panel as a Vega-Lite specification without a theme.

    width: px of the plot, or "container" for the width of the page's element. title_offset: px between title
    and chart; None draws no title. named: False leaves out the names of `Stacks`, which the chart to its left
    shows; other panels ignore it. narrow: for the screen of a phone.
    """
    if isinstance(panel, Lines):
        names = tuple(Series(one.name, one.role, (), (), one.colour) for one in panel.series)
        empty = replace(panel, series=names, x_end=None)
        spec = json.loads(_of_curves(empty, dotted(panel), width, title_offset, narrow))
        spec["data"]["values"] = points(panel)["values"]
        name, end = end_of(panel)
        next(one for one in spec["params"] if one["name"] == name)["value"] = end
        return spec
    with debug_mode(False):
        chart = drawn(panel, named=named, narrow=narrow, pointed=width == "container")
        return _specification(chart, panel, width, title_offset, narrow)


def _wrapped(text: str, characters: float) -> list[str]:
    return textwrap.wrap(text, round(characters)) or [NO_UNIT]


@lru_cache(maxsize=256)
def _of_curves(
    empty: Lines, dots: Sequence[bool], width: Width, title_offset: int | None, narrow: bool
) -> str:
    """Specification, as JSON, of a panel of curves without their points: Altair takes longest for it, and
    the page of a run that continues needs it again and again.
    """
    with debug_mode(False):
        return json.dumps(
            _specification(lines(empty, dots, pointed=width == "container"), empty, width, title_offset)
        )


def _specification(
    chart: alt.LayerChart | alt.FacetChart,
    panel: Panel,
    width: Width,
    title_offset: int | None,
    narrow: bool = False,
) -> dict[str, Any]:
    """A chart as `specification` gives it. Altair's checks, which tests make, take half of its time."""
    if isinstance(chart, alt.FacetChart):  # which a page gives its width
        columns: int = chart.columns
        small = 0 if width == "container" else (width - APART * (columns - 1)) // columns
        chart.spec = chart.spec.properties(width=small)
    else:
        chart = chart.properties(width=width)
    if width == "container" and not isinstance(chart, alt.FacetChart):
        chart = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    if title_offset is not None:
        title = alt.Title(panel.title, subtitle=panel.unit or NO_UNIT, offset=title_offset)
        if width != "container" and (narrow or len(panel.unit) > width / 6):  # lines as long as the picture
            title.text, title.subtitle = _wrapped(panel.title, width / 7), _wrapped(panel.unit, width / 6)
            title.frame = "bounds" if narrow else "group"
        chart = chart.properties(title=title)
    return {name: value for name, value in chart.to_dict(validate=False).items() if name != "config"}


def drawn(
    panel: Panel, *, named: bool = True, narrow: bool = False, pointed: bool = True
) -> alt.LayerChart | alt.FacetChart:
    """A panel as an Altair chart without width and title.

    named, narrow: as in `specification`. pointed: False leaves out layers that only have tooltips.
    """
    match panel:
        case Lines():
            return lines(panel, pointed=pointed)
        case Stacks():
            return stacks(panel, named=named, narrow=narrow)
        case Scatter():
            return scatter(panel, narrow=narrow)
        case Multiples():
            return multiples(panel, narrow=narrow)
        case HeatMap():
            return heat_map(panel, narrow=narrow)
        case Timeline():
            return timeline(panel, narrow=narrow)
        case Areas():
            return areas(panel, narrow=narrow, pointed=pointed)


# Stacks: horizontal bars cut into parts #

BAR, NARROW_BAR = 28, 44  # px of height for each bar
NARROW_PART = 9  # px of height for each of several bars of a name, on a phone
# of that: between bars, and at both ends
PADDING, NARROW_PADDING = (0.3, 0.15), (0.55, 0.4)
MOST_NAME = 52  # characters above a bar on a phone
MARK_TEXT = 22  # px between legend and bars, for the text of a mark


def stacks(panel: Stacks, *, named: bool = True, narrow: bool = False) -> alt.LayerChart:
    """Chart of horizontal bars with a legend of their parts; panel.ends and panel.mark as far as given.

    named: False leaves out the names of the bars, for a chart that stands right of one with the same names.
    narrow: for a phone, where each bar's end and name stand above it.
    """
    mark = panel.mark.value if panel.mark else 0.0
    bars = [[sizes[row] for sizes in panel.parts.values()] for row in range(len(panel.names))]
    cells = [
        (name, part, start, start + size if panel.stacked else size, size)
        for name, sizes in zip(panel.names, bars, strict=True)
        for part, size, start in zip(panel.parts, sizes, accumulate(sizes, initial=0.0), strict=False)
        for start in [start if panel.stacked else mark]
        if size or panel.stacked
    ]
    ends = [max(end for name, _, _, end, _ in cells if name == bar) for bar in panel.names]
    room = (1.08 if panel.mark else 1.3) if panel.ends and not narrow else 1.03  # for texts behind the bars
    low, high, kind, ticks = 0.0, max(*ends, mark) * room, "linear", []
    if not panel.stacked:
        low, high = min(mark / 2, *(cell[4] for cell in cells)), max(mark * 2, *ends)
        high, kind = high * (high / low) ** (room - 1), "log"
        ticks = round_values((low, high))
    inner, outer = NARROW_PADDING if narrow else PADDING
    y = alt.Y(
        "name:N",
        sort=None,
        scale=alt.Scale(domain=list(panel.names), paddingInner=inner, paddingOuter=outer),
        axis=alt.Axis(
            labels=named and not narrow, labelFont=MONO, labelFontSize=11, labelLimit=0,
            labelFontWeight=_bold_at(panel.chosen),
        ),
    )  # fmt: skip
    drawn = chart_of(cells, "name", "part", "start", "end", "size")
    drawn = drawn.mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=0.5).encode(
        across("start:Q", panel.unit, narrow=narrow, ticks=ticks, domain=[low, high], type=kind),
        y,
        colours("part:N", list(panel.parts), narrow=narrow, offset=MARK_TEXT),
        x2="end:Q",
        tooltip=[
            tooltip("name:N", panel.item),
            tooltip("part:N", "part"),
            tooltip("size:Q", panel.unit, format=ROUNDED),
        ],
    )
    if not panel.stacked:
        scale = alt.Scale(domain=list(panel.parts))
        drawn = drawn.encode(yOffset=alt.YOffset("part:N", sort=None, scale=scale))
    x = alt.X("at:Q", scale=alt.Scale(domain=[low, high], nice=False, type=kind))
    layers: Layers = [drawn]
    step = NARROW_BAR if narrow else BAR
    if not panel.stacked:
        step = (NARROW_PART if narrow else BAR / 2) * len(panel.parts) / (1 - inner)
    if narrow:
        layers.append(_names_above(panel, step * (1 - inner) / 2 + 7).encode(y=y))
    elif panel.ends:
        at = [max(end, mark) for end in ends]
        texts = chart_of(zip(panel.names, at, panel.ends, strict=True), "name", "at", "text")
        layers.append(texts.mark_text(align="left", dx=6).encode(y=y, x=x, text="text:N"))
    if panel.mark:
        layers += dashed(panel.mark, x, {"y": alt.value(0)}, align="right", baseline="bottom", dx=2, dy=-5)
    # of all bars: with a height in steps Vega-Lite warns on every page that it can't fit
    return layered(layers).properties(height=round(step * (len(panel.names) - inner + 2 * outer)))


def _names_above(panel: Stacks, up: float) -> alt.Chart:
    """Texts `up` px above the middle of the bars, end and name, which begin at the left edge; without the
    encoding of "name".
    """
    texts = [
        f"{end}  {name}" if len(end + name) <= MOST_NAME else name
        for end, name in zip(panel.ends or ("",) * len(panel.names), panel.names, strict=True)
    ]
    chart = chart_of(zip(panel.names, texts, strict=True), "name", "text")
    return chart.mark_text(align="left", dy=-up, font=MONO, fontSize=9.5).encode(
        x=alt.value(0), text="text:N"
    )


def _bold_at(place: int | None) -> Any:
    """Weight of axis labels: bold for the one at this place; None: of none."""
    if place is None:
        return 400
    return {"condition": {"test": f"datum.index === {place}", "value": 700}, "value": 400}


# Timeline: intervals in lanes #

LANE, THIN_LANE = 28, 18  # px of height for each lane
FEW_LANES = 6  # that are not thin
FEW_INTERVALS = 400  # that have a line around them, which would hide short ones


def timeline(panel: Timeline, *, narrow: bool = False) -> alt.LayerChart:
    """Intervals in lanes, coloured by name; many lanes are thin. narrow: for the screen of a phone."""
    lane = LANE if len(panel.lanes) <= FEW_LANES else THIN_LANE
    names = list(dict.fromkeys(interval.name for interval in panel.intervals))
    rows = ((one.lane, float(one.start), float(one.end), one.name, one.detail) for one in panel.intervals)
    bars = chart_of(rows, "lane", "start", "end", "name", "detail")
    bars = bars.transform_calculate(length="datum.end - datum.start")
    domain = {"domain": [0, max(panel.x_end, *(one.end for one in panel.intervals))]} if panel.x_end else {}
    apart = 0.5 if len(panel.intervals) <= FEW_INTERVALS else 0.0
    bars = bars.mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=apart).encode(
        across("start:Q", panel.unit, narrow=narrow, **domain),
        alt.Y("lane:N", sort=None, scale=alt.Scale(domain=list(panel.lanes), paddingInner=0.2)),
        colours("name:N", names, narrow=narrow),
        x2="end:Q",
        tooltip=[
            tooltip("lane:N", "lane"),
            tooltip("name:N", "interval"),
            tooltip("start:Q", f"start, {panel.unit}", format=ROUNDED),
            tooltip("length:Q", f"length, {panel.unit}", format=ROUNDED),
            tooltip("detail:N", "detail"),
        ],
    )
    return layered([bars]).properties(height=lane * len(panel.lanes))


# Areas on top of each other, with bands above them, and dashed marks across #

STRIP, TEXTS = 9, 16  # px of height of the bands, and of the sections' names below them
NEAR = 1.12  # times a peak, up to which a line would cross its text
EDGE = 0.05  # share of the width next to the end of a section in which a peak's text is not centred


def areas(panel: Areas, *, narrow: bool = False, pointed: bool = True) -> alt.LayerChart:
    """Chart of stacked areas with a legend of their parts.

    narrow: for the screen of a phone. pointed: with tooltips, which a picture has no use for.
    """
    rows, below = _rows(panel)
    above = (STRIP + TEXTS) / panel.height if panel.bands or panel.sections else 0.0
    room = 1.08 + above + 0.08 * bool(panel.peaks)
    highest = max(*below, panel.mark.value if panel.mark else 0.0, panel.y_end)
    up = alt.Scale(domain=[0, room * highest], nice=False)
    x = across("x:Q", panel.x_title, narrow=narrow, domain=[0, max(panel.x[-1], panel.x_end)])
    axis = alt.Axis(labelExpr=NUMBER, tickCount=5, minExtent=LABELS, title=plain(panel.unit))
    parts = list(dict.fromkeys([*panel.parts, *(band.name for band in panel.bands)]))
    colour = colours("part:N", parts, narrow=narrow)
    joined = "step-after" if panel.joined == "steps" else "linear"
    stacked = chart_of(rows, "x", "part", "start", "end")
    stacked = stacked.mark_area(orient="vertical", opacity=1, interpolate=joined)
    layers: Layers = [stacked.encode(x, alt.Y("start:Q", scale=up, axis=axis), colour, y2="end:Q")]
    if panel.bands:
        layers.append(_strip(panel).encode(x, colour))
    if pointed:
        dots = alt.Chart(table({"x": panel.x, "top": below, "text": panel.texts}))  # that can't be seen
        tips = [tooltip("text:N", "event"), tooltip("x:Q", panel.x_title, format=ROUNDED)]
        tips.append(tooltip("top:Q", panel.unit, format=ROUNDED))
        dots = dots.mark_circle(size=40, opacity=0.001)
        layers.append(dots.encode(x, alt.Y("top:Q", scale=up), tooltip=tips))
    if panel.mark:
        # Not where a peak's text is
        taken = any(_above(panel.mark, point) and 2 * point.x > panel.x[-1] for point in panel.peaks)
        end = {"x": alt.value(0 if taken else "width")}
        align = "left" if taken else "right"
        layers += dashed(panel.mark, alt.Y("at:Q", scale=up), end, align=align, baseline="bottom", dy=-4)
    at = x.copy(deep=False)
    at.shorthand = "at:Q"
    for section in panel.sections:
        y = {"y": alt.value(STRIP + 3)}
        layers += dashed(section, at, y, align="left", baseline="top", dx=5, fontWeight="bold")
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


def _strip(panel: Areas) -> alt.Chart:
    """The bands along the upper edge, without the encodings of "x" and "part"."""
    rows = ((float(band.start), float(band.end), band.name) for band in panel.bands)
    bars = chart_of(rows, "x", "end", "part").mark_rect()
    ends = [tooltip("x:Q", "from", format=ROUNDED), tooltip("end:Q", "to", format=ROUNDED)]
    y, y2 = alt.value(0), alt.value(STRIP)
    return bars.encode(x2="end:Q", y=y, y2=y2, tooltip=[tooltip("part:N", "phase"), *ends])


def _above(mark: Mark, point: Point) -> bool:
    """True if a peak's text stands above the line of a mark, which is near."""
    return mark.value < NEAR * point.y


def _peak(point: Point, panel: Areas, x: alt.X, up: alt.Y) -> list[alt.Chart]:
    """A dot with its text above it, and above a line that is near, inside its section. x, up: encodings of
    fields "x" and "top".
    """
    base = chart_of([(float(point.x), float(point.y), point.text)], "x", "top", "text").encode(x, up)
    line = panel.mark.value if panel.mark and _above(panel.mark, point) else 0.0
    words = chart_of([(float(point.x), max(float(point.y), line), point.text)], "x", "top", "text")
    ends = [section.value for section in panel.sections] + [panel.x[0], panel.x[-1]]
    near = [point.x - end for end in ends if abs(point.x - end) <= EDGE * (panel.x[-1] - panel.x[0])]
    align = "center" if not near else "left" if min(near, key=abs) >= 0 else "right"
    text = words.mark_text(align=align, baseline="bottom", dy=-6).encode(x, up, text="text:N")
    return [base.mark_circle(size=44, opacity=1, color=alt.ExprRef("ink")), text]


# Heat map: cells in shades of one colour, each with its texts #

ROW, LINE = 22, 14  # px of height for each row of cells, and for each of their lines
LINES = 3  # of a cell that there is room for at least, but on a phone
BELOW, NARROW_BELOW = 120, 46  # characters of a line below the cells
NAME, NARROW_NAME = 240, 110  # px of a line of a row's name at most
NARROW_ROWS = 300  # px of a row's name and cells on a phone
TEXT, LEAST_TEXT = 12, 8  # px of the height of a cell's first text, and of one that can still be read
CHARACTER = 0.62  # of a text's height, that a character is wide
LEAST_SPAN = 0.5  # of the highest value, that the shades span at least


def heat_map(panel: HeatMap, *, narrow: bool = False) -> alt.LayerChart:
    """Chart of cells in shades of one colour, each with its texts; without a value grey, with the first text.

    A line below the cells names the highest one. narrow: for a phone, where the other texts are as narrow as
    their longest word, or left out where it has no room.
    """
    words = " ".join(text for line in panel.cells for cell in line if cell for text in cell.texts[1:]).split()
    most = max(map(len, words), default=0) if narrow else 0
    rows = [
        (column, row, cell.value, (*cell.texts, "")[0], "\n".join(texts), cell.detail)
        for row, cells in zip(panel.rows, panel.cells, strict=True)
        for column, cell in zip(panel.columns, cells, strict=True)
        if cell is not None
        for texts in [textwrap.wrap(" ".join(cell.texts[1:]), most) if most else cell.texts[1:]]
    ]
    known = [row[2] for row in rows if row[2] is not None]
    high = max(known, default=0.0) or 1.0
    low = min(min(known, default=0.0), (1 - LEAST_SPAN) * high)
    title = [plain(panel.x_title)] * bool(panel.x_title)
    if known:
        column, row, _, first, _, detail = max(rows, key=lambda row: row[2] or 0.0)
        highest = f"highest: {first} {panel.unit}, {detail} ({row}, {column} {panel.x_title}".rstrip() + ")"
        title += _wrapped(plain(highest), NARROW_BELOW if narrow else BELOW)
    x_axis = alt.Axis(orient="bottom", labelAngle=0, grid=False, title=title, titleAnchor="end")
    lines_of = {row: name_lines(row) for row in panel.rows}
    labels = f"({json.dumps(lines_of)})[datum.label]" if narrow else "datum.label"
    y_axis = alt.Axis(
        grid=False, title=plain(panel.y_title), labelLimit=NARROW_NAME if narrow else NAME, labelExpr=labels
    )
    base = chart_of(rows, "column", "row", "value", "first", "others", "detail").encode(
        alt.X("column:N", sort=None, scale=alt.Scale(domain=list(panel.columns)), axis=x_axis),
        alt.Y("row:N", sort=None, scale=alt.Scale(domain=list(panel.rows)), axis=y_axis),
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
    firsts = [[row[3] for row in rows if (row[2] is None) == none] for none in (True, False)]
    sizes = (_narrow_size(panel, texts) if narrow else float(TEXT) for texts in (*firsts, words))
    grey, coloured, small = sizes
    lines = max(row[4].count("\n") + 2 for row in rows) if small else 1
    lines = lines if narrow else max(lines, LINES)
    up = LINE * (lines - 1) / 2  # from the middle of a cell to its first line
    first = filled.mark_text(dy=-up, fontWeight=600, fontSize=coloured)
    layers: Layers = [
        missing.mark_rect(color=alt.ExprRef("grid"), **cell),
        filled.mark_rect(**cell).encode(color=shade),
        missing.mark_text(fontSize=min(grey, TEXT - 1)).encode(text="first:N"),
        first.encode(text="first:N", color=alt.value(ON_SHADE)),
    ]
    if lines > 1:
        others = filled.mark_text(
            dy=LINE + 2 - up, lineBreak="\n", lineHeight=LINE, fontSize=min(small, TEXT - 1)
        )
        layers.append(others.encode(text="others:N", color=alt.value(ON_SHADE)))
    names = max(map(len, lines_of.values())) if narrow else 1
    return layered(layers).properties(height=len(panel.rows) * (ROW + LINE * max(lines, names)))


def _narrow_size(panel: HeatMap, texts: Sequence[str]) -> float:
    """Px of height at which all texts fit a cell on a phone, at most TEXT; 0 where they can't be read."""
    longest = max(map(len, texts), default=1) or 1
    name = min(NARROW_NAME, TEXT * CHARACTER * longest_line(panel.rows, narrow=True))
    size = (NARROW_ROWS - name) / len(panel.columns) / longest / CHARACTER
    return 0.0 if size < LEAST_TEXT else min(float(TEXT), round(size, 1))
