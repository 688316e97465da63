"""One of several ranks failed first: which error is shown, and how it is raised in the process that started
the ranks.

A rank that was started here leaves a `Failure` in a folder, pickled; the parent orders them and raises the
first cause. Ranks that torchrun or srun started have no parent of ours: each asks the store whether it was
the first (`claims_failure`), and only that one prints its error.
"""

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError, traceback_of
from meshtune.launch.machine import Machine
from meshtune.launch.place import Place
from meshtune.launch.rank import connect
from meshtune.launch.watch import FAILED

LOST_CONNECTION = re.compile(  # how the end of another rank shows in errors of gloo, NCCL and the store
    "closed by peer|reset by peer|connection refused|connection was closed|broken pipe|socket (error|closed)"
    "|remote process exited|communicator was aborted|timed out|timeout|recvvalue failed|failed to recv",
    re.IGNORECASE,
)


@dataclass
class Failure:
    """The failure of one rank, as it reports it to the parent."""

    seconds: float  # time of the failure, since the epoch
    text: str  # the rank, its traceback or how its process ended, the end of its log
    error: BaseException | None = (
        None  # what the parent raises; None for a bug, which it raises as RankFailed
    )
    killed: int = 0  # number of the signal that ended the process
    consequence: bool = False  # True if another rank's failure caused it

    def order(self) -> tuple[bool, bool, bool, float]:
        """Sort key: the failure to show comes first, a report of a hang before all others."""
        hang, interrupted = isinstance(self.error, RankFailed), isinstance(self.error, Interrupted)
        return not hang, self.consequence, interrupted, self.seconds


def claims_failure(place: Place, error: BaseException, patience: float) -> bool:
    """Claim, in the store, to be the rank whose error is shown; True if no other rank claimed it before.

    The claim also tells every rank's Watch that one has failed: those still running end after
    `HangLimits.grace`.
    For NonFinite and Interrupted, which all ranks raise together, nothing is claimed: True on the main rank.
    If the store can't be reached: True unless the error looks like a consequence of another rank's end.

    place: of this rank. patience: seconds to wait before claiming an error that looks like a consequence, and
    to wait for the store.
    """
    if isinstance(error, NonFinite | Interrupted):
        return place.rank == 0
    if lost_connection(error):
        time.sleep(patience)  # the rank that was the cause claims first
    try:
        return connect(place, timeout=timedelta(seconds=patience)).add(FAILED, 1) == 1
    except RuntimeError:  # the rank that held the store is gone, or the store was never there
        return not lost_connection(error)


def lost_connection(error: BaseException) -> bool:
    """True if an error looks like the consequence of another rank's end."""
    return isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None


def exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, UserError | NonFinite | Interrupted) else 1


def record_failure(folder: Path, place: Place, error: BaseException) -> None:
    """Write this rank's Failure to `folder`/failed-<rank> for the parent, by a rename.

    Expected errors and OSError are in it as they are, any other only as text with its traceback. A rank that
    has a log then prints the message there.
    """
    expected = isinstance(error, UserError | NonFinite | Interrupted | RankFailed | KeyboardInterrupt)
    message = str(error) if expected else traceback_of(error)
    text = f"rank {place.rank} of {place.world} failed:\n{message}{end_of_log(folder, place.rank)}"
    raised = error if expected or isinstance(error, OSError) else None
    failure = Failure(time.time(), text, raised, consequence=lost_connection(error))
    aside = folder / f".failed-{place.rank}"
    aside.write_bytes(pickle.dumps(failure))
    aside.rename(folder / f"failed-{place.rank}")
    if place.rank:
        print(message, file=sys.stderr)


def end_of_log(folder: Path, rank: int, lines: int = 20) -> str:
    """Return the last `lines` lines of `folder`/rank-<rank>.log under a heading; "" if empty or missing."""
    file = folder / f"rank-{rank}.log"
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    where = f" ({file.resolve()})" if file.is_symlink() else ""
    return f"\nThe end of rank {rank}'s log{where}:\n" + "\n".join(text.splitlines()[-lines:]) if text else ""


def failures_of(
    places: list[Place], processes: list[BaseProcess], ended: Mapping[int, float], folder: Path
) -> Iterator[Failure]:
    """Yield the failures of the ranks of this machine: those recorded in `folder`, else by exit code.

    places, processes: of the ranks, in their order. ended: local rank -> when its process ended unasked, in
    seconds since the epoch. A rank without a record yields none if its exit code is 0 or it was killed here;
    one with a record may have been killed here before it could end.
    """
    for place, process in zip(places, processes, strict=True):
        if (folder / f"failed-{place.rank}").exists() or (process.exitcode and place.local_rank in ended):
            seconds, name = ended.get(place.local_rank, 0.0), f"rank {place.rank} of {place.world}"
            yield failure_of(place.rank, process, folder, name=name, seconds=seconds)


def failure_of(rank: int, process: BaseProcess, folder: Path, *, name: str, seconds: float) -> Failure:
    """The failure that a rank recorded in `folder`, else the way in which its process has ended.

    name: of what ended, in a sentence. seconds: when it ended, since the epoch.
    """
    file, code = folder / f"failed-{rank}", process.exitcode or 0
    if file.exists():
        return pickle.loads(file.read_bytes())
    text = f"{name} {how_it_ended(code)}{end_of_log(folder, rank)}"
    return Failure(seconds, text, killed=max(0, -code))


def how_it_ended(code: int) -> str:
    """Describe the exit code of a process; a negative one is the number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}."
    name = signal.Signals(-code).name
    memory = "; the kernel does that when the machine's memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}."


class MachineClaim:
    """Tell the other machines that a rank of this one has failed, and learn which machine's failed first."""

    def __init__(self, machine: Machine, place: Place, folder: Path, grace: float) -> None:
        """place: of the machine's first rank. folder: of `record_failure`. grace: see `HangLimits`."""
        self.machine, self.place, self.folder, self.grace = machine, place, folder, grace
        self.first: int | None = machine.number  # None: the first machine, which has the store, is gone
        self.made = False

    def make(self) -> None:
        """Claim the failure for this machine in the store, which ends the ranks of all (`Watch`)."""
        if self.machine.machines == 1:
            return
        self.made = True
        failures = [pickle.loads(file.read_bytes()) for file in self.folder.glob("failed-*")]
        if failures and all(failure.consequence for failure in failures):
            time.sleep(self.grace / 2)  # the machine that was the cause claims first
        try:
            store = connect(self.place, timeout=timedelta(seconds=self.grace))
            store.add(FAILED, 1)
            mine = str(self.machine.number)
            self.first = int(store.compare_set("meshtune/failed machine", "", mine).decode())
        except RuntimeError:
            self.first = None

    def linger(self, received: Sequence[signal.Signals]) -> None:
        """Keep the store until the other machines have seen the claim; not after a second Ctrl-C."""
        if self.made and received.count(signal.SIGINT) < 2 and self.machine.number == 0:
            time.sleep(2 * self.grace)

    def raise_for_another(self, failures: Sequence[Failure]) -> None:
        """Raise RankFailed if a rank of another machine failed before this one's, or if another machine was
        lost. failures: of this machine's ranks.
        """
        if not self.made:
            return
        own = f"Machine {self.machine.number} of {self.machine.machines} ended after"
        if all(failure.consequence for failure in failures) and self.first in (None, self.machine.number):
            raise RankFailed(
                f"{own} it lost the connection to another, which may be gone: see the others' output."
            )
        if self.first not in (None, self.machine.number):
            raise RankFailed(f"{own} machine {self.first} had failed: see that machine's output.")


def raise_first(failures: list[Failure], received: list[signal.Signals]) -> None:
    """Raise the failure that comes first by `Failure.order`: its error, or RankFailed where it has none.

    failures: at least one. received: the signals that this process got, in order. Where the failure has no
    error, two SIGINT raise KeyboardInterrupt instead, and if a received signal killed the rank, this process
    gets it too: it ends by that signal, or as its handler has it.
    """
    first = min(failures, key=Failure.order)
    if isinstance(first.error, OSError):
        raise first.error from RankFailed(first.text)
    if first.error is not None:
        raise first.error
    if received.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
    if first.killed in received:  # it came before there was anything to save
        if first.killed == signal.SIGINT or not callable(signal.getsignal(first.killed)):
            signal.signal(first.killed, signal.SIG_DFL)
        os.kill(os.getpid(), first.killed)
    raise RankFailed(first.text)
