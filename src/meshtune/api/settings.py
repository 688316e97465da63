"""The settings that a Python program gives, as a Config."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.config import Config, load
from meshtune.errors import expanded
from meshtune.layout import Layout
from meshtune.yaml_tree import merge

Settings = Config | Mapping[str, Any] | str | os.PathLike[str]  # a Config, a tree of sections, a YAML file


def config_of(
    settings: Settings, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Config:
    """The Config of the settings, with `overrides` (section.key=value) and then `changes` (a tree of
    sections) laid over them. Raises UserError as `config.load`, whose rules these are.
    """
    if not isinstance(settings, Config | Mapping):
        settings = load(expanded(str(settings)))
    if isinstance(settings, Config) and not overrides and not changes:
        return settings
    settings = load(None, overrides, plain(settings))
    return load(defaults=merge(plain(settings), plain(changes))) if changes else settings


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
