"""Kinds of charts as plain numbers and names; `charts` draws them with Altair.

    Lines      curves over a common x, such as the loss over steps
    Stacks     a horizontal bar for each name, cut into parts
    Scatter    groups of points, joined or not, with guide lines and labels
    Multiples  small charts side by side, with dots above names and lines through some of them
    HeatMap    a grid of cells, coloured by value
    Timeline   lanes of intervals, such as ranks and what each computes
    Areas      parts on top of each other over a common x, such as memory over a step

Nothing here imports a drawing library, so what builds panels costs nothing until something is drawn. `key` is
an identifier of letters and underscores, unique on a page; titles and names may be any text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["main", "raw", "other", "ink", "soft", "chosen"]


@dataclass(frozen=True)
class Series:
    """One curve of `Lines`."""

    name: str
    role: Role  # main: full; raw: faint, behind its smoothed version; other: second colour, with dots if few
    x: tuple[float, ...]  # ascending
    y: tuple[float, ...]  # at each x
    colour: str | None = None  # "#rrggbb", on light and dark pages; None: the role's


@dataclass(frozen=True)
class Lines:
    """Curves over a common x axis."""

    key: str
    title: str
    unit: str  # of y; shown next to the title
    series: tuple[Series, ...]
    form: str  # d3 format of a value in the tooltip, such as ".4f"
    y_title: str  # name or unit of the y axis, next to it
    from_zero: bool = False  # whether the y axis begins at 0
    x_title: str = "step"
    x_end: float | None = None  # end of the x axis, which charts side by side share; None: the last point
    height: int = 190  # px


@dataclass(frozen=True)
class Mark:
    """A dashed line across a chart, at `value` of a number axis, with `text` next to it."""

    value: float
    text: str


@dataclass(frozen=True)
class Stacks:
    """A horizontal bar for each name, its parts end to end.

    With `stacked=False` each part is a bar from the mark instead, on a logarithmic axis, the parts of a name
    below each other; a size of 0 has none.
    """

    key: str
    title: str
    unit: str  # of all sizes; shown next to the title and in tooltips
    names: tuple[str, ...]  # of the bars, top to bottom
    parts: Mapping[str, tuple[float, ...]]  # part -> its size in each bar, in the order of `names`
    ends: tuple[str, ...] = ()  # a text behind each bar, in the order of `names`; (): none
    mark: Mark | None = None
    stacked: bool = True
    item: str = "layout"  # word for a bar, in tooltips
    chosen: int | None = None  # place of the bar whose name is bold; None: no bar's


@dataclass(frozen=True)
class Axis:
    """A number axis of `Scatter`."""

    title: str  # next to the axis and in tooltips, with its unit
    ends: tuple[float, float]  # lowest and highest value; both above 0 if `log`
    log: bool = False
    ticks: tuple[float, ...] = ()  # values; empty: round values
    suffix: str = ""  # behind each tick's number, such as " GiB"
    form: str = ",.4~g"  # d3 format of a value in the tooltip


@dataclass(frozen=True)
class Point:
    """A point of `Scatter`."""

    x: float
    y: float
    text: str  # in its tooltip; as the point of a `Label`, the text that is drawn
    ends: tuple[float, float] | None = None  # lowest and highest y, where it is a median; a vertical line


@dataclass(frozen=True)
class Group:
    """Points of one colour."""

    name: str  # in the legend, which is drawn if at least two groups have a name; may be ""
    points: tuple[Point, ...]
    role: Role | None = None  # main, raw: first colour; other: second; others: the theme's; None: next
    joined: Literal["no", "line", "steps"] = "no"  # by straight lines or steps; steps: horizontal first
    size: float = 12  # area of a dot, in square px
    opacity: float = 1.0


@dataclass(frozen=True)
class Label:
    """The text of `point`, drawn next to it; `\\n` begins a new line."""

    point: Point
    align: Literal["left", "center", "right"] = "center"  # left: the text begins at the point
    above: bool = True  # the point; else below it


@dataclass(frozen=True)
class Guide:
    """A line through the points (x[i], y[i]), dashed unless `solid`, with a text at its last point."""

    x: tuple[float, ...]
    y: tuple[float, ...]  # at each x
    text: str = ""  # "": none
    solid: bool = False


@dataclass(frozen=True)
class Scatter:
    """Groups of points over two number axes."""

    key: str
    title: str
    unit: str  # shown next to the title
    groups: tuple[Group, ...]
    x: Axis
    y: Axis
    labels: tuple[Label, ...] = ()
    guides: tuple[Guide, ...] = ()
    height: int = 380  # px
    item: str = "layout"  # word for a point, in tooltips


@dataclass(frozen=True)
class Dot:
    """A dot of `Multiples`."""

    head: str  # of the small chart that it is in
    x: str  # name below it
    y: float
    group: str  # gives the colour
    text: str  # in its tooltip
    joined: bool  # by the line of its group


@dataclass(frozen=True)
class Multiples:
    """Small charts side by side over the same names, with one number axis."""

    key: str
    title: str
    unit: str  # shown next to the title
    heads: tuple[str, ...]  # of the small charts, in their order; one only: a single chart without a head
    columns: tuple[str, ...]  # names along each of them
    groups: tuple[str, ...]  # of the legend, which is drawn if there are at least two
    dots: tuple[Dot, ...]
    y: Axis
    x_title: str
    legend: str = ""  # title of the legend
    item: str = "experiment"  # word for a dot, in tooltips


@dataclass(frozen=True)
class Cell:
    """One cell of a heat map."""

    value: float | None  # gives the colour; None: grey
    texts: tuple[str, ...] = ()  # lines, the first in bold
    detail: str = ""  # in the tooltip


@dataclass(frozen=True)
class HeatMap:
    """A grid of cells, shaded by value; at least one cell is not None.

    Shades begin at the lowest value, or lower, so that they span half of the highest or more: values that
    differ by some per cent look alike.
    """

    key: str
    title: str
    unit: str  # of the values; shown next to the title and in tooltips
    columns: tuple[str, ...]
    rows: tuple[str, ...]  # top to bottom
    cells: tuple[tuple[Cell | None, ...], ...]  # [row][column]; None: nothing is drawn
    form: str = ",.0f"  # d3 format of a value in the tooltip
    item: str = "layout"  # word for a cell's detail, in tooltips
    x_title: str = ""  # of the columns' names; "": they say it themselves
    y_title: str = ""  # of the rows' names


@dataclass(frozen=True)
class Interval:
    """A bar in one lane of a `Timeline`, from `start` to `end` in the timeline's unit."""

    lane: str  # one of the timeline's
    start: float
    end: float
    name: str  # gives the colour: intervals with the same name share one
    detail: str = ""  # in the tooltip


@dataclass(frozen=True)
class Timeline:
    """Intervals of time in lanes, one below the other."""

    key: str
    title: str
    unit: str  # of start and end; shown next to the title and in tooltips
    lanes: tuple[str, ...]  # top to bottom
    intervals: tuple[Interval, ...]
    x_end: float = 0.0  # of the axis at least, which charts below each other share


@dataclass(frozen=True)
class Band:
    """A named stretch of the x axis of `Areas`."""

    start: float
    end: float
    name: str  # gives the colour


@dataclass(frozen=True)
class Areas:
    """Parts on top of each other over a common x.

    Above them stand bands, such as forward and backward, if there are any, and the sections' names.
    """

    key: str
    title: str
    unit: str  # of all sizes; next to the y axis and in tooltips
    x: tuple[float, ...]  # ascending; two equal ones are a jump
    parts: Mapping[str, tuple[float, ...]]  # part -> its size at each x
    texts: tuple[str, ...]  # of each x, in tooltips
    x_title: str
    mark: Mark | None = None  # a dashed horizontal line
    height: int = 260  # px
    joined: Literal["line", "steps"] = "line"  # steps: a size stays until the next x
    bands: tuple[Band, ...] = ()  # a strip along the upper edge
    sections: tuple[Mark, ...] = ()  # dashed vertical lines, each with the name of what begins there
    peaks: tuple[Point, ...] = ()  # dots with their texts above them
    y_end: float = 0.0  # of the y axis at least, which charts below each other share
    x_end: float = 0.0  # of the x axis at least, likewise


Panel = Lines | Stacks | Scatter | Multiples | HeatMap | Timeline | Areas
