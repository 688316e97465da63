"""Runs and sweeps below the given folders, each by an id. Nothing else of the disk is read.

A request has ids, never a path: an id that was not found here is unknown. A symbolic link may lead anywhere,
so a run, and each of its files, is shown only if it lies below a given folder once all links are followed.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from meshtune.errors import UserError
from meshtune.report.compare import names_of
from meshtune.report.experiments.database import DATABASE, database_of
from meshtune.rundir import RunDir

DEPTH = 4  # folders below a given one in which runs and sweeps are looked for
MOST_FOLDERS = 20_000  # that are looked into
ID_CHARACTERS = 12
PARTS_OF_A_RUN = ("checkpoints", "model", "logs")  # hold no other run


@dataclass(frozen=True)
class Entry:
    """A run or a sweep."""

    id: str
    kind: Literal["run", "sweep"]
    name: str  # of its folder; where two have the same, with the folders above
    path: Path  # its folder, links followed; of a sweep its database


class Folders:
    """The given paths: folders of runs, run folders, sweeps' folders or databases."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: those that do not exist yet are looked for again. Raises UserError for a file that isn't a
        sweep's database.
        """
        for path in paths:
            if path.is_file() and database_of(path) is None:
                raise UserError(
                    f"{path} is not a sweep's database; name run folders, folders of runs, or sweeps."
                )
        self._given = [path.resolve() for path in paths]
        # A database stands for its folder, where the sweep's runs are.
        self._roots = [path.parent if path.is_file() else path for path in self._given]
        self.entries: dict[str, Entry] = {}
        self.find()

    def find(self) -> None:
        """Look for runs and sweeps again."""
        found = dict(kind_and_path for given in self._given for kind_and_path in self._below(given))
        names = names_of([path if kind == "run" else path.parent for path, kind in found.items()])
        self.entries = {
            (name := _id(path)): Entry(name, kind, shown, path)
            for (path, kind), shown in zip(found.items(), names, strict=True)
        }

    def _below(self, given: Path) -> Iterator[tuple[Path, Literal["run", "sweep"]]]:
        """Yield (path, kind) of what a given path holds, or is."""
        if given.is_file():
            yield given, "sweep"
            return
        waiting, looked_into = [(given, 0)], 0
        while waiting and looked_into < MOST_FOLDERS:
            folder, depth = waiting.pop(0)
            looked_into += 1
            if RunDir(folder).holds_run:
                yield folder, "run"
                continue
            if self.holds(folder / DATABASE) and (database := database_of(folder)):
                yield database.resolve(), "sweep"
            if depth < DEPTH:
                waiting += [(inner, depth + 1) for inner in self._folders(folder)]

    def _folders(self, folder: Path) -> list[Path]:
        """The folders in one, links followed, that lie below a given one."""
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    one.name
                    for one in entries
                    if one.is_dir() and not one.name.startswith(".") and one.name not in PARTS_OF_A_RUN
                )
        except OSError:  # no right to read it, or it has gone
            return []
        inner = [(folder / name).resolve() for name in names]
        return [path for path in inner if self._is_below(path)]

    def holds(self, file: Path) -> bool:
        """True for a regular file that lies below a given folder, links followed."""
        try:
            real = file.resolve(strict=True)
            return self._is_below(real) and S_ISREG(real.stat().st_mode)
        except (OSError, RuntimeError):  # it is missing, or a link leads to itself
            return False

    def _is_below(self, real: Path) -> bool:
        return any(real == root or root in real.parents for root in self._roots)

    def without_paths(self, sentence: str) -> str:
        """The sentence with paths that begin at the given folders' names, without the folders above."""
        for root in sorted(self._roots, key=lambda one: len(str(one)), reverse=True):
            if root.name:  # the root of all has none
                sentence = sentence.replace(str(root), root.name)
        return sentence

    def may_show(self, entry: Entry) -> bool:
        """True if all files that the entry's page is made of are in the given folders; a missing one is."""
        if entry.kind == "sweep":
            return self.holds(entry.path)
        run = RunDir(entry.path)
        files = (run.config_file, run.metrics_file, run.samples_file, run.lock_file, *run.rank_logs)
        return run.holds_run and all(self.holds(file) for file in files if os.path.lexists(file))


def _id(path: Path) -> str:
    """A name of the path that tells nothing of it, and stays when the server starts again."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:ID_CHARACTERS]
