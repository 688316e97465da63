"""The results of a sweep, read from its database for those who show them; study/store.py writes it.

One row an experiment, in the order of their numbers, also while the sweep runs. A database that a killed
sweep left in the middle of a change is first set back to before it, as SQLite does whenever it opens such a
file.
"""

import json
import sqlite3
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.filesystem import is_locked
from meshtune.rundir import is_number
from meshtune.units import counted

DATABASE, LOCK = "sweep.db", "sweep.lock"  # in a sweep's folder
FORM = 1  # version of the tables that can be read
SQLITE = b"SQLite format 3\x00"  # first bytes of a database
JSON_COLUMNS = ("settings", "document")
TEXT_COLUMNS = (
    "key",
    "layout",
    "status",
    "reason",
    "started",
    "ended",
    "job",
    "model",
)  # others have numbers
FACT_TYPES = {"axes": list, "unlisted": list, "machine": dict, "versions": dict, "gpus": int}
# SQL condition: the sweep's file lists the experiment. Results that it doesn't list stay in the database;
# another base may have made them, so that they can't be compared with the others by their settings.
LISTED = "number NOT IN (SELECT value FROM json_each((SELECT value FROM sweep WHERE name = 'unlisted')))"


@dataclass(frozen=True)
class SweepRows:
    """A sweep as it is in its database."""

    file: Path
    facts: Mapping[str, Any]  # of the table `sweep`: name, axes, machine, versions, simulated …
    # Of `experiments`, those that the file lists, by number; settings and document as plain values.
    rows: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...] = ()  # clauses on rows that no sweep writes, which are not among these

    @property
    def left_out_sentence(self) -> str:
        """A sentence on the rows that are left out, with the first one; "" without any."""
        if not self.left_out:
            return ""
        rows = counted(len(self.left_out), "row")
        return f"Left out, since no sweep writes them: {rows} of {self.file.name} ({self.left_out[0]})."

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


def sqlite_address(file: Path, mode: str) -> str:
    """The URI of a database file. mode: rw, or rwc to make a missing one. On a file system without locks
    SQLite is told not to use them.
    """
    locks = True
    with suppress(OSError):
        locks = is_locked(file.with_name(LOCK)) is not None
    return f"{file.resolve().as_uri()}?mode={mode}{'' if locks else '&nolock=1'}"


@contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to read it. SQLite's errors become UserError."""
    try:
        # "rw" and not "ro": SQLite can't set back a half-written change otherwise. Nothing else is written.
        with closing(sqlite3.connect(sqlite_address(file, "rw"), uri=True, timeout=30)) as database:
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


def results(file: Path) -> list[dict[str, Any]]:
    """Rows of the view `results`: an experiment each. Raises UserError as `read_sweep_rows`."""
    with opened(file) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM results")]


def read_facts(file: Path) -> dict[str, Any]:
    """Facts of a sweep, as `SweepRows` has them. Raises UserError as `read_sweep_rows`."""
    with opened(file) as database:
        return _facts(database)[0]


def _facts(database: sqlite3.Connection) -> tuple[dict[str, Any], list[str]]:
    """(Facts by name, clauses on those that no sweep writes)."""
    facts, left_out = {}, []
    for name, text in database.execute("SELECT name, value FROM sweep"):
        try:
            value = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            left_out.append(f"{name} is not JSON")
            continue
        if value is None or isinstance(value, FACT_TYPES.get(name, object)):
            facts[name] = public(value)
        else:
            left_out.append(f"{name} is {type(value).__name__}")
    return {name: value for name, value in facts.items() if value is not None}, left_out


def fault_of_experiment(row: Mapping[str, Any], *, only: Container[str] | None = None) -> str | None:
    """Clause on what no sweep writes in a row of `experiments`, or of its view; None for a row that fits.

    row: settings and document as plain values. only: columns that are looked at; None: all.
    """
    name = f"experiment {row.get('number')}"
    if type(row.get("number")) is not int or not isinstance(row.get("status"), str):
        return f"{name} has no number or no status"
    for column, value in row.items():
        if value is None or (only is not None and column not in only):
            continue
        if column == "settings" or column == "document":
            fits = isinstance(value, dict) and isinstance(value.get("measured") or {}, dict)
        else:
            fits = isinstance(value, str) if column in TEXT_COLUMNS else is_number(value)
        if not fits:
            return f"{column} of {name} is {type(value).__name__}"
    return None


def read_sweep_rows(file: Path) -> SweepRows:
    """Read a database. Raises UserError for a file that isn't a sweep's, or one of another version."""
    with opened(file) as database:
        database.row_factory = sqlite3.Row
        facts, left_out = _facts(database)
        asked = f"SELECT * FROM experiments WHERE {LISTED} ORDER BY number"
        rows = [dict(row) for row in database.execute(asked)]
    if facts.get("form") != FORM:
        raise UserError(
            f"{file} has tables of version {facts.get('form')}, and this meshtune reads version {FORM}; read "
            "it with the version that wrote it."
        )
    fit = []
    for row in rows:
        try:
            row |= {name: public(json.loads(row[name])) if row.get(name) else None for name in JSON_COLUMNS}
            fault = fault_of_experiment(row)
        except (ValueError, TypeError, RecursionError):
            fault = f"settings or document of experiment {row.get('number')} are not JSON"
        left_out += [fault] if fault else []
        fit += [] if fault else [row]
    return SweepRows(file, facts, tuple(fit), tuple(left_out))
