"""Experiments in processes of their own: how each end becomes a status, and that none outlives the sweep."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshtune.errors import Interrupted
from meshtune.layout import Layout
from meshtune.study import children
from meshtune.study.children import MARK, Child, Task, failure, kill_marked, marked
from meshtune.study.runner import Devices, Progress, run_all
from meshtune.study.store import (
    CRASHED,
    DIVERGED,
    DOES_NOT_FIT,
    DONE,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    WAITING,
    Outcome,
    Store,
)
from meshtune.study.sweep_file import Experiment

BENCHED = (
    '{"layouts": [{"layout": "mb1-ga1", "failed": null, "predicted": null, "simulated": null, "measured": '
    '{"step_seconds": 0.5, "spread": 0.1, "tokens_per_second_per_gpu": 128.0, "mfu": null, "tokens": 64, '
    '"peak_memory_bytes": 1000}}]}'
)
SCRIPTS = {
    "done": f"print('''{BENCHED}''')",
    "crash": "raise RuntimeError('a bug')",
    "refused": "import sys; sys.stderr.write('meshtune: reading …\\nmeshtune: No. Try b.\\n'); sys.exit(2)",
    "sleep": (
        "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    ),
    "late": (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.stderr.write('ready'); "
        f"sys.stderr.flush(); time.sleep(1); print('''{BENCHED}''')"
    ),
}  # commands that stand for `meshtune bench`


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments run the script that their setting `script` names."""
    monkeypatch.setattr(
        Task, "command", lambda task, *_: [sys.executable, "-c", SCRIPTS[str(task.tree["script"])]]
    )


def swept(
    folder: Path, scripts: Sequence[str], *, limit: float = 60, jobs: int = 2
) -> tuple[Store, list[str]]:
    """Run the scripts as experiments; returns the open database and the lines of progress."""
    store = Store(folder / "sweep.db")
    store.add(
        [Experiment({"script": name}, {}, f"{n} {name}") for n, name in enumerate(scripts)], ("script",)
    )
    rows, lines = store.rows(WAITING), list[str]()
    tasks = {row.number: Task(row.number, "bench", row.settings, Layout(), 1, limit) for row in rows}
    devices = Devices(jobs=jobs)
    progress = Progress(store, len(scripts), len(scripts) - len(rows), devices, lines.append)
    run_all(store, tasks, folder, devices, sweep="unit", progress=progress, log=lines.append)
    return store, lines


@pytest.mark.ci
@pytest.mark.usefixtures("scripted")
def test_each_end_is_a_result_with_its_reason(tmp_path: Path) -> None:
    store, lines = swept(tmp_path, ["done", "crash", "refused", "sleep"], limit=2)
    with store:
        (done,) = store.best("tokens_per_second_per_gpu DESC", 9)
        assert done["script"] == "done" and done["peak_memory_bytes"] == 1000 and done["attempts"] == 1
        assert store.counts() == {DONE: 1, CRASHED: 1, REFUSED: 1, TIMED_OUT: 1}
        reasons = store.reasons()
    assert "RuntimeError: a bug" in reasons[CRASHED] and reasons[REFUSED] == "No. Try b."
    assert reasons[TIMED_OUT] == "It did not end within 2.0 s."
    assert not [*marked("unit")]  # nor what the killed one had started in a session of its own
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["2.log", "3.log", "4.log"]
    assert "RuntimeError" in (tmp_path / "logs" / "2.log").read_text()
    assert lines[-1].startswith("4 of 4 · experiment 4 (script=sleep) timed out")
    assert "left" in next(line for line in lines if line.startswith("1 of 4"))
    assert lines[0] == "experiment 1 of 4 (script=done) started"


@pytest.mark.usefixtures("scripted")
def test_ctrl_c_ends_the_experiments_and_they_wait_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "TO_STOP_OTHERS", 2.0)
    began: list[Child] = []
    start = Child.__init__

    def interrupted(child: Child, *words: object) -> None:
        start(child, *words)  # type: ignore[arg-type]
        began.append(child)
        if len(began) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Child, "__init__", interrupted)
    with pytest.raises(Interrupted, match="3 experiments to run; the same command continues"):
        swept(tmp_path, ["sleep", "sleep", "done"])
    assert not [*marked("unit")]
    monkeypatch.undo()
    with Store(tmp_path / "sweep.db") as store:
        assert store.counts() == {WAITING: 3}


@pytest.mark.ci
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("others", [0, 1])
def test_what_ends_while_the_sweep_is_stopped_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Such as training that was writing its model."""
    start, stop = Child.__init__, Child.stop

    def interrupted(child: Child, *words: object) -> None:
        start(child, *words)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)

    def stopped(child: Child) -> None:
        until = time.monotonic() + 30
        while not child.task.log_file(tmp_path).read_text() and time.monotonic() < until:
            time.sleep(0.05)
        stop(child)

    monkeypatch.setattr(Child, "__init__", interrupted)
    monkeypatch.setattr(Child, "stop", stopped)
    if others:
        with pytest.raises(Interrupted, match="1 experiment to run"):
            swept(tmp_path, ["late", "sleep"], jobs=1)
    else:
        swept(tmp_path, ["late"])[0].__exit__(None)
    monkeypatch.undo()
    with Store(tmp_path / "sweep.db") as store:
        assert store.counts() == {DONE: 1} | ({WAITING: 1} if others else {})
        assert store.best("tokens_per_second_per_gpu DESC", 1)[0]["attempts"] == 1


@pytest.mark.parametrize(
    ("code", "line", "status"),
    [
        (2, "meshtune: Write b.", REFUSED),
        (3, "meshtune: Out of memory: 3 GiB. Use less.", OUT_OF_MEMORY),
        (3, "meshtune: No layout fits.", DOES_NOT_FIT),
        (4, "meshtune: Training went non-finite.", DIVERGED),
        (75, "meshtune: stopped.", CRASHED),
        (-9, "", OUT_OF_MEMORY),
        (1, "KeyError: 'a'", CRASHED),
        (-11, "", CRASHED),
    ],
)
def test_exit_codes_are_statuses(code: int, line: str, status: str) -> None:
    outcome = failure(code, ["meshtune: reading x …", line] if line else [], 1.0)
    assert outcome.status == status and outcome.reason
    assert "reading x" not in outcome.reason or status == CRASHED


def test_only_marked_processes_are_killed() -> None:
    def sleeping(mark: str | None) -> "subprocess.Popen[bytes]":
        mine = {name: value for name, value in os.environ.items() if name != MARK}
        return subprocess.Popen(["sleep", "60"], env=mine | ({MARK: mark} if mark else {}))

    others = [sleeping(None), sleeping("unit-kil/1"), sleeping("unit-kill-2/1")]
    ours = [sleeping("unit-kill/1"), sleeping("unit-kill/12")]
    until = time.monotonic() + 10
    while len([*marked("unit-kill")]) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    try:
        assert kill_marked("unit-kill/1") == 1
        assert [one.pid for one in ours if one.poll() is None] == [ours[1].pid] == [*marked("unit-kill")]
        assert kill_marked("unit-kill") == 1
        assert all(one.poll() is None for one in others)
    finally:
        for one in (*others, *ours):
            one.kill()
            one.wait()


def test_a_task_survives_as_text() -> None:
    task = Task(7, "train", {"model": {"name": "a"}}, Layout.parse("zero3x2-mb1-ga4"), 10, 60.0)
    assert Task.from_json(task.as_json()) == task
    settings = task.settings(Path("out"))
    assert settings["train"] == {"global_batch_size": 8} and settings["output"] == "out/runs/7"
    assert Outcome(DONE).status == DONE
