"""Trees of settings: read from YAML, one laid over another, changed by `section.key=value`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshtune.errors import UserError, check_file, explained, type_name, written

MAX_DEPTH = 50  # levels of a config
MAX_VALUES = 100_000  # in a config
SHELL_INPUT = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # what `meshtune train <(command)` is called with


def overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Return `tree` with one section.key=value laid over it; `tree` is not altered.

    The value is parsed as YAML; nothing after = is null. Where the override sets a key of a cluster that a
    file describes, that file is read into the tree. Raises UserError for text of another form, a value that
    is not YAML, and as `read_yaml`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"'{override}' is no setting; write section.key=value, such as train.max_steps=100.")
    with explained(f"The value of '{shortened(override)}' is not YAML"):
        value = yaml.load(text, Loader=Bounded) if text else None
    path = key.strip().split(".")
    if path[0] == "cluster" and len(path) > 1 and isinstance(tree.get("cluster"), str):
        tree = tree | {"cluster": {} if tree["cluster"] == "auto" else read_yaml(Path(tree["cluster"]))}
    return merge(tree, nested(path, value))


def read_yaml(file: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file, {} if it is empty.

    Raises UserError if it can't be read, is not YAML, writes a key twice or holds no mapping.
    """
    try:
        if not str(file).startswith(SHELL_INPUT):
            check_file(file)
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Config {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"Config {file} is not UTF-8 text.") from None
    except UserError:
        raise
    except ValueError as error:  # a NUL in the name
        raise UserError(f"Config {written(str(file))} cannot be read: {error}.") from None
    with explained(f"Config {file} is not YAML"):
        tree = yaml.load(text, Loader=Bounded)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"Config {file} holds {type_name(tree)}, not sections such as `model:` and `data:`.")
    return tree


class Bounded(yaml.SafeLoader):
    """YAML loader that refuses a key written twice in one mapping, where PyYAML keeps the later value, keys
    that are no plain values, and more than MAX_DEPTH levels or MAX_VALUES values, aliases counted as often
    as they are used.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and values_in(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(
                f"it has more than {MAX_VALUES:,} values, aliases counted where they are used"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is no plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key.value}' is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def values_in(node: yaml.Node, counted: dict[int, float]) -> float:
    """Count the values of a YAML node once its aliases are written out; infinite if it contains itself.

    counted: results by the node's id, so that each node is visited once.
    """
    if id(node) not in counted:
        counted[id(node)] = math.inf  # until it is known: only a node inside itself reads it
        children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        counted[id(node)] = 1 + sum(values_in(part, counted) for part in parts)
    return counted[id(node)]


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}…"


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
