"""Each kind of chart as an Altair chart, that is a Vega-Lite specification without width, title and theme.

Importing this module imports Altair: import it inside the function that draws, after `vega.require()`. Text
from data or settings is only ever a value of the data (quoted CSV), of a scale's domain or of a JSON string,
never a field's name. Names go to domains and not to `sort`, of which Vega-Lite makes an expression. Numbers
keep six digits.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from meshtune.report.draw.kinds import (
    Axis,
    Group,
    Guide,
    HeatMap,
    Label,
    Lines,
    Mark,
    Panel,
    Scatter,
    Stacks,
    Timeline,
)
from meshtune.report.draw.theme import MONO, ON_DARK_SHADE, ON_LIGHT_SHADE, OTHERS, SHADES, colours_of
from meshtune.report.draw.thin import merged, thinned

FEW = 60  # values of a series that are drawn with dots
BAR, LANE, ROW = 28, 28, 64  # px of height for each bar, lane and row of cells
LABELS = 46  # px at least for the labels of a number axis, so that charts below each other are in line
LEGEND_COLUMNS = 4
MARK_TEXT = 22  # px between legend and bars, for the text of a mark
NUMBER = "format(datum.value, ',~r')"  # of a tick, such as 0.25 or 12,000
NO_UNIT = "\u00a0"  # keeps titles side by side in line
NONE = "–"  # in a tooltip, where a series has no value


def specification(
    panel: Panel,
    *,
    width: int | Literal["container"],
    title_offset: int | None = None,
    named: bool = True,
) -> dict[str, Any]:
    """A panel as a Vega-Lite specification without a theme.

    width: px of the plot, or "container" for the width of the page's element. title_offset: px between title
    and chart; None draws no title. named: False leaves out the names of stacks, which the chart to its left
    shows.
    """
    chart = drawn(panel, named=named).properties(width=width)
    if title_offset is not None:
        title = alt.Title(panel.title, subtitle=panel.unit or NO_UNIT, offset=title_offset)
        chart = chart.properties(title=title)
    return {name: value for name, value in chart.to_dict().items() if name != "config"}


def drawn(panel: Panel, *, named: bool = True) -> alt.LayerChart:
    """A panel as an Altair chart without width and title."""
    match panel:
        case Lines():
            return lines(panel)
        case Stacks():
            return stacks(panel, named=named)
        case Scatter():
            return scatter(panel)
        case HeatMap():
            return heat_map(panel)
        case Timeline():
            return timeline(panel)


def table(columns: Mapping[str, Sequence[Any]]) -> alt.Data:
    """Columns as data of a chart: CSV, which is half as long as Vega-Lite's JSON rows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*([_cell(value) for value in column] for column in columns.values()), strict=True))
    numbers = {
        name: "number"
        for name, column in columns.items()
        if not any(isinstance(value, str) for value in column)
    }
    return alt.Data(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=numbers))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)


def layered(charts: Sequence[alt.Chart | alt.LayerChart]) -> alt.LayerChart:
    """Charts over each other, the first at the bottom."""
    return alt.LayerChart(layer=list(charts))


def tooltip(field: str, title: str, *, format: str | None = None) -> alt.Tooltip:
    """A line of a tooltip. format: d3 format of numbers."""
    line = alt.Tooltip(field, title=plain(title))
    return line if format is None else line.format(format)


def plain(title: str) -> str:
    """A title without backslashes and control characters.

    Vega-Lite makes strings of expressions from the titles of fields and escapes only their quotes.
    """
    return "".join(c if c.isprintable() and c != "\\" else " " for c in title)


# lines #


def lines(panel: Lines) -> alt.LayerChart:
    """Curves, and under the pointer the values of all of them."""
    x, columns = merged(panel.series)
    rows = thinned(columns)
    fields = [f"y{n}" for n in range(len(columns))]
    data = table(
        {"x": [x[row] for row in rows]}
        | {name: [column[row] for row in rows] for name, column in zip(fields, columns, strict=True)}
    )
    end = panel.x_end or max(x, default=1) or 1
    across = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[-0.015 * end, 1.015 * end], nice=False),
        axis=alt.Axis(
            format=",d", grid=False, tickCount=8, tickMinStep=1, title=plain(panel.x_title), titleAnchor="end"
        ),
    )
    up = alt.Scale(zero=panel.from_zero, nice=True)
    names = [one.name for one in panel.series]
    roles = [alt.ExprRef("other" if one.role == "other" else "main") for one in panel.series]
    legend = alt.Legend(symbolType="stroke") if len(names) > 1 else None
    colour = alt.Color("series:N", scale=alt.Scale(domain=names, range=roles), legend=legend)
    strength = alt.Opacity(
        "series:N",
        scale=alt.Scale(domain=names, range=[0.35 if one.role == "raw" else 1 for one in panel.series]),
        legend=legend,
    )
    base = alt.Chart(data).encode(x=across)
    layers = []
    for field, one in zip(fields, panel.series, strict=True):
        dots = (one.role == "other" and len(one.x) <= FEW) or len(one.x) == 1
        point = alt.OverlayMarkDef(size=36) if dots else False
        ticks = alt.Axis(labelExpr=tick_text(panel.form), tickCount=5, minExtent=LABELS)
        layers.append(
            base.mark_line(strokeWidth=1 if one.role == "raw" else 2, point=point)
            .transform_filter(f"isValid(datum.{field})")
            .transform_calculate(series=json.dumps(one.name))
            .encode(y=alt.Y(f"{field}:Q", scale=up, axis=ticks), color=colour, opacity=strength)
        )
    return layered([*layers, _pointer(base, panel, fields)]).properties(height=panel.height)


def _pointer(base: alt.Chart, panel: Lines, fields: Sequence[str]) -> alt.Chart:
    """A rule at the x nearest to the pointer, with the values of every series there."""
    name = f"nearest_{panel.key}"
    nearest = alt.selection_point(
        name=name, nearest=True, on="pointermove", clear="pointerout", fields=["x"], empty=False
    )
    form, none = json.dumps(panel.form), json.dumps(NONE)
    texts = {
        f"{field}_text": f"isValid(datum.{field}) ? format(datum.{field}, {form}) : {none}"
        for field in fields
    }
    values = [tooltip(f"{field}_text:N", one.name) for field, one in zip(fields, panel.series, strict=True)]
    return (
        base.transform_calculate(**texts)
        .mark_rule()
        .encode(
            opacity=alt.condition(nearest, alt.value(0.4), alt.value(0)),
            tooltip=[tooltip("x:Q", panel.x_title, format=","), *values],
        )
        .add_params(nearest)
    )


def tick_text(form: str) -> str:
    """Vega expression of a tick's label. Round values need fewer digits than `form`, that of exact ones."""
    if form.startswith(","):
        return "format(datum.value, '~s')"
    if form.endswith("%"):
        return "format(datum.value, '.0%')"
    return f"datum.value ? format(datum.value, '~{'e' if form.endswith('e') else 'r'}') : '0'"


# stacks #


def stacks(panel: Stacks, *, named: bool = True) -> alt.LayerChart:
    """Horizontal bars with a legend of their parts, texts behind them and a dashed mark across."""
    parts = list(panel.parts)
    cells = [
        (name, part, start, start + sizes[row], sizes[row])
        for row, name in enumerate(panel.names)
        for (part, sizes), start in zip(panel.parts.items(), _starts(panel, row), strict=True)
    ]
    data = table(dict(zip(("name", "part", "start", "end", "size"), zip(*cells, strict=True), strict=True)))
    mark = panel.mark.value if panel.mark else 0.0
    ends = [max(end for name, _, _, end, _ in cells if name == bar) for bar in panel.names]
    room = (1.08 if panel.mark else 1.3) if panel.ends else 1.03  # for the texts behind the bars
    across = alt.Scale(domain=[0, max(*ends, mark) * room], nice=False)
    y = alt.Y(
        "name:N",
        sort=None,
        scale=alt.Scale(domain=list(panel.names), paddingInner=0.3, paddingOuter=0.15),
        axis=alt.Axis(labels=named, labelFont=MONO, labelFontSize=11, labelLimit=0),
    )
    bars = alt.Chart(data).mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=0.5)
    bars = bars.encode(
        y=y,
        x=alt.X("start:Q", scale=across, axis=alt.Axis(labelExpr=NUMBER, tickCount=8)),
        x2="end:Q",
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=parts, range=colours_of(parts)),
            legend=alt.Legend(columns=LEGEND_COLUMNS, symbolType="square", offset=MARK_TEXT),
        ),
        tooltip=[
            tooltip("name:N", panel.item),
            tooltip("part:N", "part"),
            tooltip("size:Q", panel.unit, format=",.4~g"),
        ],
    )
    if not panel.stacked:
        bars = bars.encode(yOffset=alt.YOffset("part:N", sort=None, scale=alt.Scale(domain=parts)))
    x = alt.X("at:Q", scale=across)
    layers = [bars]
    if panel.ends:
        at = [max(end, mark) for end in ends]
        texts = alt.Chart(table({"name": panel.names, "at": at, "text": panel.ends}))
        layers.append(texts.mark_text(align="left", dx=6).encode(y=y, x=x, text="text:N"))
    if panel.mark:
        layers += _mark(panel.mark, x)
    return layered(layers).properties(height=alt.Step(BAR if panel.stacked else BAR / 2))


def _mark(mark: Mark, x: alt.X) -> list[alt.Chart]:
    """A dashed vertical line with its text above it."""
    base = alt.Chart(table({"at": [float(mark.value)], "text": [mark.text]})).encode(x=x)
    text = base.mark_text(align="right", baseline="bottom", dx=2, dy=-5)
    return [base.mark_rule(strokeDash=[5, 3], strokeWidth=1.3), text.encode(y=alt.value(0), text="text:N")]


def _starts(panel: Stacks, row: int) -> list[float]:
    """Where each part of a bar begins."""
    starts, end = [], 0.0
    for sizes in panel.parts.values():
        starts.append(end)
        end += sizes[row] if panel.stacked else 0.0
    return starts


# scatter #


def scatter(panel: Scatter) -> alt.LayerChart:
    """Groups of points over guide lines, with labels."""
    named = [group.name for group in panel.groups if group.name]
    spare = iter(OTHERS * (1 + len(panel.groups) // len(OTHERS)))
    colours = [alt.ExprRef(_role(group)) if group.role else next(spare) for group in panel.groups]
    colour = alt.Color(
        "group:N",
        scale=alt.Scale(domain=[group.name for group in panel.groups], range=colours),
        legend=alt.Legend(columns=LEGEND_COLUMNS, symbolType="circle", symbolOpacity=1)
        if len(named) > 1
        else None,
    )
    x, y = alt.X("x:Q", **_axis(panel.x)), alt.Y("y:Q", **_axis(panel.y))
    layers: list[alt.Chart | alt.LayerChart] = [
        layer for guide in panel.guides for layer in _guide(guide, x, y)
    ]
    for group in panel.groups:
        layers.append(_group(panel, group, x, y, colour))
    for align in ("left", "center", "right"):
        for above in (True, False):
            some = [label for label in panel.labels if (label.align, label.above) == (align, above)]
            layers += [_labels(some, x, y)] if some else []
    return layered(layers).properties(height=panel.height)


def _role(group: Group) -> str:
    return "other" if group.role == "other" else "main"


def _axis(axis: Axis) -> dict[str, Any]:
    """Scale and axis of one direction of a scatter chart."""
    given: dict[str, Any] = {"values": list(axis.ticks)} if axis.ticks else {"tickCount": 6}
    return {
        "scale": alt.Scale(type="log" if axis.log else "linear", domain=list(axis.ends), nice=False),
        "axis": alt.Axis(
            labelExpr=f"{NUMBER} + {json.dumps(axis.suffix)}",
            labelOverlap=True,
            minExtent=LABELS,
            title=plain(axis.title) if axis.show_title else None,
            **given,
        ),
    }


def _group(panel: Scatter, group: Group, x: alt.X, y: alt.Y, colour: alt.Color) -> alt.Chart | alt.LayerChart:
    """Dots of a group and, where they are joined, the line through them."""
    columns = {
        "x": [float(point.x) for point in group.points],
        "y": [float(point.y) for point in group.points],
        "text": [point.text for point in group.points],
    }
    base = alt.Chart(table(columns)).transform_calculate(group=json.dumps(group.name))
    dots = base.mark_circle(size=group.size, opacity=group.opacity).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=[
            tooltip("text:N", panel.item),
            tooltip("x:Q", panel.x.title, format=panel.x.form),
            tooltip("y:Q", panel.y.title, format=panel.y.form),
        ],
    )
    if group.joined == "no":
        return dots
    interpolate = "step-after" if group.joined == "steps" else "linear"
    line = base.mark_line(interpolate=interpolate, strokeWidth=2).encode(x=x, y=y, color=colour)
    return layered([line, dots])


def _guide(guide: Guide, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    base = alt.Chart(table({"x": list(map(float, guide.x)), "y": list(map(float, guide.y))})).encode(x=x, y=y)
    line = base.mark_line(
        color=alt.ExprRef("ink"), strokeWidth=1.3, strokeDash=[1, 0] if guide.solid else [5, 3]
    )
    if not guide.text:
        return [line]
    last = alt.Chart(table({"x": [float(guide.x[-1])], "y": [float(guide.y[-1])], "text": [guide.text]}))
    text = last.mark_text(align="right", baseline="bottom", dy=-4).encode(x=x, y=y, text="text:N")
    return [line, text]


def _labels(labels: Sequence[Label], x: alt.X, y: alt.Y) -> alt.Chart:
    """Texts beside points, all on the same side of them."""
    columns = {
        "x": [float(label.point.x) for label in labels],
        "y": [float(label.point.y) for label in labels],
        "text": [label.point.text for label in labels],
    }
    align, above = labels[0].align, labels[0].above
    lines = 1 + max(label.point.text.count("\n") for label in labels)
    mark = alt.Chart(table(columns)).mark_text(
        align=align,
        baseline="bottom" if above else "top",
        lineBreak="\n",
        lineHeight=14,
        dx={"left": 5, "center": 0, "right": -5}[align],
        dy=-7 - 14 * (lines - 1) if above else 7,
    )
    return mark.encode(x=x, y=y, text="text:N")


# heat map and timeline #


def heat_map(panel: HeatMap) -> alt.LayerChart:
    """Cells in shades of blue, each with its texts; without a value grey."""
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


def timeline(panel: Timeline) -> alt.LayerChart:
    """Intervals in lanes, coloured by name."""
    names = list(dict.fromkeys(interval.name for interval in panel.intervals))
    columns = {
        "lane": [interval.lane for interval in panel.intervals],
        "start": [float(interval.start) for interval in panel.intervals],
        "end": [float(interval.end) for interval in panel.intervals],
        "name": [interval.name for interval in panel.intervals],
        "detail": [interval.detail for interval in panel.intervals],
    }
    bars = alt.Chart(table(columns)).transform_calculate(length="datum.end - datum.start")
    bars = bars.mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=0.5).encode(
        y=alt.Y("lane:N", sort=None, scale=alt.Scale(domain=list(panel.lanes), paddingInner=0.2)),
        x=alt.X("start:Q", scale=alt.Scale(nice=False), axis=alt.Axis(labelExpr=NUMBER, tickCount=8)),
        x2="end:Q",
        color=alt.Color(
            "name:N",
            scale=alt.Scale(domain=names, range=colours_of(names)),
            legend=alt.Legend(columns=LEGEND_COLUMNS, symbolType="square"),
        ),
        tooltip=[
            tooltip("lane:N", "lane"),
            tooltip("name:N", "interval"),
            tooltip("start:Q", f"start, {panel.unit}", format=",.4~g"),
            tooltip("length:Q", f"length, {panel.unit}", format=",.4~g"),
            tooltip("detail:N", "detail"),
        ],
    )
    return layered([bars]).properties(height=alt.Step(LANE))
