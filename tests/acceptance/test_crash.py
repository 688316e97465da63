"""Killed, stopped, damaged or out of disk: a run goes on with the numbers of one that never stopped."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cases import cases
from command import Command, end

from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints

Settings = Callable[..., list[str]]
LASTING = (
    "train.lr_scheduler=constant",
    "checkpoint.every=2",
)  # the rate does not depend on where the run ends


def stopped_after(step: int, begin_fork: Any, *words: str) -> "subprocess.Popen[str]":
    """Start a command in a fork that stops itself (SIGSTOP) behind the row of `step`, and wait for that."""
    append = RunDir.append

    def written(run: RunDir, row: Any) -> None:
        append(run, row)
        if (row["kind"], row.get("step")) == ("train", step):
            os.kill(os.getpid(), signal.SIGSTOP)

    with patch.object(RunDir, "append", written):
        process = begin_fork(*words)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return process


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in RunDir(run).rows("train")]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def flip_a_byte(step: Path) -> None:
    """Damage the middle of a checkpoint's largest file."""
    file = max(step.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("layout", cases(["auto", "mb2-ga4-offload"], ci=1))
def test_a_killed_run_goes_on_bit_for_bit(
    layout: str, meshtune: Command, begin_fork: Any, settings: Settings, tmp_path: Path
) -> None:
    words = settings(
        "train.max_steps=20", "train.global_batch_size=8", "checkpoint.every=3", "train.weight_decay=0.1",
        f"layout={layout}",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    meshtune("train", *words, f"output={whole}")

    command = ("train", *words, f"output={parts}")
    process = stopped_after(10, begin_fork, *command)
    process.send_signal(signal.SIGKILL)
    end(process, code=-signal.SIGKILL)
    assert len(losses(parts)) == 10
    assert not (parts / "model").exists()
    with open(parts / "metrics.jsonl", "a") as metrics:
        metrics.write('{"kind": "train", "step": 99, "lo')  # a line that the kill tore

    meshtune(*command)
    resumed = RunDir(parts).rows("run")[-1]["resumed_from"]
    assert resumed % 3 == 0
    assert 6 <= resumed <= 10
    assert losses(parts) == losses(whole)
    assert weights(parts) == weights(whole)


@pytest.mark.ci
def test_sigterm_finishes_the_step_saves_and_exits_with_75(
    meshtune: Command, begin_fork: Any, settings: Settings, tmp_path: Path
) -> None:
    words = settings("train.max_steps=20", "train.global_batch_size=8", "checkpoint.every=0")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = stopped_after(3, begin_fork, "train", *words, f"output={parts}")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    stopped = end(process, code=75)
    done = losses(parts)[-1][0]
    assert f"Stopped by SIGTERM after step {done} of 20" in stopped.err
    assert 3 <= done <= 4
    assert Checkpoints(parts / "checkpoints").steps() == [done]
    assert (parts / "report.html").exists()
    assert not (parts / "model").exists()

    meshtune("train", *words, f"output={whole}")
    meshtune("train", *words, f"output={parts}")
    assert RunDir(parts).rows("run")[-1]["resumed_from"] == done
    assert losses(parts) == losses(whole)
    assert weights(parts) == weights(whole)


@pytest.mark.parametrize(("where", "layout"), cases([("draw", "auto"), ("train_watched", "zero3x2")], ci=2))
def test_a_signal_outside_of_the_steps_ends_with_75_too(
    where: str, layout: str, begin_fork: Any, settings: Settings
) -> None:
    starter = os.getppid if layout == "zero3x2" else os.getpid

    def signalled(*arguments: Any) -> None:
        try:
            os.kill(starter(), signal.SIGUSR1)
            time.sleep(60)
        except Exception as error:  # as transformers imports its modules
            raise ModuleNotFoundError("Could not import module") from error

    with patch(f"meshtune.api.train.{where}", signalled):
        process = begin_fork("train", *settings("train.max_steps=1", f"layout={layout}"))
    assert end(process, code=75).err.count("Stopped by SIGUSR1 outside of the training steps") == 1


@pytest.mark.ci
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    meshtune("train", *settings("train.max_steps=6", f"output={whole}", *LASTING))
    meshtune("train", *settings("train.max_steps=4", f"output={parts}", *LASTING))
    flip_a_byte(parts / "checkpoints" / "step-4")

    again = meshtune("train", *settings("train.max_steps=6", f"output={parts}", *LASTING))
    assert "is damaged: its content is not what was written" in again.err, again.err
    assert "Step 4 is skipped" in again.err
    assert RunDir(parts).rows("run")[-1]["resumed_from"] == 2
    assert losses(parts) == losses(whole)
    assert weights(parts) == weights(whole)


@pytest.mark.ci
def test_a_run_killed_before_its_report_gets_it_from_the_same_command(
    meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    command = ("train", *settings("eval.samples=1"))
    run = tmp_path / "run"
    meshtune(*command)
    rows, model = losses(run), (run / "model" / "model.safetensors").stat()
    (run / "report.html").rename(run / ".report.html.77.tmp")

    again = meshtune(*command)
    assert (run / "report.html").exists()
    assert not list(run.glob(".*.tmp"))
    assert "4 steps" in again.out
    assert (losses(run), (run / "model" / "model.safetensors").stat()) == (rows, model), "nothing was trained"
    assert not (tmp_path / "run-2").exists()
    assert "output_exists=new" in meshtune(*command, code=2).err
    meshtune(*command, "output_exists=new")
    assert (tmp_path / "run-2" / "report.html").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kib)`: a folder on a disk of that size; needs the right to mount."""
    mounted: list[Path] = []

    def make(kib: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = shutil.which("mount")
        if os.geteuid() != 0 or not mount:
            pytest.skip("mounting a small disk needs root")
        done = subprocess.run(
            [mount, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], capture_output=True
        )
        if done.returncode:
            pytest.skip("mounting a small disk is not permitted here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("room", "code", "layout"),
    [
        pytest.param(2.6, 0, "auto", id="for-two-checkpoints-and-the-model", marks=pytest.mark.all),
        pytest.param(2.2, 2, "auto", id="for-two-checkpoints", marks=pytest.mark.ci),
        pytest.param(2.2, 2, "zero3x2-mb1-ga2", id="of-two-ranks", marks=pytest.mark.all),
    ],
)
def test_a_full_disk_is_said_and_earlier_checkpoints_stay_whole(
    room: float,
    code: int,
    layout: str,
    meshtune: Command,
    settings: Settings,
    small_disk: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    meshtune("train", *settings("train.max_steps=2", f"layout={layout}", *LASTING))
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints" / "step-2").iterdir())
    run = small_disk(int(size * room) // 1024) / "run"
    words = settings("train.max_steps=8", f"layout={layout}", f"output={run}", *LASTING)

    ended = meshtune("train", *words, code=code)
    assert "Traceback" not in ended.err
    assert "No space left on device" in ended.err
    checkpoints = Checkpoints(run / "checkpoints")
    assert checkpoints.steps() == [2, 4], "the third found no room"
    assert not any(checkpoints.problems(step) for step in checkpoints.steps())
    assert [row["step"] for row in RunDir(run).rows("train")] == list(range(1, 9))
    assert (run / "model" / "model.safetensors").exists() == (code == 0)
    assert not [path for path in run.rglob("*") if ".tmp" in path.name or ".writing" in path.name], (
        "no leftovers"
    )
    if code:
        assert "last good checkpoint is step 4" in ended.err
        subprocess.run(["mount", "-o", "remount,size=64m", run.parent], check=True)
        meshtune("train", *words)
        assert RunDir(run).rows("run")[-1]["resumed_from"] == 4
        assert (run / "model" / "model.safetensors").exists()
