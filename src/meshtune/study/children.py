"""The command that runs one experiment, in a process group of its own, and what became of it.

The environment of a command, and of all that it starts, has the sweep's id: what a killed sweep has left is
found by it, whatever process ids were given out since.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from meshtune.errors import Interrupted, NonFinite, NothingFits, UserError
from meshtune.layout import Layout
from meshtune.rundir import RunDir, write_settings
from meshtune.study.outcomes import bench_outcome, dryrun_outcome, train_outcome
from meshtune.study.store import CRASHED, DIVERGED, DOES_NOT_FIT, OUT_OF_MEMORY, REFUSED, TIMED_OUT, Outcome
from meshtune.units import duration

MARK = "MESHTUNE_SWEEP"  # environment variable: id of the sweep / number of the experiment
PR_SET_PDEATHSIG = 1
TO_STOP = {"train": 60.0}  # seconds in which a command must have ended after SIGINT: training saves
TO_STOP_OTHERS = 10.0
LOG_LINES = 5  # last lines of a crash that the reason has
DRYRUN = "dryrun"


@dataclass(frozen=True)
class Task:
    """One experiment to run; the files are named by its number."""

    number: int
    run: str  # bench, train or dryrun
    tree: Mapping[str, Any]  # settings, with the whole layout
    layout: Layout | None  # None: the command chooses it
    steps: int  # timed steps of a bench
    limit: float  # seconds

    @property
    def world(self) -> int:
        return self.layout.world if self.layout else 1

    @property
    def on_processor(self) -> bool:
        train = self.tree.get("train")
        return isinstance(train, Mapping) and train.get("device") == "cpu"

    def as_json(self) -> str:
        """The task as text, for a job that runs it elsewhere."""
        layout = self.layout and str(self.layout)
        return json.dumps({**vars(self), "layout": layout}, default=str)

    @classmethod
    def from_json(cls, text: str) -> "Task":
        values = json.loads(text)
        return cls(**{**values, "layout": values["layout"] and Layout.parse(values["layout"])})

    def config_file(self, folder: Path) -> Path:
        return folder / "configs" / f"{self.number}.yaml"

    def log_file(self, folder: Path) -> Path:
        return folder / "logs" / f"{self.number}.log"

    def run_folder(self, folder: Path) -> Path:
        return folder / "runs" / str(self.number)

    def settings(self, folder: Path) -> dict[str, Any]:
        """The tree of the command's config: with the whole layout, and the global batch that it makes where
        nothing names one.
        """
        tree = dict(self.tree)
        train = dict(tree.get("train") or {})
        if self.layout:
            tree["layout"] = str(self.layout)
            if not (train.get("global_batch_size") or train.get("global_batch_tokens")):
                tree["train"] = train | {"global_batch_size": self.layout.global_batch_size}
        if self.run == "train":
            tree |= {"output": str(self.run_folder(folder)), "output_exists": "replace"}
        return tree

    def command(self, folder: Path, prefix: Sequence[str] = ()) -> list[str]:
        """The words of the command. prefix: those of what starts it, srun."""
        words = [*prefix, sys.executable, "-m", "meshtune", self.run, str(self.config_file(folder)), "--json"]
        if self.run == "bench":
            words += ["--steps", str(self.steps), "--limit", str(self.limit)]
        return words


class Child:
    """A running experiment."""

    def __init__(
        self, task: Task, folder: Path, sweep: str, environment: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        """Start the command. sweep: id of the sweep. environment: all variables. prefix: words before the
        command, of what starts it.
        """
        self.task, self.folder, self.mark = task, folder, f"{sweep}/{task.number}"
        text = yaml.safe_dump(task.settings(folder), sort_keys=False, allow_unicode=True)
        write_settings(task.config_file(folder), text)
        log = task.log_file(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out = log.with_suffix(".out")
        self.began = time.monotonic()
        with open(self._out, "wb") as out, open(log, "wb") as err:
            self._process = subprocess.Popen(
                task.command(folder, prefix),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment, MARK: self.mark},
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid()),
            )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def outcome(self) -> Outcome | None:
        """How the experiment ended; None while it runs. One that is over its limit is killed."""
        code = self._process.poll()
        if code is None:
            if self.seconds <= self.task.limit:
                return None
            self.kill()
            reason = f"It did not end within {duration(self.task.limit)}."
            return self._kept(Outcome(TIMED_OUT, reason, seconds=self.seconds))
        kill_marked(self.mark)
        return self._kept(self._judged(code))

    def stop(self) -> None:
        """Tell the command to end, as Ctrl-C does; `kill` it later."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the command and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        kill_marked(self.mark)

    def stopped(self) -> Outcome | None:
        """Kill the command if it still runs. Returns its outcome if it came to its end before, else None, and
        then removes its files.
        """
        self.kill()
        if self._process.returncode == 0:
            return self._kept(self._judged(0))
        for file in (self._out, self.task.log_file(self.folder)):
            file.unlink(missing_ok=True)
        return None

    def _kept(self, outcome: Outcome) -> Outcome:
        """Return `outcome`; the log stays only where the experiment failed."""
        self._out.unlink(missing_ok=True)
        if outcome.status == "done":
            self.task.log_file(self.folder).unlink(missing_ok=True)
        return outcome

    def _judged(self, code: int) -> Outcome:
        """The outcome of a command that ended with this exit code."""
        text = self._out.read_text("utf-8", errors="replace")
        with suppress(ValueError):
            if outcome := outcome_of(self.task, self.folder, code, json.loads(text), self.seconds):
                return outcome
        lines = lines_of(self.task.log_file(self.folder))
        return failure(code, lines, self.seconds)


def outcome_of(task: Task, folder: Path, code: int, document: Any, seconds: float) -> Outcome | None:
    """The outcome that the command's document says; None where it says nothing.

    code: exit code of the command.
    """
    if task.run == "bench":
        return bench_outcome(document, seconds)
    if task.run == DRYRUN:
        return dryrun_outcome(document, seconds)
    return train_outcome(document, RunDir(task.run_folder(folder)), seconds) if code == 0 else None


def failure(code: int, lines: Sequence[str], seconds: float) -> Outcome:
    """The outcome of a command that ended with this exit code and gave no result.

    lines: of its stderr, without empty ones.
    """
    said = " ".join(sentences(lines))
    unfit = OUT_OF_MEMORY if said.startswith("Out of memory") else DOES_NOT_FIT
    interrupted = "It was interrupted from outside (exit code 75); `--retry crashed` continues it."
    killed = "It was killed (signal 9), as the system does where memory runs out."
    last = " | ".join(line.strip() for line in lines[-LOG_LINES:]) or "no output"
    status, reason = {
        UserError.exit_code: (REFUSED, said or "It was refused."),
        NothingFits.exit_code: (unfit, said or "It does not fit."),
        NonFinite.exit_code: (DIVERGED, said or "Its loss was not finite."),
        Interrupted.exit_code: (CRASHED, interrupted),
        -signal.SIGKILL: (OUT_OF_MEMORY, killed),
        128 + signal.SIGKILL: (OUT_OF_MEMORY, killed),
    }.get(code, (CRASHED, f"It ended with exit code {code}: {last}"[-2000:]))
    return Outcome(status, reason, seconds=seconds)


def lines_of(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    with suppress(OSError), open(log, "rb") as stream:
        stream.seek(max(0, log.stat().st_size - 20_000))
        return [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    return []


def sentences(lines: Sequence[str]) -> list[str]:
    """The sentences of an error at the end of a command's stderr: what `cli.main` prints, after progress."""
    found: list[str] = []
    for line in reversed(lines):
        if not line.startswith("meshtune: ") or line.endswith("…"):
            break
        found.insert(0, line.removeprefix("meshtune: "))
    return found


def _dies_with(parent: int) -> Callable[[], None]:
    """A function for the new process: it gets SIGINT when its parent dies, and obeys it.

    A shell that starts the sweep in the background has SIGINT ignored, which the child would inherit.
    """
    linux = sys.platform == "linux"
    library: Any = ctypes.CDLL(None, use_errno=True) if linux else None

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if linux:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
            if os.getppid() != parent:  # it died before
                os._exit(1)

    return prepare


# what a killed sweep left #


def kill_marked(mark: str) -> int:
    """Kill this user's processes whose mark is `mark`, or begins with it and a slash; return how many."""
    killed: set[int] = set()
    for _ in range(10):  # those that were forked meanwhile, too
        pids = [*marked(mark)]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if not pids:
            break
        time.sleep(0.05)
    return len(killed)


def marked(mark: str) -> Iterator[int]:
    """Yield the ids of processes whose environment has the mark (`kill_marked`), except this one's."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            found = process.environ().get(MARK, "")
            if found == mark or found.startswith(f"{mark}/"):
                yield process.pid
