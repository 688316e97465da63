"""Nasty values, and mutations of trees, bytes and files. Every choice is made by the Random that is given."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

# Text that no writer of JSON or YAML would write: each key stands in a tree until `written` replaces it.
RAW = {
    "RAWdeepRAW": "[" * 100_000 + "]" * 100_000,
    "RAWlevelsRAW": "[" * 60 + "]" * 60,
    "RAWobjectsRAW": '{"a":' * 3000 + "1" + "}" * 3000,
    "RAWdigitsRAW": "9" * 5000,
    "RAWexponentRAW": "1e99999",
}
MOST = 50  # of each that are written
PATHS = [
    "~nosuchuser/x", "/dev/null/x", "/dev/zero", "/dev/full", "/proc/self/mem", "..", ".", "a" * 300, "~",
]  # fmt: skip
TEXTS = [
    "", " ", "\0", "\ud800", "é" * 50, "x" * 5000, "[/b]", "{}%s{0}", "\x1b]0;x\x07", "\n", "null", "auto",
    "0", "-1", "1e9", "true", "{{", "{% for", "cuda", "fp64", "random", "*", "(", "model", "<|im_end|>",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2, 3, 7, 0.5, -0.0, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9,
    10**12, 10**20, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
OTHERS = [
    None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"a": None}, {"a": {"b": [1]}}, [0] * 1000,
    ["a", 1, None],
]  # fmt: skip
INSERTS = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n", b"\t", b'"', b"}", b"[", b"'", b": ", b"&a *a", b"\r",
    b"\xed\xa0\x80",
]  # fmt: skip
VALUES: list[list[Any]] = [NUMBERS, TEXTS, PATHS, OTHERS, list(RAW)]


def nasty(draw: Random) -> Any:
    return copy.deepcopy(draw.choice(draw.choice(VALUES)))


def written(text: str) -> str:
    """Replace the keys of RAW in a text of JSON or YAML."""
    for key, raw in RAW.items():
        text = text.replace(f'"{key}"', raw, MOST).replace(key, raw, MOST)
    return text


# Trees #


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value in a tree of lists and dicts."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def mutated_tree(tree: Any, draw: Random) -> tuple[Any, str]:
    """Return (a copy of `tree` with one value changed, how)."""
    root = [copy.deepcopy(tree)]
    everywhere = list(places(root))
    container, key = draw.choice(everywhere)
    old = container[key]
    change = draw.choice(["replace"] * 6 + ["near"] * 4 + ["delete", "swap", "wrap", "rename", "grow"])
    if change == "replace":
        container[key] = nasty(draw)
    elif change == "near":
        container[key] = near(old, draw)
    elif change == "delete":
        del container[key]
    elif change == "swap":
        other, place = draw.choice(everywhere)
        container[key] = copy.deepcopy(other[place])
    elif change == "wrap":
        container[key] = draw.choice([[old], {"a": old}, str(old)[:10_000]])
    elif change == "rename" and isinstance(container, dict):
        container[str(draw.choice(TEXTS + PATHS))] = container.pop(key)
    else:
        container[key] = [old] * 20 if not isinstance(old, list) else old * 20
    new = container[key] if isinstance(container, list) and len(container) > key else None
    new = container.get(key) if isinstance(container, dict) else new
    return (root[0] if root else None), f"{change} {key!r}: {old!r:.60} -> {new!r:.60}"


def near(value: Any, draw: Random) -> Any:
    """A value of the same type that is a little or much off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([value + 1, value - 1, -value, value * 1000, value * 10**9, value / 3, str(value)])
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        insert = draw.choice(TEXTS)
        return draw.choice(
            [value[:at], value[at:], value[:at] + insert + value[at:], value.upper(), value * 100]
        )
    if isinstance(value, list):
        return draw.choice([value[1:], value[:1], value[::-1], [*value, nasty(draw)]])
    return nasty(draw)


# Bytes #


def mutated_bytes(content: bytes, draw: Random) -> tuple[bytes, str]:
    """Return (changed content, how)."""
    start, stop = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    stop = min(stop, start + draw.choice([1, 8, 300, 10**9]))
    change = draw.choice(["flip"] * 3 + ["insert"] * 3 + ["truncate", "delete", "repeat", "noise", "empty"])
    if change == "flip" and content:
        changed = bytearray(content)
        for _ in range(draw.choice([1, 1, 10, 100])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed), "flip bits"
    if change == "truncate":
        return content[:start], f"truncate to {start} bytes"
    if change == "delete":
        return content[:start] + content[stop:], f"delete bytes {start} to {stop}"
    if change == "repeat":
        return content[:stop] + content[start:], f"repeat bytes {start} to {stop}"
    if change == "noise":
        return content[:start] + draw.randbytes(stop - start) + content[stop:], f"noise in {start} to {stop}"
    if change == "empty":
        return b"", "empty"
    insert = draw.choice(INSERTS) * draw.choice([1, 1, 1, 5000])
    return content[:start] + insert + content[start:], f"insert {insert!r:.30} at {start}"


# Files #


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _link(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


def _unreadable(path: Path) -> None:
    path.chmod(0)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "a folder": _folder,
    "a pipe": _fifo,
    "a link to nothing": _link("nowhere"),
    "a link to itself": lambda path: _link(path.name)(path),
    "a link to /dev/zero": _link("/dev/zero"),
    "a link to /dev/full": _link("/dev/full"),
    "mode 000": _unreadable,
}


def damaged_file(file: Path, draw: Random) -> str:
    """Change the bytes of a file, or put something else in its place; return how."""
    others = sorted(path for path in file.parent.iterdir() if path.is_file() and path != file)
    if draw.random() < 0.6:
        content, how = mutated_bytes(file.read_bytes(), draw)
        file.write_bytes(content)
        return f"{file.name}: {how}"
    if others and draw.random() < 0.25:
        other = draw.choice(others)
        shutil.copyfile(other, file)
        return f"{file.name} is a copy of {other.name}"
    how = draw.choice(list(DAMAGES))
    DAMAGES[how](file)
    return f"{file.name} is {how}"
