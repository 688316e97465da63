"""A run on a file system that lacks locks, syncs, modes, links and renames."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_runs import end_row, write_run
from transformers import AutoModelForCausalLM

from meshtune import config, filesystem
from meshtune.api import build
from meshtune.filesystem import replace, sync
from meshtune.launch import start
from meshtune.report.experiments.database import opened
from meshtune.report.run.summary import UNKNOWN, summarise
from meshtune.rundir import write_text_atomically
from meshtune.study.store import Store
from meshtune.train import loop
from meshtune.train.folder import Claim
from meshtune.web.states import state_of


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse what Lustre without locks, a FUSE mount, a mounted bucket or vfat refuse."""

    def refuse(number: int) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        return call

    for module, name, call in (
        (fcntl, "flock", refuse(errno.ENOSYS)), (os, "fsync", refuse(errno.EINVAL)),
        (os, "chmod", refuse(errno.EPERM)), (os, "symlink", refuse(errno.EPERM)),
        (os, "rename", refuse(errno.EXDEV)), (os, "replace", refuse(errno.EXDEV)),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, call)
    filesystem._said.clear()


@pytest.mark.ci
def test_a_run_trains_saves_resumes_and_exports_there_with_a_line_for_each_lack(
    settings: Callable[..., list[str]], poor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        words = settings(f"train.max_steps={steps}", "train.lr_scheduler=constant", "checkpoint.every=1")
        run = build.build(config.load(None, [*words, "checkpoint.keep=1"]))
        loop.train(run)
    assert run.folder.rows("run")[-1]["resumed_from"] == 2
    assert run.checkpoints.steps() == [4]
    AutoModelForCausalLM.from_pretrained(run.folder.model)
    lines = [line for line in capsys.readouterr().err.splitlines() if "its file system refuses" in line]
    lacks = [line.split("refuses ")[1].split(" (")[0] for line in lines]
    assert sorted(lacks) == ["file locks", "fsync", "such a rename"]


def test_a_sweeps_database_is_written_and_read_there(tmp_path: Path, poor: None) -> None:
    with Store(tmp_path / "sweep.db") as store:
        assert store.rows() == []
    with opened(tmp_path / "sweep.db") as database:
        assert database.execute("SELECT count(*) FROM experiments").fetchone() == (0,)


def test_a_run_without_an_end_is_not_called_stopped_there(tmp_path: Path, poor: None) -> None:
    run = write_run(tmp_path / "run", 2)
    with Claim(run):
        summary = summarise(run)
    assert (summary.status, state_of(run, summary.status, run.rows()).word) == (UNKNOWN, "unknown")
    run.append(end_row(2, "finished"))
    assert summarise(run).status == "finished"


def test_the_folders_of_other_processes_stay_there(
    tmp_path: Path, poor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(start, "YOUNG_SECONDS", -60)
    with start.scratch_folder() as used:
        start.remove_abandoned()
        assert used.is_dir()


def test_a_disk_that_fails_or_is_full_is_still_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for number in (errno.EIO, errno.ENOSPC):

        def fail(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            patch.setattr(os, "replace", fail)
            for work in (
                lambda: sync(tmp_path / "file"),
                lambda: replace(tmp_path / "file", tmp_path / "other"),
                lambda: write_text_atomically(tmp_path / "file", "new"),
            ):
                with pytest.raises(OSError, match=os.strerror(number)):
                    work()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
