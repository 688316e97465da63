"""Curves over a common x, with the values of all of them under the pointer."""

import json
from collections.abc import Sequence

import altair as alt

from meshtune.report.draw.encode import LABELS, layered, plain, table, tooltip
from meshtune.report.draw.kinds import Lines
from meshtune.report.draw.thin import merged, thinned

FEW = 60  # values of a series that are drawn with dots
MARGIN = 0.015  # of the x axis beyond the first and the last step
NONE = "–"  # in a tooltip, where a series has no value


def points(panel: Lines) -> alt.Data:
    """Table of a panel's curves, thinned to MOST_ROWS steps: columns x, y0, y1 …"""
    x, columns = merged(panel.series)
    rows = thinned(columns)
    return table(
        {"x": [x[row] for row in rows]}
        | {f"y{n}": [column[row] for row in rows] for n, column in enumerate(columns)}
    )


def dotted(panel: Lines) -> tuple[bool, ...]:
    """For each curve, whether its points are drawn with dots."""
    return tuple((one.role == "other" and len(one.x) <= FEW) or len(one.x) == 1 for one in panel.series)


def end_of(panel: Lines) -> tuple[str, float]:
    """Name and value of the parameter that ends the x axis. A page which continues sets it."""
    last = max((one.x[-1] for one in panel.series if one.x), default=1)
    return f"end_{panel.key}", panel.x_end or last or 1


def lines(panel: Lines, dots: Sequence[bool] | None = None) -> alt.LayerChart:
    """Chart of a panel's curves, with a tooltip of all curves' values at an x. dots: of `dotted`."""
    data, fields = points(panel), [f"y{n}" for n in range(len(panel.series))]
    name, value = end_of(panel)
    end = alt.param(name=name, value=value)
    ends = (f"-{MARGIN} * {name}", f"{1 + MARGIN} * {name}")
    across = alt.X("x:Q").scale(domain=[alt.ExprRef(one) for one in ends], nice=False)
    across = across.axis(
        format=",d", grid=False, tickCount=8, tickMinStep=1, title=plain(panel.x_title), titleAnchor="end"
    )
    up = alt.Scale(zero=panel.from_zero, nice=5)
    names = [one.name for one in panel.series]
    colours = [one.colour or alt.ExprRef("other" if one.role == "other" else "main") for one in panel.series]
    legend = alt.Legend(symbolType="stroke") if len(names) > 1 else None
    colour = alt.Color("series:O", scale=alt.Scale(domain=names, range=colours), legend=legend)
    strength = alt.Opacity(
        "series:O",
        scale=alt.Scale(
            type="ordinal",
            domain=names,
            range=[0.35 if one.role == "raw" else 1 for one in panel.series],
        ),
        legend=legend,
    )
    base = alt.Chart(data).encode(x=across)
    layers = []
    for field, one, with_dots in zip(fields, panel.series, dots or dotted(panel), strict=True):
        point = alt.OverlayMarkDef(size=36) if with_dots else False
        ticks = alt.Axis(
            labelExpr=tick_text(panel.form), tickCount=5, minExtent=LABELS, title=plain(panel.y_title)
        )
        layers.append(
            base.mark_line(strokeWidth=1 if one.role == "raw" else 2, point=point)
            .transform_filter(f"isValid(datum.{field})")
            .transform_calculate(series=json.dumps(one.name))
            .encode(y=alt.Y(f"{field}:Q", scale=up, axis=ticks), color=colour, opacity=strength)
        )
    chart = layered([*layers, _pointer(alt.Chart(data), panel, fields, ends)]).add_params(end)
    return chart.properties(height=panel.height)


def _pointer(base: alt.Chart, panel: Lines, fields: Sequence[str], ends: tuple[str, str]) -> alt.Chart:
    """Layer of one band around each x, invisible until pointed at, with the values of every series there.

    base: a chart of the data without encodings; the data has column "x". fields: the data's column of each
    series' y, in the order of `panel.series`. ends: expressions of the lowest and the highest x of the axis.
    """
    under = alt.selection_point(
        name=f"under_pointer_{panel.key}", on="pointerover", clear="pointerout", fields=["x"], empty=False
    )
    form, none = json.dumps(panel.form), json.dumps(NONE)
    texts = {
        f"{field}_text": f"isValid(datum.{field}) ? format(datum.{field}, {form}) : {none}"
        for field in fields
    }
    halfway = {
        "left": f"isValid(datum.before) ? (datum.before + datum.x) / 2 : {ends[0]}",
        "right": f"isValid(datum.after) ? (datum.x + datum.after) / 2 : {ends[1]}",
    }
    values = [tooltip(f"{field}_text:N", one.name) for field, one in zip(fields, panel.series, strict=True)]
    return (
        base.transform_window(before="lag(x)", after="lead(x)", sort=[alt.SortField("x")])
        .transform_calculate(**texts, **halfway)
        .mark_rect(color=alt.ExprRef("ink"))
        .encode(
            x=alt.X("left:Q").scale(domain=[alt.ExprRef(one) for one in ends], nice=False),
            x2="right:Q",
            opacity=alt.condition(under, alt.value(0.12), alt.value(0)),
            tooltip=[tooltip("x:Q", f"at {panel.x_title}", format=","), *values],
        )
        .add_params(under)
    )


def tick_text(form: str) -> str:
    """Vega expression of a tick's label, with fewer digits than `form`: ticks are round values.

    form: d3 format of exact values, in tooltips.
    """
    if form.startswith(","):
        return "format(datum.value, '~s')"
    if form.endswith("%"):
        return "format(datum.value, '.0%')"
    return f"datum.value ? format(datum.value, '~{'e' if form.endswith('e') else 'r'}') : '0'"
