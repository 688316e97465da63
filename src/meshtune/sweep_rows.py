"""The results of a sweep, read from its database for those who show them; study/store.py writes it.

One row an experiment, in the order of their numbers, also while the sweep runs. A database that a killed
sweep left in the middle of a change is first set back to before it, as SQLite does whenever it opens such a
file.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.filesystem import has_locks

DATABASE = "sweep.db"  # in a sweep's folder
FORM = 1  # version of the tables that can be read
SQLITE = b"SQLite format 3\x00"  # first bytes of a database
JSON_COLUMNS = ("settings", "document")
# SQL condition: the sweep's file lists the experiment. Results that it no longer lists stay in the database;
# another base may have made them, so that they can't be compared with the others by their settings.
LISTED = "number NOT IN (SELECT value FROM json_each((SELECT value FROM sweep WHERE name = 'unlisted')))"


@dataclass(frozen=True)
class SweepRows:
    """A sweep as it is in its database."""

    file: Path
    facts: Mapping[str, Any]  # of the table `sweep`: name, axes, machine, versions, simulated …
    # Of `experiments`, those that the file lists, by number; settings and document as plain values.
    rows: tuple[dict[str, Any], ...]

    @property
    def folder(self) -> Path:
        return self.file.resolve().parent


def database_of(path: Path) -> Path | None:
    """The database that a path names, itself or its folder; None if there is none."""
    file = path / DATABASE if path.is_dir() else path
    try:
        with open(file, "rb") as start:
            return file if start.read(len(SQLITE)) == SQLITE else None
    except OSError:
        return None


def sqlite_address(file: Path, mode: str, *, locks: bool) -> str:
    """The URI of a database file. mode: rw, or rwc to make a missing one. locks: False for a file system
    without, where SQLite must not use them.
    """
    return f"{file.resolve().as_uri()}?mode={mode}{'' if locks else '&nolock=1'}"


@contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to read it. SQLite's errors become UserError."""
    try:
        # "rw" and not "ro": SQLite can't set back a half-written change otherwise. Nothing else is written.
        address = sqlite_address(file, "rw", locks=has_locks(file))
        with closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
            yield database
    except sqlite3.Error as error:
        raise UserError(f"{file} can't be read as the database of a sweep: {error}.") from error


def counts_by_status(file: Path) -> dict[str, int]:
    """Number of experiments that the file lists by status, the most frequent first. Raises UserError as
    `read_sweep_rows`.
    """
    asked = f"SELECT status, count(*) FROM experiments WHERE {LISTED} GROUP BY status ORDER BY count(*) DESC"
    with opened(file) as database:
        return dict(database.execute(asked).fetchall())


def read_facts(file: Path) -> dict[str, Any]:
    """Facts of a sweep, as `SweepRows` has them. Raises UserError as `read_sweep_rows`."""
    with opened(file) as database:
        return _facts(database)


def _facts(database: sqlite3.Connection) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM sweep")}


def read_sweep_rows(file: Path) -> SweepRows:
    """Read a database. Raises UserError for a file that is no sweep's, or one of another version."""
    with opened(file) as database:
        database.row_factory = sqlite3.Row
        facts = _facts(database)
        asked = f"SELECT * FROM experiments WHERE {LISTED} ORDER BY number"
        rows = [dict(row) for row in database.execute(asked)]
    if facts.get("form") != FORM:
        raise UserError(
            f"{file} has tables of version {facts.get('form')}, and this meshtune reads version {FORM}; read "
            "it with the version that wrote it."
        )
    for row in rows:
        row |= {name: json.loads(row[name]) if row.get(name) else None for name in JSON_COLUMNS}
    return SweepRows(file, facts, tuple(rows))
