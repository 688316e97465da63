"""Seconds that the host needs to start one operation; the state of the GPU from its driver."""

import queue
import subprocess
import threading
import time

import torch
from torch import Tensor, nn

from meshtune.meter.ledger import Ledger
from meshtune.rundir import Row

BLOCKS = 8  # of the passes that are timed
WIDTH = 8  # numbers that an operation works on


class Block(nn.Module):
    """A residual block as Hugging Face's models write it, in small: a norm, a gate, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(self.gate(self.up(normed)))


class OperationCost:
    """Measures what an operation of a model without a size costs this thread, forward and backward: Python,
    modules, autograd.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=()):  # the run's own draws stay as they are
            self._model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self._x = torch.ones(1, WIDTH)
        with Ledger(torch.device("cpu")) as ledger:
            self._pass()
        self._operations = ledger.operations

    def seconds(self) -> float:
        """Seconds of processor time an operation, now: the quicker of two passes, as caches are cold in the
        first. Takes some 4 ms. A processor's speed changes within seconds: compare with a time measured just
        before.
        """
        return min(self._pass(), self._pass()) / self._operations

    def _pass(self) -> float:
        began = time.thread_time()
        self._model(self._x).sum().backward()
        return time.thread_time() - began


# The driver #

# A thread asks, so that no step waits for the answer. Without nvidia-smi, or where it does not answer, no
# rows are written.


EVERY = 60.0  # seconds between two questions
PATIENCE = 20.0  # seconds for an answer
LIMITS = {  # bits of nvidia-smi's clocks_event_reasons.active -> in words
    0x04: "the power limit", 0x08: "a slowdown of the hardware", 0x20: "heat", 0x40: "heat",
    0x80: "the power brake of the host",
}  # fmt: skip
FIELDS = ("clocks.sm", "clocks.max.sm", "clocks_event_reasons.active")


class DriverWatch:
    """Asks the driver about one GPU: `with DriverWatch(uuid) as watch: … watch.rows(step)`."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid  # as nvidia-smi writes it: GPU-…
        self._answers: queue.SimpleQueue[Row] = queue.SimpleQueue()
        self._stop = threading.Event()

    def __enter__(self) -> "DriverWatch":
        threading.Thread(target=self._ask, name="driver", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def rows(self, step: int) -> list[Row]:
        """The answers since the last call, as rows of kind "device". step: the one at hand."""
        return [self._answers.get() | {"step": step} for _ in range(self._answers.qsize())]

    def _ask(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = EVERY
            command = [
                "nvidia-smi", f"--id={self.uuid}", f"--query-gpu={','.join(FIELDS)}",
                "--format=csv,noheader,nounits",
            ]  # fmt: skip
            try:
                answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
                self._answers.put(device_row(self.uuid, answer.stdout))
            except (OSError, subprocess.SubprocessError, ValueError):
                return


def device_row(uuid: str, answer: str) -> Row:
    """The row of an answer of nvidia-smi: clocks in MHz, and what limits them. Raises ValueError for an
    answer that has no numbers, such as [N/A].
    """
    clock, full, reasons = (value.strip() for value in answer.strip().split(","))
    active = int(reasons, 16)
    limits = sorted({words for bit, words in LIMITS.items() if active & bit})
    return {
        "kind": "device", "gpu": uuid, "clock": float(clock), "full_clock": float(full), "limits": limits,
    }  # fmt: skip
