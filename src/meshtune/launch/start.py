"""Start the ranks, forward signals to them, wait for them; or run as one rank of those started elsewhere."""

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from meshtune.errors import Interrupted, NonFinite, NoProgress, RankFailed, UserError, traceback_of
from meshtune.filesystem import try_lock
from meshtune.launch.failure import (
    MachineClaim,
    claims_failure,
    exit_code,
    failures_of,
    raise_first,
    record_failure,
)
from meshtune.launch.machine import ONLY, Machine, machine_of
from meshtune.launch.place import Place, place_of, reachable_address, refuse_batch_script
from meshtune.launch.rank import Rank, RankLog, announced_ranks, process_group
from meshtune.launch.signals import Stopped, as_interrupted, asked, to_handle
from meshtune.launch.watch import HangLimits
from meshtune.streams import flush, guard
from meshtune.units import notice

RESULT = "result"  # file of the scratch folder: what the first rank of this machine returned, pickled


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    device: str = "cpu",
    limits: HangLimits = HangLimits(),  # noqa: B008 - a frozen value
) -> Any:
    """Run `function(rank, *args)`, its first argument a Rank, on each of `ranks` ranks; return what it
    returned: on the first of those that are started here, on this rank under torchrun or srun.

    ranks: 1 runs the function in this process, without a process group; of several machines (`machine_of`)
    the ranks of all, and this machine's share is started here. Not used on a rank that torchrun or srun
    started: there the function runs here, once. device: cpu, or cuda with a GPU for each rank; there the
    function and `args` must be picklable (`spawns`), and with several ranks what is returned.

    Raises what the first rank to fail raised: UserError, NonFinite, Interrupted and OSError as they are,
    anything else, and hangs, as RankFailed with the rank's traceback. Where the function runs in this
    process, all its errors are raised as they are; if another rank failed first, SystemExit is raised.
    """
    if place := place_of(os.environ):
        return run_joined(place, function, args, device, limits)
    if name := asked():  # ranks that are spawned would not know of it
        raise Stopped(name)
    refuse_batch_script(os.environ)
    machine = machine_of(os.environ) or ONLY
    if ranks == 1:
        return function(Rank(), *args)
    return run_here(ranks // machine.machines, function, args, device, limits, machine)


def spawns(device: str) -> bool:
    """True if ranks started here are spawned: CUDA survives no fork, neither in use nor just initialised."""
    torch = sys.modules.get("torch")
    return device == "cuda" or (torch is not None and torch.cuda.is_initialized())


# A rank that torchrun or srun started #


def run_joined(
    place: Place, function: Callable[..., Any], args: tuple[Any, ...], device: str, limits: HangLimits
) -> Any:
    """Run the function in this process as the rank `place`, started by torchrun or srun; see `run`.

    The first rank to fail raises its error. The others write theirs to their logs and raise SystemExit; a
    hang ends the process by os._exit. If the first machine has no address here, the first rank of this
    machine raises UserError, the others SystemExit.
    """
    try:
        place = replace(place, address=reachable_address(place.address))
    except UserError as error:
        if place.local_rank:
            raise SystemExit(error.exit_code) from None
        raise
    log = RankLog() if place.rank else None

    def tell(report: str) -> None:
        if log:
            log.restore_terminal()
        notice(f"meshtune: {report}")

    try:
        with (
            as_interrupted(),
            process_group(place, device, log=log, limits=limits, tell=tell) as rank,
        ):
            return function(rank, *args)
    except Exception as error:
        if not claims_failure(place, error, limits.grace / 2):
            if log:
                print(traceback_of(error), end="", file=sys.stderr)
            raise SystemExit(exit_code(error)) from None
        if log:
            log.restore_terminal()
        raise


# Ranks started here #


def run_here(
    ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    limits: HangLimits,
    machine: Machine = ONLY,
) -> Any:
    """Start the ranks of this machine, wait for them, and raise what the first to fail raised, or return what
    the first returned; see `run`.

    Ranks still alive when this function is left are killed. machine: this one of several; the first keeps the
    store. Where a rank of another machine failed first, RankFailed names that machine.
    """
    context: Any = get_context("spawn" if spawns(device) else "fork")
    with (
        scratch_folder() as folder,
        machine.door() as door,
        # Forked from a thread of their own: a thread that has computed with OpenMP (a notebook's) has a pool
        # of threads that a fork does not copy, and the rank would wait for it for ever. The thread lives as
        # long as the ranks, which the kernel kills with it (`child_process`).
        ThreadPoolExecutor(1) as starter,
    ):
        places = machine.places(ranks, door)
        shared = {"device": device, "limits": limits, "folder": folder, "parent": os.getpid()}
        processes = [
            context.Process(target=rank_process, args=(place, function, args), kwargs=shared)
            for place in places
        ]
        try:
            for process in processes:
                starter.submit(process.start).result()
            # After the forks, which must not copy the store's thread; until then the socket queues the ranks.
            pids = {place.rank: process.pid or 0 for place, process in zip(places, processes, strict=True)}
            claim = MachineClaim(machine, places[0], folder, limits.grace)
            with announced_ranks(places[0], pids, door):
                with forwarded_signals(processes) as received:
                    ended = wait_for(processes, limits.grace, claim.make)
                claim.linger(received)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = list(failures_of(places, processes, ended, folder))
        if not failures:
            return pickle.loads((folder / RESULT).read_bytes())
    claim.raise_for_another(failures)
    raise_first(failures, received)


def rank_process(
    place: Place,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    device: str,
    limits: HangLimits,
    folder: Path,
    parent: int,
) -> None:
    """Run one rank; the target of its process, which exits here: it never returns.

    folder: where the parent reads the rank's failure and log. parent: the parent's process id.
    """
    with child_process(parent, folder, place):
        guard()  # a spawned process has its own streams
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank holds the store: the parent does
        log = RankLog(folder / f"rank-{place.rank}.log") if place.rank else None
        if log:
            faulthandler.enable()  # a crash in native code leaves its stack in the log

        def tell(report: str) -> None:
            record_failure(folder, place, RankFailed(report))
            flush()

        with process_group(place, device, log=log, limits=limits, tell=tell, announced=True) as rank:
            result = function(rank, *args)
        if place.local_rank == 0:
            (folder / RESULT).write_bytes(pickle.dumps(result))


@contextmanager
def child_process(parent: int, folder: Path, place: Place) -> Iterator[None]:
    """Run the block as a child of the process `parent`, and exit at its end: the block is never left.

    The kernel kills this process when its parent dies, even while it is stopped. An error of the block is
    recorded in `folder`.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches it through the parent, once
    code = 0
    try:
        with as_interrupted():
            yield
    except BaseException as error:
        record_failure(folder, place, error)
        code = exit_code(error)
    flush()
    os._exit(code)  # no clean-up of what the parent owns, or that waits for other ranks


@contextmanager
def forwarded_signals(processes: list[BaseProcess]) -> Iterator[list[signal.Signals]]:
    """Forward the signals that this process gets to every rank; yields the list of those that came."""
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for process in processes:
            if process.is_alive():
                # A second Ctrl-C ends at once, also ranks whose main thread is blocked.
                again = received.count(signal.SIGINT) > 1
                os.kill(process.pid or 0, signal.SIGKILL if again else number)

    handlers = {number: signal.signal(number, forward) for number in to_handle()}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_for(processes: list[BaseProcess], grace: float, failed: Callable[[], None]) -> dict[int, float]:
    """Wait for all ranks; return local rank -> when it ended unasked, in seconds since the epoch.

    processes: in rank order. failed: called at the first failure. Ranks that still run `grace` seconds after
    it are killed, and are not in the result. The exit codes of Interrupted, NoProgress and NonFinite do not
    count as a failure here: those reach all ranks together, and the others get the time that they need.
    """
    no_failure = (0, NonFinite.exit_code, Interrupted.exit_code, NoProgress.exit_code)
    ended: dict[int, float] = {}
    deadline = None
    # Not those that are alive now: one that has just ended would never be looked at.
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if timeout == 0:
            for rank in running.values():
                processes[rank].kill()
                processes[rank].join()
            break
        for sentinel in wait(list(running), timeout=timeout):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            processes[rank].join()
            ended[rank] = time.time()
            if deadline is None and processes[rank].exitcode not in no_failure:
                deadline = time.monotonic() + grace
                failed()
    return ended


# A folder of the ranks #


PREFIX = "meshtune-ranks-"
YOUNG_SECONDS = 60  # a younger folder may not be locked yet


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new temporary folder, which is removed at the end of the block.

    It is locked as long as this process or one forked from it lives, whatever kills them: a folder whose
    lock is free is a killed process's, and is removed here. Without locks none is.
    """
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            try_lock(handle, shared=True)
            yield Path(name)
        finally:
            os.close(handle)


def remove_abandoned() -> None:
    """Remove the folders of killed processes of this user from the temporary directory."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < YOUNG_SECONDS:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if not try_lock(handle):  # BlockingIOError: it is in use
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
