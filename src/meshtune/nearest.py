"""Names and paths that a mistyped one may mean: at most two edits away, and a third of its letters."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

MOST_ENTRIES = 5_000  # files and folders that are looked at
DEPTH = 3  # levels below the current folder
MOST_NAMED = 3


def nearest(name: str, choices: Iterable[str], part: Callable[[str], str] = str) -> list[str]:
    """The choices with the fewest edits, in their order; [] if those are too many. Case isn't an edit.

    part: the part of a choice that is compared with `name`; all of it by default.
    """
    most = min(2, len(name) // 3)
    similar = [choice for choice in choices if abs(len(part(choice)) - len(name)) <= most]  # quick
    distances = {choice: edits(name.lower(), part(choice).lower()) for choice in similar}
    least = min([*distances.values(), most])
    return [choice for choice, distance in distances.items() if distance == least]


def did_you_mean(near: Sequence[str], otherwise: str = ".") -> str:
    """Return the end of a sentence, `; did you mean a or b?`; `otherwise` where nothing is near."""
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def edits(first: str, second: str) -> int:
    """Count the letters to insert, remove, replace or swap with the next that make `second` of `first`."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, previous, row = row, before, [i]
        for j, other in enumerate(second, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, previous[j - 2] + 1)
            row.append(cost)
    return row[-1]


def path_meant(path: str, wanted: Callable[[Path], bool]) -> str:
    """Clause `; did you mean a or b?` with the paths that are wanted and end alike; "" where none does.

    Looks below the current folder and next to the path, for the last name and then for it without its suffix.
    """
    beside = Path(path).parent
    roots = [Path("."), *([beside] if beside.is_dir() and beside != Path(".") else [])]
    found: dict[str, str] = {}  # absolute path -> as it is named
    for root in roots:
        for each in islice(entries(root), MOST_ENTRIES):
            if wanted(each):
                found.setdefault(os.path.abspath(each), str(each))
    near = nearest(Path(path).name, found.values(), part=lambda each: Path(each).name)
    near = near or nearest(Path(path).stem, found.values(), part=lambda each: Path(each).stem)
    near.sort(key=lambda each: (edits(each, path), each))
    return did_you_mean(near[:MOST_NAMED], "")


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
