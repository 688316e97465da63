"""Sentences for values that do not fit their setting; another trainer's value is answered with ours."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from meshtune.errors import UserError, nearest, quoted, written
from meshtune.tools.table import pasted_value

# Pydantic's kind of an error -> what to write instead; {…} are numbers of its context.
REMEDIES = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text, in quotes where YAML reads something else",
    "string_too_short": "text that is not empty",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "names with values, such as {{a: b}}",
    "model": "settings of this section, such as {{name: value}}",
    "greater_than": "a number above {gt:,.15g}",
    "greater_than_equal": "a number from {ge:,.15g} on",
    "less_than": "a number below {lt:,.15g}",
    "less_than_equal": "a number up to {le:,.15g}",
    "too_long": "{max_length} values",
    "too_short": "{min_length} values",
}
UNION_TYPES = ("int", "float", "bool", "str")  # of a setting with several types, as pydantic names them


def sentences(
    error: ValidationError, unknown: Callable[[Sequence[str]], str], section: str = ""
) -> Iterator[str]:
    """Yield pydantic's problems as sentences with a remedy; a UserError of a validator yields its own.

    unknown: sentence about a key that isn't a setting, by its path. section: dotted path of the section that
    was validated; "" for the whole tree.
    """
    wrong: dict[str, tuple[Any, list[str]]] = {}  # key -> its value, and what could be written instead
    for problem in error.errors():
        path = [section] if section else []
        path += without_branches(problem["loc"])
        key, cause = ".".join(path), problem.get("ctx", {}).get("error")
        if pasted := pasted_value(key, problem["input"]):
            yield pasted
        elif isinstance(cause, UserError):
            yield from cause.problems
        elif problem["type"] == "extra_forbidden":
            yield unknown(path)
        elif problem["type"] == "missing" and path[-1].isdigit():  # the last problem has the list's length
            wrong[".".join(path[:-1])] = (problem["input"], [f"{int(path[-1]) + 1} values"])
        elif problem["type"] == "missing":
            yield f"{key} is missing."
        elif isinstance(cause, ValueError):
            yield str(cause)
        else:
            value, remedies = wrong.setdefault(key, (problem["input"], []))
            remedies += [] if (text := remedy(problem, value)) in remedies else [text]
    for key, (value, remedies) in wrong.items():
        yield f"{key} = {as_given(value)}: write {' or '.join(remedies)}."


def as_given(value: Any) -> str:
    """A value as its user wrote it; a text that would be a number, true, false or null has its quotes."""
    with suppress(ValueError):
        if isinstance(value, str) and not isinstance(json.loads(value), str):
            return quoted(value)
    return written(value)


def without_branches(place: Sequence[str | int]) -> list[str]:
    """The path of a setting from pydantic's, which also names the types of a union that it tried."""
    return [
        str(part)
        for number, part in enumerate(place)
        if not (number and isinstance(part, str) and (part in UNION_TYPES or "[" in part))
    ]


def remedy(problem: Mapping[str, Any], value: Any) -> str:
    """Clause on the values to write instead, which follows "write"."""
    kind, facts = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        return one_of(facts["expected"].replace("'", "").replace(" or ", ", ").split(", "), value)
    for name in (kind, kind.partition("_")[0]):
        if name in REMEDIES:
            return REMEDIES[name].format(**facts)
    return problem["msg"].removeprefix("Write ").removeprefix("Input should be ")


def one_of(choices: Sequence[str], value: Any) -> str:
    """The choices of a setting as text, the nearest to the value first where one is near."""
    near = nearest(written(value), choices)
    listed = ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]
    return f"{listed} (did you mean {near[0]}?)" if near else listed
