"""The settings that a sweep may change: those of the config, and the fields of the layout."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin

from meshtune.config import SETTINGS, Config
from meshtune.errors import UserError
from meshtune.layout import AUTO, Layout, PartialLayout
from meshtune.plan.cluster import FOR_SUBMIT
from meshtune.setting import section_in, usable
from meshtune.tools.table import unknown_setting
from meshtune.yaml_tree import leaves, merge, nested

LAYOUT_FIELDS = tuple(f"layout.{row.name}" for row in fields(Layout))
LEFT_TO_THE_SWEEP = ("output", "output_exists")
ANY_MODEL = {"model": {"name": "any"}}  # next to one setting that is checked


def key_problems(key: str) -> list[str]:
    """Sentences on a dotted key that isn't a setting, or one that the sweep sets itself; none: it is one."""
    if key in LEFT_TO_THE_SWEEP:
        return [f"{key}: each experiment has a folder of its own; leave it out."]
    if key in SETTINGS or key in LAYOUT_FIELDS or _entry_of_a_table(key):
        return []
    path = key.split(".")
    return [unknown_setting(path, [*SETTINGS, *LAYOUT_FIELDS], list(Config.model_fields))]


def axis_problems(key: str, values: list[Any]) -> list[str]:
    """Sentences as `key_problems`, on a key that experiments change. values: those of the key."""
    below = [f"{key}.{name}" for value in values if isinstance(value, Mapping) for name in value]
    for name in (key, *below):
        section, _, rest = name.partition(".")
        if section == "cluster" and rest.split(".")[0] in FOR_SUBMIT:
            return [f"{name}: all experiments are submitted in the same way; set it in `base`."]
    return key_problems(key)


def _entry_of_a_table(key: str) -> bool:
    """True for a key below a setting that holds names with values, such as model.overrides.num_layers."""
    path = key.split(".")
    return any(_is_table(".".join(path[:end])) for end in range(1, len(path)))


def _is_table(key: str) -> bool:
    kinds = (field.annotation, *get_args(field.annotation)) if (field := SETTINGS.get(key)) else ()
    return any(get_origin(kind) is dict or kind is dict for kind in kinds)


def default_of(key: str) -> Any:
    """The default of a setting; None where it has none, and for an entry of a table."""
    field = SETTINGS.get(key)
    return None if field is None or field.is_required() else field.default


def value_problems(key: str, value: Any) -> list[str]:
    """Sentences on a value that a setting can't have, whatever the other settings are."""
    if key in LAYOUT_FIELDS:
        return _field_problems(key.removeprefix("layout."), value)
    if key == "layout":
        return _problems_of(lambda: PartialLayout.parse(value))
    if _entry_of_a_table(key):
        return []
    return [*_wrong_values(nested(key.split("."), value))]


def base_problems(base: Mapping[str, Any]) -> list[str]:
    """Sentences on the keys of a base that aren't settings, and on values that they can't have."""
    names = [".".join(map(str, leaf.path)) for leaf in leaves(base, SETTINGS)]
    names = ["layout" if name.split(".")[0] == "layout" else name for name in names]
    unknown = [problem for name in dict.fromkeys(names) for problem in key_problems(_setting_in(name))]
    wrong = [problem for problem in _wrong_values(base) if not (unknown and "is not a setting" in problem)]
    return list(dict.fromkeys([*unknown, *wrong]))


def _setting_in(name: str) -> str:
    """The setting that a leaf belongs to: a list of sources has keys below it."""
    parts = name.split(".")
    return next((key for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in SETTINGS
                 and not section_in(SETTINGS[key])), name)  # fmt: skip


def _wrong_values(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences on values of a wrong type; those on values that contradict each other are left to
    the experiments.
    """
    whole = merge(ANY_MODEL, tree)
    problems: list[str] = []
    whole = usable(whole, Config, problems)
    if problems:
        yield from problems
        return
    names = tuple(
        f"{'.'.join(map(str, leaf.path))}{end}"
        for leaf in leaves(tree, SETTINGS)
        for end in ((" = ", ".") if isinstance(leaf.value, list) else (" = ",))
    )
    for problem in _problems_of(lambda: Config(**whole)):
        if problem.startswith(names) or "is not a setting" in problem:
            yield problem


def _field_problems(name: str, value: Any) -> list[str]:
    """Sentences on a value that a field of the layout can't have with any other ones."""
    problems = [] if value == AUTO else _problems_of(lambda: Layout(**{name: value}))
    return [f"layout.{problem}" for problem in problems if re.match(f"{name} is .*; it must be ", problem)]


def _problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except UserError as error:
        return [*error.problems]
    return []
