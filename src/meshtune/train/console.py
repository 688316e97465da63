"""The rows of a run on the terminal: a bar with its numbers, or plain lines."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from meshtune.rundir import Row
from meshtune.units import count, duration, human


class ConsoleTracker:
    """Shows a progress bar on a terminal, else plain lines; an evaluation always gets a line.

    Plain lines (a log file, a pipe) come at most once a second; as the run goes on, once per 1 % of the
    elapsed time, at least once a minute. The first and the last step always have one.

    start_step: the step resumed from, 0 for a new run; world: number of ranks, speed is per GPU if several.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int = 0, world: int = 1) -> None:
        self.console = console
        self.total_steps = total_steps
        self.start_step = start_step
        self.speed_unit = "tokens/s" if world == 1 else "tokens/s/GPU"
        # Bar and clock start with the first row: earlier lines print without a bar, and compilation in the
        # first step does not count in the time left.
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._began: float | None = None
        self._first_step = start_step
        self._last_line = -math.inf

    def log(self, row: Row) -> None:
        match row["kind"]:
            case "train":
                self._train(row)
            case "eval":
                self._line(eval_line(row))

    def close(self, *, failed: bool = False) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _train(self, row: Row) -> None:
        now, step = time.monotonic(), row["step"]
        if self._began is None:
            self._began, self._first_step = now, step
        pace = (now - self._began) / max(1, step - self._first_step)
        left = pace * (self.total_steps - step) if step > self._first_step else None
        pause = min(60.0, max(1.0, 0.01 * (now - self._began)))
        if self.console.is_interactive:
            self._progress = self._progress or self._bar()
            self._progress.update(self._task, completed=step, numbers=train_line(row, left, self.speed_unit))
        elif now - self._last_line >= pause or step == self.total_steps:
            self._last_line = now
            self._line(f"step {step}/{self.total_steps}  {train_line(row, left, self.speed_unit)}")

    def _bar(self) -> Progress:
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=24, complete_style="blue", finished_style="blue"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=5)
        self._task = progress.add_task("train", total=self.total_steps, completed=self.start_step, numbers="")
        progress.start()
        return progress

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def train_line(row: Row, seconds_left: float | None, speed_unit: str = "tokens/s") -> str:
    """A train row as text: loss, speed, and MFU, memory and time left where known (not None).

    speed_unit: printed after the row's tokens per second and GPU.
    """
    parts = [f"loss {row['loss']:.4f}", f"{count(row['tokens_per_second_per_gpu'])} {speed_unit}"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row["peak_memory_bytes"] is not None:
        parts.append(human(row["peak_memory_bytes"]))
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return " · ".join(parts)


def eval_line(row: Row) -> str:
    """An eval row as text: loss, perplexity, and exact match where measured."""
    parts = [f"eval at step {row['step']}: loss {row['loss']:.4f}", f"perplexity {row['perplexity']:.4g}"]
    if "exact_match" in row:
        parts.append(f"exact match {row['exact_match']:.1%}")
    return " · ".join(parts)
