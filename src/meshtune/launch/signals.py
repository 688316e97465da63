"""The signals that ask a run to stop, from a user, a closed terminal or a queue, and the answer to them."""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from meshtune.errors import Interrupted, NonFinite, RankFailed

# SIGHUP: the terminal was closed, or ssh lost its connection. SIGUSR1, SIGUSR2 and SIGXCPU: before the time
# limit, from Slurm (--signal), LSF and Grid Engine (-notify, s_cpu).
STOPPING = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip

ASKING = tuple(number for number in STOPPING if number != signal.SIGINT)


def to_handle(signals: Iterable[signal.Signals] = STOPPING) -> list[signal.Signals]:
    """Those of the signals that this process handles: all but a SIGHUP that is ignored, as under nohup."""
    return [
        number
        for number in signals
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


# Stop on a signal #


class Stopped(BaseException):
    """Raised by a signal, whose name it has, outside of the steps; `except Exception` does not hide it."""


class Stopping:
    """Handler of signals that raises Stopped, and keeps the name of the first in `asked`: an import that the
    error ends, or a destructor, may hide it.
    """

    def __init__(self) -> None:
        self.asked: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
        raise Stopped(self.asked)


def asked() -> str | None:
    """Name of the signal that has asked this process to stop while Stopping handled it; None: none has."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler.asked if isinstance(handler, Stopping) else None


@contextmanager
def as_interrupted() -> Iterator[None]:
    """Raise Interrupted for Stopped, and for what hides it once a signal has `asked` to stop."""
    try:
        yield
    except BaseException as error:
        name = error.args[0] if isinstance(error, Stopped) else asked()
        if name is None or isinstance(error, Interrupted | SystemExit | RankFailed | NonFinite):
            raise
        for number in to_handle(ASKING):  # a second one would end what follows
            if isinstance(signal.getsignal(number), Stopping):
                signal.signal(number, signal.SIG_IGN)
        message = f"Stopped by {name} outside of the training steps; the same command continues."
        raise Interrupted(message) from error


@contextmanager
def interrupted_by_signals(*, enabled: bool = True) -> Iterator[None]:
    """Raise Interrupted in the block at a signal that asks a run to stop, where StopRequest does not note it:
    before the first step and after the last one a run has nothing to save. SIGINT keeps its handler.

    enabled: False leaves the signals' handlers as they are.
    """
    stop = Stopping()
    handlers = {number: signal.signal(number, stop) for number in to_handle(ASKING) if enabled}
    try:
        with as_interrupted():
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class EvaluationStopped(Exception):
    """Raised on every rank in the middle of an evaluation, because one was asked to stop."""


class StopRequest:
    """Context that puts the name of a received signal into `requested`, also of one that was hidden before
    (`asked`).

    A second SIGINT raises KeyboardInterrupt. signals: those that are noted, but not a SIGHUP that is ignored.
    enabled: False leaves the signals' handlers as they are. say: gets a line at the first signal, with the
    `consequence`.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        signals: Sequence[signal.Signals] = STOPPING,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.enabled = enabled
        self.signals = signals
        self.say = say
        self.consequence = (
            "the run stops after this step, or this batch of an evaluation, and saves a checkpoint"
        )
        self.requested: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}  # of before

    def __enter__(self) -> "StopRequest":
        if self.enabled:
            hidden = asked()
            self._handlers = {number: signal.signal(number, self._note) for number in to_handle(self.signals)}
            if hidden:
                self._note(signal.Signals[hidden], None)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.requested = self.requested is None, signal.Signals(number).name
        if first and self.say:
            again = " Ctrl-C again stops at once, without that." if number == signal.SIGINT else ""
            with suppress(OSError, RuntimeError):  # no terminal any more; in the middle of a write to it
                self.say(f"{self.requested}: {self.consequence}.{again}")
