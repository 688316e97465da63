"""Paths on this machine that a mistyped one may have meant."""

import difflib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

MOST_ENTRIES = 5_000  # files and folders that are looked at
DEPTH = 3  # levels below the current folder
MOST_NAMED = 3
LIKE = 0.6  # least likeness of names that may be mistyped


def did_you_mean(path: str, wanted: Callable[[Path], bool]) -> str:
    """Clause `; did you mean a or b?` with the nearest paths that are wanted; "" where none is near.

    Looks below the current folder and beside the path.
    """
    beside = Path(path).parent
    roots = [Path("."), *([beside] if beside.is_dir() and beside != Path(".") else [])]
    found: dict[str, str] = {}  # absolute path -> as it is named
    for root in roots:
        for each in islice(entries(root), MOST_ENTRIES):
            if wanted(each):
                found.setdefault(os.path.abspath(each), str(each))
    scores = {each: same_name(each, path) for each in found.values()}
    near = [each for each in scores if scores[each] > LIKE]
    near.sort(key=lambda each: (-scores[each] - 0.3 * likeness(each, path), each))
    return f"; did you mean {' or '.join(near[:MOST_NAMED])}?" if near else ""


def same_name(one: str, other: str) -> float:
    """Likeness of the last words of two paths, with or without their suffixes."""
    first, second = Path(one), Path(other)
    return max(likeness(first.name, second.name), likeness(first.stem, second.stem))


def likeness(one: str, other: str) -> float:
    """Share of equal characters of two words, 0 to 1."""
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def entries(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield what is in a folder and `depth` - 1 levels below it, folder by folder, without hidden entries."""
    try:
        each = sorted(Path(folder, entry.name) for entry in os.scandir(folder) if entry.name[0] != ".")
    except OSError:  # no right to read it
        return
    yield from each
    for path in each if depth > 1 else ():
        if path.is_dir() and not path.is_symlink():
            yield from entries(path, depth - 1)
