"""Measures each step of a run: time by part and memory, of every rank.

begin ──> the step's passes, in `watching` and `phase` ──> end: one exchange of numbers ──> Measured
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshtune.meter.clock import StepClock
from meshtune.meter.parts import AXIS_PARTS, MEASURED, step_time, time_row
from meshtune.meter.phases import PhaseMemory, peak_resident_bytes
from meshtune.meter.rows import memory_row
from meshtune.parallel.mesh import World
from meshtune.rundir import Row
from meshtune.train.heap import releasing

NEW_PEAK = 1.01  # times the rank's highest peak so far, from which a later step's has a row of its own


@dataclass(frozen=True)
class Measured:
    """One step of all ranks, the same on every rank."""

    peak_bytes: int | None  # of tensors, on the fullest rank; None: not known, on a CPU with compiled blocks
    resident_bytes: int  # the largest process so far
    stopping: bool  # whether a rank was asked to stop
    time: Row  # of kind "time"
    memory: Sequence[Row]  # of kind "memory": of every rank in watched steps, later of ranks with a new peak
    watched: bool  # whether memory was watched, which takes time


class Meter:
    """Measures the steps of this rank: `with meter.running(): … meter.begin() … meter.end(…)`."""

    def __init__(self, world: World, memory: PhaseMemory) -> None:
        self.world, self.memory = world, memory
        self.clock = StepClock(world.device, group_parts(world))
        self.running, self.watching = self.clock.running, memory.watching
        self.phase = releasing(self._phase, world.device)
        self._began = 0.0
        self._highest: list[float] = [0.0] * world.size

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.memory.phase(name), self.clock.part(name):
            yield

    def begin(self) -> None:
        """Begin a step. What was measured since the last one, such as an evaluation, is no step's."""
        self.clock.take()
        self._began = time.perf_counter()

    def end(self, step: int, *, loading: float, in_flight: float, stop: bool) -> Measured:
        """End a step; every rank calls it. loading: seconds that this rank waited for the batch.

        step: its number. in_flight: most micro-batches whose activations this rank held. stop: whether this
        rank was asked to stop.
        """
        clock = self.clock.take() | {"loading": loading}
        own = [
            self.memory.peak_bytes(), peak_resident_bytes(), stop, in_flight,
            time.perf_counter() - self._began, *(clock.get(name, 0.0) for name in MEASURED),
        ]  # fmt: skip
        ranks = self.world.gather_numbers(*own)
        peaks, resident, stops, flights, seconds, *_ = zip(*ranks, strict=True)
        clocks = [dict(zip(MEASURED, rank[-len(MEASURED) :], strict=True)) for rank in ranks]
        layout = self.world.layout
        found = step_time(layout, clocks, seconds)
        watched = self.memory.step == step
        return Measured(
            peak_bytes=round(max(peaks)) or None,
            resident_bytes=round(max(resident)),
            stopping=any(stops),
            time=time_row(step, found, flights if layout.pp > 1 else None),
            memory=self._memory_rows(step, peaks, watched=watched),
            watched=watched,
        )

    def _memory_rows(self, step: int, peaks: Sequence[float], *, watched: bool) -> list[Row]:
        if watched:
            rows = self.world.gather_object(self.memory.row(step, self.world.rank))
        else:
            risen = [
                rank
                for rank, (peak, before) in enumerate(zip(peaks, self._highest, strict=True))
                if peak > NEW_PEAK * before
            ]
            rows = [memory_row(step, {"step": (round(peaks[rank]), {})}, rank) for rank in risen]
        self._highest = [max(pair) for pair in zip(self._highest, peaks, strict=True)]
        return [row for row in rows if row is not None]


def group_parts(world: World) -> dict[str, str | None]:
    """Part of a step's time that the collectives of each group are, by the group's name: of parts.WAITS; None
    for groups of hosts, which are no part of it. Groups that are not here are those of data parallelism.
    """
    if world.mesh is None:
        return {}
    parts: dict[str, str | None] = {
        group.group_name: None for group in (world.host_group, world.checkpoint_group)
    }
    everyone: Any = dist.group.WORLD
    parts[everyone.group_name] = "data" if world.parameter_ranks == world.size else "other"
    for axis in world.axes:
        if axis.group is not None:
            parts[axis.group.group_name] = AXIS_PARTS[axis.name]
    return parts
