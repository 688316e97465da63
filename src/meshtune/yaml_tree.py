"""Trees of settings: read from YAML, one laid over another, changed by `section.key=value`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshtune.errors import UserError


def overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Return `tree` with one section.key=value laid over it; `tree` is not altered.

    The value is parsed as YAML; nothing after = is null. Where the override sets a key of a cluster that a
    file describes, that file is read into the tree. Raises UserError for text of another form, a value that
    is not YAML, and as `read_yaml`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"'{override}' is no setting; write section.key=value, such as train.max_steps=100.")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise UserError(f"The value of '{override}' is not YAML: {one_line(error)}") from None
    path = key.strip().split(".")
    if path[0] == "cluster" and len(path) > 1 and isinstance(tree.get("cluster"), str):
        tree = tree | {"cluster": {} if tree["cluster"] == "auto" else read_yaml(Path(tree["cluster"]))}
    return merge(tree, nested(path, value))


def read_yaml(file: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file, {} if it is empty.

    Raises UserError if it can't be read, is not YAML, writes a key twice or holds no mapping.
    """
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise UserError(f"Config {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"Config {file} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        raise UserError(f"Config {file} is not YAML: {one_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(
            f"Config {file} holds a {type(tree).__name__}, not sections such as 'model:' and 'data:'."
        )
    return tree


class UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a key written twice in one mapping, where PyYAML keeps the later value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key.value}' is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the tree that has `value` at `path` and nothing else: {"train": {"seed": 1}}."""
    for key in reversed(path):
        value = {key: value}
    return value


def merge(base: Any, change: Any) -> Any:
    """Return `base` with `change` laid over it; neither is altered.

    Where both have a mapping, it is merged key by key; any other value of `change`, lists too, replaces that
    of `base`.
    """
    if not (isinstance(base, Mapping) and isinstance(change, Mapping)):
        return change
    return {
        **base,
        **{key: merge(base[key], value) if key in base else value for key, value in change.items()},
    }
