"""The columns of one row by our names, those inside objects too.

    {"extra_info": {"question": "2 + 2?"}}   extra_info.question ──> "2 + 2?"

A column whose own name has the dot comes first. A number is a place in a list: answers.text.0.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshtune.data.example import BadRow, is_absent
from meshtune.errors import type_name

MOST_INNER = 20  # names inside one column that an error lists


class ArrowRow(dict[str, Any]):
    """A row without null values, with which Arrow fills keys that a struct lacks (`tool_calls` of messages).

    stored: the row with them, for filters on a column that may be null.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(_without_nulls(stored))
        self.stored = stored


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def reach(value: Any, name: str) -> Any:
    """The value of a column, or of one inside objects by its dotted name. Raises KeyError without one."""
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        for at, character in enumerate(name):
            if character == "." and name[:at] in value:
                try:
                    return reach(value[name[:at]], name[at + 1 :])
                except KeyError:
                    continue
    elif isinstance(value, list):
        place, _, rest = name.partition(".")
        if place.isdecimal() and int(place) < len(value):
            return reach(value[int(place)], rest) if rest else value[int(place)]
    raise KeyError(name)


def _transposed(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Objects from one object of lists of equal length, as which `datasets` before version 4 stored a list of
    objects ({"role": ["user", …], "content": ["Hi", …]}); None for any other. Nulls are left out.
    """
    columns = [*value.values()]
    if not columns or not all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns):
        return None
    rows = zip(*columns, strict=True)
    return [{key: inner for key, inner in zip(value, row, strict=True) if inner is not None} for row in rows]


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column of this name, or one inside objects."""
    try:
        reach(row, name)
    except KeyError:
        return False
    return True


def inner_names(name: str, value: Any, levels: int = 3) -> Iterator[str]:
    """Yield the dotted names of what an object in the column `name` holds; nothing for other values.

    levels: of objects that are looked into.
    """
    if levels and isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{name}.{key}"
            yield from inner_names(f"{name}.{key}", inner, levels - 1)


def unused_columns(row: Mapping[str, Any], read: Set[str]) -> Iterator[str]:
    """Yield the columns of a row that have a value and are not in `read`; of an object that is read in part,
    what is inside it.
    """
    for column, value in row.items():
        name = str(column)
        if name in read or is_absent(value):
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in read):
            inside = {f"{name}.{key}": inner for key, inner in value.items()}
            yield from unused_columns(inside, read)
        else:
            yield name


def column_names(row: Mapping[str, Any], wanted: Iterable[str] = ()) -> list[str]:
    """Names of a row's columns, of the first MOST_INNER inside each, and of the `wanted` that are there."""
    inside = ((str(name), inner_names(str(name), value)) for name, value in row.items())
    names = [each for name, inner in inside for each in (name, *islice(inner, MOST_INNER))]
    return [*dict.fromkeys([*names, *(name for name in wanted if has(row, name))])]


@dataclass(frozen=True)
class Columns:
    """The columns of one row, looked up by our names; the methods raise BadRow for values of a wrong type."""

    row: Mapping[str, Any]
    names: Mapping[str, str]  # our name -> theirs, where `data.columns` maps it
    roles: Mapping[str, str]  # their role -> ours, where `data.roles` maps it

    def get(self, name: str) -> Any:
        """The value as it was read, None where the column is missing or NaN, as pandas writes it."""
        try:
            value = reach(self.row, self.names.get(name, name))
        except KeyError:
            return None
        return None if isinstance(value, float) and value != value else value

    def text(self, name: str, *, empty: str | None = None) -> str:
        """The text of a column. Raises BadRow if it is missing, null or no text.

        empty: the reason with which blank text is refused; None allows it.
        """
        value, theirs = self.get(name), self.names.get(name, name)
        if value is None:
            raise self._missing(theirs)
        if not isinstance(value, str):
            shown = self._inside(theirs, value) or json.dumps(value, default=str)[:40]
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)} ({shown}), expected text")
        if empty and not value.strip():
            raise BadRow(empty, f"column {theirs} is empty")
        return value

    def items(self, name: str) -> list:
        """The list in a column, or the list whose JSON text it holds (csv and some parquet files). Raises
        BadRow as `text`.
        """
        value, theirs = self.get(name), self.names.get(name, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise BadRow(
                    "wrong type", f"column {theirs} is text that is not JSON, expected a list"
                ) from None
        if value is None:
            raise self._missing(theirs)
        if isinstance(value, Mapping) and (rows := _transposed(value)) is not None:
            return rows
        if not isinstance(value, list):
            shown = f" ({inside})" if (inside := self._inside(theirs, value)) else ""
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)}{shown}, expected a list")
        return value

    def _inside(self, theirs: str, value: Any) -> str:
        """Clause with the columns inside an object; "" for other values."""
        return ", ".join(column_names({theirs: value})[1:])

    def _missing(self, theirs: str) -> BadRow:
        """The reason to refuse a row without a value in a column."""
        if has(self.row, theirs):
            return BadRow(f"null in column {theirs}", f"column {theirs} is null")
        columns = ", ".join(column_names(self.row))
        return BadRow(f"no column {theirs}", f"column {theirs} is missing (there are {columns})")
