"""Parts that all kinds of charts share: data, layers, axes, legends, tooltips, and the rule that keeps text
harmless.

Text from data or settings is only ever a value of the data (quoted CSV), of a scale's domain or of a JSON
string, never a field's name. Names go to domains and not to `sort`: Vega-Lite makes an expression of it.
Numbers keep six digits.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from meshtune.report.draw.colours import colours_of
from meshtune.report.draw.kinds import Mark

LABELS = 46  # px at least for the labels of a number axis, so that charts below each other are in line
LEGEND_COLUMNS, NARROW_LEGEND_COLUMNS = 4, 2
NUMBER = "format(datum.value, ',~r')"  # of a tick, such as 0.25 or 12,000
ROUNDED = ",.4~g"  # d3 format of a value in a tooltip


def table(columns: Mapping[str, Sequence[Any]]) -> alt.Data:
    """Columns of equal length as data of a chart: CSV, which is half as long as Vega-Lite's JSON rows.

    A column without any str is read as numbers; None is an empty cell. ValueError for unequal lengths.
    """
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


def chart_of(rows: Iterable[Sequence[Any]], *names: str) -> alt.Chart:
    """A chart of rows without mark and encodings. names: of the columns."""
    return alt.Chart(table(dict(zip(names, zip(*rows, strict=True), strict=True))))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)


def layered(charts: Sequence[alt.Chart | alt.LayerChart]) -> alt.LayerChart:
    """Charts over each other, the first at the bottom."""
    return alt.LayerChart(layer=list(charts))


def across(field: str, title: str, *, narrow: bool, ticks: Sequence[float] = (), **scale: Any) -> alt.X:
    """A number axis from left to right. ticks: (): round values. scale: arguments of its scale."""
    given: dict[str, Any] = {"values": list(ticks)} if ticks else {"tickCount": 4 if narrow else 8}
    axis = alt.Axis(labelExpr=NUMBER, title=plain(title), **given)
    return alt.X(field, scale=alt.Scale(nice=False, **scale), axis=axis)


def colours(field: str, names: Sequence[str], *, narrow: bool, **legend: Any) -> alt.Color:
    """A colour for each name, with a legend. legend: more arguments of it."""
    columns = NARROW_LEGEND_COLUMNS if narrow else LEGEND_COLUMNS
    return alt.Color(
        field,
        scale=alt.Scale(domain=list(names), range=colours_of(names)),
        legend=alt.Legend(columns=columns, symbolType="square", **legend),
    )


def dashed(mark: Mark, axis: alt.X | alt.Y, along: Mapping[str, Any], **text: Any) -> list[alt.Chart]:
    """A dashed line across the chart and its text.

    axis: encoding of the field "at". along: encoding of the text's place on the line. text: its properties.
    """
    base = chart_of([(float(mark.value), mark.text)], "at", "text").encode(axis)
    words = base.mark_text(**text).encode(**along, text="text:N")
    return [base.mark_rule(strokeDash=[5, 3], strokeWidth=1.3), words]


def tooltip(field: str, title: str, *, format: str | None = None) -> alt.Tooltip:
    """A line of a tooltip. field: with its type, as "x:Q". format: d3 format of a number; None: none."""
    line = alt.Tooltip(field, title=plain(title))
    return line if format is None else line.format(format)


def plain(title: str) -> str:
    """A title without backslashes and control characters.

    Vega-Lite makes strings of expressions from the titles of fields and escapes only their quotes.
    """
    return "".join(c if c.isprintable() and c != "\\" else " " for c in title)
