"""Choose a run's folder: an empty one, or that of an unfinished run, which is resumed.

the folder has                      then
nothing                             it is taken
the lock of a run without settings  it is taken: the run was killed, or had no disk, before its config.yaml
an unfinished run, same settings    it is resumed from the newest whole checkpoint, in any layout
... none of its checkpoints whole   refused, naming the damage; nothing is deleted
an unfinished run, other settings   refused, naming the settings that differ (settings in FREE may)
a finished run                      the next free name (runs/x-2): no trained model is overwritten
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import IO, Any

from meshtune.config import Config, load
from meshtune.errors import UserError, check_file, expanded
from meshtune.rundir import RunDir, aside_pattern, write_text_atomically
from meshtune.sections import SourceConfig
from meshtune.train.checkpoint import Checkpoints

# Settings that may change when a run is resumed. A longer or shorter run continues with the schedule of its
# new length; the other settings do not change what a step computes.
FREE = ("train.max_steps", "train.num_epochs", "train.device", "eval", "checkpoint", "log", "hub", "layout",
        "cluster", "output", "data.cache")  # fmt: skip
LOCK = ".lock"


def choose_folder(config: Config, steps: int, report: Callable[[str], None]) -> tuple[RunDir, int | None]:
    """Choose (the run folder, the step to resume from) as in the table above; writes nothing.

    The step is None for a new run, and for an unfinished one that saved no checkpoint. With
    checkpoint.resume=never every folder that holds a run is skipped. steps: updates of the whole run. report:
    gets a sentence for each damaged checkpoint that is skipped, and for rows that are missing. Raises
    UserError if `output` is a file, holds something else, an unfinished run with other settings, or one
    whose checkpoints are all damaged.
    """
    named = RunDir(expanded(config.output).absolute())
    if named.path.exists() and not named.path.is_dir():
        raise UserError(f"output = {config.output} is a file; name a folder.")
    for run in candidates(named):
        if is_unused(run):
            return run, None
        if not run.config_file.exists():
            if run == named:
                raise UserError(
                    f"output = {config.output} is not empty and holds no run; name another folder."
                )
            continue
        if config.checkpoint.resume == "never":
            continue
        finished = [row for row in run.rows("end") if row.get("status") == "finished"]
        if finished and (finished[-1]["step"] >= steps or finished[-1].get("early")):
            continue
        differing = list(differences(settings(config), settings_of(run)))
        if not differing:
            return run, step_to_resume(run, report, finished=bool(finished))
        if finished and not Checkpoints(run.checkpoints).steps():
            continue
        if run == named:
            raise UserError(
                [
                    f"{run.path} holds an unfinished run with other settings; change `output`, or set "
                    "checkpoint.resume=never:",
                    *differing,
                ]
            )
    raise AssertionError("candidates never end")


def without_report(config: Config) -> RunDir | None:
    """The finished run of exactly these settings that was killed before its report.html; None if there is
    none.

    With checkpoint.resume=never there is none.
    """
    for run in candidates(RunDir(expanded(config.output).absolute())):
        if config.checkpoint.resume == "never" or not run.config_file.exists():
            return None
        ended = [row.get("status") for row in run.rows("end")][-1:]
        if ended == ["finished"] and not run.report_file.exists():
            same = settings_of(run) | {"output": ""} == settings(config) | {"output": ""}
            return run if same else None
    return None


def is_unused(run: RunDir) -> bool:
    """True if the folder is missing, or empty but for what a run writes before its config.yaml."""
    first = {LOCK, aside_pattern(run.config_file)}
    return not run.path.exists() or all(
        any(fnmatch(path.name, pattern) for pattern in first) for path in run.path.iterdir()
    )


def step_to_resume(run: RunDir, report: Callable[[str], None], *, finished: bool) -> int | None:
    """The newest whole checkpoint's step; None if the run was killed before its first checkpoint.

    report: gets a sentence for each damaged checkpoint that is skipped, for rows that are missing, and where
    a run that has rows begins again. finished: True for a finished run that is to be made longer.

    Raises UserError if no checkpoint is whole: starting again at step 1 would delete them and the rows. So
    too if a file can't be read, or if a finished run has no checkpoint.
    """
    damage: list[str] = []
    checkpoints = Checkpoints(run.checkpoints, report=damage.append)
    there = checkpoints.steps()
    step = checkpoints.newest_good()
    rows = [row["step"] for row in run.rows("train")]
    if step is None and (there or finished):
        which = (
            f"none of its checkpoints (steps {', '.join(map(str, there))}) is whole"
            if there
            else (f"it has no checkpoint in {run.checkpoints}")
        )
        state = "a finished run that would go on" if finished else "an unfinished run"
        raise UserError(
            [
                f"{run.path} holds {state}, but {which}. Nothing was changed. Restore a checkpoint, or set "
                "checkpoint.resume=never to train from step 1 in another folder.",
                *damage,
            ]
        )
    for sentence in damage:
        report(sentence)
    if step is None and rows:
        report(
            f"{run.path} has rows up to step {max(rows)} and no checkpoint: training begins again at step 1."
        )
    elif step is not None and "jsonl" in load(run.config_file).log.to and not rows:
        report(
            f"{run.metrics_file} has no rows of steps 1 to {step}, which were trained: the report begins at "
            f"step {step + 1}."
        )
    return step


def candidates(run: RunDir) -> Iterator[RunDir]:
    """Yield runs/x, runs/x-2, runs/x-3 … without end."""
    yield run
    for number in count(2):
        yield RunDir(run.path.with_name(f"{run.path.name}-{number}"))


class Claim:
    """A run folder that this process trains in: its lock, and the files that make the folder a run.

    Use as a context manager, which releases the lock; so does the end of the process.
    """

    def __init__(self, run: RunDir, texts: Mapping[Path, str]) -> None:
        """Lock the folder, clear it of what killed processes left, and write `texts`, by file.

        Raises UserError if another process has the lock.
        """
        self.run, self._texts = run, dict(texts)
        self._lock = self._locked()
        self.run.clear_leftovers()
        self._write()

    def renew(self) -> bool:
        """Make the folder a run again if it was deleted or moved away; returns whether it was.

        Raises UserError if another process has begun a run there.
        """
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock.fileno()), (self.run.path / LOCK).stat()):
                return False
        self._lock.close()
        self._lock = self._locked()
        self._write()
        return True

    def _locked(self) -> IO[str]:
        self.run.create()
        check_file(self.run.path / LOCK)
        lock = open(self.run.path / LOCK, "w")  # noqa: SIM115 - open as long as the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"Another process is training in {self.run.path}; wait for it, or change `output`."
            ) from None
        return lock

    def _write(self) -> None:
        for file, text in self._texts.items():
            write_text_atomically(file, text)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()


def begin(run: RunDir, config: Config, plan: str, resumed: int | None) -> Claim:
    """Claim the folder, write config.yaml and plan.yaml, and drop the rows of steps that are run again.

    plan: text of plan.yaml; resumed: step of the checkpoint that the run starts from. None: from the
    beginning; an old metrics.jsonl and samples.jsonl are deleted. So is report.html, which would not be of
    this start. Raises UserError if another process trains there.
    """
    claim = Claim(run, {run.config_file: resolved(config, run).to_yaml(), run.plan_file: plan})
    run.report_file.unlink(missing_ok=True)  # a finished run that has one is not touched again
    if resumed is not None:
        run.drop_after(resumed)
    else:  # rows of a run that was killed before its first checkpoint
        for file in (run.metrics_file, run.samples_file):
            file.unlink(missing_ok=True)
    return claim


def resolved(config: Config, run: RunDir) -> Config:
    """The settings with absolute paths, so that the file works from any folder; output is `run`'s path."""

    def absolute_sources(sources: Iterable[SourceConfig]) -> tuple[SourceConfig, ...]:
        return tuple(source.model_copy(update={"path": absolute(source.path)}) for source in sources)

    template = config.data.chat_template  # a folder may have the name of a built-in one
    data = config.data.model_copy(
        update={
            "train": absolute_sources(config.data.train),
            "eval": absolute_sources(config.data.eval),
            "chat_template": absolute(template) if template and Path(template).is_file() else template,
        }
    )
    model = config.model.model_copy(update={"name": absolute(config.model.name)})
    train = config.train.model_copy(update={"learning_rate": config.learning_rate})
    return config.model_copy(update={"data": data, "model": model, "train": train, "output": str(run.path)})


def absolute(name: str) -> str:
    """The absolute path of a local file or folder; any other name (a hub id, a built-in) unchanged."""
    path = expanded(name)
    return str(path.absolute()) if path.exists() else name


def settings(config: Config) -> dict[str, Any]:
    """The settings with absolute paths, as plain values."""
    return resolved(config, RunDir(config.output)).model_dump(mode="json")


def settings_of(run: RunDir) -> dict[str, Any]:
    """The settings in a run folder's config.yaml, as plain values."""
    return load(run.config_file).model_dump(mode="json")


def differences(now: Any, before: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each setting that differs and is not FREE.

    now, before: settings of this run and of the folder's, as plain values; key: their dotted name, "" for all
    settings. A setting that one of them lacks counts as None.
    """
    if key in FREE:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        for name in {**before, **now}:
            yield from differences(now.get(name), before.get(name), f"{key}.{name}".lstrip("."))
    elif now != before:
        yield f"{key} is {now!r} here and {before!r} there."
