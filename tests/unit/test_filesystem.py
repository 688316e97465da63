"""A path that can't be used is reported with the setting or variable that chose it."""

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtune import cli, config
from meshtune.errors import UserError, expanded
from meshtune.filesystem import paths_named
from meshtune.study.store import Store


def refused(path: Path) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("setting", ["output", "data.cache", "data.train", "model.name"])
@pytest.mark.parametrize("place", [".", "a/file", ".."])
def test_the_setting_that_chose_a_path_is_named(tmp_path: Path, setting: str, place: str) -> None:
    path = tmp_path / "place" / "folder"
    path.mkdir(parents=True)
    words = {"model.name": "org/name", "data.train": "rows.jsonl", "output": "runs/x"} | {setting: str(path)}
    settings = config.load(None, [f"{name}={value}" for name, value in words.items()])
    named = rf"{setting} is {path}, but .* \(Permission denied\).* by {setting}\."
    with pytest.raises(UserError, match=named), paths_named(settings):
        raise refused(path / place)
    with pytest.raises(PermissionError), paths_named(settings):
        raise refused(tmp_path / "another")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (lambda folder: refused(folder / "meshtune-ranks-1"), "TMPDIR chooses another folder than"),
        (lambda folder: FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
         "No usable temporary directory found in ['/tmp']. Set TMPDIR to a folder that can be written."),
        (lambda folder: refused(folder.parent / "hub" / "models"), "HF_HOME chooses another folder"),
        (lambda folder: refused(Path("/etc/typed")), "'/etc/typed'. Change the path. Then run the command"),
        (lambda folder: OSError(errno.ENOSPC, "No space left on device"), "Make room."),
        (lambda folder: OSError(errno.EFBIG, "File too large"), "(ulimit -f)."),
    ],
)  # fmt: skip
def test_the_variable_that_chose_a_path_is_named(
    error: Callable[[Path], OSError],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    tmp_path: Path,
) -> None:
    raised = error(tmp_path / "tmp")

    def gettempdir() -> str:
        if raised.errno == errno.ENOENT:
            raise raised
        return str(tmp_path / "tmp")

    def app(**_: Any) -> None:
        raise raised

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["meshtune"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_sweeps_folder_that_can_not_be_made_names_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"folder .*file/sweep can't be used: Not a directory; .* --out"):
        Store(tmp_path / "file" / "sweep" / "sweep.db")


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    with pytest.raises(UserError, match=r"data.cache = ~/.cache: this user has no home \(HOME is not set\)"):
        expanded("~/.cache", "data.cache")
