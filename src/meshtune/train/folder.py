"""Which run folder a run gets: a fresh one, or the one that it goes on in.

the folder holds            then
nothing                     it is taken
an unfinished run, same     it goes on from the newest whole checkpoint, in any layout
an unfinished run, other    refused, naming the settings that differ
a finished run              the next free name (runs/x-2): nothing that was trained is overwritten
"""

import fcntl
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from meshtune.config import Config, load
from meshtune.errors import UserError
from meshtune.rundir import RunDir, write_text_atomically
from meshtune.train.checkpoint import Checkpoints

# Settings that may change between the parts of one run. A run made longer or shorter goes on with the
# schedule of its new length; the others do not change what a step computes.
FREE = ("train.max_steps", "train.num_epochs", "train.device", "eval", "checkpoint", "log", "hub", "layout",
        "cluster", "output", "data.cache")  # fmt: skip


def claim(config: Config, steps: int, report: Callable[[str], None]) -> tuple[RunDir, int | None]:
    """(the run folder, the step to go on from or None), as the table above says; writes nothing.

    `report` gets a sentence for each damaged checkpoint that is passed over. Raises UserError for a folder
    that holds something else, or an unfinished run with other settings.
    """
    named = RunDir(Path(config.output).expanduser().absolute())
    if named.path.exists() and not named.path.is_dir():
        raise UserError(f"output = {config.output} is a file; name a folder.")
    for run in candidates(named):
        if not run.path.exists() or not any(run.path.iterdir()):
            return run, None
        if not run.config_file.exists():
            if run == named:
                raise UserError(
                    f"output = {config.output} is not empty and holds no run; name another folder."
                )
            continue
        if config.checkpoint.resume == "never":
            continue
        step = Checkpoints(run.checkpoints, report=report).newest_good()
        done = [row for row in run.rows("end") if row.get("status") == "finished"]
        if done and (step is None or done[-1]["step"] >= steps or done[-1].get("early")):
            continue
        differing = list(differences(settings(config), settings_of(run)))
        if not differing:
            return run, step
        if run == named:
            raise UserError(
                [
                    f"{run.path} holds an unfinished run with other settings; change `output`, or set "
                    "checkpoint.resume=never:",
                    *differing,
                ]
            )
    raise AssertionError("candidates never end")


def candidates(run: RunDir) -> Iterator[RunDir]:
    """runs/x, runs/x-2, runs/x-3 …"""
    yield run
    for number in count(2):
        yield RunDir(run.path.with_name(f"{run.path.name}-{number}"))


def begin(run: RunDir, config: Config, plan: str, resumed: int | None) -> IO[str]:
    """Take the folder: lock it, write what is to run, and drop the rows of steps that will be done again.

    plan: the text of plan.yaml.

    Returns the lock: closing it, or the end of the process, lets go. Raises UserError when somebody else
    holds it.
    """
    run.create()
    lock = open(run.path / ".lock", "w")  # noqa: SIM115 - held as long as the run goes on
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"Another process is training in {run.path}; wait for it, or change `output`."
        ) from None
    write_text_atomically(run.config_file, resolved(config, run).to_yaml())
    write_text_atomically(run.plan_file, plan)
    if resumed is not None:
        run.drop_after(resumed)
    else:  # what a run left that was killed before its first checkpoint
        for file in (run.metrics_file, run.samples_file):
            file.unlink(missing_ok=True)
    return lock


def resolved(config: Config, run: RunDir) -> Config:
    """The same settings with absolute paths, so that the file works from anywhere."""
    data = config.data.model_copy(
        update={
            "train": tuple(
                each.model_copy(update={"path": absolute(each.path)}) for each in config.data.train
            ),
            "eval": tuple(each.model_copy(update={"path": absolute(each.path)}) for each in config.data.eval),
            "chat_template": absolute(config.data.chat_template) if config.data.chat_template else None,
        }
    )
    model = config.model.model_copy(update={"name": absolute(config.model.name)})
    return config.model_copy(update={"data": data, "model": model, "output": str(run.path)})


def absolute(name: str) -> str:
    """A local path made absolute; a hub id or a built-in's name as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def settings(config: Config) -> dict[str, Any]:
    return resolved(config, RunDir(config.output)).model_dump(mode="json")


def settings_of(run: RunDir) -> dict[str, Any]:
    """The settings a run folder was made with, in today's tree."""
    return load(run.config_file).model_dump(mode="json")


def differences(now: Any, before: Any, key: str = "") -> Iterator[str]:
    """Sentences for each setting that differs and is not FREE."""
    if key in FREE:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        for name in {**before, **now}:
            yield from differences(now.get(name), before.get(name), f"{key}.{name}".lstrip("."))
    elif now != before:
        yield f"{key} is {now!r} here and {before!r} there."
