"""Panels as Vega-Lite specifications without a theme; one module draws each kind.

Importing this module imports Altair: import it inside the function that draws, after `vega.require()`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import altair as alt
from altair.utils.schemapi import debug_mode

from meshtune.report.draw.areas import areas
from meshtune.report.draw.heat_map import heat_map
from meshtune.report.draw.kinds import Areas, HeatMap, Lines, Panel, Scatter, Series, Stacks, Timeline
from meshtune.report.draw.lines import dotted, end_of, lines, points
from meshtune.report.draw.scatter import scatter
from meshtune.report.draw.stacks import stacks
from meshtune.report.draw.timeline import timeline

NO_UNIT = "\u00a0"  # keeps titles side by side in line
Width = int | Literal["container"]


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
        spec = json.loads(_of_curves(empty, dotted(panel), width, title_offset))
        spec["data"]["values"] = points(panel)["values"]
        name, end = end_of(panel)
        next(one for one in spec["params"] if one["name"] == name)["value"] = end
        return spec
    with debug_mode(False):
        chart = drawn(panel, named=named, narrow=narrow, pointed=width == "container")
        return _specification(chart, panel, width, title_offset)


@lru_cache(maxsize=256)
def _of_curves(empty: Lines, dots: Sequence[bool], width: Width, title_offset: int | None) -> str:
    """Specification, as JSON, of a panel of curves without their points: Altair takes longest for it, and
    the page of a run that continues needs it again and again.
    """
    with debug_mode(False):
        return json.dumps(_specification(lines(empty, dots), empty, width, title_offset))


def _specification(
    chart: alt.LayerChart, panel: Panel, width: Width, title_offset: int | None
) -> dict[str, Any]:
    """A chart as `specification` gives it. Altair's checks, which tests make, take half of its time."""
    chart = chart.properties(width=width)
    if width == "container":
        chart = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    if title_offset is not None:
        title = alt.Title(panel.title, subtitle=panel.unit or NO_UNIT, offset=title_offset)
        chart = chart.properties(title=title)
    return {name: value for name, value in chart.to_dict(validate=False).items() if name != "config"}


def drawn(panel: Panel, *, named: bool = True, narrow: bool = False, pointed: bool = True) -> alt.LayerChart:
    """A panel as an Altair chart without width and title.

    named, narrow: as in `specification`. pointed: False leaves out layers that only have tooltips.
    """
    match panel:
        case Lines():
            return lines(panel)
        case Stacks():
            return stacks(panel, named=named, narrow=narrow)
        case Scatter():
            return scatter(panel, narrow=narrow)
        case HeatMap():
            return heat_map(panel, narrow=narrow)
        case Timeline():
            return timeline(panel, narrow=narrow)
        case Areas():
            return areas(panel, narrow=narrow, pointed=pointed)
