"""Types of settings."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

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


def is_template(text: str) -> bool:
    """True if the text is a Jinja template, not the name of one or of a file."""
    return "{%" in text or "{{" in text
