"""Curves over a common x, with the values of all of them under the pointer; points over two number axes."""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import altair as alt

from meshtune.report.draw.encode import (
    LABELS,
    LEGEND_COLUMNS,
    NUMBER,
    chart_of,
    layered,
    plain,
    table,
    tooltip,
)
from meshtune.report.draw.kinds import Axis, Group, Guide, Label, Lines, Multiples, Scatter
from meshtune.report.draw.theme import OTHERS
from meshtune.report.draw.thin import merged, thinned

FEW = 60  # values of a series that are drawn with dots
MARGIN = 0.015  # of the x axis beyond the first and the last step
LEGEND_LETTER, LEGEND_SYMBOL = 6.5, 34  # px of a name's letter, and of its symbol with the space around it
NONE = "–"  # in a tooltip, where a series has no value
Layers = list[alt.Chart | alt.LayerChart]


# Curves #


def columns_for(names: Sequence[str], otherwise: int = 1) -> alt.ExprRef:
    """Columns of a legend that cut no name, by the width of the chart. otherwise: where Vega doesn't know it,
    as of charts together in a picture.
    """
    entries = [LEGEND_LETTER * len(name) + LEGEND_SYMBOL for name in names] or [LEGEND_SYMBOL]
    several = f"width >= {sum(entries)} ? {len(entries)} : max(1, floor(width / {max(entries)}))"
    return alt.ExprRef(f"width ? ({several}) : {otherwise}")


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
    """Name and value of the parameter that ends the x axis. A page sets it as its run continues and, with
    `begin_…`, to zoom.
    """
    last = max((one.x[-1] for one in panel.series if one.x), default=1)
    return f"end_{panel.key}", panel.x_end or last or 1


def lines(panel: Lines, dots: Sequence[bool] | None = None, *, pointed: bool = True) -> alt.LayerChart:
    """Chart of a panel's curves. dots: of `dotted`. pointed: with a tooltip of all curves' values at an x."""
    data, fields = points(panel), [f"y{n}" for n in range(len(panel.series))]
    name, value = end_of(panel)
    end, begin = alt.param(name=name, value=value), alt.param(name=f"begin_{panel.key}", value=0)
    margin = f"{MARGIN} * ({name} - {begin.name})"
    ends = (f"{begin.name} - {margin}", f"{name} + {margin}")
    inside = f"datum.x >= {begin.name} && datum.x <= {name}"
    across = alt.X("x:Q").scale(domain=[alt.ExprRef(one) for one in ends], nice=False)
    across = across.axis(
        labelExpr="datum.value % 1 ? '' : format(datum.value, ',d')",
        grid=False,
        tickCount=8,
        title=plain(panel.x_title),
        titleAnchor="end",
        labelOverlap=True,
        labelSeparation=10,
    )
    up = alt.Scale(zero=panel.from_zero, nice=5)
    names = [one.name for one in panel.series]
    colours = [one.colour or alt.ExprRef("other" if one.role == "other" else "main") for one in panel.series]
    strengths = [0.35 if one.role == "raw" else 1 for one in panel.series]
    legend = alt.Legend(symbolType="stroke", columns=columns_for(names)) if len(names) > 1 else None
    colour = alt.Color("series:O", scale=alt.Scale(domain=names, range=colours), legend=legend)
    scale = alt.Scale(type="ordinal", domain=names, range=strengths)
    strength = alt.Opacity("series:O", scale=scale, legend=legend)
    ticks = alt.Axis(
        labelExpr=tick_text(panel.form), tickCount=5, minExtent=LABELS, title=plain(panel.y_title)
    )
    base = alt.Chart(data).encode(x=across)
    layers = []
    for field, one, with_dots in zip(fields, panel.series, dots or dotted(panel), strict=True):
        point = alt.OverlayMarkDef(size=36) if with_dots else False
        layers.append(
            base.mark_line(strokeWidth=1 if one.role == "raw" else 2, point=point)
            .transform_filter(f"isValid(datum.{field}) && {inside}")
            .transform_calculate(series=json.dumps(one.name))
            .encode(y=alt.Y(f"{field}:Q", scale=up, axis=ticks), color=colour, opacity=strength)
        )
    layers += [_pointer(alt.Chart(data).transform_filter(inside), panel, fields, ends)] if pointed else []
    return layered(layers).add_params(end, begin).properties(height=panel.height)


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


# Points #

NARROW_NAME = 42  # characters of a line of the legend on a phone


def scatter(panel: Scatter, *, narrow: bool = False) -> alt.LayerChart:
    """Groups of points over guide lines, with labels. narrow: for a phone, without labels, which overlap."""
    named = [group.name for group in panel.groups if group.name]
    spare = iter(OTHERS * (1 + len(panel.groups) // len(OTHERS)))
    colours = [alt.ExprRef(_role(group)) if group.role else next(spare) for group in panel.groups]
    long = narrow and max(map(len, named), default=0) > NARROW_NAME
    lines = f"length(datum.label) > {NARROW_NAME} ? split(datum.label, ', ') : datum.label"
    colour = alt.Color(
        "group:N",
        scale=alt.Scale(domain=[group.name for group in panel.groups], range=colours),
        legend=alt.Legend(
            columns=columns_for(named, 1 if narrow else LEGEND_COLUMNS), symbolType="circle",
            symbolOpacity=1, labelExpr=lines if long else alt.Undefined,
        )
        if len(named) > 1
        else None,
    )  # fmt: skip
    across = alt.X("x:Q", **_axis(panel.x))
    up = alt.Y("y:Q", **_axis(panel.y, least=LABELS))
    layers: Layers = [layer for guide in panel.guides for layer in _guide(guide, across, up)]
    for _, alike in groupby(panel.groups, key=lambda group: (group.joined, group.size, group.opacity)):
        layers.append(_alike(panel, [*alike], across, up, colour))
    for align in () if narrow else ("left", "center", "right"):
        for above in (True, False):
            some = [label for label in panel.labels if (label.align, label.above) == (align, above)]
            layers += [_labels(some, across, up)] if some else []
    return layered(layers).properties(height=panel.height)


SMALL, APART = 4, 22  # charts side by side at most, and px between them
SMALL_HEIGHT, LOW = 200, 140  # px, and in a column of a paper
CROWDED, NARROW_CROWDED = 26, 12  # characters below a small chart, above which they are turned


def multiples(panel: Multiples, *, narrow: bool = False) -> alt.LayerChart | alt.FacetChart:
    """Dots over names, and lines through those that are joined; in small charts where there are several."""
    rows = (
        (panel.heads.index(one.head), one.head, one.x, one.y, one.group, one.text, int(one.joined))
        for one in panel.dots
    )
    data = chart_of(rows, "place", "head", "x", "y", "group", "text", "joined").data
    colour = alt.Color(
        "group:N",
        scale=alt.Scale(domain=list(panel.groups), range=[*OTHERS]),
        legend=alt.Legend(title=plain(panel.legend) or None, symbolType="circle",
                          symbolOpacity=1, columns=3 if narrow else LEGEND_COLUMNS)
        if len(panel.groups) > 1
        else None,
    )  # fmt: skip
    crowded = NARROW_CROWDED if narrow and len(panel.heads) > 1 else CROWDED
    turned = sum(map(len, panel.columns)) > crowded
    axis = alt.Axis(labelAngle=-40 if turned else 0, title=plain(panel.x_title), titleAnchor="end")
    across = alt.X("x:N", sort=None, scale=alt.Scale(domain=list(panel.columns)), axis=axis)
    base = alt.Chart().encode(x=across, y=alt.Y("y:Q", **_axis(panel.y, least=LABELS)), color=colour)
    tips = [tooltip("text:N", panel.item), tooltip("x:N", panel.x_title), tooltip("y:Q", panel.y.title)]
    tips[-1] = tips[-1].format(panel.y.form)
    dots = base.mark_circle(size=22, opacity=0.4).encode(tooltip=tips)
    line = base.transform_filter("datum.joined > 0").mark_line(
        strokeWidth=2, point=alt.OverlayMarkDef(size=36)
    )
    chart = layered([dots, line]).properties(height=LOW if narrow else SMALL_HEIGHT, data=data)
    if len(panel.heads) < 2:
        return chart
    head = alt.Header(title=None, labelAnchor="start", labelPadding=4)
    facet = alt.Facet("head:N", sort=alt.EncodingSortField("place", op="min"), header=head)
    return chart.facet(facet=facet, columns=small_columns(panel, narrow=narrow), spacing=APART)


def small_columns(panel: Multiples, *, narrow: bool = False) -> int:
    """Small charts in a row, so that the rows are as full as they can be."""
    most = 2 if narrow else SMALL
    return -(-len(panel.heads) // -(-len(panel.heads) // most))


def _role(group: Group) -> str:
    return "main" if group.role in (None, "raw") else group.role


def _axis(axis: Axis, *, least: int = 0) -> dict[str, Any]:
    """Arguments `scale` and `axis` of an Altair encoding. least: px that its tick labels take at least."""
    ticks = list(axis.ticks) or (round_values(axis.ends) if axis.log else [])
    given: dict[str, Any] = {"values": ticks} if ticks else {"tickCount": 6}
    return {
        "scale": alt.Scale(type="log" if axis.log else "linear", domain=list(axis.ends), nice=False),
        "axis": alt.Axis(
            labelExpr=f"{NUMBER} + {json.dumps(axis.suffix)}",
            labelOverlap=True,
            minExtent=least,
            title=plain(axis.title + " (log)" * axis.log),
            **given,
        ),
    }


def round_values(ends: tuple[float, float]) -> list[float]:
    """A handful of round values inside `ends` (lowest, highest; above 0) of a logarithmic axis."""
    low, high = map(math.log10, ends)
    digits = (1, 2, 3, 5, 7) if high - low < 1 else (1, 2, 5) if high - low < 3 else (1,)
    powers = range(math.floor(low), math.ceil(high))
    values = [digit * 10.0**power for power in powers for digit in digits]
    return [value for value in values if ends[0] <= value <= ends[1]]


def _alike(
    panel: Scatter, groups: Sequence[Group], across: alt.X, up: alt.Y, colour: alt.Color
) -> alt.Chart | alt.LayerChart:
    """Dots of groups that are drawn alike and, where they are joined, a line through each group's points.

    across, up: encodings of fields "x" and "y", the same for all layers. colour: that of field "group".
    """
    rows = [
        (float(point.x), float(point.y), point.text, group.name) for group in groups for point in group.points
    ]
    look = groups[0]
    if len(groups) == 1:  # a name for each of many points would be most of the data
        base = chart_of((row[:3] for row in rows), "x", "y", "text")
        base = base.transform_calculate(group=json.dumps(look.name))
    else:
        base = chart_of(rows, "x", "y", "text", "group")
    dots = base.mark_circle(size=look.size, opacity=look.opacity).encode(
        x=across,
        y=up,
        color=colour,
        tooltip=[
            tooltip("text:N", panel.item),
            tooltip("x:Q", panel.x.title, format=panel.x.form),
            tooltip("y:Q", panel.y.title, format=panel.y.form),
        ],
    )
    layers: Layers = [dots]
    if ends := [(one.x, *one.ends, group.name) for group in groups for one in group.points if one.ends]:
        low = up.copy(deep=False)
        low.shorthand = "low:Q"
        rule = chart_of(ends, "x", "low", "high", "group").mark_rule(strokeWidth=1.5)
        layers.append(rule.encode(x=across, y=low, y2="high:Q", color=colour))
    if look.joined != "no":
        interpolate = "step-after" if look.joined == "steps" else "linear"
        line = base.mark_line(interpolate=interpolate, strokeWidth=2).encode(x=across, y=up, color=colour)
        layers.insert(0, line)
    return layered(layers) if len(layers) > 1 else dots


def _guide(guide: Guide, across: alt.X, up: alt.Y) -> list[alt.Chart]:
    """Layers of the line and, if it has one, of its text. across, up: as in `_alike`."""
    base = chart_of(zip(map(float, guide.x), map(float, guide.y), strict=True), "x", "y")
    base = base.encode(x=across, y=up)
    dash = [1, 0] if guide.solid else [5, 3]
    line = base.mark_line(clip=True, color=alt.ExprRef("ink"), strokeWidth=1.3, strokeDash=dash)
    if not guide.text:
        return [line]
    last = chart_of([(float(guide.x[-1]), float(guide.y[-1]), guide.text)], "x", "y", "text")
    text = last.mark_text(align="right", baseline="bottom", dy=-4).encode(x=across, y=up, text="text:N")
    return [line, text]


def _labels(labels: Sequence[Label], across: alt.X, up: alt.Y) -> alt.Chart:
    """Texts next to points. labels: not empty, all with equal align and above. across, up: see `_alike`."""
    rows = ((float(one.point.x), float(one.point.y), one.point.text) for one in labels)
    align, above = labels[0].align, labels[0].above
    lines = 1 + max(label.point.text.count("\n") for label in labels)
    mark = chart_of(rows, "x", "y", "text").mark_text(
        align=align,
        baseline="bottom" if above else "top",
        lineBreak="\n",
        lineHeight=14,
        dx={"left": 5, "center": 0, "right": -5}[align],
        dy=-7 - 14 * (lines - 1) if above else 7,
    )
    return mark.encode(x=across, y=up, text="text:N")
