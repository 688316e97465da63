"""Axes and groups that the pictures of a sweep share."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshtune.report.draw.kinds import Axis, Group, Point
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


def counts_axis(title: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis with a tick at each value, such as numbers of GPUs or of sequences."""
    some = sorted(set(values))
    return Axis(title, (some[0] / ROOM, some[-1] * ROOM), log=True, ticks=tuple(some), form=",")


def most_frequent(keys: Iterable[Any]) -> list[Any]:
    """The keys in the order in which they come first; of more than MOST_LINES those that come most often."""
    counts = Counter(keys)
    chosen = {key for key, _ in counts.most_common(MOST_LINES)}
    return [key for key in counts if key in chosen]


def left_out(drawn: Sequence[Any], keys: Iterable[Any], noun: str) -> str:
    """ "; 8 of 12 models drawn", or "" where all are."""
    total = len(set(keys))
    return f"; {len(drawn)} of {total} {noun} drawn" if len(drawn) < total else ""


def lines(
    experiments: Sequence[Experiment],
    names: Sequence[str],
    name_of: Callable[[Experiment], str],
    x_of: Callable[[Experiment], float | None],
    y_of: Callable[[Experiment], float | None],
) -> list[Group]:
    """A joined group of points for each name that has any, ascending by x."""
    groups = []
    for name in names:
        points = [
            Point(float(x), float(y), about(one))
            for one in experiments
            if name_of(one) == name and (x := x_of(one)) is not None and (y := y_of(one)) is not None
        ]
        points.sort(key=lambda point: point.x)
        if points:
            groups.append(Group(name, tuple(points), None, "line", DOT))
    return groups


def about(one: Experiment) -> str:
    """The layout of an experiment with its number, for a tooltip."""
    seeds = f", median of {one.repeats} seeds" if one.repeats > 1 else ""
    return f"{one.layout} (experiment {one.number}{seeds})"


def values(groups: Iterable[Group], which: str) -> list[float]:
    """x or y of all points."""
    return [getattr(point, which) for group in groups for point in group.points]
