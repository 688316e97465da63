"""Values of a sweep's axes: lists, ranges, the planner's best layouts."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from meshtune.errors import UserError, written
from meshtune.study.sweep_settings import key_problems, value_problems

Change = dict[str, Any]  # dotted setting -> value
MOST_VALUES = 100_000  # of a range
RANGE = "{from: 8, to: 512, times: 2}"


@dataclass(frozen=True)
class Best:
    """A value of the axis `layout`: the planner's best layouts of each combination of the other axes."""

    number: int


def values_of(key: str, value: Any, problems: list[str]) -> list[Any]:
    """The values of the axis `key` as the file writes them; a sentence is added to `problems` for each one
    that is wrong.
    """
    if unknown := key_problems(key):
        problems += unknown
        return []
    if isinstance(value, Mapping) and key == "layout" and value.keys() == {"best"}:
        return [*_best(value, problems)]
    if isinstance(value, Mapping):
        try:
            return [*_range(key, value)]
        except UserError as error:
            problems += error.problems
            return []
    if not isinstance(value, list) or not value:
        problems.append(f"axes.{key} = {written(value)}: write a list of values, or a range such as {RANGE}.")
        return []
    values = [number_of(one) for one in value]
    for place, one in enumerate(values):
        if any(one == other and type(one) is type(other) for other in values[:place]):
            problems.append(f"axes.{key} has {written(one)} twice.")
        problems += value_problems(key, one)
    return values


def changes_of(name: str, entries: Any, problems: list[str]) -> list[Change]:
    """The mappings of settings under `together` or `experiments`; problems: as `values_of`."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and entry for entry in entries):
        problems.append(
            f"{name} = {written(entries)}: write a list of mappings, [{{train.seed: 1, layout: tp2-mb1}}]."
        )
        return []
    changes = []
    for entry in entries:
        change = {str(key): number_of(value) for key, value in entry.items()}
        for key, value in change.items():
            if unknown := key_problems(key):
                problems += unknown
            elif name == "experiments" and key == "layout" and isinstance(value, Mapping) and "best" in value:
                change[key] = next(iter(_best(value, problems)), value)
            else:
                problems += value_problems(key, value)
        changes.append(change)
    return changes


def number_of(value: Any) -> Any:
    """The number that 1e-4 means, which YAML reads as text; any other value as it is."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}", value):
        return float(value)
    return value


def _best(value: Mapping[str, Any], problems: list[str]) -> Iterator[Best]:
    number = value["best"]
    if type(number) is int and number > 0:
        yield Best(number)
    else:
        problems.append(f"layout.best = {written(number)}: write a number of layouts, such as 3.")


def _range(key: str, value: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of {from, to} with `times` or `step`; `to` is included where a step ends on it."""
    allowed = {"from", "to", "times", "step"}
    given = {str(name): number_of(one) for name, one in value.items()}
    if not {"from", "to"} <= given.keys() <= allowed or {"times", "step"} <= given.keys():
        raise UserError(f"axes.{key} = {written(dict(value))}: write a list, or a range such as {RANGE}.")
    for name, one in given.items():
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise UserError(f"axes.{key}.{name} = {written(one)}: write a number.")
    start, end, step = (Decimal(str(given.get(name, 1))) for name in ("from", "to", "step"))
    times = Decimal(str(given["times"])) if "times" in given else None
    if end < start or step <= 0 or (times is not None and (times <= 1 or start <= 0)):
        raise UserError(
            f"axes.{key} = {written(dict(value))} has no values: `to` is from `from` on, `times` above 1 and "
            "`step` above 0."
        )
    whole = all(isinstance(one, int) for one in given.values())
    at, count = start, 0
    while at <= end:
        yield int(at) if whole else float(at)
        count += 1
        if count > MOST_VALUES:
            raise UserError(f"axes.{key} has more than {MOST_VALUES:,} values; write a larger step.")
        at = at * times if times is not None else at + step
