"""Axes and groups that the pictures of a sweep share."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from meshtune.report.draw.kinds import Axis, Group, Point, Scatter
from meshtune.report.draw.theme import OTHERS
from meshtune.report.experiments.rows import Experiment

MOST_LINES = len(OTHERS)  # of a picture: one colour each
WIDE = 8.0  # ratio of the largest value to the smallest, from which an axis is logarithmic
ROOM = 1.15  # factor between the outermost values and the ends of a logarithmic axis
DOT = 46.0  # square px


def axis(title: str, values: Iterable[float], *, suffix: str = "", form: str = ",.4~g") -> Axis:
    """A number axis from 0, or a logarithmic one for positive values that span more than WIDE."""
    some = [*values]
    low, high = min(some), max(some)
    if low > 0 and high / low > WIDE:
        return Axis(title, (low / ROOM, high * ROOM), log=True, suffix=suffix, form=form)
    return Axis(title, (0, high * 1.1 or 1), suffix=suffix, form=form)


def loss_axis(title: str, values: Iterable[float]) -> Axis:
    """An axis around losses, which needn't begin at 0; as `axis` where they span more than WIDE."""
    low, high = min(some := [*values]), max(some)
    if low <= 0 or high / low > WIDE:
        return axis(title, some)
    room = (high - low) * 0.1 or 0.1
    return Axis(title, (low - room, high + room), form=".4f")


def counts_axis(title: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis with a tick at each value, such as numbers of GPUs or of sequences."""
    some = sorted(set(values))
    return Axis(title, (some[0] / ROOM, some[-1] * ROOM), log=True, ticks=tuple(some), form=",")


def most_frequent(keys: Iterable[Any], noun: str = "") -> tuple[list[Any], str]:
    """(The keys in the order in which they come first, of more than MOST_LINES those that come most often;
    "; 8 of 12 models drawn", or "" where all are).
    """
    counts = Counter(keys)
    chosen = {key for key, _ in counts.most_common(MOST_LINES)}
    note = f"; {len(chosen)} of {len(counts)} {noun} drawn" if len(chosen) < len(counts) else ""
    return [key for key in counts if key in chosen], note


class Quantity(NamedTuple):
    """A quantity that experiments are drawn by."""

    key: str  # of the picture
    title: str
    unit: str
    of: Callable[[Experiment], float | None]


def curves(
    quantities: Iterable[Quantity],
    experiments: Sequence[Experiment],
    names: tuple[Sequence[str], Callable[[Experiment], str]],
    x: tuple[str, Callable[[Experiment], float | None]],
    note: str,
    *,
    height: int = Scatter.height,
) -> Iterator[Scatter]:
    """Yield a picture of each quantity that there are numbers for, with a line for each name.

    names: of the lines, and function that names an experiment. x: title of the axis, and its quantity. note:
    behind the unit.
    """
    for key, title, unit, y_of in quantities:
        lines: dict[str, list[Point]] = {name: [] for name in names[0]}
        for one in experiments:
            place, y = x[1](one), y_of(one)
            if (name := names[1](one)) in lines and place is not None and y is not None:
                lines[name].append(Point(float(place), float(y), about(one)))
        if groups := [joined(name, points) for name, points in lines.items() if points]:
            x_axis, y_axis = counts_axis(x[0], values(groups, "x")), axis(unit, values(groups, "y"))
            yield Scatter(key, title, unit + note, tuple(groups), x_axis, y_axis, height=height)


def joined(name: str, points: Iterable[Point]) -> Group:
    """A line through points, from left to right."""
    return Group(name, tuple(sorted(points, key=lambda point: point.x)), None, "line", DOT)


def about(one: Experiment) -> str:
    """The layout of an experiment with its number, for a tooltip."""
    seeds = f", median of {one.repeats} seeds" if one.repeats > 1 else ""
    return f"{one.layout} (experiment {one.number}{seeds})"


def values(groups: Iterable[Group], which: str) -> list[float]:
    """x or y of all points."""
    return [getattr(point, which) for group in groups for point in group.points]
