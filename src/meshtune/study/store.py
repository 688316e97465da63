"""The database of a sweep: one SQLite file with every experiment, its settings and its result.

    sweep        name -> value (JSON): the file, the axes in order, machine, device, versions, simulated …
    experiments  one row an experiment: settings, status, reason, the figures, the command's whole document
    results      a view of it with a column for each axis

Each change is one transaction with the rollback journal synced, so that a kill at any moment loses nothing
that was finished. One process writes: it holds `sweep.lock` next to the file. Where another program locks the
database (a viewer, a backup), statements wait for it; every other error of SQLite ends the sweep with a
sentence, and what was recorded before stays.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.filesystem import lock
from meshtune.meter.rows import time_now

if TYPE_CHECKING:
    from meshtune.study.sweep_file import Experiment
from meshtune.report.experiments.database import FORM, LISTED, LOCK, fault_of_experiment, sqlite_address
from meshtune.units import duration

WAITING, RUNNING, DONE = "waiting", "running", "done"
OUT_OF_MEMORY, CRASHED, REFUSED = "out of memory", "crashed", "refused"
TIMED_OUT, DOES_NOT_FIT, DIVERGED = "timed out", "does not fit", "diverged"
STATUSES = (
    WAITING, RUNNING, DONE, OUT_OF_MEMORY, CRASHED, REFUSED, TIMED_OUT, DOES_NOT_FIT, DIVERGED
)  # fmt: skip
FINISHED = STATUSES[2:]
LOCKED, TRIES = 1.0, 600  # seconds for which a statement waits for other programs, and how often
PRINTED_AFTER = 5.0  # seconds of waiting after which it is printed
FIGURES = {  # column -> its type
    "step_seconds": "REAL",  # median
    "spread": "REAL",  # distance of the quartiles of the steps, of the median
    "tokens_per_second_per_gpu": "REAL",
    "mfu": "REAL",
    "tokens": "REAL",  # of a step (bench) or of the run (train)
    "peak_memory_bytes": "REAL",
    "loss": "REAL",  # the last one of training
    "eval_loss": "REAL",
    "gradient_noise_scale": "REAL",
    "predicted_step_seconds": "REAL",
    "predicted_peak_bytes": "REAL",
    "predicted_mfu": "REAL",
    "predicted_tokens_per_second_per_gpu": "REAL",
    "simulated_step_seconds": "REAL",
    "simulated_peak_bytes": "REAL",
    "parameters": "INTEGER",
    "global_batch_size": "INTEGER",  # sequences
    "seq_len": "INTEGER",  # tokens
    "model": "TEXT",
    "gpus": "INTEGER",
}
SCHEMA = f"""
CREATE TABLE sweep (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE experiments (
    key TEXT PRIMARY KEY, number INTEGER UNIQUE, settings TEXT, layout TEXT, world INTEGER, status TEXT,
    reason TEXT, started TEXT, ended TEXT, seconds REAL, attempts INTEGER DEFAULT 0, job TEXT,
    {", ".join(f"{name} {kind}" for name, kind in FIGURES.items())}, document TEXT
);
INSERT INTO sweep VALUES ('form', '{FORM}');
"""


@dataclass(frozen=True)
class Outcome:
    """How an experiment ended."""

    status: str  # of STATUSES
    reason: str | None = None  # a sentence; None: done
    figures: Mapping[str, Any] | None = None  # of FIGURES
    document: Any = None  # of the command, for JSON
    seconds: float | None = None  # that it took


@dataclass(frozen=True, eq=False)
class Row:
    """One row of `experiments`, as far as the runner needs it."""

    number: int
    key: str
    settings: Mapping[str, Any]
    layout: str | None
    world: int | None
    status: str
    seconds: float | None
    predicted_step_seconds: float | None
    job: str | None  # id of the task in a cluster's queue that runs it
    started: str | None  # when its last attempt did, as `time_now` writes it


class Store:
    """The database of one sweep, open for writing; use as a context manager."""

    def __init__(self, file: Path, log: Callable[[str], None] = lambda _: None) -> None:
        """Lock and open the file, or make it. log: gets a line where the file is locked for long.

        Raises UserError if another process sweeps there, and for a file that isn't such a database. So do all
        methods where the file can't be read or written.
        """
        self.file, self._log = file, log
        self.hurry: Callable[[], bool] = bool  # True once nobody waits for long any more (Ctrl-C)
        self._unrecorded: dict[int, Outcome] = {}  # how experiments ended, as far as it is not in the file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = locked(file.with_name(LOCK), file.parent)
        except OSError as error:
            reason = f"The sweep's folder {file.parent} can't be used: {error.strerror}"
            raise UserError(f"{reason}; name another with --out.") from error
        try:
            self._database = sqlite3.connect(
                sqlite_address(file, "rwc"), uri=True, isolation_level=None, timeout=LOCKED
            )
            self._database.execute("PRAGMA synchronous = FULL")
            tables = {name for (name,) in self._read("SELECT name FROM sqlite_master")}
            if not tables:
                with self._transaction() as database:
                    for statement in SCHEMA.strip().rstrip(";").split(";"):
                        database.execute(statement)
            elif "experiments" not in tables or self.description().get("form") != FORM:
                raise UserError(f"{file} is not a sweep of this version; name another folder with --out.")
        except sqlite3.Error as error:
            self._lock.close()
            raise self._failed(error) from error
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.hurry = lambda: True
        try:
            if self._unrecorded:  # the lock, or the full disk, may have gone
                self._record()
        finally:
            self._database.close()
            self._lock.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._patiently(lambda: self._database.execute("BEGIN IMMEDIATE"))
        try:
            yield self._database
            self._patiently(lambda: self._database.execute("COMMIT"))
        except sqlite3.Error as error:
            raise self._failed(error) from error
        finally:
            if self._database.in_transaction:
                with suppress(sqlite3.Error):  # what SQLite could not write is rolled back by the next one
                    self._database.execute("ROLLBACK")

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._patiently(lambda: self._database.execute(query, values).fetchall())

    def _patiently(self, statement: Callable[[], Any]) -> Any:
        """Result of a statement, once no other program locks the file. Raises UserError if one does so for
        minutes, and for each other error.
        """
        for attempt in range(TRIES):
            try:
                return statement()
            except sqlite3.Error as error:
                if "locked" not in str(error):
                    raise self._failed(error) from error
            waited = (attempt + 1) * LOCKED
            if waited >= PRINTED_AFTER and self.hurry():
                break
            if waited - LOCKED < PRINTED_AFTER <= waited:
                self._log(
                    f"{self.file} is locked by another program, such as a viewer or a backup. Waiting for "
                    f"it, at most {duration(TRIES * LOCKED)}.{self._kept('in memory until then')}"
                )
        raise UserError(
            f"{self.file} could not be used for {duration(waited)}, since another program has it locked: end "
            f"that program.{self._kept('not recorded yet')} The same command continues."
        )

    def _failed(self, error: sqlite3.Error) -> UserError:
        """A sentence on an error that isn't a lock, with the remedy."""
        text = str(error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            return UserError(
                f"{self.file} can't be read as a database ({text}); name another folder with --out."
            )
        remedy = "Mend its disk"
        if not self.file.exists():
            text, remedy = f"it is gone; {text}", "Put it back, or begin anew"
        elif "full" in text:
            remedy = "Make room"
        elif "readonly" in text or "unable to open" in text:
            remedy = "Make the file and its folder writable"
        return UserError(
            f"{self.file} can't be written ({text}). What was recorded before is kept."
            f"{self._kept('not recorded yet')} {remedy}; the same command continues."
        )

    def _kept(self, where: str) -> str:
        """A sentence on results that are not in the file yet, behind a space; "" without any."""
        names = ", ".join(map(str, self._unrecorded))
        word = "experiment" if len(self._unrecorded) == 1 else "experiments"
        return f" The result of {word} {names} is {where}." if names else ""

    # the sweep #

    def description(self) -> dict[str, Any]:
        """The table `sweep`."""
        rows = self._read("SELECT name, value FROM sweep")
        return {name: json.loads(value) for name, value in rows}

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set rows of the table `sweep`."""
        with self._transaction() as database:
            self._describe(database, facts)

    def add(self, experiments: Sequence["Experiment"], axes: Sequence[str]) -> tuple[int, int]:
        """Make the experiments of the file rows, in its order, and the view with its axes.

        Rows of the same key stay as they are. Rows that the file doesn't list are removed where they have
        no result, else `unlisted` in the table `sweep` has their numbers. Returns (number of new rows, number
        of results that the file doesn't list).
        """
        listed = {experiment.key for experiment in experiments}
        with self._transaction() as database:
            there = {
                key: rest for key, *rest in database.execute("SELECT key, number, status FROM experiments")
            }
            others = {key: rest for key, rest in there.items() if key not in listed}
            stale = [(key,) for key, (_, status) in others.items() if status == WAITING]
            unlisted = [number for number, status in others.values() if status != WAITING]
            database.executemany("DELETE FROM experiments WHERE key = ?", stale)
            self._describe(database, {"unlisted": unlisted})
            (number,) = database.execute("SELECT coalesce(max(number), 0) FROM experiments").fetchone()
            new = [experiment for experiment in experiments if experiment.key not in there]
            database.executemany(
                "INSERT INTO experiments (key, number, settings, status) VALUES (?, ?, ?, ?)",
                [
                    (one.key, number + place, json.dumps(public(one.settings), default=str), WAITING)
                    for place, one in enumerate(new, 1)
                ],
            )
            database.execute("DROP VIEW IF EXISTS results")
            database.execute(view(axes))
        return len(new), len(unlisted)

    # experiments #

    def rows(self, *statuses: str, keys: Iterable[str] | None = None) -> list[Row]:
        """The experiments with one of these statuses (none: all) by number. keys: only these."""
        columns = (
            "number, key, settings, layout, world, status, seconds, predicted_step_seconds, job, started"
        )
        query = f"SELECT {columns} FROM experiments"
        if statuses:
            query += f" WHERE status IN ({', '.join('?' * len(statuses))})"
        wanted = None if keys is None else set(keys)
        return [
            Row(number, key, json.loads(settings), *rest)
            for number, key, settings, *rest in self._read(f"{query} ORDER BY number", statuses)
            if wanted is None or key in wanted
        ]

    def judged(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Write what is known of waiting experiments before they run: number -> columns and values."""
        with self._transaction() as database:
            for number, values in facts.items():
                if values:
                    self._set(database, number, values)

    def start(self, numbers: Iterable[int], job: str | None = None) -> None:
        """Set experiments to running. job: id in a queue, to which the place in the job is added."""
        with self._transaction() as database:
            for place, number in enumerate(numbers):
                database.execute(
                    "UPDATE experiments SET status = ?, started = ?, ended = NULL, reason = NULL, "
                    "seconds = NULL, attempts = attempts + 1, job = ? WHERE number = ?",
                    (RUNNING, time_now(), job and f"{job}_{place}", number),
                )

    def finish(self, outcomes: Mapping[int, Outcome]) -> None:
        """Write how experiments ended: number -> outcome. All in one transaction.

        An outcome that can't be written is kept, and tried again before the store is closed.
        """
        self._unrecorded |= outcomes
        if self._unrecorded:
            self._record()

    def _record(self) -> None:
        with self._transaction() as database:
            for number, outcome in self._unrecorded.items():
                document = public(outcome.document)
                text = None if document is None else json.dumps(document, default=str)
                values = {
                    **(outcome.figures or {}), "status": outcome.status, "reason": public(outcome.reason),
                    "seconds": outcome.seconds, "ended": time_now(), "document": text, "job": None,
                }  # fmt: skip
                self._set(database, number, values)
        self._unrecorded = {}

    def wait_again(self, numbers: Iterable[int]) -> None:
        """Set experiments that were stopped, or are to be tried again, to waiting."""
        with self._transaction() as database:
            for number in numbers:
                values = {"status": WAITING, "reason": None, "job": None, "seconds": None, "ended": None}
                self._set(database, number, values)

    def counts(self, keys: Iterable[str] | None = None) -> dict[str, int]:
        """Number of experiments by status, in the order of STATUSES; those without any are left out."""
        found = [row.status for row in self.rows(keys=keys)]
        return {status: found.count(status) for status in STATUSES if status in found}

    def reasons(self) -> dict[str, str]:
        """The most frequent reason of each status, of listed experiments."""
        query = (
            f"SELECT status, reason, count(*) FROM experiments WHERE reason IS NOT NULL AND {LISTED} "
            "GROUP BY status, reason ORDER BY count(*), number DESC"
        )
        return {status: reason for status, reason, _ in self._read(query)}

    def best(self, order: str, most: int) -> list[dict[str, Any]]:
        """The first listed rows of the view `results` that have the figure `order`: a column, with " DESC"
        for the largest first.
        """
        known = f"{order.split()[0]} IS NOT NULL"
        query = f"SELECT * FROM results WHERE {known} AND status = ? AND {LISTED} ORDER BY {order} LIMIT ?"
        names = [name for _, name, *_ in self._read("PRAGMA table_info(results)")]
        rows = (dict(zip(names, values, strict=True)) for values in self._read(query, (DONE, most)))
        return [row for row in rows if fault_of_experiment(row, only=FIGURES) is None]

    @staticmethod
    def _describe(database: sqlite3.Connection, facts: Mapping[str, Any]) -> None:
        database.executemany(
            "INSERT OR REPLACE INTO sweep VALUES (?, ?)",
            [(name, json.dumps(public(value), default=str)) for name, value in facts.items()],
        )

    @staticmethod
    def _set(database: sqlite3.Connection, number: int, values: Mapping[str, Any]) -> None:
        columns = ", ".join(f"{name} = ?" for name in values)
        database.execute(f"UPDATE experiments SET {columns} WHERE number = ?", (*values.values(), number))


def view(axes: Sequence[str]) -> str:
    """The statement that makes the view `results`: the table's columns but the document, then the axes."""
    columns = ["key", "number", "layout", "world", "status", "reason", "started", "ended", "seconds"]
    columns += ["attempts", *FIGURES]
    selected = [f'"{name}"' for name in columns]
    for axis in axes:
        name = axis if axis not in columns else f"{axis} (axis)"
        path = '$."{}"'.format(axis.replace("'", "''").replace('"', ""))
        quoted = name.replace('"', "")
        selected.append(f"json_extract(settings, '{path}') AS \"{quoted}\"")
    return f"CREATE VIEW results AS SELECT {', '.join(selected)} FROM experiments ORDER BY number"


def locked(file: Path, folder: Path) -> IO[str]:
    """The file, locked by this process until it is closed, with the process id in it.

    Raises UserError, with the id, if another process has the lock.
    """
    handle = open(file, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        lock(handle, file)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise UserError(
            f"{folder} is being swept by process {holder}; wait for its end, stop it with Ctrl-C, or "
            "name another folder with --out."
        ) from None
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle
