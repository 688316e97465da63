"""The declaration of a setting: its default, sentence, what it needs to take effect, its unit and limits.

    lr_decay_steps: int | None = setting(None, "Steps that the schedule spans.", LENGTH, unit="steps", ge=1)

The settings page, schema, starter, completion and the answers to wrong keys read the declarations. A setting
whose need isn't met is refused where it is written, and left out where the command line took the need away.
Fields of a layout that need others are in layout.py.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo

from meshtune.errors import Table, UserError, expanded, with_variables, written
from meshtune.setting_types import is_template


class Section(BaseModel):
    """Settings that belong together: a key that is no field of it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Settings = TypeVar("Settings", bound=Section)


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


def unchecked(kind: type[Settings], tree: Mapping[str, Any]) -> Settings:
    """The settings of a tree, each validated, but not whether they take effect beside each other."""
    fields = {
        name: TypeAdapter(info.annotation).validate_python(tree[name])
        for name, info in kind.model_fields.items()
        if name in tree and info.annotation
    }
    return kind.model_construct(**fields)


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
