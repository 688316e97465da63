"""Options of a sweep: which experiments they run again, and which have no effect and are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from golden import refuses

from meshtune.api import sweep as api
from meshtune.errors import UserError
from meshtune.meter.rows import time_now
from meshtune.rundir import RunDir
from meshtune.study.children import Task
from meshtune.study.queue import written
from meshtune.study.store import DOES_NOT_FIT, DONE, RUNNING, WAITING, Outcome, Store
from meshtune.study.sweep_file import Experiment, read_sweep

TOO_LARGE: dict[str, Any] = {
    "base": {"model": {"name": "llama-3.1-70b"}, "data": {"seq_len": 4096}, "cluster": {"gpu": "h100-sxm"}},
    "axes": {"layout": ["mb1-ga1", "mb2-ga1"]},
}


@pytest.mark.parametrize(("given", "option"), [({"everything": True}, "--all"), ({"jobs": 2}, "--jobs")])
def test_options_that_the_planner_has_no_use_for_are_refused(given: dict[str, Any], option: str) -> None:
    with refuses(UserError):
        api.check_options("planner", [], to=None, **given)
    api.check_options("dryrun", [], to=None, **given)


@pytest.mark.ci
def test_what_was_run_and_does_not_fit_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[int]] = []

    def run_all(store: Store, tasks: Mapping[int, Task], *_: object, **__: object) -> None:
        ran.append([*tasks])
        store.finish({min(tasks): Outcome(DOES_NOT_FIT, "By the dry run.", seconds=1.0)})  # then it is killed

    monkeypatch.setattr(api, "run_all", run_all)

    def swept(*, everything: bool) -> dict[str, int]:
        done = api.sweep(TOO_LARGE, out=tmp_path, simulate="dryrun", everything=everything)
        return dict(done.counts)

    assert swept(everything=False) == {DOES_NOT_FIT: 2} and ran == []
    assert swept(everything=True) == {"waiting": 1, DOES_NOT_FIT: 1}
    assert swept(everything=True) == {DOES_NOT_FIT: 2}
    assert ran == [[1, 2], [2]]


def test_a_killed_sweep_settles_what_was_running(tmp_path: Path) -> None:
    """A run that had finished is a result, unless it was that of an attempt before; one whose rows are
    damaged waits, and the sweep starts.
    """
    finished, long_ago = '{"kind": "end", "step": 1, "status": "finished"}', "2026-01-01T00:00:00+02:00"
    with Store(tmp_path / "sweep.db") as store:
        store.add([Experiment({"n": number}, {}, str(number)) for number in range(1, 7)], ("n",))
        store.start(range(1, 7))
        for number, line, began in (
            (1, finished, time_now()), (2, "no JSON", time_now()), (4, finished, long_ago),
            (5, finished, "yesterday"), (6, finished, "2026-01-01T00:00:00"),
        ):  # fmt: skip
            run = RunDir(tmp_path / "runs" / str(number)).create()
            run.append({"kind": "run", "started": began})
            run.append({"kind": "train", "step": 1, "loss": 2.0, "step_seconds": 0.5, "tokens": 8})
            with open(run.metrics_file, "a") as file:
                file.write(f"{line}\n")
        api.settle(store, tmp_path)
        assert [row.status for row in store.rows()] == [DONE, *5 * [WAITING]]
        assert store.best("loss", 1)[0]["loss"] == 2.0


def test_the_machine_is_that_which_runs_the_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the login node that submits them, nor GPUs that they leave unused."""
    monkeypatch.setattr("meshtune.study.runner.gpus_here", lambda: [("a GPU", 1)])

    def facts(device: str, *, elsewhere: bool) -> dict[str, Any]:
        document = {**TOO_LARGE, "base": {**TOO_LARGE["base"], "train": {"device": device}}}
        return api.facts_of(read_sweep(document), None, "id", {}, elsewhere=elsewhere)

    here, unused = facts("auto", elsewhere=False), facts("cpu", elsewhere=False)
    assert (here["gpus"], here["device"]) == (1, "a GPU")
    assert unused["gpus"] == 0 and unused["device"] == unused["machine"]["processor"]
    there, on_processors = facts("auto", elsewhere=True), facts("cpu", elsewhere=True)
    assert there["gpus"] is None and on_processors["gpus"] == 0
    assert not {"machine", "device"} & there.keys()


def test_a_result_that_lies_there_is_collected_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Task] = []

    def submit(store: Store, tasks: Mapping[int, Task], *_: object, **__: object) -> list[str]:
        submitted.extend(tasks.values())
        store.start(tasks, "7")
        return ["7"]

    monkeypatch.setattr(api.slurm, "submit", submit)
    monkeypatch.setattr(api.slurm, "recover", lambda *_: None)
    monkeypatch.setattr(api, "follow", lambda *_: None)
    document = {**TOO_LARGE, "base": {**TOO_LARGE["base"], "model": {"name": "llama-3.2-1b"}}}
    api.sweep(document, out=tmp_path, to="slurm")
    assert [task.number for task in submitted] == [1, 2]
    with Store(tmp_path / "sweep.db") as store:
        store.wait_again([1, 2])  # Slurm had no word of them
    written(submitted[0], tmp_path, Outcome(DONE))
    assert api.sweep(document, out=tmp_path, to="slurm").counts == {DONE: 1, RUNNING: 1}
    assert [task.number for task in submitted] == [1, 2, 2]


def test_an_engine_without_a_queue_and_experiments_in_another_queue_are_refused(tmp_path: Path) -> None:
    for to in ("sky", "pbs"):
        with refuses(UserError):
            api.sweep(TOO_LARGE, out=tmp_path, to=to)
    of_slurm, of_ray = "7_0", "meshtune-7@http://head:8265_0"
    for job, to in ((of_slurm, "ray"), (of_slurm, None), (of_ray, "slurm")):
        with refuses(UserError):
            api.check_jobs([job], to, Path("runs/sweep"))
    api.check_jobs([of_slurm], "slurm", tmp_path)
    api.check_jobs([of_ray], "ray", tmp_path)
