"""Finished runs as they were measured, and the devices that they were on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshtune.config import Config
from meshtune.errors import UserError, expanded
from meshtune.plan.cluster import Cluster, cluster_here
from meshtune.plan.hardware import named
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
    for path in map(expanded, paths):
        inside = [path] if RunDir(path).metrics_file.exists() else sorted(_runs_in(path))
        found += inside
        if not inside:
            problems.append(f"{path} holds no run: there is no metrics.jsonl in it or in its folders.")
    if problems:
        raise UserError(problems)
    return found


def _runs_in(path: Path) -> Iterator[Path]:
    return (file.parent for file in path.glob("*/metrics.jsonl"))


def cluster_of_run(config: Config, run: MeasuredRun) -> Cluster:
    """The devices that a run was on, by its run row. Raises as `cluster_here`."""
    if run.facts.get("device_type") != "cuda":
        return cluster_here(config, run.layout.world, [])
    device, ranks = str(run.facts["device"]), run.layout.world
    kind = named(device)
    here = ranks // run.nodes
    return cluster_here(config, ranks, [(device, kind.memory if kind else 0.0)] * here)
