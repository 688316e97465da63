"""Kinds of charts as plain numbers and names; `charts` draws them with Altair.

    Lines      curves over a common x, such as the loss over steps
    Stacks     a horizontal bar for each name, cut into parts
    Scatter    groups of points, joined or not, with guide lines and labels
    HeatMap    a grid of cells, coloured by value
    Timeline   lanes of intervals, such as ranks and what each computes

Nothing here imports a drawing library, so what builds panels costs nothing until something is drawn. `key` is
an identifier of letters and underscores, unique on a page; titles and names may be any text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["main", "raw", "other"]


@dataclass(frozen=True)
class Series:
    """One curve of `Lines`."""

    name: str
    role: Role  # main: full; raw: faint, behind its smoothed version; other: second colour, with dots if few
    x: tuple[float, ...]  # ascending
    y: tuple[float, ...]


@dataclass(frozen=True)
class Lines:
    """Curves over a common x axis."""

    key: str
    title: str
    unit: str
    series: tuple[Series, ...]
    form: str  # d3 format of a value in the tooltip, such as ".4f"
    from_zero: bool = False  # whether the y axis begins at 0
    x_title: str = "step"
    x_end: float | None = None  # end of the x axis, which charts side by side share; None: the last point
    height: int = 190  # px


@dataclass(frozen=True)
class Mark:
    """A dashed line across a chart, at `value` of its number axis."""

    value: float
    text: str


@dataclass(frozen=True)
class Stacks:
    """A horizontal bar for each name, cut into parts (or with `stacked=False` the parts below each other)."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]  # top to bottom
    parts: Mapping[str, tuple[float, ...]]  # part -> its size for each name
    ends: tuple[str, ...] = ()  # texts written behind the bars
    mark: Mark | None = None
    stacked: bool = True
    item: str = "layout"  # word for a bar, in tooltips


@dataclass(frozen=True)
class Axis:
    """A number axis of `Scatter`."""

    title: str  # in tooltips
    ends: tuple[float, float]
    log: bool = False
    ticks: tuple[float, ...] = ()  # empty: round values
    suffix: str = ""  # behind each tick's number, such as " GiB"
    form: str = ",.4~g"  # d3 format of a value in the tooltip
    show_title: bool = False


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Group:
    """Points of one colour."""

    name: str  # in the legend, where several groups are named; may be ""
    points: tuple[Point, ...]
    role: Role | None = None  # None: the next colour of the palette
    joined: Literal["no", "line", "steps"] = "no"  # steps: horizontal first
    size: float = 12  # area of a dot, in square px
    opacity: float = 1.0


@dataclass(frozen=True)
class Label:
    """Text beside a point; `\\n` begins a new line."""

    point: Point
    align: Literal["left", "center", "right"] = "center"
    above: bool = True


@dataclass(frozen=True)
class Guide:
    """A line through the given points, dashed unless `solid`, with a text at its last point."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    text: str = ""
    solid: bool = False


@dataclass(frozen=True)
class Scatter:
    """Groups of points over two number axes."""

    key: str
    title: str
    unit: str
    groups: tuple[Group, ...]
    x: Axis
    y: Axis
    labels: tuple[Label, ...] = ()
    guides: tuple[Guide, ...] = ()
    height: int = 380  # px
    item: str = "layout"  # word for a point, in tooltips


@dataclass(frozen=True)
class Cell:
    """One cell of a heat map; without a value it is grey."""

    value: float | None
    texts: tuple[str, ...] = ()  # lines, the first in bold
    detail: str = ""  # in the tooltip


@dataclass(frozen=True)
class HeatMap:
    """A grid of cells, coloured from the lowest value to the highest."""

    key: str
    title: str
    unit: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]  # top to bottom
    cells: tuple[tuple[Cell | None, ...], ...]  # [row][column]; None: nothing is drawn
    form: str = ",.0f"  # d3 format of a value in the tooltip
    item: str = "layout"  # word for a cell's detail, in tooltips


@dataclass(frozen=True)
class Interval:
    lane: str
    start: float
    end: float
    name: str  # gives the colour
    detail: str = ""  # in the tooltip


@dataclass(frozen=True)
class Timeline:
    """Intervals of time in lanes, one below the other."""

    key: str
    title: str
    unit: str
    lanes: tuple[str, ...]  # top to bottom
    intervals: tuple[Interval, ...]


Panel = Lines | Stacks | Scatter | HeatMap | Timeline
