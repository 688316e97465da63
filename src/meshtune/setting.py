"""The declaration of a setting: its default, sentence, unit and limits, and whether its text is a path.

    max_steps: int | None = setting(None, "Optimizer steps of the run.", unit="steps", ge=1)

The settings page, schema, starter, completion and the answers to wrong keys read the declarations.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from meshtune.errors import Table, UserError, expanded, with_variables, written
from meshtune.setting_types import is_template


class Section(BaseModel):
    """Settings that belong together: a key that is no field of it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Facts(NamedTuple):
    """Facts of a setting that pydantic has no place for."""

    path: bool = False  # its text is a path, in which environment variables are replaced


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    path: bool = False,
    table: Table | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting.

    default: ... for a setting that must be given. unit: of a number. table: its rows are the choices.
    limits: as pydantic's `Field` takes them.
    """
    extra: dict[str, Any] = ({"unit": unit} if unit else {}) | ({"enum": list(table)} if table else {})
    field = Field(default, description=description, json_schema_extra=extra or None, **limits)
    field.metadata.append(Facts(path))
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


def unusable(value: Any, kind: type[BaseModel], key: str = "") -> Iterator[str]:
    """Yield a sentence for each key or text of a tree that no file name, model or encoding can take.

    kind: class of the whole tree. key: dotted name of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(name, str):
                yield from unusable(name, kind, f"the key {written(name)}")
                yield from unusable(item, kind, f"{key}.{name}".lstrip("."))
            else:
                yield f"{f'{key}: ' if key else ''}the key {written(name)} is no text; write it in quotes."
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unusable(item, kind, f"{key}.{number}")
    elif isinstance(value, str):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            shown = written(value)
            yield f"{key} = {shown} has a character that is no text (NUL or a broken one); remove it."
        elif (value.startswith("~") or "$" in value) and is_path(value, key, kind):
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


def with_path_variables(value: Any, kind: type[BaseModel], key: str = "") -> Any:
    """A tree of settings whose paths have the values of environment variables.

    kind: class of the whole tree. key: dotted name of `value`. Raises UserError as `with_variables`.
    """
    if isinstance(value, Mapping):
        inner = {name: (item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
        return {name: with_path_variables(item, kind, path) for name, (item, path) in inner.items()}
    if isinstance(value, list | tuple):
        return [with_path_variables(item, kind, f"{key}.{number}") for number, item in enumerate(value)]
    return with_variables(value) if isinstance(value, str) and is_path(value, key, kind) else value
