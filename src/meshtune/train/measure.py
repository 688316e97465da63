"""Measures each step of a run: time by part and memory, of every rank.

begin ──> the step's passes, in `watching` and `phase` ──> end: one exchange of numbers ──> Measured
"""

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshtune import compat
from meshtune.data.batch import MicroBatch
from meshtune.meter.clock import StepClock
from meshtune.meter.host import DriverWatch, OperationCost
from meshtune.meter.parts import AXIS_PARTS, MEASURED, step_time, time_row
from meshtune.meter.phases import Phase, PhaseMemory, peak_resident_bytes
from meshtune.meter.rows import memory_row
from meshtune.parallel.mesh import World
from meshtune.placement.ranks import coordinates
from meshtune.placement.schedules import MOST_PASSES
from meshtune.rundir import Row
from meshtune.units import MIB, notice

LAUNCHES = 12  # steps of a start; the cost of an operation is measured after each
NEW_PEAK = 1.01  # times the rank's highest peak so far, from which a later step's has a row of its own


@dataclass(frozen=True)
class Measured:
    """One step of all ranks, the same on every rank."""

    peak_bytes: int | None  # of tensors, on the fullest rank; None: not known, on a CPU with compiled blocks
    resident_bytes: int  # the largest process so far
    stopping: bool  # whether a rank was asked to stop
    time: Row  # of kind "time"
    memory: Sequence[Row]  # of kind "memory": of every rank in watched steps, later of ranks with a new peak
    # Of kind "device": the driver's answers since the last step, of the main rank's GPU; of kind "passes": of
    # the first step that doesn't warm up under a pipeline.
    others: Sequence[Row]
    warm_up: bool  # the first step, or memory was watched, which takes time: no part of medians


class Meter:
    """Measures the steps of this rank: `with meter.running(): … meter.begin() … meter.end(…)`."""

    def __init__(self, world: World, memory: PhaseMemory) -> None:
        self.world, self.memory = world, memory
        self.clock = StepClock(world.device, group_parts(world))
        self.watching = memory.watching
        self._driver = (
            DriverWatch(gpu_id(world.device)) if world.main and world.device.type == "cuda" else None
        )
        self.phase = releasing(self._phase, world.device)
        self._compiled = compat.is_compiled(memory.model)
        self._on_cpu = world.device.type != "cuda"
        self._operation = OperationCost() if self._on_cpu and not self._compiled else None
        self._interrupted = compat.interruptions() if self._compiled else None  # before the steps
        self._counts = 0, 0  # graphs compiled and retries of the allocator, before the step
        self._steps = 0
        self._awaits_passes = world.layout.pp > 1
        self._began = self._began_busy = 0.0  # by the clock, and of this thread's own processor time
        self._highest: list[float] = [0.0] * world.size

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure in this context."""
        with self.clock.running(), self._driver or nullcontext():
            yield

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.memory.phase(name), self.clock.part(name):
            yield

    def begin(self, last: float | None = None) -> float:
        """Begin a step; returns when it began, by the clock.

        last: when the one before it ended, from which on this one counts; None: from now on, since what was
        measured meanwhile, such as an evaluation, isn't a step's.
        """
        if last is None:
            self.clock.take()
            self.clock.take_facts()
        self._counts = self._counted()
        self._began = time.perf_counter() if last is None else last
        self._began_busy = time.thread_time()
        return self._began

    def end(
        self, step: int, *, micro_batches: Sequence[MicroBatch], loading: float, in_flight: float, stop: bool
    ) -> Measured:
        """End a step; every rank calls it. loading: seconds that this rank waited for the batch.

        step: its number. micro_batches: this rank's. in_flight: the most of them whose activations it held.
        stop: whether this rank was asked to stop.
        """
        clock = self.clock.take() | {"loading": loading}
        own = [
            self.memory.peak_bytes(), peak_resident_bytes(), stop, in_flight,
            time.perf_counter() - self._began, sum(each.tokens for each in micro_batches),
            sum(each.input_ids.numel() for each in micro_batches),
            *(now - before for now, before in zip(self._counted(), self._counts, strict=True)),
            *(clock.get(name, 0.0) for name in MEASURED),
        ]  # fmt: skip
        ranks = self.world.gather_numbers(*own)
        peaks, resident, stops, flights, seconds, tokens, columns, graphs, retries, *_ = zip(
            *ranks, strict=True
        )
        clocks = [dict(zip(MEASURED, rank[-len(MEASURED) :], strict=True)) for rank in ranks]
        layout = self.world.layout
        found = step_time(layout, clocks, seconds)
        watched = self.memory.step == step
        self._steps += 1
        warm_up = watched or self._steps == 1
        if self._steps == 1 and self._interrupted is not None and self.world.main:
            for why in compat.interruptions() - self._interrupted:
                notice(f"meshtune: The compiler is interrupted, so parts of the blocks run uncompiled: {why}")
        facts = self._facts() | {
            "padding": 1 - sum(tokens) / (sum(columns) or 1),
            "recompilations": round(sum(graphs)) or None,
            "allocator_retries": round(sum(retries)) or None,
            "warm_up": warm_up or None,
        }
        return Measured(
            peak_bytes=round(max(peaks)) or None,
            resident_bytes=round(max(resident)),
            stopping=any(stops),
            time=time_row(step, found, flights if layout.pp > 1 else None, **facts),
            memory=self._memory_rows(step, peaks, watched=watched),
            others=[
                *(self._driver.rows(step) if self._driver else ()),
                *(() if warm_up else self._pass_rows(step)),
            ],
            warm_up=warm_up,
        )

    def _counted(self) -> tuple[int, int]:
        """Graphs that torch.compile has made so far, and retries of CUDA's allocator."""
        retries = 0 if self._on_cpu else torch.cuda.memory_stats(self.world.device)["num_alloc_retries"]
        return compat.compiled_graphs() if self._compiled else 0, retries

    def _facts(self) -> dict[str, Any]:
        """Columns of the step's row that tell why it is slow, from this rank's host."""
        facts, busy = self.clock.take_facts(), time.thread_time() - self._began_busy
        return {
            "traffic": {axis: [calls, facts.bytes[axis]] for axis, calls in facts.calls.items()} or None,
            "head_start": facts.head_start,
            "backlog": None if self._on_cpu else facts.backlog,
            "launching": self._launching(),
            "host_seconds": busy if self._on_cpu else None,
        }

    def _launching(self) -> float | None:
        """Seconds that starting the operations of the passes takes the host; None after the first LAUNCHES
        steps, and where it is not known. Every rank measures, so that none waits for another.
        """
        operations = self.memory.operations
        if self._operation is None or not operations or self._steps > LAUNCHES:
            return None
        return operations * self._operation.seconds()

    def _pass_rows(self, step: int) -> list[Row]:
        """The row of the passes of the first pipeline's ranks, once; every rank calls it."""
        if not self._awaits_passes:
            return []
        self._awaits_passes = False
        place = coordinates(self.world.layout, self.world.rank)
        rank = place.pop("pp")
        own = [(rank, one.kind, start, end, *one[1:]) for start, end, one in self.clock.passes]
        found = [
            one for of_rank in self.world.gather_object([] if any(place.values()) else own) for one in of_rank
        ]
        return [{"kind": "passes", "step": step, "passes": found}] if 0 < len(found) <= MOST_PASSES else []

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


def gpu_id(device: torch.device) -> str:
    """A GPU's id as nvidia-smi takes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def group_parts(world: World) -> dict[str, str | None]:
    """Part of a step's time that the collectives of each group are, by the group's name: of parts.WAITS; None
    for groups of hosts, which aren't part of it. Groups that are not here are those of data parallelism.
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
    if world.ep.group is not None:
        parts[world.ep.group.group_name] = "experts"
    return parts


# Free memory of glibc's heap, on CPU #

# Documents differ in length from one micro-batch to the next, so their activations fit badly into each
# other's holes, and the heap grows to 1.5 times what is needed. Giving free pages back costs page faults when
# they are taken again, a fifth of a step after every backward pass: so only every 16th, and only where 256
# MiB are free.


RELEASED_BYTES, RELEASED_EVERY = 256 * MIB, 16  # free bytes at least; backward passes between two releases


def releasing(phase: Phase, device: torch.device) -> Phase:
    """Wrap `phase` so that the heap's free memory is released after every 16th phase whose name ends with
    "backward", when activations are freed.

    On CUDA, whose tensors are not on the heap, `phase` itself.
    """
    if device.type == "cuda":
        return phase
    backward_passes = count(1)

    @contextmanager
    def released(name: str) -> Iterator[None]:
        with phase(name):
            yield
        if name.endswith("backward") and next(backward_passes) % RELEASED_EVERY == 0:
            release_free_heap()

    return released


def release_free_heap(at_least: int = RELEASED_BYTES) -> None:
    """Give the heap's free pages back to the operating system, if `at_least` bytes are free.

    Nothing where the C library isn't a glibc of 2.33 or newer.
    """
    library = _glibc()
    if library is not None and library.mallinfo2().fordblks >= at_least:
        library.malloc_trim(0)


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2; `fordblks` is the heap's free bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is a glibc that reports how much of its heap is free (2.33 or newer)."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.mallinfo2.restype = HeapInfo
    except AttributeError:
        return None
    return library
