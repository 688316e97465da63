"""Types of settings."""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from meshtune.errors import UserError, expanded, with_variables, written

MOST_GPUS = 10**6
LARGEST = 10**12  # of a setting that counts: beyond it search and arithmetic take for ever
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Margin = Annotated[float, Field(ge=0, lt=1)]
GpuCount = Annotated[int, Field(ge=1, le=MOST_GPUS)]
COMPRESSIBLE = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
SUFFIXES = (*COMPRESSIBLE, ".parquet", *(f"{suffix}.gz" for suffix in COMPRESSIBLE))  # of data files
MOST_TOKENS = 10**15  # of a run
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


def whole(value: Any) -> Any:
    """Return the int of a whole number with an exponent, such as "20e9", which is text in YAML; else the
    value.
    """
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", value):
        number = Decimal(value)
        return int(number) if number == number.to_integral_value() else value
    return value


def prices(value: Any) -> Any:
    """Return a value that can be a price or several; plan/prices.py judges the entries of a mapping."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    table = isinstance(value, Mapping) and all(
        isinstance(price, int | float | str) for price in value.values()
    )
    if value is None or number or table or isinstance(value, str):
        return value
    raise PydanticCustomError(
        "prices",
        "Write a number above 0, prices by kind such as {h100-sxm: 2.5, currency: USD}, or a file of these",
    )


Prices = Annotated[
    Annotated[float, Field(gt=0)] | dict[str, float | str] | str | None, BeforeValidator(prices)
]


def is_regular_expression(target: str) -> bool:
    """True if a target of LoRA is a regular expression of whole names of layers, as peft reads a text."""
    return not re.fullmatch(r"[\w., -]*", target)


def layer_names(value: Any) -> Any:
    """A regular expression of names as a list of one; any other value as it is."""
    return (value,) if isinstance(value, str) and is_regular_expression(value) else value


LayerNames = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(layer_names)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS), BeforeValidator(whole)]
Interval = Annotated[NonNegative | Annotated[str, Field(pattern=INTERVAL)], BeforeValidator(interval)]
Format = Literal["auto", "text", "prompt-completion", "alpaca", "messages", "sharegpt", "tokens"]
PATHS = re.compile(  # settings that are paths; a source is one, or has one
    r"model\.name|output|cluster|cluster\.(hardware|price_per_gpu_hour)|log\.textfile_directory|data\.(cache|chat_template)"
    r"|data\.(train|eval)(\.\d+)?(\.path)?"
)


def is_template(text: str) -> bool:
    """True if the text is a Jinja template, not the name of one or of a file."""
    return "{%" in text or "{{" in text


class Section(BaseModel):
    """Settings that belong together: a key that is no field of it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def unusable(value: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each key or text of a tree that no file name, model or encoding can take.

    key: dotted name of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(name, str):
                yield from unusable(name, f"the key {written(name)}")
                yield from unusable(item, f"{key}.{name}".lstrip("."))
            else:
                yield f"{f'{key}: ' if key else ''}the key {written(name)} is no text; write it in quotes."
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unusable(item, f"{key}.{number}")
    elif isinstance(value, str):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            shown = written(value)
            yield f"{key} = {shown} has a character that is no text (NUL or a broken one); remove it."
        elif (value.startswith("~") or "$" in value) and is_path(value, key):
            try:
                expanded(value)
            except UserError as error:
                yield f"{key}: {error}"


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each text in a tree. key: dotted name of `value`."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, item in items:
        yield from texts(item, f"{key}.{name}".lstrip("."))
    if isinstance(value, str):
        yield key, value


def is_path(value: str, key: str) -> bool:
    """True if the text of a setting is a path. key: the setting's dotted name."""
    return bool(PATHS.fullmatch(key)) and not is_template(value)


def with_path_variables(value: Any, key: str = "") -> Any:
    """A tree of settings whose PATHS have the values of environment variables. key: dotted name of `value`.

    Raises UserError as `with_variables`.
    """
    if isinstance(value, Mapping):
        return {name: with_path_variables(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_path_variables(item, f"{key}.{number}") for number, item in enumerate(value)]
    return with_variables(value) if isinstance(value, str) and is_path(value, key) else value
