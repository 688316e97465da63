"""Run a sweep's waiting experiments on this machine: at once those that its devices take."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from meshtune.errors import Interrupted
from meshtune.launch.rank import cores
from meshtune.launch.signals import to_handle
from meshtune.meter.rows import time_now
from meshtune.plan.cluster import gpus_here
from meshtune.study.children import TO_STOP, TO_STOP_OTHERS, Child, Task
from meshtune.study.store import DONE, FINISHED, REFUSED, Outcome, Row, Store
from meshtune.train.run_row import git_facts, processor_name, versions
from meshtune.units import counted, duration, working

# Experiments on the machine's GPUs #


@dataclass(frozen=True)
class Devices:
    """Devices that experiments run on."""

    gpus: tuple[str, ...] = ()  # ids for CUDA_VISIBLE_DEVICES; (): the processor
    jobs: int = 1  # experiments at once, at most

    def next(
        self, waiting: Sequence[Row], used: Sequence[Sequence[str]], on_processor: Collection[int] = ()
    ) -> tuple[Row, tuple[str, ...]] | None:
        """(The experiment to start now, its GPUs); None: all must wait.

        On GPUs the largest one that fits on what is free, of equal ones the first; on a processor the first.
        used: GPUs of each running experiment. on_processor: numbers of experiments that need no GPU, whatever
        the machine has.
        """

        def gpus_of(row: Row) -> int:
            return 0 if row.number in on_processor else row.world or 1

        if len(used) >= self.jobs or not waiting:
            return None
        if not self.gpus:
            return waiting[0], ()
        taken = {gpu for gpus in used for gpu in gpus}
        free = [gpu for gpu in self.gpus if gpu not in taken]
        fitting = [row for row in waiting if gpus_of(row) <= len(free)]
        if not fitting:
            return None
        row = max(fitting, key=lambda row: (gpus_of(row), -row.number))
        return row, tuple(free[: gpus_of(row)])


@dataclass(frozen=True)
class Estimate:
    """How long experiments take, from those that have ended."""

    of_world: Mapping[int, float]  # mean seconds by number of ranks
    overhead: float  # seconds of any experiment, and
    times_plan: float | None  # seconds for each predicted second of a step; None: not known
    mean: float | None  # of all; None: none has ended

    @classmethod
    def of(cls, ended: Sequence[Row]) -> "Estimate":
        """Estimate from experiments that ran to their end."""
        timed = [(row, row.seconds) for row in ended if row.seconds]
        by_world: dict[int, list[float]] = {}
        for row, seconds in timed:
            by_world.setdefault(row.world or 1, []).append(seconds)
        means = {world: mean(several) for world, several in by_world.items()}
        planned = [
            (step, seconds) for row, seconds in timed if (step := row.predicted_step_seconds) is not None
        ]
        overhead, slope = _line(planned)
        return cls(means, overhead, slope, mean(seconds for _, seconds in timed) if timed else None)

    def seconds(self, row: Row) -> float | None:
        """Seconds that an experiment will take; None where none has ended."""
        if self.times_plan is not None and row.predicted_step_seconds is not None:
            return self.overhead + self.times_plan * row.predicted_step_seconds
        return self.of_world.get(row.world or 1, self.mean)

    def left(self, waiting: Sequence[Row], running: Mapping[Row, float], devices: Devices) -> float | None:
        """Seconds until all have ended; None where nothing is known yet. running: row -> seconds so far."""
        if self.mean is None:
            return None
        rest = {row: self.seconds(row) or self.mean for row in waiting}
        rest |= {row: max(0.0, (self.seconds(row) or self.mean) - so_far) for row, so_far in running.items()}
        if devices.gpus:
            work = sum(seconds * (row.world or 1) for row, seconds in rest.items())
            return max([work / len(devices.gpus), *rest.values()])
        return max([sum(rest.values()) / devices.jobs, *rest.values()])


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """(a, b) of the line a + b x through (predicted seconds, seconds) by least squares; b is None for fewer
    than 5 points, equal ones, and where it would be below 0.
    """
    known = np.array(points)
    if len(known) < 5 or not np.ptp(known[:, 0]):
        return 0.0, None
    slope, overhead = np.polyfit(known[:, 0], known[:, 1], 1)
    return (float(overhead), float(slope)) if slope > 0 and overhead >= 0 else (0.0, None)


# The runner #


Log = Callable[[str], None]
POLL = 0.1  # seconds between looks at the running experiments
MOST_SAID = 120  # characters of an experiment's settings or reason in a line of progress


class Running(NamedTuple):
    """An experiment that runs."""

    row: Row
    child: Child
    gpus: tuple[str, ...]


class Progress:
    """Lines on stderr: one for each experiment that has ended, with those that are left."""

    def __init__(
        self, store: Store, total: int, done: int, devices: Devices, log: Log, *, per: str = "rank"
    ) -> None:
        """total: experiments of the sweep. done: those that ended before. per: GPU or rank, of speeds."""
        self._store, self._total, self._done = store, total, done
        self._devices, self._log, self._per = devices, log, per

    def started(self, row: Row) -> None:
        """Print that an experiment begins."""
        self._log(f"experiment {row.number} of {self._total} ({settings_text(row)}) started")

    def ended(self, row: Row, outcome: Outcome, waiting: list[Row], running: Mapping[Row, float]) -> None:
        """Print how an experiment ended, and the time that the others take."""
        self._done += 1
        result = outcome.status
        speed = (outcome.figures or {}).get("tokens_per_second_per_gpu")
        if outcome.status == DONE and speed:
            result += f", {speed:,.0f} tokens/s/{self._per}"
        elif outcome.reason:
            result += f": {shortened(outcome.reason)}"
        parts = [f"{self._done} of {self._total}", f"experiment {row.number} ({settings_text(row)}) {result}"]
        if outcome.seconds is not None:
            parts.append(duration(outcome.seconds))
        if waiting or running:
            ended = [one for one in self._store.rows(*FINISHED) if one.status != REFUSED]
            left = Estimate.of(ended).left(waiting, running, self._devices)
            parts += [] if left is None else [f"{duration(left)} left"]
        self._log(" · ".join(parts))


def settings_text(row: Row) -> str:
    """The settings of an experiment, for a line of progress."""
    return shortened(", ".join(f"{key}={value}" for key, value in row.settings.items())) or "as the base"


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_SAID else f"{line[: MOST_SAID - 1]}…"


def run_all(
    store: Store,
    tasks: Mapping[int, Task],
    folder: Path,
    devices: Devices,
    *,
    sweep: str,
    progress: Progress,
    log: Log,
) -> None:
    """Run the experiments of `tasks`, by number, and write how each ended.

    sweep: id of the sweep, the mark of its processes. Raises Interrupted at one of `Signals`, after the
    running experiments have been stopped and set to waiting.
    """
    waiting = [row for row in store.rows() if row.number in tasks]
    on_processor = {number for number, task in tasks.items() if task.on_processor}
    running: list[Running] = []

    def choice() -> tuple[Row, tuple[str, ...]] | None:
        return devices.next(waiting, [one.gpus for one in running], on_processor)

    with Signals() as signals, working("starting", lambda _: None) as show:
        store.hurry = lambda: signals.count > 0
        try:
            while (waiting or running) and not signals.count:
                while (chosen := choice()) and not signals.count:
                    row, gpus = chosen
                    waiting.remove(row)
                    store.start([row.number])
                    progress.started(row)
                    task = tasks[row.number]
                    child = Child(task, folder, sweep, environment(task, devices, gpus))
                    running.append(Running(row, child, gpus))
                show(f"{counted(len(running), 'experiment')} running, {len(waiting):,} to come")
                signals.sleep(POLL)
                for one in list(running):
                    if outcome := one.child.outcome():
                        running.remove(one)
                        store.finish({one.row.number: outcome})
                        so_far = {other.row: other.child.seconds for other in running}
                        progress.ended(one.row, outcome, waiting, so_far)
            if not (waiting or running):
                return
            log(f"Stopping {counted(len(running), 'experiment')} …")
            ended = stop([one.child for one in running], signals)
            results = {one.row.number: outcome for one in running if (outcome := ended[one.child])}
            store.finish(results)
            running = [one for one in running if one.row.number not in results]
            store.wait_again(one.row.number for one in running)
            if not (waiting or running):  # the last ones came to their end
                return
        except BaseException:
            for one in running:
                one.child.kill()
            raise
    left = len(waiting) + len(running)
    raise Interrupted(
        f"Stopped with {counted(left, 'experiment')} to run; the same command continues with them."
    )


def stop(children: Sequence[Child], signals: "Signals") -> dict[Child, Outcome | None]:
    """End running experiments: training saves a checkpoint first. One more signal kills them at once.

    Returns the outcome of those that came to their end all the same, and None of the others.
    """
    for child in children:
        child.stop()
    patience = max((TO_STOP.get(child.task.run, TO_STOP_OTHERS) for child in children), default=0.0)
    until, before = time.monotonic() + patience, signals.count
    while time.monotonic() < until and signals.count == before:
        if all(child.ended() for child in children):
            break
        signals.sleep(POLL)
    return {child: child.stopped() for child in children}


def environment(task: Task, devices: Devices, gpus: tuple[str, ...]) -> dict[str, str]:
    """Variables of an experiment: with its GPUs, or its part of the cores where several run at once."""
    variables = dict(os.environ)
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif devices.jobs > 1 and not variables.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // devices.jobs // task.world))
    return variables


class Signals:
    """Counts SIGTERM, Ctrl-C and a closed terminal's SIGHUP in a `with` block, so that they never come
    between two lines that belong together, such as starting a process and keeping it. In another thread than
    the main one none come.
    """

    count = 0

    def __enter__(self) -> "Signals":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            numbers = to_handle((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
            self._before = {number: signal.signal(number, self._came) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, *_: object) -> None:
        if number != signal.SIGHUP or not self.count:  # kernel and shell may both send one
            self.count += 1

    def sleep(self, seconds: float) -> bool:
        """Sleep, not longer than until the next signal; True if there was one since the block began."""
        until = time.monotonic() + seconds
        before = self.count
        while self.count == before and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL, left))
        return self.count > 0


# The machine #


def machine_facts(simulated: str | None, *, on_processor: bool, elsewhere: bool) -> dict[str, Any]:
    """Rows of the table `sweep`: host, devices, versions, commit, time.

    simulated: the devices are those of the settings. on_processor: the experiments use no GPU, whatever the
    machine has. elsewhere: they run on nodes whose devices are not known here.
    """
    facts = {"started": time_now(), "versions": versions(), **git_facts()}
    if elsewhere:
        return {"submitted_from": socket.gethostname(), "gpus": 0 if on_processor else None, **facts}
    gpus = [] if on_processor else [name for name, _ in gpus_here()]
    device = None if simulated else ", ".join(dict.fromkeys(gpus)) or processor_name()
    machine = {"host": socket.gethostname(), "cores": cores(), "processor": processor_name()}
    return {"machine": machine, "device": device, "gpus": len(gpus), **facts}
