"""Groups of points over two number axes, joined or not, with guide lines and labels."""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import altair as alt

from meshtune.report.draw.encode import LABELS, LEGEND_COLUMNS, NUMBER, layered, plain, table, tooltip
from meshtune.report.draw.kinds import Axis, Group, Guide, Label, Scatter
from meshtune.report.draw.theme import OTHERS


def scatter(panel: Scatter, *, narrow: bool = False) -> alt.LayerChart:
    """Groups of points over guide lines, with labels. narrow: for a phone, without labels, which overlap."""
    named = [group.name for group in panel.groups if group.name]
    spare = iter(OTHERS * (1 + len(panel.groups) // len(OTHERS)))
    colours = [alt.ExprRef(_role(group)) if group.role else next(spare) for group in panel.groups]
    colour = alt.Color(
        "group:N",
        scale=alt.Scale(domain=[group.name for group in panel.groups], range=colours),
        legend=alt.Legend(columns=1 if narrow else LEGEND_COLUMNS, symbolType="circle", symbolOpacity=1)
        if len(named) > 1
        else None,
    )
    across = alt.X("x:Q", **_axis(panel.x))
    up = alt.Y("y:Q", **_axis(panel.y, least=LABELS))
    layers: list[alt.Chart | alt.LayerChart] = [
        layer for guide in panel.guides for layer in _guide(guide, across, up)
    ]
    for _, alike in groupby(panel.groups, key=lambda group: (group.joined, group.size, group.opacity)):
        layers.append(_alike(panel, [*alike], across, up, colour))
    for align in () if narrow else ("left", "center", "right"):
        for above in (True, False):
            some = [label for label in panel.labels if (label.align, label.above) == (align, above)]
            layers += [_labels(some, across, up)] if some else []
    return layered(layers).properties(height=panel.height)


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
            title=plain(axis.title),
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
    points = [(group.name, point) for group in groups for point in group.points]
    columns = {
        "x": [float(point.x) for _, point in points],
        "y": [float(point.y) for _, point in points],
        "text": [point.text for _, point in points],
    }
    look = groups[0]
    if len(groups) == 1:  # a name for each of many points would be most of the data
        base = alt.Chart(table(columns)).transform_calculate(group=json.dumps(look.name))
    else:
        base = alt.Chart(table(columns | {"group": [name for name, _ in points]}))
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
    layers: list[alt.Chart | alt.LayerChart] = [dots]
    if ends := [(point.x, *point.ends, name) for name, point in points if point.ends]:
        bars = table(dict(zip(("x", "low", "high", "group"), zip(*ends, strict=True), strict=True)))
        rule = alt.Chart(bars).mark_rule(strokeWidth=1.5)
        layers.append(rule.encode(x=across, y=_of_field(up, "low:Q"), y2="high:Q", color=colour))
    if look.joined != "no":
        interpolate = "step-after" if look.joined == "steps" else "linear"
        line = base.mark_line(interpolate=interpolate, strokeWidth=2).encode(x=across, y=up, color=colour)
        layers.insert(0, line)
    return layered(layers) if len(layers) > 1 else dots


def _of_field(up: alt.Y, field: str) -> alt.Y:
    """The encoding with its scale and axis, of another field."""
    other = up.copy(deep=False)
    other.shorthand = field
    return other


def _guide(guide: Guide, across: alt.X, up: alt.Y) -> list[alt.Chart]:
    """Layers of the line and, if it has one, of its text. across, up: as in `_alike`."""
    base = alt.Chart(table({"x": list(map(float, guide.x)), "y": list(map(float, guide.y))})).encode(
        x=across, y=up
    )
    dash = [1, 0] if guide.solid else [5, 3]
    line = base.mark_line(clip=True, color=alt.ExprRef("ink"), strokeWidth=1.3, strokeDash=dash)
    if not guide.text:
        return [line]
    last = alt.Chart(table({"x": [float(guide.x[-1])], "y": [float(guide.y[-1])], "text": [guide.text]}))
    text = last.mark_text(align="right", baseline="bottom", dy=-4).encode(x=across, y=up, text="text:N")
    return [line, text]


def _labels(labels: Sequence[Label], across: alt.X, up: alt.Y) -> alt.Chart:
    """Texts next to points. labels: not empty, all with equal align and above. across, up: see `_alike`."""
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
    return mark.encode(x=across, y=up, text="text:N")
