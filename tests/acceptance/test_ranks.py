"""Several ranks through the front door: started by the command itself, or by torchrun."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import TORCHRUN, Command, end, start
from golden import says

from meshtune.rundir import RunDir

Settings = Callable[..., list[str]]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in RunDir(run).rows() if row["kind"] in ("train", "eval")]


def ranks_of(process: "subprocess.Popen[str]", run: Path, step: int) -> list[int]:
    """The process ids of a command's ranks, once its metrics hold `step`."""
    until = time.monotonic() + 200
    while not any(row["step"] >= step for row in RunDir(run).rows("train")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    # Not /proc/…/children: the kernel may leave some out while others start or end.
    return [child.pid for child in psutil.Process(process.pid).children()]


def test_a_number_of_ranks_that_is_not_the_layouts_is_refused(meshtune: Command, settings: Settings) -> None:
    says(meshtune("train", *settings("layout=dp2"), "--nproc", 3, code=2).err)


def test_a_rank_that_torchrun_started_starts_none(
    meshtune: Command, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    says(meshtune("train", *settings(), "--nproc", 2, code=2).err)


@pytest.mark.all
def test_two_ranks_train_as_one_started_here_by_torchrun_or_on_two_machines(
    process: Command, begin_fork: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process("train", *settings(f"output={tmp_path / 'one'}"))
    words = settings(f"output={tmp_path / 'here'}", "layout=zero3x2", "log.to=[jsonl,console]")
    here = process("train", *words, "--json")
    assert here.json["steps"] == 4
    assert here.err.count("step 4/4") == 1
    words = ["train", *settings(f"output={tmp_path / 'torchrun'}", "layout=zero3x2")]
    assert end(start(*words, "--json", python=TORCHRUN)).json["steps"] == 4
    machines = []
    for number in "01":
        names = {
            "NODE_RANK": number,
            "NODES_NUM": "2",
            "MASTER_NODE_IP": "127.0.0.1",
            "RUN_NAME": str(tmp_path),
        }
        for name, value in names.items():
            monkeypatch.setenv(f"DSTACK_{name}", value)
        machines.append(begin_fork("train", *settings(f"output={tmp_path / 'machines'}", "layout=zero3x2")))
    assert [end(machine).code for machine in machines] == [0, 0]
    for name in names:
        monkeypatch.delenv(f"DSTACK_{name}")
    for run in ("here", "torchrun", "machines"):
        assert losses(tmp_path / run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        assert [file.name for file in (tmp_path / run / "logs").iterdir()] == ["rank-1.log"]
    assert end(start(*words, python=TORCHRUN), code=1).err.count("holds a finished run of 4 steps") == 1


@pytest.mark.ci
def test_tasks_of_srun_meet_and_train(
    begin_fork: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two tasks on one node by the variables that srun gives them; a real Slurm is in test_slurm.py."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    names = {
        "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    tasks = []
    for number in "01":
        for name, value in {**names, "SLURM_PROCID": number, "SLURM_LOCALID": number}.items():
            monkeypatch.setenv(name, value)
        tasks.append(begin_fork("train", *settings("train.max_steps=2", "layout=zero3x2")))
    ended = [end(task) for task in tasks]
    assert [task.code for task in ended] == [0, 0], ended
    assert [row["step"] for row in RunDir(tmp_path / "run").rows("train")] == [1, 2]
    assert RunDir(tmp_path / "run").rows("run")[0]["layout"].startswith("zero3x2")


@pytest.mark.all
def test_a_signal_saves_on_every_rank_and_one_rank_goes_on(
    begin_fork: Any, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    words = settings("train.max_steps=300", "layout=zero3x2")
    running = begin_fork("train", *words)
    ranks_of(running, tmp_path / "run", 2)
    running.send_signal(signal.SIGTERM)
    assert end(running, code=75).err.count("Stopped by SIGTERM") == 1
    done = RunDir(tmp_path / "run").rows("train")[-1]["step"]
    meshtune("train", *settings(f"train.max_steps={done + 2}", "layout=auto"))
    assert RunDir(tmp_path / "run").rows("run")[-1]["resumed_from"] == done


@pytest.mark.all
def test_a_stopped_rank_is_named_within_a_minute(begin: Any, settings: Settings, tmp_path: Path) -> None:
    running = begin("train", *settings("train.max_steps=100000", "layout=zero3x2"))
    ranks = ranks_of(running, tmp_path / "run", 2)
    os.kill(ranks[1], signal.SIGSTOP)
    stopped = time.monotonic()
    ended = end(running, timeout=60, code=1)
    assert time.monotonic() - stopped < 60
    assert "rank 1 has not answered for 30 s (its process is stopped); rank 0 waits for it in" in ended.err
    assert "over dp_shard (step " in ended.err
