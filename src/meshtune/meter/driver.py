"""Limits of heat and power that the driver sets a GPU's clock, asked of nvidia-smi once a minute.

A thread asks, so that no step waits for the answer. Without nvidia-smi, or where it does not answer, there
are no rows.
"""

import queue
import subprocess
import threading

from meshtune.rundir import Row

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
