"""Start ranks here, or join those that torchrun or srun started. Knows nothing of training.

    run(function, *args, ranks=8, device="cpu")      # function(rank, *args) on each of 8 ranks

    this process is a rank (`place_of`)   the function runs here, as that rank
    one rank                              it runs here, without a process group
    several                               they are started here: forked on CPU, so that all share what is
                                          imported; spawned on CUDA, which survives no fork

Ranks started here get torchrun's environment, and this process keeps the store they meet at, so that the
store outlives any of them. The first rank that fails ends all, and its error is raised here; siblings that
lost their connection to it are passed over. Signals go on to every rank.

torch.distributed.elastic's start_processes is not used: it stops siblings by SIGTERM, which here asks for a
checkpoint, gives them 30 s for it, and tells which rank was seen to fail first, not which did.
"""

import faulthandler
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError
from meshtune.watch import FAILED, Limits, Watch

HERE = "127.0.0.1"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
MEETING = timedelta(minutes=5)  # until every rank has come
OPERATION = timedelta(minutes=30)  # until one operation is done: the main rank may prepare data, or save
LOST = re.compile(  # how the end of another rank shows in gloo, NCCL and the store
    "closed by peer|reset by peer|connection refused|connection was closed|broken pipe|socket (error|closed)"
    "|remote process exited|communicator was aborted|timed out|timeout|recvvalue failed|failed to recv",
    re.IGNORECASE,
)


# Who this process is #


@dataclass(frozen=True)
class Place:
    """A process among the ranks; the local ranks are those on its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        """What torchrun would set."""
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world), "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }  # fmt: skip


def joined() -> bool:
    """Whether this process is one of several ranks that torchrun or srun started."""
    return place_of(os.environ) is not None


def place_of(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun's or srun's environment gives this process; None for one rank, or none.

    Raises UserError where the environment says too little to meet.
    """
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        world = int(environ["WORLD_SIZE"])
        return torchrun_place(environ, world) if world > 1 else None
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environ.keys():
        # The tasks of this srun; SLURM_NTASKS is the whole allocation's in the shell of salloc or sbatch.
        world = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
        return srun_place(environ, world) if world > 1 else None
    return None


def torchrun_place(environ: Mapping[str, str], world: int) -> Place:
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise UserError(
            f"RANK={environ['RANK']} and WORLD_SIZE={world} are set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: start the ranks by torchrun, or unset both to "
            "start them here (--nproc)."
        )
    rank = int(environ["RANK"])
    return Place(
        rank=rank,
        world=world,
        local_rank=int(environ.get("LOCAL_RANK", rank)),
        local_world=int(environ.get("LOCAL_WORLD_SIZE", world)),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )


def srun_place(environ: Mapping[str, str], world: int) -> Place:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if name in environ), socket.gethostname())
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(world)))
    job, step = (int(environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        world=world,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world=tasks_on(tasks, int(environ.get("SLURM_NODEID", 0))),
        address=environ.get("MASTER_ADDR", first_host(nodes)),
        # Every rank works out the same; below the ports that the kernel gives away.
        port=int(environ.get("MASTER_PORT", 10000 + (job * 7 + step) % 20000)),
    )


def first_host(nodes: str) -> str:
    """node003 of node[003-010,012],login1"""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else nodes)


def tasks_on(tasks: str, node: int) -> int:
    """How many tasks a node has. Slurm writes 4(x2),3 for two nodes with four each and a third with three."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]


# One rank #


class Rank:
    """A rank, as the function that runs on it sees it."""

    def __init__(self, number: int = 0, *, log: "Log | None" = None, watch: Watch | None = None) -> None:
        self.number = number
        self._log, self._watch = log, watch

    @property
    def main(self) -> bool:
        """Whether this rank speaks; the others write to their logs."""
        return self.number == 0

    def keep_log(self, folder: Path) -> None:
        """Write on in `folder`/rank-<n>.log, what was written so far included; the main rank has no log."""
        if self._log is not None:
            self._log.move(folder / f"rank-{self.number}.log")

    def explain(self, progress: Callable[[], str], axes: Mapping[str, str], *, spins: bool = False) -> None:
        """Say for the report of a hang how far this rank is (`progress()`: "step 12"), and which axis each
        group is of (its group_name -> "dp_shard"). spins: whether waiting burns the processor (CUDA).
        """
        if self._watch is not None:
            self._watch.progress, self._watch.axes, self._watch.spins = progress, axes, spins


class Log:
    """Where a rank writes instead of the terminal: the process' stdout and stderr, native code's too."""

    def __init__(self, file: Path | None = None) -> None:
        """file: None for one that has no name until `move`."""
        self._terminal = os.dup(1), os.dup(2)
        self._named = file
        self._file = tempfile.TemporaryFile("a+b") if file is None else open(file, "a+b")  # noqa: SIM115
        self._redirect(self._file.fileno(), self._file.fileno())
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))

    def move(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        target = open(file, "ab")  # noqa: SIM115 - it stays this process' output
        flush()
        self._file.seek(0)
        shutil.copyfileobj(self._file, target)
        target.flush()
        self._redirect(target.fileno(), target.fileno())
        if self._named is not None:  # who knew the old name finds the new file
            self._named.unlink()
            self._named.symlink_to(file.absolute())
        self._file.close()
        self._file = target

    def terminal(self) -> None:
        """Write to the terminal again."""
        self._redirect(*self._terminal)

    @staticmethod
    def _redirect(out: int, err: int) -> None:
        flush()
        os.dup2(out, 1)
        os.dup2(err, 2)


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


@contextmanager
def group(
    place: Place, device: str, log: Log | None, limits: Limits, end: Callable[[str], None]
) -> Iterator[Rank]:
    """The default process group, and the watch over it, while the rank runs.

    end: called with the report of a hang, from another thread; it must not return.
    """
    os.environ.update(place.environment())
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // place.local_world))))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        index = place.local_rank % gpus_for(place.local_world)  # srun may show each task its own GPU alone
        torch.cuda.set_device(index)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", index)}
    store = meet(place)
    dist.init_process_group(
        store=store, rank=place.rank, world_size=place.world, timeout=OPERATION, **options
    )
    with Watch(place.rank, place.world, connect(place), limits=limits, end=end) as watch:
        yield Rank(place.rank, log=log, watch=watch)
    dist.destroy_process_group()  # not after a failure, when it may wait for ranks that are gone


def gpus_for(ranks: int) -> int:
    """How many GPUs this process sees. Raises UserError when `ranks` ranks can't have one each."""
    import torch

    gpus = torch.cuda.device_count()
    if 1 != gpus < ranks:
        raise UserError(f"{ranks} ranks on a machine with {gpus} GPUs: start {gpus}, one for each GPU.")
    return gpus


def meet(place: Place) -> Any:
    """The store of all ranks, once they are all there. Raises UserError when they don't come."""
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", place.rank, place.world, timeout=MEETING))[0]
    except DistError as error:
        raise UserError(
            f"Rank {place.rank} of {place.world} could not meet the others at {place.address}:{place.port}: "
            f"{str(error).splitlines()[0]} Start all {place.world} ranks (under Slurm by srun), set "
            "MASTER_ADDR to the first machine, and MASTER_PORT to a free port of it."
        ) from error


def connect(place: Place, *, is_master: bool = False, **options: Any) -> Any:
    """A connection of one's own to the store; see torch.distributed.TCPStore."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented there

    return TCPStore(place.address, place.port, is_master=is_master, wait_for_workers=False, **options)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# Run #


def run(
    function: Callable[..., object],
    *args: Any,
    ranks: int,
    device: str = "cpu",
    limits: Limits = Limits(),  # noqa: B008 - a frozen value
) -> None:
    """`function(rank, *args)` on each of `ranks` ranks; with device cuda each has a GPU of its own.

    Raises what the first rank to fail raised: UserError, NonFinite, Interrupted and OSError as they are,
    anything else, and hangs, as RankFailed with the rank's traceback. On a rank that torchrun or srun started
    SystemExit is raised when another rank failed first.
    """
    if place := place_of(os.environ):
        run_joined(place, function, args, device, limits)
    elif ranks == 1:
        function(Rank(), *args)
    else:
        run_here(ranks, function, args, device, limits)


def run_joined(
    place: Place, function: Callable[..., object], args: tuple[Any, ...], device: str, limits: Limits
) -> None:
    """The function in this process, as one rank of those started elsewhere; only the first to fail speaks."""
    log = Log() if place.rank else None

    def end(report: str) -> None:
        if log:
            log.terminal()
        print(f"meshtune: {report}", file=sys.stderr, flush=True)
        os._exit(RankFailed.exit_code)

    try:
        with group(place, device, log, limits, end) as rank:
            function(rank, *args)
    except Exception as error:
        if not speaks(place, error, limits.grace / 2):
            if log:
                traceback.print_exc()
            raise SystemExit(exit_code(error)) from None
        if log:
            log.terminal()
        raise


def speaks(place: Place, error: BaseException, patience: float) -> bool:
    """Whether this rank's error is the one to show: the first, or the main rank's when all ended alike."""
    if isinstance(error, NonFinite | Interrupted):
        return place.rank == 0
    if lost_connection(error):
        time.sleep(patience)  # the rank that was the cause goes first
    try:
        return connect(place, timeout=timedelta(seconds=patience)).add(FAILED, 1) == 1
    except RuntimeError:  # the rank that held the store is gone, or the store was never there
        return not lost_connection(error)


def lost_connection(error: BaseException) -> bool:
    """Whether an error looks like the consequence of another rank's end."""
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


def exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, UserError | NonFinite | Interrupted) else 1


# Ranks of our own #


@dataclass
class Failure:
    """What a rank left when it failed."""

    seconds: float  # when, since the epoch
    text: str  # which rank, its traceback or what is known, the end of its log
    error: BaseException | None = None  # where it is to be raised here as it was
    killed: int = 0  # the signal that ended its process
    consequence: bool = False  # of another rank's failure

    def order(self) -> tuple[bool, bool, bool, float]:
        """First comes what is shown; the report of a hang before all."""
        hang, interrupted = isinstance(self.error, RankFailed), isinstance(self.error, Interrupted)
        return not hang, self.consequence, interrupted, self.seconds


def run_here(
    ranks: int, function: Callable[..., object], args: tuple[Any, ...], device: str, limits: Limits
) -> None:
    """Start the ranks, wait for them, and raise what the first to fail raised."""
    context: Any = get_context("spawn" if device == "cuda" else "fork")
    with tempfile.TemporaryDirectory(prefix="meshtune-") as name, socket.create_server((HERE, 0)) as door:
        folder, port = Path(name), door.getsockname()[1]
        places = [Place(rank, ranks, rank, ranks, HERE, port) for rank in range(ranks)]
        shared = (os.getpid(), device, folder, limits, function, args)
        processes = [context.Process(target=own_rank, args=(place, *shared)) for place in places]
        try:
            for process in processes:
                process.start()
            # After the forks, which must not copy its thread; ranks that are faster wait at the door.
            store = connect(places[0], is_master=True, master_listen_fd=door.detach())
            with forwarded(processes) as received:
                ended = wait_for(processes, limits.grace)
            del store
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = list(failures_of(processes, ended, folder))
    if failures:
        raise_first(failures, received)


def own_rank(
    place: Place,
    parent: int,
    device: str,
    folder: Path,
    limits: Limits,
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    """One rank in its own process; what it fails with is left in `folder`."""
    end_with(parent)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches it through the parent, once
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank holds the store: the parent does
    log = Log(folder / f"rank-{place.rank}.log") if place.rank else None
    if log:
        faulthandler.enable()  # a crash in native code leaves its stack in the log

    def leave(error: BaseException) -> None:
        record(folder, place, error)
        flush()
        os._exit(exit_code(error))  # no clean-up of what the parent owns, or that waits for other ranks

    try:
        with group(place, device, log, limits, lambda report: leave(RankFailed(report))) as rank:
            function(rank, *args)
    except BaseException as error:
        leave(error)
    flush()
    os._exit(0)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while it is stopped."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def record(folder: Path, place: Place, error: BaseException) -> None:
    """Leave a failure for the parent, whole or not at all; and in the rank's log, if it has one."""
    expected = isinstance(error, UserError | NonFinite | Interrupted | RankFailed | KeyboardInterrupt)
    what = str(error) if expected else "".join(traceback.format_exception(error))
    text = f"rank {place.rank} of {place.world} failed:\n{what}{last_lines(folder, place.rank)}"
    if place.rank:
        print(what, file=sys.stderr)
    carried = error if expected or isinstance(error, OSError) else None
    failure = Failure(time.time(), text, carried, consequence=lost_connection(error))
    aside = folder / f".failed-{place.rank}"
    aside.write_bytes(pickle.dumps(failure))
    aside.rename(folder / f"failed-{place.rank}")


def last_lines(folder: Path, rank: int, lines: int = 20) -> str:
    """The end of a rank's log with a heading; empty when there is nothing."""
    file = folder / f"rank-{rank}.log"
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    where = f" ({file.resolve()})" if file.is_symlink() else ""
    return f"\nThe end of rank {rank}'s log{where}:\n" + "\n".join(text.splitlines()[-lines:]) if text else ""


@contextmanager
def forwarded(processes: list[BaseProcess]) -> Iterator[list[signal.Signals]]:
    """Send every rank the signals that this process gets; yields those that came."""
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for process in processes:
            if process.is_alive():
                # A second Ctrl-C ends at once, also ranks whose main thread is blocked.
                again = received.count(signal.SIGINT) > 1
                os.kill(process.pid or 0, signal.SIGKILL if again else number)

    before = {each: signal.signal(each, forward) for each in SIGNALS}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def wait_for(processes: list[BaseProcess], grace: float) -> dict[int, float]:
    """Rank -> when it ended by itself, in seconds since the epoch. Those that don't within `grace` seconds of
    a failure are killed.

    Ranks come to an interruption or to non-finite numbers together, so these leave the others their time.
    """
    together = (0, NonFinite.exit_code, Interrupted.exit_code)
    ended: dict[int, float] = {}
    until = None
    while running := {process.sentinel: rank for rank, process in enumerate(processes) if process.is_alive()}:
        left = None if until is None else max(0.0, until - time.monotonic())
        if left == 0:
            for rank in running.values():
                processes[rank].kill()
                processes[rank].join()
            break
        for sentinel in wait(list(running), timeout=left):
            rank = running[sentinel]  # type: ignore[index]
            processes[rank].join()
            ended[rank] = time.time()
            if until is None and processes[rank].exitcode not in together:
                until = time.monotonic() + grace
    return ended


def failures_of(processes: list[BaseProcess], ended: Mapping[int, float], folder: Path) -> Iterator[Failure]:
    """What the ranks that ended by themselves failed with."""
    for rank, seconds in ended.items():
        file, code = folder / f"failed-{rank}", processes[rank].exitcode
        if file.exists():
            yield pickle.loads(file.read_bytes())
        elif code:
            text = f"rank {rank} of {len(processes)} {how_it_ended(code)}{last_lines(folder, rank)}"
            yield Failure(seconds, text, killed=max(0, -code))


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}."
    name = signal.Signals(-code).name
    memory = "; the kernel does that when the machine's memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}."


def raise_first(failures: list[Failure], received: list[signal.Signals]) -> None:
    """Raise the failure that the others followed from, as what it was."""
    first = min(failures, key=Failure.order)
    if isinstance(first.error, OSError):
        raise first.error from RankFailed(first.text)
    if first.error is not None:
        raise first.error
    if received.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
    if first.killed in received:  # it came before there was anything to save, and ends us alike
        signal.signal(first.killed, signal.SIG_DFL)
        os.kill(os.getpid(), first.killed)
    raise RankFailed(first.text)
