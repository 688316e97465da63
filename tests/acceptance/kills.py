"""A run that is killed again and again, and the comparison with one that never was.

`Chain` starts one and the same `meshtune train`, kills it where a `Kill` says, and starts it again, until it
finishes by itself. Then `differences` compares the run folder with that of an uninterrupted run, to the bit,
and `leftovers` lists what killed processes have left.

Nothing in the package helps: windows are found by looking at files every millisecond.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from command import TORCHRUN, Ended, end, fork, start
from families import SPARSE
from tiny import short_run
from transformers import AutoModelForCausalLM

from meshtune.data import cache as data_cache
from meshtune.launch.start import PREFIX, remove_abandoned
from meshtune.launch.watch import process_status
from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints

STEPS = 36
MEASURED = {"step_seconds", "data_seconds", "seconds", "tokens_per_second_per_gpu", "tflops_per_second",
            "peak_memory_bytes", "peak_resident_bytes", "ended",
            "warm_up"}  # differ from run to run; steps after each start warm up  # fmt: skip
WINDOWS = {
    "start-up": "from the command to its first step, importing, reading data, building, restoring",
    "data": "the data cache is half written",
    "before config.yaml": "the folder is locked and has no config.yaml",
    "before the group": "the ranks exist and have not met",
    "training": "in a step",
    "checkpoint": "a checkpoint is half written",
    "export": "model/ is half written",
    "report": "the run is finished and has no report.html",
}
VICTIMS = ("all", "launcher", "rank", "rank stopped")
CASES = {  # settings, ranks
    "one rank": ([], 1),
    "streaming": (["data.streaming=true"], 1),
    "pp2": (["layout=pp2"], 2),
    "zero1x2": (["layout=zero1x2"], 2),
    "zero3x2-tp2": (["layout=zero3x2-tp2"], 4),
    "LoRA zero3x2": (["method=lora", "lora.dropout=0.1", "eval.keep_best=true", "layout=zero3x2"], 2),
    "host states zero3x2": (
        ["train.offload=optimizer", "train.step_in_backward=true", "train.max_grad_norm=0", "layout=zero3x2",
         "train.optimizer=adamw-8bit"], 2,
    ),
    "QLoRA zero3x2": (["method=qlora", "lora.use_dora=true", "layout=zero3x2"], 2),
    "experts zero3x2-ep2": (["layout=zero3x2-ep2", "experts.balance=loss"], 2),
}  # fmt: skip
HANG_SECONDS = 60  # within which a command ends after one of its ranks is killed or stopped


@dataclass(frozen=True)
class Kill:
    """One SIGKILL (or, of "rank stopped", SIGSTOP)."""

    victim: str  # of VICTIMS; with one rank they are the same process
    window: str  # of WINDOWS
    fraction: float = 0.0  # 0 to 1: of the run's steps, of the seconds before the first one, of the files


class Failed(Exception):
    """A promise of the run that was broken; the message says which."""


@dataclass(frozen=True)
class Straight:
    """The run that was not killed."""

    run: RunDir
    start_seconds: float  # from its command to its first row


@dataclass
class Life:
    """One start of the command, as far as its files show it."""

    run: RunDir
    cache: Path
    process: "subprocess.Popen[str]"
    how: str  # it was started, as `begin` takes it
    starts: int  # rows of kind "run" that it keeps from before
    begun: float = field(default_factory=time.time)

    def new(self, folder: Path, pattern: str) -> list[Path]:
        """Paths that this life has written."""
        paths = []
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime >= self.begun - 0.01:
                    paths.append(path)
        return paths

    def rows(self) -> list[dict[str, Any]]:
        """Rows of this life."""
        rows = self.run.rows() if self.new(self.run.path, "metrics.jsonl") else []
        starts = [number for number, row in enumerate(rows) if row["kind"] == "run"]
        return rows[starts[-1] :] if len(starts) > self.starts else []

    def step(self) -> int:
        return max((row["step"] for row in self.rows() if row["kind"] == "train"), default=0)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in rank order; none for a run of one rank, or before all are there."""
        with suppress(OSError, psutil.Error):
            pids = sorted(child.pid for child in psutil.Process(self.process.pid).children())
            # torchrun's children are ranks from their exec on: until then it waits itself
            programs = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
            return pids if self.how != "torchrun" or (len(pids) > 1 and len(programs) == 1) else []
        return []


def reached(life: Life, kill: Kill, straight: Straight) -> bool:
    """True once the life is in the window of the kill."""
    run, step = life.run, 1 + int(kill.fraction * (STEPS - 1))
    match kill.window:
        case "start-up":
            return time.time() - life.begun >= kill.fraction * straight.start_seconds
        case "data":
            names = [path.name for path in life.new(life.cache, ".*")]
            return any(data_cache.TEMPORARY.fullmatch(name) for name in names)
        case "before config.yaml":
            return bool(life.new(run.path, ".lock")) and not run.config_file.exists()
        case "before the group":
            return bool(life.ranks())
        case "training":
            return life.step() >= step
        case "checkpoint":
            files = ("", "/*.distcp", "/values.json", "/manifest.json")[int(kill.fraction * 40) % 4]
            return bool(life.new(run.checkpoints, f".tmp-step-*{files}")) and life.step() >= step
        case "export":
            files = ("", "/*.safetensors", "/tokenizer.json")[int(kill.fraction * 30) % 3]
            return bool(life.new(run.path, f".model.writing-*{files}"))
        case "report":
            aside = kill.fraction < 0.5 or life.new(run.path, ".report.html.*.tmp")
            return bool(aside and any(row["kind"] == "end" for row in life.rows()) and not complete(run))
    raise AssertionError(kill.window)


@dataclass
class Chain:
    """Kills of one run, in this order, as far as the run comes to their windows."""

    case: str  # of CASES
    kills: tuple[Kill, ...]
    how: str = "fork"  # or "command" (the installed meshtune), "torchrun"
    done: list[Kill] = field(default_factory=list)  # kills that came in time
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a kill to the end of all processes
    seconds: float = 0.0  # of the whole chain
    others: set[int] = field(default_factory=set)  # processes that this one had started before

    def run(self, straight: Straight, tiny: Path, folder: Path) -> "Chain":
        """Kill, start again, finish, compare. What is wrong is in `problems` afterwards.

        tiny: model and data, of `make_folder`. folder: a new one, for the run, its cache and temporary files.
        """
        begun = time.monotonic()
        self.others = {child.pid for child in psutil.Process().children(recursive=True)}
        run = RunDir(folder / "run")
        words = ["train", *settings(self.case, tiny, folder)]
        try:
            with temporary_directory(folder / "tmp"), orphans_come_here():
                for kill in (*self.kills, None):
                    age(folder / "tmp")
                    if self._finishes(kill, straight, run, words, folder):
                        break
            self.problems += differences(straight.run, run)
            self.problems += leftovers(folder)
        except Failed as error:
            self.problems.append(str(error))
        self.seconds = time.monotonic() - begun
        return self

    def _finishes(
        self, kill: Kill | None, straight: Straight, run: RunDir, words: list[str], folder: Path
    ) -> bool:
        """Start the command and kill it; True if it finished before it came to the window.

        Raises Failed if it ends with an error by itself, does not end, does not name the rank that was
        killed, or leaves processes.
        """
        starts = len(run.rows("run")) if Checkpoints(run.checkpoints).steps() else 0
        life, ranks = Life(run, folder / "cache", begin(self.how, words), self.how, starts), []
        of_ranks = kill is not None and kill.victim.startswith("rank") and CASES[self.case][1] > 1
        while kill is None or not reached(life, kill, straight) or (of_ranks and not (ranks := life.ranks())):
            if kill is None or life.process.poll() is not None:
                ended = self._ended(life.process, 300, f"its start (before {kill})")
                if ended.code:
                    raise Failed(f"before {kill} it ended with exit code {ended.code}: {ended.err[-2000:]}")
                return True
            time.sleep(0.001)
        killed = time.monotonic()
        number = int(kill.fraction * 1000) % len(ranks) if of_ranks else 0
        strike(kill, life.process.pid, ranks[number] if of_ranks else life.process.pid)
        ended = self._ended(life.process, HANG_SECONDS, str(kill))
        if ended.code == 0:  # it was faster
            return True
        self.slowest = max(self.slowest, time.monotonic() - killed)
        if of_ranks:
            self._expect_named(kill, number, ended)
        self.done.append(kill)
        return complete(run)  # a rank was killed when all was done

    def _ended(self, process: "subprocess.Popen[str]", seconds: float, after: str) -> Ended:
        """Wait for a command and all that it has started; raises Failed, after killing them, if they take
        longer than `seconds`.
        """
        begun = time.monotonic()
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._kill_all()
            err = process.communicate()[1]
            raise Failed(f"{seconds:.0f} s after {after} it had not ended: {err[-2000:]}") from None
        while living := self._started():
            for child in living:
                with suppress(ChildProcessError):  # its parent was killed
                    os.waitpid(child.pid, os.WNOHANG)
            if time.monotonic() - begun > seconds:
                alive = {child.pid: process_status(child.pid) for child in living}
                self._kill_all()
                raise Failed(f"{seconds:.0f} s after {after} there are processes: {alive}")
            time.sleep(0.02)
        return Ended(process.returncode, out, err)

    def _started(self) -> list[psutil.Process]:
        """Processes that the command has started, also those whose parents are dead."""
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in self.others]

    def _kill_all(self) -> None:
        for child in self._started():
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def _expect_named(self, kill: Kill, number: int, ended: Ended) -> None:
        """Raise Failed unless the command says which rank was killed or stopped."""
        names = [f"rank {number} of {CASES[self.case][1]} was killed by SIGKILL"]
        if self.how == "torchrun":
            names = [rf"rank +: {number} \(local_rank: {number}\)\s+exitcode +: -9 "]  # torchrun's own words
        if kill.victim == "rank stopped":
            names = [rf"rank {number} has not answered for \d+ s \(its process is stopped\)"]
        if not any(re.search(name, ended.err) for name in names) or not ended.code:
            raise Failed(
                f"{kill}: exit code {ended.code}, and rank {number} is not named: {ended.err[-2000:]}"
            )


def settings(case: str, tiny: Path, folder: Path) -> list[str]:
    words = [f"train.max_steps={STEPS}", "checkpoint.every=3", "eval.every=6", "eval.samples=1"]
    words += ["eval.max_new_tokens=8", *CASES[case][0]]
    if case.startswith("experts"):
        words.append(f"model.name={mixture(tiny)}")
    return [*short_run(tiny, folder / "cache", folder / "run"), *words]


def mixture(tiny: Path) -> Path:
    """The folder of a tiny mixture of experts, which the first run makes, the one that nobody kills."""
    folder = tiny / "mixture"
    if not folder.exists():
        shutil.copytree(tiny / "model", folder)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SPARSE["qwen3_moe"](vocab_size=300)).save_pretrained(folder)
    return folder


def straight_run(case: str, tiny: Path, folder: Path, how: str = "fork") -> Straight:
    """Run a case to its end without a kill."""
    begun = time.monotonic()
    process = begin(how, ["train", *settings(case, tiny, folder)])
    run, first = RunDir(folder / "run"), 0.0
    while not first and process.poll() is None:
        first = time.monotonic() - begun if run.rows("train") else 0.0
        time.sleep(0.01)
    ended = end(process, code=None)
    if ended.code:
        raise Failed(f"{case}, not killed, ended with exit code {ended.code}: {ended.err[-2000:]}")
    return Straight(run, first)


def begin(how: str, words: list[str]) -> "subprocess.Popen[str]":
    """Start a command: in a fork of this process, as the installed meshtune, or two ranks by torchrun."""
    if how == "fork":
        return fork(*words)
    if how == "torchrun":
        return start(*words, python=TORCHRUN)
    return start(*words)


def strike(kill: Kill, launcher: int, rank: int) -> None:
    """Send the signal to the victim."""
    victims = [rank]
    if kill.victim == "launcher":
        victims = [launcher]
    elif kill.victim == "all":
        with suppress(psutil.NoSuchProcess):
            victims = [launcher, *(child.pid for child in psutil.Process(launcher).children(recursive=True))]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if kill.victim == "rank stopped" else signal.SIGKILL)


# Comparison #


def complete(run: RunDir) -> bool:
    """True if the run is finished and reported, so that the same command would begin another one."""
    return run.report_file.exists() and any(row["status"] == "finished" for row in run.rows("end"))


def content(file: Path) -> tuple[Any, bytes]:
    """A file's bytes, with the header of a safetensors file as JSON: the order of its metadata is random."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    if file.suffix != ".safetensors" or end > len(data):
        return None, data
    return json.loads(data[8:end]), data[end:]


def differences(straight: RunDir, run: RunDir) -> list[str]:
    """Sentences on what the run has otherwise than the straight one: rows, samples, model, checkpoints."""
    problems = []
    for kind in ("train", "eval"):
        wanted, rows = (list(map(unmeasured, folder.rows(kind))) for folder in (straight, run))
        if [row["step"] for row in rows] != [row["step"] for row in wanted]:
            problems.append(f"{kind} rows are of steps {[row['step'] for row in rows]}")
        else:
            unequal = [row["step"] for row, other in zip(rows, wanted, strict=True) if row != other]
            problems += [f"{kind} rows of steps {unequal} have other numbers"] if unequal else []
    ended, wanted = (list(map(unmeasured, folder.rows("end")[-1:])) for folder in (run, straight))
    if ended != wanted:
        problems.append(f"it ended otherwise: {run.rows('end')[-1:]}")
    if run.samples() != straight.samples():
        problems.append(f"samples.jsonl has other answers, or {len(run.samples())} of them")
    for folder in ("model", "checkpoints"):
        wanted, there = (names(run.path / folder) for run in (straight, run))
        if there != wanted:
            problems.append(f"{folder}/ has {sorted(there ^ wanted)} too many or too few")
    for file in sorted(names(straight.model) & names(run.model)):
        if content(run.model / file) != content(straight.model / file):
            problems.append(f"model/{file} has other bytes")
    checkpoints = Checkpoints(run.checkpoints)
    problems += [sentence for step in checkpoints.steps() for sentence in checkpoints.problems(step)]
    return problems if run.report_file.exists() else [*problems, "it has no report.html"]


def unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in MEASURED}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def leftovers(folder: Path) -> list[str]:
    """Sentences on half-written files in a chain's run folder, cache and temporary directory."""
    paths = [path for path in (folder / "run").rglob(".*") if path.name not in (".lock", ".metadata")]
    for path in (folder / "cache").glob(".*"):  # a write removes those that are a day old
        os.utime(path, (0, 0))
    data_cache.remove_unfinished(folder / "cache")
    paths += [path for path in (folder / "cache").glob(".*") if path.suffix != ".lock"]
    age(folder / "tmp")  # the next start of ranks removes those that are a minute old; a report starts none
    with temporary_directory(folder / "tmp"):
        remove_abandoned()
    # torchrun leaves a folder each time, also after a run that nobody killed.
    paths += [path for path in (folder / "tmp").glob("*") if not path.name.startswith("torchelastic_")]
    return [f"{path.relative_to(folder)} is left" for path in paths]


def age(folder: Path) -> None:
    """Make the launchers' folders look like those of processes killed long ago."""
    for path in folder.glob(f"{PREFIX}*"):
        os.utime(path, (0, 0))


# Processes #


@contextmanager
def temporary_directory(folder: Path) -> Iterator[None]:
    """Let this process and those that it starts use `folder` for temporary files."""
    folder.mkdir(exist_ok=True)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextmanager
def orphans_come_here() -> Iterator[None]:
    """Become the parent of processes whose parent dies, so that they are found."""
    subreaper = ctypes.CDLL(None).prctl
    subreaper(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        subreaper(36, 0)
