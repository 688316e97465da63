"""Commands in processes of their own, and how a command ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout; fails where anything else is there."""
        return json.loads(self.out)


Command = Callable[..., Ended]


def start(*words: object) -> "subprocess.Popen[str]":
    """Start a command in a process of its own, one thread, so that sums are made in one order."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshtune", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]", *, timeout: float = 240) -> Ended:
    """Wait for a command's end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, out, err)
