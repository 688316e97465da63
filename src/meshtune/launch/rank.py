"""One rank: its process group, its log file, and the watch that names a hang."""

import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, traceback_of
from meshtune.launch.place import Place, rank_before, siblings, threads_of
from meshtune.launch.watch import (
    Awake,
    HangLimits,
    Silence,
    Watch,
    announce,
    end_process,
    process_status,
    ranks_named,
    silent_rank,
)
from meshtune.streams import Output, flush, keep_in, text_stream
from meshtune.units import duration, notice

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # until every rank has come, after its machine's image
QUIET = timedelta(seconds=10)  # of waiting for them, before a line says for whom
LOOK = 1.0  # seconds between looks for the store of another machine
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # long, since the main rank may prepare data, or save, meanwhile


class Rank:
    """This rank, as the first argument of the function that runs on it."""

    def __init__(self, number: int = 0, *, log: "RankLog | None" = None, watch: Watch | None = None) -> None:
        """log: None if this rank writes to the terminal. watch: None for a world of one."""
        self.number = number
        self._log, self._watch = log, watch
        self._logs: Path | None = None  # the folder of `keep_log`

    @property
    def main(self) -> bool:
        """True on the rank that writes to the terminal; the others write to log files."""
        return self.number == 0

    def keep_log(self, folder: Path) -> None:
        """Move this rank's log to `folder`/rank-<n>.log and continue there; the main rank gets one only by
        `log_cause`, and where its output can't be written.
        """
        self._logs = folder
        file = folder / f"rank-{self.number}.log"
        if self._log is None:
            keep_in(file)
        else:
            self._log.move(file)

    def log_cause(self, error: UserError) -> None:
        """Append to this rank's log the traceback of what a sentence was made of, once it has a folder."""
        if self._logs is None or error.__cause__ is None:
            return
        with suppress(OSError):  # the sentence itself is shown whatever the disk does
            self._logs.mkdir(exist_ok=True)
            with open(self._logs / f"rank-{self.number}.log", "a", errors="backslashreplace") as log:
                log.write(traceback_of(error))

    def set_hang_facts(
        self, progress: Callable[[], str], axes: Mapping[str, str], *, spins: bool = False
    ) -> None:
        """Give the watch what its report of a hang needs; without effect in a world of one.

        progress: returns how far this rank is, "step 12". axes: name of a process group (group_name) -> mesh
        axis, "dp_shard". spins: True if a thread that waits for a device keeps its core busy (CUDA).
        """
        if self._watch is not None:
            self._watch.progress, self._watch.axes, self._watch.spins = progress, axes, spins


class RankLog:
    """The file that gets this process's stdout and stderr instead of the terminal, native code's included.

    Creating it redirects file descriptors 1 and 2 and replaces sys.stdout and sys.stderr.
    """

    def __init__(self, file: Path | None = None) -> None:
        """file: None for an unnamed temporary file, until `move`."""
        self._terminal = os.dup(1), os.dup(2)
        self._path = file
        self._file = tempfile.TemporaryFile("a+b") if file is None else open(file, "a+b")  # noqa: SIM115
        self._redirect(self._file.fileno(), self._file.fileno())
        # What a full disk does not accept is dropped: the run continues.
        sys.stdout, sys.stderr = (text_stream(Output(number)) for number in (1, 2))

    def move(self, file: Path) -> None:
        """Append what was written so far to `file` and continue there; the old path becomes a link to it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        target = open(file, "ab")  # noqa: SIM115 - it stays this process's output
        flush()
        self._file.seek(0)
        shutil.copyfileobj(self._file, target)
        target.flush()
        self._redirect(target.fileno(), target.fileno())
        if self._path is not None:  # a reader of the old path, such as the parent, finds the new file
            with suppress(OSError):  # a file system without links
                self._path.unlink()
                self._path.symlink_to(file.absolute())
        self._file.close()
        self._file = target

    def tell_terminal(self, text: str) -> None:
        """Write a line on the terminal, as well as in the file."""
        print(text, file=sys.stderr)
        with suppress(OSError):
            os.write(self._terminal[1], f"{text}\n".encode())

    def restore_terminal(self) -> None:
        """Write to the terminal again."""
        self._redirect(*self._terminal)

    @staticmethod
    def _redirect(out: int, err: int) -> None:
        flush()
        os.dup2(out, 1)
        os.dup2(err, 2)


@contextmanager
def process_group(
    place: Place,
    device: str,
    *,
    log: RankLog | None,
    limits: HangLimits,
    tell: Callable[[str], None],
    announced: bool = False,
) -> Iterator[Rank]:
    """Open the watch and then torch's default process group, once all ranks have come; yields the Rank.

    Sets torchrun's environment variables and the number of CPU threads; under cuda also the current GPU, by
    the local rank. The group is closed at the end of the block, but not if the block raises.

    place: of this rank. device: cpu (gloo) or cuda (NCCL for what is on the GPU, gloo for the rest). log:
    None if this rank writes to the terminal. tell: called with the report of a hang, also from another
    thread, before this process is ended. announced: True if the process that started the ranks
    announces them to the watch. Raises UserError if ranks don't come in time or there are fewer GPUs than
    ranks.
    """
    os.environ.update(place.environment())
    threads = threads_of(os.environ, max(1, cores() // place.local_world))
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "").strip() or str(threads)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        index = place.local_rank % gpus_for(place.local_world)  # srun may show each task only its own GPU
        torch.cuda.set_device(index)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", index)}
    say = log.tell_terminal if log else notice
    # Before the watch: on rank 0 of srun it is the store itself.
    store = open_store(place, limits, tell, say, own_starter=announced)
    neighbour = None if announced else partial(rank_before, place)
    connection = connect(place)
    with Watch(place.rank, place.world, connection, limits=limits, tell=tell, neighbour=neighbour) as watch:
        meet(place, store, say)
        dist.init_process_group(
            store=store, rank=place.rank, world_size=place.world, timeout=COLLECTIVE_TIMEOUT, **options
        )
        all_connected = "meshtune/all connected"
        if store.add("meshtune/ranks connected", 1) == place.world:
            store.set(all_connected, "")
        # A rank that ended before another has connected would close the sockets that gloo still opens.
        with suppress(RuntimeError):  # the store went with rank 0, which had seen that all are connected
            store.wait([all_connected], RENDEZVOUS_TIMEOUT)
        yield Rank(place.rank, log=log, watch=watch)
    dist.destroy_process_group()  # not after a failure, when it may wait for ranks that are gone


def gpus_for(ranks: int) -> int:
    """Count the GPUs that this process sees. Raises UserError if they are fewer than `ranks`, the ranks of
    this machine; but a single GPU is taken to be this rank's own, as srun can show it.
    """
    import torch

    gpus = torch.cuda.device_count()
    if 1 != gpus < ranks:
        raise UserError(f"{ranks} ranks on a machine with {gpus} GPUs: start {gpus}, one for each GPU.")
    return gpus


def open_store(
    place: Place,
    limits: HangLimits,
    tell: Callable[[str], None],
    say: Callable[[str], None],
    *,
    own_starter: bool = False,
) -> Any:
    """Connect to the store of the rendezvous, which rank 0 holds unless torchrun or the parent does.

    limits, tell: of a hang of rank 0 before it has made the store. say: gets a line where this takes long,
    and its rank is the first of its machine that waits for rank 0. own_starter: True if this process's parent
    started the ranks of this machine (`start.run_here`): the first machine may come later. Raises UserError
    if the store can't be reached in time.
    """
    from torch.distributed import DistError

    holds = place.rank == 0 and not store_is_external()
    if not holds:
        first = place.local_rank == 0 or place.rank == 1
        wait_for_store(place, limits, tell, say if first else lambda line: None, own_starter=own_starter)
    try:
        return connect(place, is_master=holds, timeout=RENDEZVOUS_TIMEOUT)
    except DistError as error:
        raise not_met(place, str(error).splitlines()[0]) from error


def store_is_external() -> bool:
    """True if the TCP store is held by torchrun or the parent process, not by a rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_store(
    place: Place,
    limits: HangLimits,
    tell: Callable[[str], None],
    say: Callable[[str], None],
    *,
    own_starter: bool,
) -> None:
    """Wait until something listens at the address of the store, for at most RENDEZVOUS_TIMEOUT.

    Without a store there is no watch, so what it would end is ended here after `limits.silent`: a rank 0 of
    this machine that is stopped or does nothing before it has made the store, and ranks whose torchrun, which
    made it before it started them, is gone. Raises UserError if rank 0 of this machine has ended.
    """
    silence, began = Silence(limits.tick), time.monotonic()
    until, said = began + RENDEZVOUS_TIMEOUT.total_seconds(), False
    awake, waited, seen = Awake(limits.tick), 0.0, False
    while time.monotonic() < until:
        patience = QUIET.total_seconds()
        with suppress(OSError), socket.create_connection((place.address, place.port), patience):
            return
        if not said and time.monotonic() - began >= patience:
            said = True
            say(waiting_for(place, [0]))
        waited += awake.seconds()
        if store_is_external():
            if waited >= limits.silent and not own_starter:
                end_process(tell, f"what started rank {place.rank} is gone: its process was killed.")
        else:
            _, pid = siblings(place).get(0, (0, 0))
            status = process_status(pid) if pid else None
            if seen and status is None:
                raise UserError(f"Rank 0 has ended before rank {place.rank} could meet it.")
            seen = status is not None
            silent = silence.seconds(0, status)
            if status and silent >= limits.silent:
                report = f"{silent_rank(0, silent, status)}, and the others can't meet without it."
                end_process(tell, report, pid)
        time.sleep(limits.tick)


def meet(place: Place, store: Any, say: Callable[[str], None]) -> None:
    """Wait for all ranks. Raises UserError, naming them, if some don't come in time.

    say: gets a line about those that have not come after QUIET, on the first rank that has.
    """
    from torch.distributed import DistError

    here, all_here = "meshtune/here/{}", "meshtune/all here"
    store.set(here.format(place.rank), "")
    if store.add("meshtune/ranks here", 1) == place.world:
        store.set(all_here, "")

    def absent(store: Any) -> list[int]:
        return [rank for rank in range(place.world) if not store.check([here.format(rank)])]

    def remind() -> None:
        with suppress(RuntimeError):  # the store is gone
            missing = absent(connect(place))  # the other connection is locked by the wait
            if missing and place.rank == min(set(range(place.world)).difference(missing)):
                say(waiting_for(place, missing))

    timer = threading.Timer(QUIET.total_seconds(), remind)
    timer.daemon = True
    timer.start()
    try:
        store.wait([all_here], RENDEZVOUS_TIMEOUT)
    except DistError as error:
        missing = absent(store)
        seconds = RENDEZVOUS_TIMEOUT.total_seconds()
        raise not_met(place, f"{ranks_named(missing)} did not come in {seconds:.0f} s.") from error
    finally:
        timer.cancel()


def waiting_for(place: Place, missing: list[int]) -> str:
    """Line about the ranks that have not come yet."""
    return (
        f"meshtune: rank {place.rank} of {place.world} waits at {place.address}:{place.port} for "
        f"{ranks_named(missing)}, for {duration(RENDEZVOUS_TIMEOUT.total_seconds())} at most."
    )


def not_met(place: Place, reason: str) -> UserError:
    return UserError(
        f"Rank {place.rank} of {place.world} could not meet the others at {place.address}:{place.port}: "
        f"{reason} Start all {place.world} ranks (under Slurm by srun), set "
        "MASTER_ADDR to the first machine, and MASTER_PORT to a free port of it."
    )


def connect(place: Place, *, is_master: bool = False, **options: Any) -> Any:
    """Open one more connection to the store at `place`; its keys are those only of this start of the ranks,
    where torchrun has started them again.

    Does not wait for other ranks. is_master: True to hold the store in this process. options: of
    torch.distributed.TCPStore.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(place.address, place.port, is_master=is_master, wait_for_workers=False, **options)
    return PrefixStore(f"meshtune/start {start}", store)


@contextmanager
def announced_ranks(place: Place, pids: Mapping[int, int], door: socket.socket | None) -> Iterator[None]:
    """Write a first heartbeat of this machine's ranks, so that one that never comes is missed; keep the store
    for the block if this process has it.

    place: of the first rank here. pids: rank -> process id. door: the socket of the store; None: the first
    machine has it, which may come later, so that a thread waits for it.
    """
    over = threading.Event()

    def announce_to(store: Any) -> Any:
        for rank, pid in pids.items():
            announce(store, rank, pid)
        return store

    def wait() -> None:
        # By a socket of Python's: torch's client sleeps between its attempts, and a thread that is still in
        # there when the interpreter ends aborts the process.
        while not over.wait(LOOK):
            with suppress(OSError), socket.create_connection((place.address, place.port), LOOK):
                break
        with suppress(RuntimeError):  # the run has ended: the ranks say so
            if not over.is_set():
                announce_to(connect(place, timeout=QUIET))

    thread = threading.Thread(target=wait, name="meshtune-announce", daemon=True)
    store = None
    if door is None:
        thread.start()
    else:
        store = announce_to(connect(place, is_master=True, master_listen_fd=door.detach()))
    try:
        yield
    finally:
        over.set()
        if door is None:
            thread.join(QUIET.total_seconds())  # torch's client has no time limit where nobody answers
        del store


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
