"""Types of settings, and sentences for values that do not fit them."""

import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from meshtune.errors import UserError, expanded

MOST_GPUS = 10**6
LARGEST = 10**12  # of a setting that counts: beyond it search and arithmetic take for ever
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
GpuCount = Annotated[int, Field(ge=1, le=MOST_GPUS)]
INTERVAL = r"^(\d*\.?\d+ epochs?|\d+( steps?)?)$"


def interval(value: Any) -> Any:
    """Return a number of steps as an int, "200 steps" too, and a number of epochs as "0.5 epoch"."""
    steps = value
    if isinstance(value, str) and re.fullmatch(INTERVAL, value):
        number = value.split()[0]
        if "epoch" in value and 0 < float(number) < math.inf:
            return f"{float(number):g} epoch"
        steps = None if "epoch" in value else int(number)
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise PydanticCustomError("interval", "Write a number of steps, or of epochs such as 0.5 epoch")
    return steps


def epochs_of(interval: int | str) -> float | None:
    """Number of epochs of an Interval; None where it is a number of steps."""
    return float(interval.split()[0]) if isinstance(interval, str) else None


Interval = Annotated[NonNegative | Annotated[str, Field(pattern=INTERVAL)], BeforeValidator(interval)]
Format = Literal["auto", "text", "prompt-completion", "alpaca", "messages", "sharegpt", "tokens"]
PATHS = ("model.name", "data.train", "data.eval", "data.cache", "data.chat_template", "cluster", "output")
SHORT = reprlib.Repr()  # of a value in an error
SHORT.maxstring = SHORT.maxother = 200


class Section(BaseModel):
    """Settings that belong together: a key that is no field of it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def sentences(
    error: ValidationError, unknown: Callable[[Sequence[str]], str], section: str = ""
) -> Iterator[str]:
    """Yield pydantic's problems as sentences with a remedy; a UserError of a validator yields its own.

    unknown: sentence about a key that is no setting, by its path. section: dotted path of the section that
    was validated; "" for the whole tree.
    """
    for problem in error.errors():
        path = [section] if section else []
        path += [
            str(part)
            for part in problem["loc"]
            if part not in ("str", "tuple[str, ...]", "literal['all-linear']")
        ]
        key, cause = ".".join(path), problem.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            yield from cause.problems
        elif problem["type"] == "extra_forbidden":
            yield unknown(path)
        elif problem["type"] == "missing":
            yield f"{key} is missing."
        elif isinstance(cause, ValueError):
            yield str(cause)
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            yield f"{key} = {SHORT.repr(problem['input'])}: {message}."


def unusable(value: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each key or text of a tree that no file name, model or encoding can take.

    key: dotted name of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(name, str):
                yield from unusable(name, f"the key {name!r}")
                yield from unusable(item, f"{key}.{name}".lstrip("."))
            else:
                yield f"{f'{key}: ' if key else ''}the key {name!r} is no text; write it in quotes."
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unusable(item, f"{key}.{number}")
    elif isinstance(value, str):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            shown = SHORT.repr(value)
            yield f"{key} = {shown} has a character that is no text (NUL or a broken one); remove it."
        elif value.startswith("~") and key.startswith(PATHS):
            try:
                expanded(value)
            except UserError as error:
                yield f"{key}: {error}"
