"""The folder of a run: its lock, the checkpoint that the run resumes from, and a run that it replaces.

Which folder a run writes, and whether it begins or continues there, is decided from the settings
(api/output.py). A replaced run is renamed, and deleted once the new one has done a step.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from meshtune import filesystem
from meshtune.errors import UserError, check_file
from meshtune.rundir import RunDir, write_settings
from meshtune.train.checkpoint import Checkpoints


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
        which = f"it has no checkpoint in {run.checkpoints}"
        if there:
            which = f"none of its checkpoints (steps {', '.join(map(str, there))}) is whole"
        state = "a finished run that would resume" if finished else "an unfinished run"
        raise UserError(
            [
                f"{run.path} holds {state}, but {which}. Nothing was changed. Restore a checkpoint, or set "
                "checkpoint.resume=never and output_exists=new to train from step 1 in another folder.",
                *damage,
            ]
        )
    for sentence in damage:
        report(sentence)
    if step is None and rows:
        report(
            f"{run.path} has rows up to step {max(rows)} and no checkpoint: training begins again at step 1."
        )
    elif step is not None and not rows:
        report(
            f"{run.metrics_file} has no rows of steps 1 to {step}, which were trained: the report begins at "
            f"step {step + 1}."
        )
    return step


class Claim:
    """A run folder that this process trains in: its lock, and the files that make the folder a run.

    Use as a context manager, which releases the lock; so does the end of the process.
    """

    def __init__(self, run: RunDir) -> None:
        """Lock the folder and clear it of what killed processes left.

        Raises UserError if another process has the lock.
        """
        self.run = run
        self._texts: dict[Path, str] = {}
        self._lock = self._locked()
        self._replaced = run.replaced.exists()
        self.run.clear_leftovers()

    def write(self, texts: Mapping[Path, str]) -> None:
        """Write the files that make the folder a run, by their text."""
        self._texts = dict(texts)
        for file, text in self._texts.items():
            write_settings(file, text)

    def renew(self) -> bool:
        """Make the folder a run again if it was deleted or moved away; returns whether it was.

        Raises UserError if another process has begun a run there.
        """
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock.fileno()), self.run.lock_file.stat()):
                return False
        self._lock.close()
        self._lock = self._locked()
        self.write(self._texts)
        return True

    def drop_replaced(self) -> None:
        """Delete the run that this one has replaced, if there is one."""
        if self._replaced:
            shutil.rmtree(self.run.replaced)
            self._replaced = False

    def _locked(self) -> IO[str]:
        self.run.create()
        check_file(self.run.lock_file)
        lock = open(self.run.lock_file, "w")  # noqa: SIM115 - open as long as the run
        try:
            filesystem.lock(lock, self.run.lock_file)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"Another process is training in {self.run.path}; wait for it, or change `output`."
            ) from None
        return lock

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()


def set_aside(run: RunDir) -> None:
    """Rename the folder of a run that is to be replaced.

    One that was set aside before is deleted: the run there now did a step (`put_back`).
    """
    with Claim(run) as claim:
        claim.drop_replaced()
        try:
            if run.path.is_symlink():
                raise OSError(0, "it is a link")
            run.path.rename(run.replaced)
        except OSError as error:
            raise UserError(
                f"output_exists=replace: {run.path} can't be renamed ({error.strerror}); name another "
                "`output`, or empty it yourself."
            ) from error


def put_back(run: RunDir) -> bool:
    """Give a run that was set aside its name again if the one that was to replace it did no step; returns
    whether it did.

    Raises UserError if another process trains there.
    """
    stepped = any(not row.get("skipped") for row in run.rows("train"))
    if stepped or not run.replaced.exists():
        return False
    with Claim(run):
        shutil.rmtree(run.path)
    run.replaced.rename(run.path)
    return True


def rate_change(run: RunDir, resumed: int, steps: int, rate: Callable[[int], float]) -> str | None:
    """Sentence on a learning rate that does not continue where the earlier start of a run left it; None if it
    does.

    resumed: step of the checkpoint that the run starts from; steps: updates of the whole run; rate: learning
    rate of an update, from 1.
    """
    starts, rows = run.rows("run"), [row for row in run.rows("train") if row["step"] <= resumed]
    if not starts or not rows or resumed >= steps:
        return None
    step, before = rows[-1]["step"], rows[-1].get("learning_rate")
    spanned = starts[-1].get("schedule_steps") or starts[-1].get("total_steps")
    if not before or not spanned or abs(rate(step) / before - 1) < 0.01:
        return None
    return (
        f"The learning rate was {before:.2g} at step {step} and is {rate(resumed + 1):.2g} at step "
        f"{resumed + 1}: the schedule spanned {spanned} steps and now spans {steps}. "
        f"train.lr_decay_steps={spanned} keeps the rate: it follows the schedule of {spanned} steps, then "
        "stays at its last value."
    )
