"""Job arrays of a sweep, with scripts for Slurm's commands; tests/acceptance/test_slurm.py has a real one."""

import json
import os
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden import refuses, says

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.study import queue, slurm
from meshtune.study.children import Task
from meshtune.study.queue import collect, follow, read_task, run_in_job, written
from meshtune.study.runner import Devices, Progress
from meshtune.study.slurm import ended_without, options_of, recover, resources, submit
from meshtune.study.store import CRASHED, DONE, OUT_OF_MEMORY, RUNNING, TIMED_OUT, WAITING, Outcome, Store
from meshtune.study.sweep_file import Experiment, read_sweep

COMMANDS = {
    "sbatch": (
        'echo "$@" >> "$CALLS"; case "$*" in *"${FAIL:-none}"*) echo "invalid partition" >&2; exit 1;; esac; '
        'echo "Welcome: 24 nodes"; echo "$(wc -l < "$CALLS");local"'
    ),
    "squeue": 'test -z "$DOWN" || { echo "$DOWN" >&2; exit 1; }; cat "$QUEUE" 2>/dev/null || true',
    "scontrol": (
        'echo "scontrol $*" >> "$RELEASED"; '
        'test "$*" = "$FAIL" && { echo "1_0: Requested partition not available" >&2; exit 1; }; '
        'test "$1" = show && test -n "$REFUSAL" && { echo "$REFUSAL" >&2; exit 1; }; '
        'echo "MaxArraySize = 4"; echo "JobState=$STATE Reason=x"'
    ),
    "sacct": 'test -n "$ACCOUNTED" && echo "$ACCOUNTED"',
    "scancel": 'echo "$*" >> "$CANCELLED"',
}  # fmt: skip


PLAN = read_sweep({"axes": {"train.seed": [1]}, "slurm": {"partition": "gpu"}}, name="study")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands as shell scripts; returns the folder with what they were called with."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    files = {"CALLS": "calls", "QUEUE": "queue", "RELEASED": "released", "CANCELLED": "cancelled"}
    for name, value in files.items():
        monkeypatch.setenv(name, str(folder / value))
    monkeypatch.setattr(slurm, "LOOK", 0.01)
    return folder


def task(number: int, layout: str, **tree: Any) -> Task:
    return Task(number, "bench", tree, Layout.parse(layout), 10, 600.0)


def store_of(folder: Path, tasks: list[Task]) -> Store:
    store = Store(folder / "sweep.db")
    store.add([Experiment({"n": one.number}, {}, str(one.number)) for one in tasks], ("n",))
    return store


def test_each_number_of_ranks_is_an_array_and_large_ones_are_cut(commands: Path, tmp_path: Path) -> None:
    tasks = [task(number, "zero3x8-mb1-ga1" if number % 2 else "mb1-ga1") for number in range(1, 9)]
    with store_of(tmp_path, tasks) as store:
        by_number = {one.number: one for one in tasks}
        ids = submit(store, by_number, tmp_path, PLAN, 2)
        assert ids == ["1", "2", "3", "4"]  # of at most 3 tasks: MaxArraySize is 4
        jobs = " ".join(str(row.job) for row in store.rows(RUNNING))
        assert jobs == "3_0 1_0 3_1 1_1 3_2 1_2 4_0 2_0"
    lines = (commands / "calls").read_text().splitlines()
    assert ["--array=0-2%2" in line for line in lines] == [True, False, True, False]
    assert "--gpus-per-node=1" in lines[0] and "--gpus-per-node=8" in lines[2]
    assert all("--hold" in line and "--partition=gpu" in line and "--time=15" in line for line in lines)
    assert "scontrol release 4" in (commands / "released").read_text()
    listing = Path(lines[0].split()[-1])
    assert [read_task(tmp_path, int(number)).world for number in listing.read_text().split()] == [1, 1, 1]
    assert '"$((SLURM_ARRAY_TASK_ID + 1))p"' in (tmp_path / "sweep.sbatch").read_text()


@pytest.mark.parametrize(
    ("refused", "cancelled"),
    [("--ntasks-per-node=8", "1\n"), ("release 1", "1 2\n")],
    ids=["sbatch", "release"],
)
def test_where_an_array_is_refused_the_others_are_cancelled_and_all_experiments_wait(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, cancelled: str
) -> None:
    tasks = {1: task(1, "mb1-ga1"), 2: task(2, "zero3x8-mb1-ga1")}
    monkeypatch.setenv("FAIL", refused)
    with store_of(tmp_path, [*tasks.values()]) as store:
        with refuses(UserError):
            submit(store, tasks, tmp_path, PLAN, 0)
        assert store.counts() == {WAITING: 2} and not any(row.job for row in store.rows())
    assert (commands / "cancelled").read_text() == cancelled


def test_results_are_collected_and_tasks_that_vanish_are_named(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(number, "mb1-ga1") for number in (1, 2)]
    lines: list[str] = []
    monkeypatch.setenv("STATE", "TIMEOUT")
    with store_of(tmp_path, tasks) as store:
        store.start([1, 2], "7")
        written(tasks[0], tmp_path, Outcome(DONE, None, {"step_seconds": 0.5}, {"a": [1]}, 3.0))
        follow(store, slurm, tmp_path, Progress(store, 2, 0, Devices(), lines.append), lines.append)
        assert store.counts() == {DONE: 1, TIMED_OUT: 1}
        assert store.best("step_seconds", 1)[0]["seconds"] == 3.0
    assert not [*(tmp_path / "results").iterdir()]
    says(lines[-1])


def test_a_result_that_comes_while_others_are_collected_is_kept(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(number, "mb1-ga1") for number in (1, 2)]
    with store_of(tmp_path, tasks) as store:
        store.start([1, 2], "7")
        written(tasks[0], tmp_path, Outcome(DONE))
        finish = store.finish

        def late(outcomes: dict[int, Outcome]) -> None:
            finish(outcomes)
            written(tasks[1], tmp_path, Outcome(DONE))

        monkeypatch.setattr(store, "finish", late)
        assert [*collect(store, tmp_path)] == [1]
        monkeypatch.undo()
        (tmp_path / "results" / "3.json").write_text("{half")
        assert [*collect(store, tmp_path)] == [2] and store.counts() == {DONE: 2}


@pytest.mark.parametrize(
    ("state", "status"),
    [("CANCELLED", None), ("NODE_FAIL", None), ("FAILED", CRASHED), ("TIMEOUT", TIMED_OUT)],
)
def test_the_state_of_a_task_decides(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, status: str | None
) -> None:
    monkeypatch.setenv("STATE", state)
    with store_of(tmp_path, [task(1, "mb1-ga1")]) as store:
        store.start([1], "7")
        outcome = ended_without(store.rows(RUNNING)[0], tmp_path)
    assert (outcome and outcome.status) == status


@pytest.mark.parametrize(
    ("accounted", "status", "reason"),
    [
        ("CANCELLED by 1000", None, ""),
        ("OUT_OF_MEMORY", OUT_OF_MEMORY, "state OUT_OF_MEMORY"),
        ("", CRASHED, "forgotten its task 7_0, which left no result; see slurm/7_0.out. `--retry crashed`"),
    ],
)
def test_accounting_is_asked_for_a_task_that_the_controller_has_forgotten(
    commands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accounted: str,
    status: str | None,
    reason: str,
) -> None:
    monkeypatch.setenv("REFUSAL", "slurm_load_jobs error: Invalid job id specified")
    monkeypatch.setenv("ACCOUNTED", accounted)
    with store_of(tmp_path, [task(1, "mb1-ga1")]) as store:
        store.start([1], "7")
        outcome = ended_without(store.rows(RUNNING)[0], tmp_path)
    assert (outcome and outcome.status) == status and reason in ((outcome and outcome.reason) or "")


@pytest.mark.parametrize("silent", ["DOWN", "REFUSAL"], ids=["squeue", "scontrol"])
def test_a_slurm_that_does_not_answer_ends_the_sweep_after_a_while_alone(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """Results are collected meanwhile, and nothing is taken for vanished."""
    tasks, lines = [task(number, "mb1-ga1") for number in (1, 2)], list[str]()
    monkeypatch.setenv(silent, "Unable to contact slurm controller")
    monkeypatch.setattr(queue, "PATIENCE", 0.3)
    clock = count(0.0, 0.2)  # seconds: a machine's load changes nothing
    monkeypatch.setattr(queue, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: next(clock)}))
    if silent == "REFUSAL":
        (commands / "queue").write_text("")
    with store_of(tmp_path, tasks) as store:
        store.start([1, 2], "7")
        written(tasks[0], tmp_path, Outcome(DONE))
        progress = Progress(store, 2, 0, Devices(), lines.append)
        with refuses(UserError):
            follow(store, slurm, tmp_path, progress, lines.append)
        assert store.counts() == {RUNNING: 1, DONE: 1}
        assert len([line for line in lines if "Unable to contact" in line]) == 1
        monkeypatch.delenv(silent)
        (commands / "queue").write_text("")
        follow(store, slurm, tmp_path, progress, lines.append)
        assert store.counts() == {DONE: 1, CRASHED: 1}


def test_held_arrays_that_the_database_does_not_know_are_cancelled(commands: Path, tmp_path: Path) -> None:
    script, lines = tmp_path / "sweep.sbatch", list[str]()
    held = [f"7|JobHeldUser|{script}", f"8|JobHeldUser|{script} x", "6|JobHeldUser|/a"]
    (commands / "queue").write_text("\n".join([*held, f"9|Priority|{script}"]))
    with store_of(tmp_path, [task(1, "mb1-ga1")]) as store:
        store.start([1], "7")
        recover(store, tmp_path, lines.append)
    assert (commands / "cancelled").read_text() == "8\n"
    says(lines)


def test_machines_follow_from_the_ranks_and_what_the_file_says_counts() -> None:
    assert "--nodes=2" in resources(task(1, "zero3x16-mb1-ga1"), {"gpus-per-node": 8})
    assert "--gpus-per-node=8" in resources(task(1, "zero3x16-mb1-ga1"), {"gpus-per-node": 8})
    typed = resources(task(1, "zero3x16-mb1-ga1"), {"gpus_per_node": "h100:8"})
    assert "--gpus-per-node=h100:8" in typed and "--nodes=2" in typed
    assert {"--nodes=2", "--ntasks-per-node=8"} < set(typed), "a core for each rank"
    uneven = resources(task(1, "zero3x12-mb1-ga1"), {"gpus-per-node": 8})
    assert {"--nodes=2", "--ntasks-per-node=6", "--gpus-per-node=6"} < set(uneven), "no rank is left out"
    theirs = resources(task(1, "mb1-ga1"), {"gpus": 4})
    assert "--gpus=4" in theirs and "--gpus-per-node" not in " ".join(theirs), "sbatch refuses both"
    on_cpu = resources(task(1, "mb1-ga1", train={"device": "cpu"}), {"time": 3, "exclusive": True})
    assert "--time=3" in on_cpu and "--exclusive" in on_cpu and "gpus" not in " ".join(on_cpu)


def test_options_of_the_base_are_used_and_those_of_the_file_are_laid_over_them() -> None:
    def options(cluster: dict[str, Any], **slurm: Any) -> dict[str, Any]:
        document = {"base": {"cluster": {"slurm": cluster}}, "axes": {"train.seed": [1]}, "slurm": slurm}
        return options_of(read_sweep(document))

    with pytest.raises(UserError) as error:
        options({}, **{"array": "1-3", "Parti tion": 1, "chdir": "/", "gpus-per-node": "all"})
    assert len(error.value.problems) == 4
    with refuses(UserError):
        options({"container": "x.sif", "extra": ["--hold", "--comment=a"]}, ntasks_per_node=1)
    base = {"partition": "cpu", "account": "team", "extra": ["--exclusive", "--mem=0"]}
    ours = {"account": "team", "exclusive": True, "mem": "0", "partition": "gpu", "gpus-per-node": "h100:8"}
    assert options(base, partition="gpu", gpus_per_node="h100:8") == ours


def test_a_bench_on_several_machines_is_refused_in_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    outcome = run_in_job(task(5, "zero3x16-mb1-ga1"), tmp_path)
    says(outcome.reason or "")
    assert json.loads((tmp_path / "results" / "5.json").read_text())["outcome"]["status"] == "refused"
