"""How far preparing data is: a bar on a terminal, else a line now and then; nothing if it is soon done."""

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from meshtune.data.files import DataFile

SOON = 2.0  # seconds before anything is shown
EVERY = 30.0  # seconds between lines where there is no terminal


class Progress:
    """Shows the share of the data files that has been read, tokens per second and the time that is left."""

    def __init__(self, data_files: Sequence[DataFile]) -> None:
        self._files = data_files
        self._started = self._printed = time.monotonic()
        self._hashed = 0  # bytes
        self._console = Console(stderr=True)
        columns = (TextColumn("preparing data"), BarColumn(), TextColumn("{task.description}"))
        self._bar = None
        if self._console.is_terminal:
            self._bar = Bar(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("", total=1.0) if self._bar else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def hashed(self, size: int) -> None:
        """Show how much of the files has been hashed. size: bytes more."""
        self._hashed += size
        total = max(1, sum(file.size for file in self._files))
        self._show(self._hashed / total, f"{self._hashed / total:.0%} of the files hashed")

    def show(self, tokens: int) -> None:
        """Show how far tokenising is. tokens: so far."""
        self._show(self._share(), self.text(tokens, max(1e-9, time.monotonic() - self._started)))

    def _show(self, share: float, text: str) -> None:
        now = time.monotonic()
        if now - self._started < SOON:
            return
        if self._bar and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=share, description=text)
        elif now - self._printed >= EVERY:
            self._printed = now
            print(f"preparing data: {text}", file=sys.stderr, flush=True)

    def text(self, tokens: int, seconds: float) -> str:
        """Share, rate and time left, after `seconds` with `tokens` tokens."""
        share = self._share()
        left = seconds / share * (1 - share) if share else 0.0
        minutes, rest = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
        return f"{share:.0%}, {tokens / seconds:,.0f} tokens/s, {clock} left"

    def _share(self) -> float:
        """Share (0 to 1) of the bytes of all files that have been read."""
        total = sum(file.size for file in self._files)
        return sum(file.size * file.share for file in self._files) / total if total else 0.0
