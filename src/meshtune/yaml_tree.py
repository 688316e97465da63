"""Trees of settings: read from YAML, one laid over another, changed by `section.key=value` or dotted keys."""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshtune.errors import UserError, check_file, explained, path_meant, type_name, written

MAX_DEPTH = 50  # levels of a config
MAX_VALUES = 100_000  # in a config
YAML = (".yaml", ".yml")
SHELL_INPUT = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # what `meshtune train <(command)` is called with


def overridden(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Return `tree` with one section.key=value laid over it; `tree` is not altered.

    The value is parsed as YAML; nothing after = is null, {} clears a mapping. Where the override sets a key
    of a cluster that a file describes, that file is read into the tree. Raises UserError for text of another
    form, a value that is not YAML, and as `read_yaml`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"'{override}' is not a setting; write section.key=value, such as train.max_steps=100."
        )
    with explained(f"The value of '{shortened(override)}' is not YAML"):
        value = yaml.load(text, Loader=Bounded) if text else None
    path = key.strip().split(".")
    return laid(laid(tree, path, None) if value == {} else tree, path, value)


def laid(tree: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return `tree` with `value` laid over it at `path`; a cluster that a file describes is read first."""
    if path[0] == "cluster" and len(path) > 1 and isinstance(tree.get("cluster"), str):
        tree = tree | {"cluster": {} if tree["cluster"] == "auto" else read_cluster(Path(tree["cluster"]))}
    return merge(tree, nested(path, value))


def read_yaml(
    file: Path, settings: Collection[str] = (), *, repeated: list[tuple[str, str]] | None = None
) -> dict[str, Any]:
    """Read the mapping in a YAML file, {} if it is empty.

    settings: as `undotted` takes them. repeated: gets (key, value as text) of each key that is written again
    further down, whose last value is read; None: such a key is refused. Raises UserError if the file can't be
    read, is not YAML or holds no mapping.
    """
    try:
        if not str(file).startswith(SHELL_INPUT):
            check_file(file)
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        near = configs_like(file) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"Config {file} cannot be read: {error.strerror}{near or '.'}") from None
    except UnicodeDecodeError:
        raise UserError(f"Config {file} is not UTF-8 text.") from None
    except UserError:
        raise
    except ValueError as error:  # a NUL in the name
        raise UserError(f"Config {written(str(file))} cannot be read: {error}.") from None
    with explained(f"Config {file} is not YAML"):
        loader = Bounded(text)
        loader.repeated = repeated
        tree = loader.get_single_data()
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"Config {file} holds {type_name(tree)}, not sections such as `model:` and `data:`.")
    lines = list(key_lines(yaml.compose(text, Loader=Bounded))) if settings else []
    return undotted(tree, settings, lines, name=f"Config {file}")


def read_toml(file: Path, setting: str) -> dict[str, Any]:
    """Read the tables of the TOML file that `setting` names. Raises UserError for one that can't be read."""
    try:
        check_file(file)
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{setting} = {file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{setting} = {file} is not TOML: {error}.") from None


def read_cluster(file: Path) -> dict[str, Any]:
    """Read a cluster's settings from a YAML file of them, or from the TOML file that `meshtune probe` writes.

    Of the latter the settings are its [cluster], and its [kind] is what cluster.hardware reads. Raises
    UserError as `read_yaml`, as `read_toml`, and for a TOML file without the two.
    """
    if file.suffix != ".toml":
        return read_yaml(file)
    tables = read_toml(file, "cluster")
    if lacking := [name for name in ("cluster", "kind") if not isinstance(tables.get(name), dict)]:
        tables_lacking = " and ".join(f"[{name}]" for name in lacking)
        raise UserError(
            f"cluster = {file} has no {tables_lacking}, which `meshtune probe --out {file}` would write; a "
            "file of only GPU kinds is named by cluster.hardware."
        )
    return {**tables["cluster"], "hardware": str(file)}


def configs_like(file: Path) -> str:
    """Clause with the YAML files on this machine that `file` may mean; "" where none is near."""
    return path_meant(str(file), lambda path: path.suffix in YAML and path.is_file())


class Written(NamedTuple):
    """A value of a tree that isn't a mapping, or an empty one."""

    path: tuple[Any, ...]  # the keys from the top to it, dotted ones in their parts
    value: Any
    dotted: bool  # True if a key on the way was dotted


def undotted(
    tree: dict[str, Any], settings: Collection[str], lines: Sequence[int] = (), *, name: str = "The config"
) -> dict[str, Any]:
    """Return the tree with each dotted key (`train.seed: 1`) laid as key=value of the command line is.

    settings: the dotted names of all settings; a key whose first part is none of them stays, such as a
    column's name. lines: as `key_lines` gives them; name: of the file. Both for the UserError that is raised
    if two keys set the same setting.
    """
    values = list(leaves(tree, settings))
    if not any(value.dotted for value in values):
        return tree
    known = lines if len(lines) == len(values) else [0] * len(values)  # `<<` makes more values than keys
    ordered = sorted(zip(values, known, strict=True), key=lambda entry: [*map(str, entry[0].path)])
    if twice := [
        f"{name} sets {place(first, line)}, and {place(second, other)} too; keep one."
        for (first, line), (second, other) in pairwise(ordered)
        if second.path[: len(first.path)] == first.path
        and first.value not in (None, {})
        and (first.path != ("cluster",) or first.path == second.path)
    ]:
        raise UserError(twice)
    result: dict[str, Any] = {}
    for value, _ in ordered:  # a cluster's file comes before the keys that are laid over it
        result = laid(result, value.path, value.value)
    return result


def leaves(
    tree: Mapping[Any, Any], settings: Collection[str], prefix: tuple[Any, ...] = (), dotted: bool = False
) -> Iterator[Written]:
    """Yield the values of a tree in their order. prefix: path of `tree`; dotted: as Written has it."""
    for key, value in tree.items():
        parts = key.split(".") if isinstance(key, str) else [key]
        if len(parts) > 1 and ".".join(map(str, (*prefix, parts[0]))) not in settings:
            parts = [key]
        path, split = (*prefix, *parts), dotted or len(parts) > 1
        if isinstance(value, Mapping) and value:
            yield from leaves(value, settings, path, split)
        else:
            yield Written(path, value, split)


def key_lines(node: yaml.Node | None) -> Iterator[int]:
    """Yield the line, from 1, of the key of each value that `leaves` yields."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from key_lines(value)
        else:
            yield key.start_mark.line + 1


def place(value: Written, line: int) -> str:
    return ".".join(map(str, value.path)) + (f" in line {line}" if line else "")


class Bounded(yaml.SafeLoader):
    """YAML loader that refuses a key written twice in one mapping, where PyYAML keeps the later value, keys
    that aren't plain values, and more than MAX_DEPTH levels or MAX_VALUES values, aliases counted as often
    as they are used.
    """

    depth = 0
    repeated: list[tuple[str, str]] | None = None  # where keys that are written again go; None: refused

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
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key.start_mark)
            if (earlier := seen.get(key.value)) is not None:
                if self.repeated is None:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"'{key.value}' is written twice", key.start_mark
                    )
                self.repeated.append(
                    (key.value, earlier.value if isinstance(earlier, yaml.ScalarNode) else "…")
                )
            seen[key.value] = value
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


def without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the tree without the value at `path`; not altered itself. A path that it lacks is ignored."""
    first, *rest = path
    if rest and isinstance(inner := tree.get(first), Mapping):
        return {**tree, first: without(inner, rest)}
    return {key: value for key, value in tree.items() if rest or key != first}


def sets(tree: Any, path: Sequence[str]) -> bool:
    """True if the tree has a value at `path`, or one that isn't a mapping in place of what is above it."""
    for name in path:
        if not isinstance(tree, Mapping):
            return True
        if name not in tree:
            return False
        tree = tree[name]
    return True
