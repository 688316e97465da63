"""Stop on a signal such as SIGTERM, SIGHUP or Ctrl-C: finish the step, save, end with exit code 75."""

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from meshtune.launch.signals import STOPPING, heeded


class StopRequest:
    """Context that puts the name of a received signal into `requested`.

    A second SIGINT raises KeyboardInterrupt. signals: those that are noted, but not a SIGHUP that is ignored.
    enabled: False leaves the signals' handlers as they are.
    """

    def __init__(self, *, enabled: bool = True, signals: Sequence[signal.Signals] = STOPPING) -> None:
        self.enabled = enabled
        self.signals = signals
        self.requested: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}  # of before

    def __enter__(self) -> "StopRequest":
        if self.enabled:
            self._handlers = {number: signal.signal(number, self._note) for number in heeded(self.signals)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
