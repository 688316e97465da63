"""Detect a hang and name it: the rank, the collective that the others wait in, and its mesh axis.

Each rank has a thread that writes a heartbeat once a tick into the store of the rendezvous: where its main
thread is, and for how long that thread has neither moved nor computed. It continues while the main thread
is blocked in gloo or NCCL. Two states are a hang:

    silent  the previous rank's heartbeats have stopped, and its process computes nothing (it is stopped, or
            its machine is gone): the run is ended.
    stuck   all heartbeats arrive, but no rank has moved or computed for long, and some wait for others: a
            warning is printed, and the run is ended if it lasts. A slow forward, save or evaluation on some
            rank isn't a hang.

A rank has a heartbeat before it joins the process group. A first one is written for it by the process that
started it, or, under torchrun and srun, by the next rank of its machine: so a rank that hangs in its start,
before it could write any, is silent too. Ranks whose torchrun is gone end as well: nobody would stop them.

Time is measured, so that a busy machine, on which a tick takes long, delays nothing. But it is counted only
while this thread runs (`Awake`): ranks that were stopped together and continued together are not a hang
either.
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
from typing import Any, NoReturn

from meshtune.errors import RankFailed

# A main thread that waits for other ranks is blocked in one of these modules (of its innermost frame).
WAITING_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "meshtune.parallel.mesh",
    "meshtune.parallel.pipeline",
)
# Their frames call what waits: operators, and the clock that measures waits.
CALLING_MODULES = ("torch._ops", "meshtune.meter.clock")
PIPELINE_MODULES = ("torch.distributed.pipelining", "meshtune.parallel.pipeline")  # communicate only over pp
COLLECTIVES = {  # how the name of the function that sends or waits begins -> the collective
    "all_gather": "all_gather", "foreach_all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "foreach_reduce": "reduce_scatter", "all_reduce": "all_reduce", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "_wait_batch_p2p": "send/recv",
    "reduce_tied": "send/recv",
}  # fmt: skip
# On CUDA a thread that waits for the device keeps its core busy, so CPU time spent there is no progress.
SPINNING_MODULES = ("torch", "transformers", "meshtune.parallel")
# A longer time between two looks was a pause of this process too, as of a job that its queue suspends.
MOST_TICKS = 5
FAILED = "meshtune/failed"  # key in the store: how many ranks have failed


@dataclass(frozen=True)
class HangLimits:
    """Seconds after which a state is a hang, and the seconds between two heartbeats."""

    silent: float = 30.0  # without a heartbeat: the run is ended
    stuck: float = 45.0  # without progress on any rank: a warning is printed
    end: float = 300.0  # without progress on any rank: the run is ended
    tick: float = 1.0  # between two heartbeats
    grace: float = 5.0  # that the other ranks have to end after one has failed


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, as its thread last wrote it to the store."""

    number: int  # heartbeats written so far
    place: str  # position of the main thread: "flush, rundir.py line 164"
    waits: str | None  # "all_reduce over dp_shard" while it waits for other ranks
    still: float  # seconds since it last moved or computed
    pid: int
    started: int  # start time of the process: tells it from another process with the same pid
    done: bool = False  # the rank has ended well


class Watch:
    """The watching thread of one rank; use as a context manager around what the rank runs.

    Each tick it writes this rank's heartbeat and checks the previous rank's; on rank 0 it also checks that
    some rank makes progress. Once any rank has claimed a failure (FAILED), it ends this process with exit
    code 1 after `limits.grace` seconds.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        *,
        limits: HangLimits,
        tell: Callable[[str], None],
        neighbour: Callable[[], tuple[int, int] | None] | None = None,
    ) -> None:
        """rank: this rank. world: number of ranks. store: a connection only for this thread to the store of
        all ranks (a shared one is locked while the main thread waits in it). tell: called with the report of
        a hang, from this thread, before this process is ended. neighbour: returns (rank, process id) of
        another rank of this machine, which may not have written a heartbeat; called until it has. None: all
        are announced.
        """
        self.rank, self.world, self.store, self.limits, self.tell = rank, world, store, limits, tell
        self.progress: Callable[[], str] = str  # "step 12", for reports
        self.axes: Mapping[str, str] = {}  # name of a process group -> axis, where torch has another name
        self.spins = False  # True if a thread that waits may keep its core busy (CUDA)
        self.main = threading.main_thread()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshtune-watch", daemon=True)
        status = process_status("self")
        self._started = status.started if status else 0
        self._number = 0  # of this rank's last heartbeat
        self._awake = Awake(limits.tick)
        self._seconds = 0.0  # of the last tick
        self._still = self._failed = 0.0  # seconds: see HangLimits
        self._position: Any = None
        self._cpu_seconds = time.process_time()
        self._neighbour = neighbour
        self._silences: dict[int, Silence] = {}  # of the ranks that this one checks
        self._warned = False
        self._parent = os.getppid()
        self._agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher has the store

    def __enter__(self) -> "Watch":
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop.set()
        self._thread.join(5)
        if kind is None and not self._thread.is_alive():
            with suppress(RuntimeError):  # the rank that held the store may have ended before us
                self._write(done=True)

    def _run(self) -> None:
        errors, without_store = 0, 0.0  # ticks and seconds without the store
        while not self._stop.wait(self.limits.tick):
            self._seconds = self._awake.seconds()
            if self._agent and (os.getppid() != self._parent or without_store >= 10):
                gone = self.rank if os.getppid() != self._parent else 0
                started_by = f"what started rank {gone} is gone{self._progress_note()}"
                end_process(self.tell, f"{started_by}: its process was killed.")
            if errors >= 10 and not self._agent:  # the rank that has the store has ended
                return
            try:
                self._write_heartbeat()
                self._check((self.rank - 1) % self.world)
                self._check_neighbour()
                if self.rank == 0 and self._still >= self.limits.stuck:
                    self._check_all_ranks()
                self._failed += self._seconds * self.store.check([FAILED])
                # A main thread that is blocked on NCCL would wait until its timeout.
                if self._failed >= self.limits.grace:
                    os._exit(1)
                errors, without_store = 0, 0.0
            except Exception:  # reading a moving thread, or a busy store, may fail; the next tick tries again
                errors, without_store = errors + 1, without_store + self._seconds

    def _write_heartbeat(self) -> None:
        """Add up the time without progress of the main thread and write it, with its position."""
        position = stack_position(self.main)
        cpu_seconds = time.process_time() - time.thread_time()
        status = process_status(f"self/task/{self.main.native_id}")
        computed = cpu_seconds - self._cpu_seconds > 0.01 * self.limits.tick
        moved = (
            position != self._position
            or (computed and not (self.spins and python_module(self.main).startswith(SPINNING_MODULES)))
            or (status is not None and status.state == "D")  # the disk, or a network's
        )
        self._still = 0.0 if moved else self._still + self._seconds
        self._position, self._cpu_seconds = position, cpu_seconds
        self._write()

    def _write(self, *, done: bool = False) -> None:
        self._number += 1
        place, waits = position_and_wait(self.main, self.axes)
        heartbeat = Heartbeat(self._number, place, waits, self._still, os.getpid(), self._started, done)
        self.store.set(heartbeat_key(self.rank), json.dumps(asdict(heartbeat)))

    def _read(self, rank: int) -> Heartbeat | None:
        key = heartbeat_key(rank)
        return Heartbeat(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _progress_note(self) -> str:
        """Return " (step 12)", or "" before the run has a step."""
        progress = self.progress()
        return f" ({progress})" if progress else ""

    def _check_neighbour(self) -> None:
        """Announce and check a rank of this machine until it has written a heartbeat itself."""
        found = self._neighbour() if self._neighbour else None
        if found is None:
            return
        rank, pid = found
        announce(self.store, rank, pid)
        heartbeat = self._read(rank)
        if heartbeat is not None and heartbeat.number:
            self._neighbour = None
        elif rank != (self.rank - 1) % self.world:
            self._check(rank)

    def _check(self, rank: int) -> None:
        """End the run when another rank writes no heartbeats and computes nothing."""
        heartbeat = self._read(rank)
        if heartbeat is None or heartbeat.done:
            return
        status = process_status(heartbeat.pid)
        if status is not None and status.started != heartbeat.started:  # on another machine
            status = None
        if status is None and not heartbeat.number:  # in its start there, where its next rank sees it
            return
        silence = self._silences.setdefault(rank, Silence(self.limits.tick))
        silent = silence.seconds(heartbeat.number, status)
        if silent >= self.limits.silent * (1 if status else 1.5):
            others = {n: other for n in range(self.world) if n != rank and (other := self._read(n))}
            report = silent_rank(rank, silent, status)
            report += f"{waiting_ranks(others)}{self._progress_note()}."
            end_process(self.tell, report, heartbeat.pid if status else None)

    def _check_all_ranks(self) -> None:
        """Warn that no rank makes progress, and after `limits.end` end the run; only the main rank checks."""
        heartbeats = {n: last for n in range(self.world) if (last := self._read(n)) and not last.done}
        still = min(heartbeat.still for heartbeat in heartbeats.values())
        not_waiting = {n: heartbeat for n, heartbeat in heartbeats.items() if not heartbeat.waits}
        if still < self.limits.stuck or len(not_waiting) == len(heartbeats):
            self._warned = False
            return
        where = "; ".join(f"rank {n} is in {heartbeat.place}" for n, heartbeat in not_waiting.items())
        has_not = "has not" if len(not_waiting) == 1 else "have not"
        subject = f"{ranks_named(not_waiting)} {has_not}" if not_waiting else "no rank has"
        report = f"{subject} moved for {still:.0f} s{f' ({where})' if where else ''}"
        report += f"{waiting_ranks(heartbeats)}{self._progress_note()}."
        if still >= self.limits.end:
            end_process(self.tell, report)
        elif not self._warned:
            self._warned = True
            left = self.limits.end - still
            print(f"meshtune: {report} The run is ended if this lasts {left:.0f} s more.", file=sys.stderr)


def end_process(tell: Callable[[str], None], report: str, silent: int | None = None) -> NoReturn:
    """Tell of a hang, then end this process with RankFailed's exit code, whatever its main thread does.

    silent: process id of a rank of this machine, killed too: whoever started it may not know that only
    SIGKILL ends a stopped process. It is killed after the report is out, since its end is seen as a failure
    of its own.
    """
    try:
        tell(report)
    finally:  # also where the terminal is gone
        if silent is not None:
            with suppress(ProcessLookupError):
                os.kill(silent, signal.SIGKILL)
        os._exit(RankFailed.exit_code)


class Awake:
    """Measures the time in which this process ran, between one look and the next."""

    def __init__(self, tick: float) -> None:
        """tick: seconds between two looks, at least. Of a longer gap MOST_TICKS of them count."""
        self._most = MOST_TICKS * tick
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the look before."""
        before, self._last = self._last, time.monotonic()
        return min(self._most, self._last - before)


class Silence:
    """Adds up the time in a row without a sign of life of a process."""

    def __init__(self, tick: float) -> None:
        """tick: seconds between two looks at it, at least."""
        self._signs: tuple[int, float] | None = None
        self._awake = Awake(tick)
        self._seconds = 0.0

    def seconds(self, number: int, status: "ProcessStatus | None") -> float:
        """Look at a process, and return for how many seconds there was no sign of it.

        number: of its last heartbeat. status: None for a process of another machine.
        """
        signs = number, status.cpu_seconds if status else 0.0
        # For a disk, or a core of a busy machine; a debugger holds it.
        waits = status is not None and status.state in "DRt"
        passed = self._awake.seconds()
        self._seconds = 0.0 if waits or signs != self._signs else self._seconds + passed
        self._signs = signs
        return self._seconds


def announce(store: Any, rank: int, pid: int) -> None:
    """Write the first heartbeat of a rank of this machine, unless the rank has written one itself."""
    status = process_status(pid)
    if status is not None:
        first = Heartbeat(0, "its start", None, 0, pid, status.started)
        store.compare_set(heartbeat_key(rank), "", json.dumps(asdict(first)))


def heartbeat_key(rank: int) -> str:
    return f"meshtune/heartbeat/{rank}"


# Position of a thread #


def stack_position(thread: threading.Thread) -> tuple[tuple[int, int], ...]:
    """Return (code object's id, instruction) of each frame of a thread; it changes when the thread moves."""
    frame, position = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(position)


def position_and_wait(thread: threading.Thread, axes: Mapping[str, str]) -> tuple[str, str | None]:
    """Return ("flush, rundir.py line 164", "all_reduce over dp_shard" or None).

    The first is the innermost function, file and line of a thread; the second is set while it waits for other
    ranks. axes: see `Watch.axes`.
    """
    frames = sys._current_frames()
    # With this function's own frame among its variables the thread's tensors would outlive their functions,
    # until the garbage collector runs.
    del frames[threading.get_ident()]
    frame = frames.get(thread.ident or 0)
    if frame is None:
        return "its start", None
    waits = waiting_in(frame, axes)
    if frame.f_code.co_name == "_engine_run_backward":  # on CUDA the hooks run in threads of autograd's own
        waits = next((wait for other in frames.values() if (wait := waiting_in(other, axes))), None)
    return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}", waits


def waiting_in(frame: FrameType, axes: Mapping[str, str]) -> str | None:
    """Return `all_reduce over dp_shard` if this frame, a thread's innermost, communicates; else None.

    It communicates if it is in one of WAITING_MODULES; one that COLLECTIVES lacks goes by its own name.
    axes: see `Watch.axes`.
    """
    inner: FrameType | None = frame
    while inner is not None and module_of(inner).startswith(CALLING_MODULES):
        inner = inner.f_back
    if inner is None or not module_of(inner).startswith(WAITING_MODULES):
        return None
    name = inner.f_code.co_name
    collective = next((word for start, word in COLLECTIVES.items() if name.startswith(start)), name)
    return f"{collective} over {axis_of(inner, axes)}"


def python_module(thread: threading.Thread) -> str:
    """Return the Python module of a thread's innermost Python function; "" for a thread that has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return module_of(frame) if frame is not None else ""


def module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def axis_of(frame: FrameType, axes: Mapping[str, str]) -> str:
    """Return the mesh axis of the process group that a communicating function was given.

    The group is looked up in the local variables of `frame` and its three callers. The name is that of
    `axes` (see `Watch.axes`), else that of torch's device mesh; "all ranks" for the default group or where
    none is found; "pp" in PIPELINE_MODULES.
    """
    from torch.distributed import ProcessGroup

    if module_of(frame).startswith(PIPELINE_MODULES):
        return "pp"
    outer: FrameType | None = frame
    for _ in range(4):
        if outer is None:
            break
        for name, value in list(outer.f_locals.items()):  # a copy: the frame belongs to a running thread
            if isinstance(value, ProcessGroup):
                torch_name = value.group_desc.removeprefix("mesh_").replace("default_pg", "all ranks")
                return axes.get(value.group_name, torch_name)
            if name == "group" and value is None:
                return "all ranks"
        outer = outer.f_back
    return "all ranks"


@dataclass(frozen=True)
class ProcessStatus:
    state: str  # R runs, S sleeps, D waits for a device, T stopped …
    cpu_seconds: float
    started: int  # clock ticks after boot


def process_status(pid: int | str) -> ProcessStatus | None:
    """Read the status of a process of this machine; None if it can't be read.

    pid: a process id, or a path below /proc such as self or self/task/7.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third on, as proc(5) counts: the name may hold spaces
    cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcessStatus(fields[0], cpu_seconds, int(fields[19]))


# Sentences of a report #


def waiting_ranks(heartbeats: Mapping[int, Heartbeat]) -> str:
    """Return `; ranks 0, 1, 2 wait for it in all_reduce over dp_shard`, one such clause per collective."""
    ranks_by_collective: dict[str, list[int]] = {}
    for rank, heartbeat in heartbeats.items():
        if heartbeat.waits and not heartbeat.done:
            ranks_by_collective.setdefault(heartbeat.waits, []).append(rank)
    return "".join(
        f"; {ranks_named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {collective}"
        for collective, ranks in ranks_by_collective.items()
    )


def silent_rank(rank: int, seconds: float, status: ProcessStatus | None) -> str:
    """Return `rank 3 has not answered for 30 s (its process is stopped)`."""
    why = "its process or machine may be gone"
    if status:
        why = "its process is stopped" if status.state == "T" else "its process does nothing"
    return f"rank {rank} has not answered for {seconds:.0f} s ({why})"


def ranks_named(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0, 1, 2`, or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more`."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"
