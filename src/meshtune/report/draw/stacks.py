"""Horizontal bars cut into parts, with texts behind them and a dashed mark across."""

from typing import Any

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
from meshtune.report.draw.kinds import Mark, Stacks
from meshtune.report.draw.theme import MONO

BAR, NARROW_BAR = 28, 44  # px of height for each bar
PADDING, NARROW_PADDING = (0.3, 0.15), (0.55, 0.4)  # of that: between bars, and beside the first and the last
MOST_NAME = 52  # characters above a bar on a phone
MARK_TEXT = 22  # px between legend and bars, for the text of a mark


def stacks(panel: Stacks, *, named: bool = True, narrow: bool = False) -> alt.LayerChart:
    """Chart of horizontal bars with a legend of their parts; panel.ends and panel.mark as far as given.

    named: False leaves out the names of the bars, for a chart that stands right of one with the same names.
    narrow: for a phone, where each bar's end and name stand above it.
    """
    parts = list(panel.parts)
    cells = [
        (name, part, start, start + sizes[row], sizes[row])
        for row, name in enumerate(panel.names)
        for (part, sizes), start in zip(panel.parts.items(), _starts(panel, row), strict=True)
    ]
    data = table(dict(zip(("name", "part", "start", "end", "size"), zip(*cells, strict=True), strict=True)))
    mark = panel.mark.value if panel.mark else 0.0
    ends = [max(end for name, _, _, end, _ in cells if name == bar) for bar in panel.names]
    # for the texts behind the bars
    room = (1.08 if panel.mark else 1.3) if panel.ends and not narrow else 1.03
    across = alt.Scale(domain=[0, max(*ends, mark) * room], nice=False)
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
    bars = alt.Chart(data).mark_bar(stroke=alt.ExprRef("paper"), strokeWidth=0.5)
    bars = bars.encode(
        y=y,
        x=alt.X(
            "start:Q",
            scale=across,
            axis=alt.Axis(labelExpr=NUMBER, tickCount=4 if narrow else 8, title=plain(panel.unit)),
        ),
        x2="end:Q",
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=parts, range=colours_of(parts)),
            legend=alt.Legend(
                columns=NARROW_LEGEND_COLUMNS if narrow else LEGEND_COLUMNS,
                symbolType="square",
                offset=MARK_TEXT,
            ),
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
    if narrow:
        layers.append(_names_above(panel).encode(y=y))
    elif panel.ends:
        at = [max(end, mark) for end in ends]
        texts = alt.Chart(table({"name": panel.names, "at": at, "text": panel.ends}))
        layers.append(texts.mark_text(align="left", dx=6).encode(y=y, x=x, text="text:N"))
    if panel.mark:
        layers += _mark(panel.mark, x)
    return layered(layers).properties(height=_height(panel, narrow=narrow))


def _height(panel: Stacks, *, narrow: bool) -> int:
    """Px of all bars together: with a height in steps Vega-Lite warns on every page that it can't fit."""
    inner, outer = NARROW_PADDING if narrow else PADDING
    step = NARROW_BAR if narrow else BAR
    if not panel.stacked:
        step = step / 2 * len(panel.parts) / (1 - inner)
    return round(step * (len(panel.names) - inner + 2 * outer))


def _names_above(panel: Stacks) -> alt.Chart:
    """Texts above the bars, end and name, which begin at the left edge; without the encoding of "name"."""
    ends = panel.ends or ("",) * len(panel.names)
    texts = [
        f"{end}  {name}" if len(end + name) < MOST_NAME else f"{end}  {name[: MOST_NAME - len(end)]}…"
        for end, name in zip(ends, panel.names, strict=True)
    ]
    chart = alt.Chart(table({"name": panel.names, "text": texts}))
    mark = chart.mark_text(align="left", dy=-17, font=MONO, fontSize=9.5)
    return mark.encode(x=alt.value(0), text="text:N")


def _bold_at(place: int | None) -> Any:
    """Weight of axis labels: bold for the one at this place; None: of none."""
    if place is None:
        return 400
    return {"condition": {"test": f"datum.index === {place}", "value": 700}, "value": 400}


def _mark(mark: Mark, x: alt.X) -> list[alt.Chart]:
    """A dashed vertical line with its text above it. x: encoding of field "at" on the bars' scale."""
    base = alt.Chart(table({"at": [float(mark.value)], "text": [mark.text]})).encode(x=x)
    text = base.mark_text(align="right", baseline="bottom", dx=2, dy=-5)
    return [base.mark_rule(strokeDash=[5, 3], strokeWidth=1.3), text.encode(y=alt.value(0), text="text:N")]


def _starts(panel: Stacks, row: int) -> list[float]:
    """The beginning of each part of one bar, in the order of panel.parts: all at 0 unless panel.stacked.

    row: index of the bar in panel.names.
    """
    starts, end = [], 0.0
    for sizes in panel.parts.values():
        starts.append(end)
        end += sizes[row] if panel.stacked else 0.0
    return starts
