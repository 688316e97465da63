"""The database of a sweep: nothing finished is lost or repeated, one process writes."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from golden import refuses, says

from meshtune.errors import UserError
from meshtune.report.experiments.database import FORM
from meshtune.study import store as store_module
from meshtune.study.store import CRASHED, DONE, RUNNING, WAITING, Outcome, Store
from meshtune.study.sweep_file import Experiment


def listed(*seeds: int) -> list[Experiment]:
    return [Experiment({"train.seed": seed, "layout": "mb1"}, {}, f"key{seed}") for seed in seeds]


AXES = ("train.seed", "layout")


def test_rows_keep_their_number_and_result_when_the_file_changes(tmp_path: Path) -> None:
    with Store(tmp_path / "sweep.db") as store:
        assert store.add(listed(1, 2, 3), AXES) == (3, 0)
        store.start([1])
        store.finish({1: Outcome(DONE, None, {"step_seconds": 0.5, "loss": 2.0}, {"a": 1}, 3.0)})
    with Store(tmp_path / "sweep.db") as store:
        assert store.add(listed(3, 4), AXES) == (1, 1)  # 2 had no result and is gone; 1 stays
        assert [(row.number, row.status) for row in store.rows()] == [(1, DONE), (3, WAITING), (4, WAITING)]
        assert store.counts(["key3", "key4"]) == {WAITING: 2}
        assert store.description()["unlisted"] == [1] and store.best("step_seconds", 9) == []
        assert store.add(listed(1, 3, 4), AXES) == (0, 0)
        assert store.counts() == {WAITING: 2, DONE: 1}
        assert [row["number"] for row in store.best("step_seconds", 9)] == [1]


def test_the_view_has_a_column_for_each_axis_and_one_line_reads_it(tmp_path: Path) -> None:
    with Store(tmp_path / "sweep.db") as store:
        store.add(listed(1, 2), ("train.seed", "layout", "odd\"'name"))
        store.judged({1: {"layout": "mb1-ga8", "world": 1, "predicted_peak_bytes": 7.0}, 2: {}})
        store.finish({2: Outcome(CRASHED, "It ended.", {"mfu": 0.25})})
        assert store.best("mfu DESC", 3) == []  # it has no result
        assert store.reasons() == {CRASHED: "It ended."}
    database = sqlite3.connect(tmp_path / "sweep.db")
    query = (
        'SELECT number, "train.seed", "layout (axis)", layout, mfu, predicted_peak_bytes, status FROM results'
    )
    assert database.execute(query).fetchall() == [
        (1, 1, "mb1", "mb1-ga8", None, 7.0, WAITING), (2, 2, "mb1", None, 0.25, None, CRASHED)
    ]  # fmt: skip


def test_a_second_sweep_is_refused_with_the_process_that_has_the_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "sweep.db"),
        pytest.raises(UserError, match=f"being swept by process {os.getpid()}"),
    ):
        Store(tmp_path / "sweep.db")
    with Store(tmp_path / "sweep.db"):  # the lock is released
        pass


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_what_is_no_database_of_a_sweep_is_refused_and_stays(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "sweep.db"
    if content:
        file.write_bytes(content)
    else:
        sqlite3.connect(file).execute("CREATE TABLE other (a)")
    before = file.read_bytes()
    with refuses(UserError):
        Store(file)
    assert file.read_bytes() == before


def test_tables_and_their_version_are_made_in_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is killed at any moment after its tables are there can be opened again."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "describe", killed)
        with suppress(KeyboardInterrupt):
            Store(tmp_path / "sweep.db")
    with Store(tmp_path / "sweep.db") as store:
        assert store.description() == {"form": FORM}


def test_a_reader_delays_a_result_and_does_not_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has not read all rows of its query holds a lock, against which nothing is committed."""
    monkeypatch.setattr(store_module, "LOCKED", 0.05)
    file = tmp_path / "sweep.db"
    with Store(file) as store:
        store.add(listed(*range(1, 50)), AXES)
        with closing(sqlite3.connect(file, check_same_thread=False)) as reader:
            rows = reader.execute("SELECT * FROM experiments")
            rows.fetchone()
            monkeypatch.setattr(store_module, "TRIES", 2)
            with refuses(UserError):
                store.start([1])
            assert store.counts() == {WAITING: 49}
            monkeypatch.setattr(store_module, "TRIES", 1000)
            later = threading.Timer(0.3, rows.close)
            later.start()
            store.start([1])
            later.join()
        assert store.counts() == {WAITING: 48, RUNNING: 1}


WRITER = """
import sys
from pathlib import Path
from meshtune.study.store import DONE, Outcome, Store
from meshtune.study.sweep_file import Experiment
with Store(Path(sys.argv[1])) as store:
    store.add([Experiment({"a": n}, {}, str(n)) for n in range(2000)], ("a",))
    for row in store.rows("waiting"):
        store.start([row.number])
        store.finish({row.number: Outcome(DONE, None, {"loss": float(row.number)})})
        print(row.number, flush=True)
"""


@pytest.mark.ci
def test_killed_at_any_moment_no_finished_result_is_lost(tmp_path: Path) -> None:
    """A killed writer's rows are all there, and at most one is half way."""
    file = tmp_path / "sweep.db"
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, file], stdout=subprocess.PIPE, text=True)
        assert writer.stdout
        said = [writer.stdout.readline() for _ in range(5)]
        time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
        writer.wait()
        with Store(file) as store:
            done = {row.number for row in store.rows(DONE)}
            assert {int(line) for line in said if line.endswith("\n")} <= done
            running = store.rows(RUNNING)
            assert len(running) <= 1
            store.wait_again(row.number for row in running)
    database = sqlite3.connect(file)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("SELECT max(attempts) FROM experiments").fetchone()[0] <= 2


DONE_WITH = Outcome(DONE, None, {"loss": 1.0}, {"text": "x" * 100_000})


@pytest.mark.parametrize("fault", ["PRAGMA max_page_count = 1", "PRAGMA query_only = 1", "moved"])
def test_a_result_that_cant_be_written_is_named_and_what_was_recorded_stays(
    tmp_path: Path, fault: str
) -> None:
    """The disk is full, the file can't be written any more, or it is gone."""
    file = tmp_path / "sweep.db"
    with suppress(UserError), Store(file) as store:  # which tries once more
        store.add(listed(1, 2), AXES)
        store.finish({1: DONE_WITH})
        if fault == "moved":
            file.rename(tmp_path / "elsewhere.db")
        else:
            store._database.execute(fault)
        with refuses(UserError):
            store.finish({2: DONE_WITH})
    (tmp_path / "elsewhere.db").exists() and (tmp_path / "elsewhere.db").rename(file)
    with Store(file) as store:  # the same command goes on
        assert store.counts() == {WAITING: 1, DONE: 1}
        store.finish({2: DONE_WITH})


def test_a_result_is_recorded_at_the_end_where_the_disk_has_room_again(tmp_path: Path) -> None:
    with Store(tmp_path / "sweep.db") as store:
        store.add(listed(1), AXES)
        store._database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(UserError):
            store.finish({1: DONE_WITH})
        store._database.execute("PRAGMA max_page_count = 1000000")
    with Store(tmp_path / "sweep.db") as store:
        assert store.counts() == {DONE: 1}


def test_a_locked_database_is_waited_for_and_the_line_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOCKED", 0.01)
    monkeypatch.setattr(store_module, "PRINTED_AFTER", 0.03)
    file = tmp_path / "sweep.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as viewer:

        def log(line: str) -> None:
            says(line)
            viewer.execute("ROLLBACK")

        with Store(file, log) as store:
            store.add(listed(1), AXES)
            viewer.execute("BEGIN EXCLUSIVE")
            store.finish({1: DONE_WITH})
            assert store.counts() == {DONE: 1}
