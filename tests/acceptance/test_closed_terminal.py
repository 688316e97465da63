"""The terminal of a run goes away."""

import fcntl
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import cases
from command import Command

from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints

SLOWLY = """
import sys, time
from meshtune import cli
from meshtune.rundir import RunDir
append = RunDir.append
def slowly(run, row):
    append(run, row)
    time.sleep(0.2)
RunDir.append = slowly
cli.main()
"""


@pytest.mark.parametrize("ranks", cases([1, 2], ci=2))
def test_a_run_whose_terminal_is_closed_saves_and_goes_on_with_the_same_command(
    ranks: int, meshtune: Command, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = settings("train.max_steps=20", "train.global_batch_size=2", "checkpoint.every=0")
    command = ["train", *words, f"output={folder}", f"layout=dp{ranks}-mb1", "log.to=[console]"]
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *command],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    os.set_blocking(master, False)
    while not RunDir(folder).rows("train") and process.poll() is None:
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.05)
    os.close(master)
    assert process.wait(timeout=240) == 75
    end = RunDir(folder).rows("end")[-1]
    assert end["status"] == "stopped by SIGHUP"
    assert Checkpoints(folder / "checkpoints").steps() == [end["step"]]
    log = (folder / "logs" / "rank-0.log").read_text()
    assert "Input/output error" in log and "\033" not in log

    meshtune(*command)
    assert RunDir(folder).rows("run")[-1]["resumed_from"] == end["step"]
