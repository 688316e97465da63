"""A hang is named: the rank, what the others wait in, and over which axis.

Each rank has a thread that writes a *beat* once a tick into the store that the ranks met at: where its main
thread is, and for how many ticks it has neither moved nor computed. It goes on while the main thread is
blocked in gloo or NCCL. Two things are a hang:

    silent  the rank before us has stopped beating, and its process computes nothing (it is stopped, or its
            machine is gone): the run is ended.
    stuck   all answer, but none has moved or computed for long, and some wait for others: that is said, and
            the run is ended if it lasts. A slow forward, save or evaluation somewhere is no hang.

Time is counted in the watcher's own ticks: a machine that slept, or ranks stopped together and continued
together, are no hang either.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Where the main thread is blocked when it waits for other ranks: the module of its innermost frame.
WAITING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "meshtune.parallel.mesh",
    "meshtune.parallel.pipeline",
)
PIPELINES = ("torch.distributed.pipelining", "meshtune.parallel.pipeline")  # talk over pp alone
OPERATIONS = {  # how torch's functions begin that send, or wait for what was sent -> what that is
    "all_gather": "all_gather", "foreach_all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "foreach_reduce": "reduce_scatter", "all_reduce": "all_reduce", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "_wait_batch_p2p": "send/recv",
    "reduce_tied": "send/recv",
}  # fmt: skip
# On CUDA a thread that waits for the device burns its processor, so that computing there is no moving.
SPINNING = ("torch", "transformers", "meshtune.parallel")
FAILED = "meshtune/failed"  # in the store: how many ranks have failed


@dataclass(frozen=True)
class Limits:
    """Seconds after which something is a hang; and the seconds between two looks."""

    silent: float = 30.0
    stuck: float = 45.0  # it is said
    end: float = 300.0  # still stuck: the run is ended
    tick: float = 1.0
    grace: float = 5.0  # that the others have to end by themselves after one has failed


@dataclass(frozen=True)
class Beat:
    """What a rank last told of itself."""

    number: int
    place: str  # of its main thread: "flush, rundir.py line 164"
    waits: str | None  # "all_reduce over dp_shard" while it waits for other ranks
    still: int  # ticks since it last moved or computed
    pid: int
    started: int  # tells its process from a later one, or one of another machine, with the same pid
    done: bool = False


class Watch:
    """The thread of one rank; `with` it while the rank runs.

    store: a connection of the thread's own to the store of all ranks (a shared one is locked while the main
    thread waits in it). end: called with the report of a hang; it must not return.
    """

    def __init__(
        self, rank: int, world: int, store: Any, *, limits: Limits, end: Callable[[str], None]
    ) -> None:
        self.rank, self.world, self.store, self.limits, self.end = rank, world, store, limits, end
        self.progress: Callable[[], str] = str
        self.axes: Mapping[str, str] = {}  # group -> axis, where torch has another name for it
        self.spins = False  # whether a thread that waits may burn its processor (CUDA)
        self.main = threading.main_thread()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshtune-watch", daemon=True)
        own = process("self")
        self._started = own.started if own else 0
        self._number = self._still = self._silent = self._failed = 0
        self._position: Any = None
        self._computed = time.process_time()
        self._seen: tuple[int, float] = (0, 0.0)  # of the rank before us: beat, CPU seconds
        self._said = False

    def __enter__(self) -> "Watch":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop.set()
        self._thread.join(5)
        if kind is None and not self._thread.is_alive():
            with suppress(RuntimeError):  # the rank that held the store may have ended before us
                self._write(done=True)

    def _run(self) -> None:
        errors = 0
        while errors < 10 and not self._stop.wait(self.limits.tick):  # 10 in a row: the store is gone
            try:
                self._beat()
                self._look_at_neighbour()
                if self.rank == 0 and self._long(self._still, self.limits.stuck):
                    self._look_at_all()
                self._failed += self.store.check([FAILED])
                if self._long(
                    self._failed, self.limits.grace
                ):  # blocked on NCCL, it would wait for a timeout
                    os._exit(1)
                errors = 0
            except Exception:  # a look at a moving thread, or at a busy store, may fail; the next one counts
                errors += 1

    def _long(self, ticks: int, seconds: float) -> bool:
        return ticks * self.limits.tick >= seconds

    def _beat(self) -> None:
        """Write where this rank is."""
        position = stack(self.main)
        computed = time.process_time() - time.thread_time()
        own = process(f"self/task/{self.main.native_id}")
        burns = computed - self._computed > 0.01 * self.limits.tick
        moved = (
            position != self._position
            or (burns and not (self.spins and module_of(self.main).startswith(SPINNING)))
            or (own is not None and own.state == "D")  # the disk, or a network's
        )
        self._still = 0 if moved else self._still + 1
        self._position, self._computed = position, computed
        self._write()

    def _write(self, *, done: bool = False) -> None:
        self._number += 1
        place, waits = doing(self.main, self.axes)
        beat = Beat(self._number, place, waits, self._still, os.getpid(), self._started, done)
        self.store.set(f"meshtune/beat/{self.rank}", json.dumps(asdict(beat)))

    def _read(self, rank: int) -> Beat | None:
        key = f"meshtune/beat/{rank}"
        return Beat(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _at(self) -> str:
        progress = self.progress()
        return f" ({progress})" if progress else ""

    def _look_at_neighbour(self) -> None:
        """End the run when the rank before us neither answers nor computes."""
        rank = (self.rank - 1) % self.world
        beat = self._read(rank)
        if beat is None or beat.done:
            return
        seen = process(beat.pid)
        here = seen is not None and seen.started == beat.started
        now = (beat.number, seen.seconds if here and seen else 0.0)
        if now != self._seen or (here and seen and seen.state in "Dt"):  # t: a debugger holds it
            self._seen, self._silent = now, 0
            return
        self._silent += 1
        if self._long(self._silent, self.limits.silent * (1 if here else 1.5)):
            if here and seen:
                why = "its process is stopped" if seen.state == "T" else "its process does nothing"
            else:
                why = "its process or machine may be gone"
            seconds = self._silent * self.limits.tick
            others = {n: each for n in range(self.world) if n != rank and (each := self._read(n))}
            report = f"rank {rank} has not answered for {seconds:.0f} s ({why}){waiting(others)}{self._at()}."
            if here:  # whoever started it may not know that nothing milder ends a stopped process
                os.kill(beat.pid, signal.SIGKILL)
            self.end(report)

    def _look_at_all(self) -> None:
        """Say that no rank moves, and after long enough end the run; only the main rank looks."""
        beats = {n: beat for n in range(self.world) if (beat := self._read(n)) and not beat.done}
        still = min(beat.still for beat in beats.values())
        idle = {n: beat for n, beat in beats.items() if not beat.waits}
        if not self._long(still, self.limits.stuck) or len(idle) == len(beats):
            self._said = False
            return
        seconds = still * self.limits.tick
        where = "; ".join(f"rank {n} is in {beat.place}" for n, beat in idle.items())
        who = ranks_named(idle) + (" has" if len(idle) == 1 else " have") if idle else "no rank has"
        report = f"{who} not moved for {seconds:.0f} s{f' ({where})' if where else ''}{waiting(beats)}"
        report += self._at() + "."
        if self._long(still, self.limits.end):
            self.end(report)
        elif not self._said:
            self._said = True
            left = self.limits.end - seconds
            print(f"meshtune: {report} The run is ended if this lasts {left:.0f} s more.", file=sys.stderr)


# Where a thread is #


def stack(thread: threading.Thread) -> tuple[tuple[int, int], ...]:
    """A thread's place in every function it is in; changes when it moves."""
    frame, found = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def doing(thread: threading.Thread, axes: Mapping[str, str]) -> tuple[str, str | None]:
    """(the function, file and line that a thread is in, what it waits in for other ranks or None)."""
    frames = sys._current_frames()
    # With this function's own frame among its variables the thread's tensors would outlive their functions,
    # until the garbage collector looks.
    del frames[threading.get_ident()]
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return "its start", None
    waits = waits_in(frame, axes)
    if frame.f_code.co_name == "_engine_run_backward":  # on CUDA the hooks run in threads of autograd's own
        waits = next((found for each in frames.values() if (found := waits_in(each, axes))), None)
    return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}", waits


def waits_in(frame: FrameType, axes: Mapping[str, str]) -> str | None:
    """`all_reduce over dp_shard` when this frame, a thread's innermost, is in torch's communication."""
    inner: FrameType | None = frame
    if module(inner) == "torch._ops":
        inner = inner.f_back
    if inner is None or not module(inner).startswith(WAITING):
        return None
    name = inner.f_code.co_name
    operation = next((each for start, each in OPERATIONS.items() if name.startswith(start)), name)
    return f"{operation} over {axis(inner, axes)}"


def module_of(thread: threading.Thread) -> str:
    """Where a thread's innermost Python function is from."""
    frame = sys._current_frames().get(thread.ident or 0)
    return module(frame) if frame is not None else ""


def module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def axis(frame: FrameType, axes: Mapping[str, str]) -> str:
    """The axis whose group a communicating function was given: its name in `axes`, or that its device mesh
    gave it.
    """
    from torch.distributed import ProcessGroup

    if module(frame).startswith(PIPELINES):
        return "pp"
    outer: FrameType | None = frame
    for _ in range(4):
        if outer is None:
            break
        for name, value in list(outer.f_locals.items()):  # a copy: the frame belongs to a running thread
            if isinstance(value, ProcessGroup):
                given = value.group_desc.removeprefix("mesh_").replace("default_pg", "all ranks")
                return axes.get(value.group_name, given)
            if name == "group" and value is None:
                return "all ranks"
        outer = outer.f_back
    return "all ranks"


@dataclass(frozen=True)
class Process:
    state: str  # R runs, S sleeps, D waits for a device, T stopped …
    seconds: float  # of CPU time
    started: int


def process(pid: int | str) -> Process | None:
    """How a process of this machine does; None where it can't be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on, as proc(5) counts: the name may hold spaces
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(fields[0], seconds, int(fields[19]))


# Words #


def waiting(beats: dict[int, Beat]) -> str:
    """; ranks 0, 1, 2 wait for it in all_reduce over dp_shard"""
    places: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        if beat.waits and not beat.done:
            places.setdefault(beat.waits, []).append(rank)
    return "".join(
        f"; {ranks_named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {place}"
        for place, ranks in places.items()
    )


def ranks_named(ranks: Iterable[int]) -> str:
    """rank 3; ranks 0, 1, 2; ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"
