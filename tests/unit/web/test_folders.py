"""Runs and sweeps are found below the given folders, and nothing else is."""

import os
from pathlib import Path

import pytest
from golden import refuses
from live_runs import locked, write_run
from sweeps import bench_rows, write_sweep

from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.web import pages
from meshtune.web.folders import Folders
from meshtune.web.states import first_and_last_rows, state_of


@pytest.fixture
def given(tmp_path):
    folder = tmp_path / "runs"
    write_run(folder / "a", 3)
    write_run(folder / "deep" / "b", 3)
    (folder / "study").mkdir()
    write_sweep(folder / "study", bench_rows()[:2])
    write_run(folder / "study" / "1", 3)
    return folder


def names(folders: Folders) -> dict[str, str]:
    return {entry.name: entry.kind for entry in folders.entries.values()}


def test_runs_and_sweeps_are_found_at_any_depth_and_a_sweeps_own_runs_too(given):
    assert names(Folders([given])) == {"a": "run", "b": "run", "study": "sweep", "1": "run"}
    assert names(Folders([given / "a", given / "study" / "sweep.db"])) == {"a": "run", "study": "sweep"}


def test_names_that_are_the_same_have_the_folders_above(given):
    write_run(given / "other" / "b", 1)
    assert {"deep/b", "other/b"} <= {*names(Folders([given]))}


def test_ids_stay_and_tell_nothing_of_the_path(given):
    one, other = Folders([given]), Folders([given / "a", given])
    assert one.entries.keys() == other.entries.keys()
    assert all(len(name) == 12 and name.isalnum() for name in one.entries)


def test_what_links_lead_to_outside_is_not_found(given, tmp_path):
    write_run(tmp_path / "outside", 3)
    (given / "link").symlink_to(tmp_path / "outside")
    (given / "loop").symlink_to(given)
    (given / "inside").symlink_to(given / "a")
    (given / "fake").mkdir()
    write_sweep(tmp_path, bench_rows()[:1])
    (given / "fake" / "sweep.db").symlink_to(tmp_path / "sweep.db")
    assert names(Folders([given])) == {"a": "run", "b": "run", "study": "sweep", "1": "run"}


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "config.yaml", "samples.jsonl", "logs/rank-0.log", ".lock"]
)
def test_a_run_with_a_file_that_leads_outside_is_not_shown(given, tmp_path, file):
    secret = tmp_path / "secret"
    secret.write_text("{}\n")
    folders = Folders([given / "a"])
    (entry,) = folders.entries.values()
    assert folders.may_show(entry)
    place = given / "a" / file
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(secret)
    assert not folders.may_show(entry)
    place.unlink()
    os.mkfifo(place)
    assert not folders.may_show(entry), "a pipe"


def test_sentences_name_files_from_the_given_folder_on(given):
    folders = Folders([given, given / "a", given / "study" / "sweep.db"])
    sentence = f"{given}/deep/b, {given}/a/x, {given}/study/sweep.db and /elsewhere can't be read."
    assert folders.without_paths(sentence) == (
        "runs/deep/b, a/x, study/sweep.db and /elsewhere can't be read."
    )
    assert Folders([given / "a"]).without_paths(f"{given}/b") == f"{given}/b"
    folders._roots = [Path("/")]
    assert folders.without_paths("/a/b can't be read.") == "/a/b can't be read."


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with refuses(UserError):
        Folders([tmp_path / "file"])


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path):
    folders = Folders([tmp_path / "runs"])
    assert folders.entries == {} and "meshtune train" in pages.list_page([], []).before
    write_run(tmp_path / "runs" / "first", 1)
    folders.find()
    (entry,) = folders.entries.values()
    assert (entry.name, entry.kind) == ("first", "run") and folders.may_show(entry)


def state(run: RunDir, status: str) -> tuple[str, str]:
    return tuple(state_of(run, status, first_and_last_rows(run.metrics_file)))


def test_states(tmp_path):
    run = write_run(tmp_path / "run", 3)
    assert state(run, "running") == ("running", "")
    assert state(run, "finished") == ("finished", "")
    assert state(run, "stopped by SIGTERM") == ("stopped", "by SIGTERM")
    why = "loss or gradients were not finite"
    assert state(run, f"stopped: {why}") == ("failed", why)
    assert state(run, "stopped without an end")[0] == "failed"
    run.logs.mkdir()
    (run.logs / "rank-1.log").write_text("a line\nRuntimeError: no \x1b[31mroom\n\n")
    assert state(run, "stopped without an end") == ("failed", "rank-1.log: RuntimeError: no ␛[31mroom")
    assert state(write_run(tmp_path / "new", 0), "running") == ("waiting", "for its first step")
    run.append({"kind": "run", "start": 2})  # it goes on, and has done no step yet
    assert state(run, "running")[0] == "waiting"
    untouched = RunDir(tmp_path / "untouched").create()
    untouched.config_file.write_text("")
    assert state(untouched, "stopped without an end") == ("waiting", "to be started")


def test_the_first_and_last_rows_of_a_long_file_are_read_and_all_of_a_short_one(tmp_path):
    short, long = write_run(tmp_path / "short", 150), write_run(tmp_path / "long", 3000)
    assert len(first_and_last_rows(short.metrics_file)) == 151
    rows = first_and_last_rows(long.metrics_file)
    assert rows[0]["kind"] == "run" and rows[-1]["step"] == 3000 and len(rows) < 600
    with open(short.metrics_file, "a") as file:
        file.write('not JSON\n{"kind": "train", "step": 151')  # a row that is being written
    assert len(first_and_last_rows(short.metrics_file)) == 151
    assert first_and_last_rows(tmp_path / "missing") == []


def test_who_holds_the_lock_is_named(tmp_path):
    run = write_run(tmp_path / "run", 1)
    assert pages.holder_of(run.lock_file) is None
    with locked(run):
        assert pages.holder_of(run.lock_file) in (os.getpid(), None)  # None without /proc/locks
    assert pages.holder_of(run.lock_file) is None


def test_who_holds_a_file_of_the_same_inode_on_another_disk_is_not_named(tmp_path, monkeypatch):
    """Else the page would show a command that ends a foreign process."""
    run = write_run(tmp_path / "run", 1)
    run.lock_file.touch()
    inode = run.lock_file.stat().st_ino
    line = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:99:{inode} 0 EOF\n"
    monkeypatch.setattr(pages.Path, "read_text", lambda *_, **__: line)
    assert pages.holder_of(run.lock_file) is None
    with open(run.lock_file):
        assert pages.holder_of(run.lock_file) == os.getpid()
