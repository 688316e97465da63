"""The declaration of a setting: its default, sentence, what it needs to take effect, its unit and limits.

    lr_decay_steps: int | None = setting(None, "Steps that the schedule spans.", LENGTH, unit="steps", ge=1)

The settings page, schema, starter, completion and the answers to wrong keys read the declarations. A setting
whose need isn't met is refused where it is written, and left out where the command line took the need away.
Fields of a layout that need others are in layout.py.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from meshtune.errors import Table, UserError, expanded, with_variables, written

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
    """Return a value that can be a price or several; plan/cluster.py judges the entries of a mapping."""
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


class Section(BaseModel):
    """Settings that belong together: a key that isn't a field of it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Need(NamedTuple):
    """Condition on other settings without which a setting, given another value than its default, has no
    effect.
    """

    met: Callable[[Any], Any]  # by the Config
    reason: str  # clause on why it has no effect
    remedy: str = "leave it out"  # imperative
    part: str = ""  # key below the setting that needs it, in a mapping, section or sources; *: every one
    # True: refused even where an override took the effect: it did not switch the feature off, and without the
    # setting the run would do something else.
    relied_on: bool = False
    late: bool = False  # judged by `load`, not by Config: train(eval_data=…) gives a Config its rows

    @property
    def answer(self) -> str:
        return f"{self.reason}; {self.remedy}"


class Facts(NamedTuple):
    """Facts of a setting that pydantic has no place for."""

    needs: tuple[Need, ...] = ()
    path: bool = False  # its text is a path, in which environment variables are replaced


def setting(
    default: Any,
    description: str | None,
    *needs: Need,
    unit: str = "",
    path: bool = False,
    table: Table | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting.

    default: ... for a setting that must be given. description: None for a section, which has its docstring.
    needs: of a value that is not the default. unit: of a number. table: its rows are the choices. limits: as
    pydantic's `Field` takes them.
    """
    extra: dict[str, Any] = ({"unit": unit} if unit else {}) | ({"enum": list(table)} if table else {})
    field = Field(default, description=description, json_schema_extra=extra or None, **limits)
    field.metadata.append(Facts(needs, path))
    if table:
        field.metadata.append(BeforeValidator(partial(in_table, table)))
    return field


def in_table(table: Table, value: Any) -> Any:
    """Return `value`. Raises UserError, with the nearest name, if the table lacks it."""
    table[value if isinstance(value, str) else written(value)]
    return value


def facts(field: FieldInfo) -> Facts:
    return next((entry for entry in field.metadata if isinstance(entry, Facts)), Facts())


def declared(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of every setting of `section` and, recursively, of the sections in it.

    prefix: begins every key; the section's own path with a dot at the end, "train.".
    """
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inner := section_in(field):
            yield from declared(inner, f"{prefix}{name}.")


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The class of the section that a field holds, or a list of them; None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


@cache
def paths(kind: type[BaseModel]) -> frozenset[str]:
    """Dotted keys of the settings that are paths."""
    return frozenset(key for key, field in declared(kind) if facts(field).path)


def is_path(text: str, key: str, kind: type[BaseModel]) -> bool:
    """True if the text of a setting is a path. key: dotted, data.train.0.path; kind: class of the tree."""
    return re.sub(r"\.\d+(?=\.|$)", "", key) in paths(kind) and not is_template(text)


def usable(value: Any, kind: type[BaseModel], problems: list[str], key: str = "") -> Any:
    """The tree `value` with environment variables replaced in its paths.

    kind: class of the whole tree. problems: gets a sentence for each key or text that no file name, model or
    encoding can take. key: dotted name of `value`.
    """
    if isinstance(value, Mapping):
        tree = {}
        for name, item in value.items():
            if isinstance(name, str):
                usable(name, kind, problems, f"the key {written(name)}")
                tree[name] = usable(item, kind, problems, f"{key}.{name}".lstrip("."))
            else:
                place = f"{key}: " if key else ""
                problems.append(f"{place}the key {written(name)} is not a text; write it in quotes.")
        return tree
    if isinstance(value, list | tuple):
        return [usable(item, kind, problems, f"{key}.{number}") for number, item in enumerate(value)]
    if isinstance(value, str):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            problems.append(
                f"{key} = {written(value)} has a character that isn't text (NUL or a broken one); remove it."
            )
        elif is_path(value, key, kind):
            try:
                expanded(value)  # for the user of ~user
                return with_variables(value)
            except UserError as error:
                problems.append(f"{key}: {error}")
    return value


def without_effect(config: Section, *, late: bool, remedy: str = "") -> Iterator[str]:
    """Yield a sentence for each setting that lacks what it needs to take effect.

    late: of the needs that are late, or of the others. remedy: another one, before that of the need.
    """
    for key, value, need in unmet(config):
        if need.late == late:
            yield f"{key}={shown(value)} has no effect: {need.reason}; {remedy}{need.remedy}."


def unmet(config: Section) -> Iterator[tuple[str, Any, Need]]:
    """Yield (dotted key, value, its need) for each setting that lacks what it needs to take effect."""
    for key, field in declared(type(config)):
        for need in facts(field).needs:
            for part, value in changed(config, [*key.split("."), *([need.part] if need.part else [])]):
                if not need.met(config):
                    yield part, value, need


def changed(
    section: Section | Mapping[str, Any], path: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) at `path` if the value is not the default; of sources, for each one."""
    first, *rest = path
    if isinstance(section, Mapping):
        if first in section:
            yield f"{prefix}{first}", section[first]
        return
    fields = type(section).model_fields
    for name in fields if first == "*" else [first]:
        value = getattr(section, name)
        if not rest:
            if value != fields[name].get_default(call_default_factory=True):
                yield f"{prefix}{name}", value
            continue
        for inner in value if isinstance(value, tuple) else (value,):
            yield from changed(inner, rest, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """The value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
