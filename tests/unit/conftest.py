"""Clients of clusters as shell scripts."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Clients = Callable[[Mapping[str, str]], Path]


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the tests is the active one."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Function(programs: name -> lines of a shell script) that puts them on PATH, and works in their folder;
    returns the file $CALLED.
    """

    def of(programs: Mapping[str, str]) -> Path:
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CALLED", str(tmp_path / "called"))
        monkeypatch.chdir(tmp_path)
        return tmp_path / "called"

    return of
