"""Finished runs as they were measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshtune.errors import UserError
from meshtune.plan.step_parts import MeasuredRun
from meshtune.rundir import RunDir

StrPath = str | os.PathLike[str]


def read_runs(paths: Sequence[StrPath]) -> list[tuple[MeasuredRun, RunDir]]:
    """The timed steps of all run folders. Raises UserError with a sentence for each that has none."""
    found, problems = [], []
    for path in dict.fromkeys(folders_of(paths)):
        folder = RunDir(path)
        try:
            found.append((MeasuredRun.of(str(path), folder.rows()), folder))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return found


def folders_of(paths: Sequence[StrPath]) -> list[Path]:
    """The run folders among these, and in those that hold run folders. Raises UserError for any other."""
    found, problems = [], []
    for path in (Path(path).expanduser() for path in paths):
        inside = [path] if RunDir(path).metrics_file.exists() else sorted(_runs_in(path))
        found += inside
        if not inside:
            problems.append(f"{path} holds no run: there is no metrics.jsonl in it or in its folders.")
    if problems:
        raise UserError(problems)
    return found


def _runs_in(path: Path) -> Iterator[Path]:
    return (file.parent for file in path.glob("*/metrics.jsonl"))
