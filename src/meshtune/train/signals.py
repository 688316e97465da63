"""SIGTERM and Ctrl-C as a request: the step is finished, a checkpoint saved, and the run ends with exit code
75.
"""

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 are noted in `requested` (the signal's name); a second
    SIGINT ends at once.

    disabled: signals keep doing what they did before.
    """

    SIGNALS = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGUSR1,
    )  # Slurm sends USR1 before the time is up when asked

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if self.enabled:
            self._before = {each: signal.signal(each, self._note) for each in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
