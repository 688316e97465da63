"""Which experiment starts next on which GPUs, and how long the rest takes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from meshtune.study.store import Row


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
        timed = [row for row in ended if row.seconds]
        by_world: dict[int, list[float]] = {}
        for row in timed:
            by_world.setdefault(row.world or 1, []).append(row.seconds or 0.0)
        means = {world: mean(seconds) for world, seconds in by_world.items()}
        overhead, slope = _line([(row.predicted_step_seconds, row.seconds or 0.0) for row in timed])
        return cls(means, overhead, slope, mean(row.seconds or 0.0 for row in timed) if timed else None)

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


def _line(points: Sequence[tuple[float | None, float]]) -> tuple[float, float | None]:
    """(a, b) of the line a + b x through (predicted seconds, seconds) by least squares; b is None for fewer
    than 5 points, equal ones, and where it would be below 0.
    """
    known = [(x, seconds) for x, seconds in points if x is not None]
    if len(known) < 5:
        return 0.0, None
    center, level = mean(x for x, _ in known), mean(seconds for _, seconds in known)
    variance = sum((x - center) ** 2 for x, _ in known)
    if not variance:
        return 0.0, None
    slope = sum((x - center) * (seconds - level) for x, seconds in known) / variance
    overhead = level - slope * center
    return (overhead, slope) if slope > 0 and overhead >= 0 else (0.0, None)
