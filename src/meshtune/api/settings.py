"""The settings that a Python program gives, as a Config."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.config import SETTINGS, Config, laid_over, load
from meshtune.errors import expanded
from meshtune.layout import Layout
from meshtune.yaml_tree import read_yaml, undotted

Settings = Config | Mapping[str, Any] | str | os.PathLike[str]  # a Config, a tree of sections, a YAML file


def config_of(settings: Settings, overrides: Sequence[str] = ()) -> Config:
    """The Config of the settings, with `overrides` (section.key=value) laid over them. Raises UserError as
    `config.load`, whose rules these are.
    """
    if isinstance(settings, Config) and not overrides:
        return settings
    return load(defaults=tree_of(settings, overrides))


def tree_of(settings: Settings, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings as a tree of sections that is not validated yet, with `overrides` laid over them."""
    if isinstance(settings, Config | Mapping):
        tree = undotted(plain(settings), SETTINGS)
    else:
        tree = read_yaml(expanded(str(settings)), SETTINGS)
    return laid_over(tree, overrides)


def plain(value: Any) -> Any:
    """The tree with paths, layouts and sections as the values that YAML has; settings that nobody set are
    left out.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike | Layout):
        return str(value)
    return value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else value
