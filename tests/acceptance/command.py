"""Commands in processes of their own, and how a command ended."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.rundir import RunDir


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout; fails where anything else is there."""
        return json.loads(self.out)

    def checked(self, code: int | None) -> "Ended":
        """Return this if the command ended with `code`, or if that is None."""
        assert code in (None, self.code), self.err
        return self


Command = Callable[..., Ended]


MESHTUNE = ("-m", "meshtune")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *MESHTUNE)


def start(*words: object, python: Sequence[str] = MESHTUNE) -> "subprocess.Popen[str]":
    """Start a command in a process of its own, one thread, so that sums are made in one order.

    python: the options of the interpreter, TORCHRUN for two ranks.
    """
    return subprocess.Popen(
        [sys.executable, *python, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fork(*words: object) -> "subprocess.Popen[str]":
    """Start a command in a fork of this process, which has imported all that it needs: seconds sooner."""
    from meshtune import cli

    def command() -> None:  # in place of a program: it does not return
        os.closerange(3, 1024)  # so the parent is told that its child has started
        # closefd: else a rank that replaces its stdout closes 1, which is then the store's socket.
        files = [open(number, mode, closefd=False) for number, mode in enumerate(("r", "w", "w"))]  # noqa: SIM115
        sys.stdin, sys.stdout, sys.stderr = files
        sys.argv = ["meshtune", *map(str, words)]
        code = 1
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(
        ["never run"], preexec_fn=command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]", *, timeout: float = 240, code: int | None = 0) -> Ended:
    """Wait for a command's end. code: with which it must end; None for any."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, out, err).checked(code)


def wait_until(happened: Callable[[], object], *, seconds: float = 900) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.2)


def losses(run: Path) -> list[tuple[int, float, float]]:
    """(Step, loss, gradient norm) of each step of a run."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in RunDir(run).rows("train")]
