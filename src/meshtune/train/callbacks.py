"""Callbacks of a Python program: four moments of a run, on the main rank.

    class Enough(Callback):
        def on_step(self, training: Training, row: Row) -> None:
            if row["loss"] < 1:
                training.stop(f"the loss is {row['loss']:.2f}")

A callback is a tracker of rows, and has each update's, where the others get one in log.every.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.rundir import Row

if TYPE_CHECKING:
    from meshtune.train.loss import LossFunction


@dataclass
class Training:
    """The run that a callback is called for."""

    folder: Path  # of the run
    steps: int  # updates of the whole run
    step: int = 0  # updates done
    reason: str | None = None  # given to `stop`

    def stop(self, reason: str) -> None:
        """Finish the run after this step on all ranks: evaluate, save, write the model, as after the last
        step. reason: a clause that is logged.
        """
        self.reason = reason


class Callback:
    """Base class; override what is of interest. An exception ends the run."""

    def on_start(self, training: Training, row: Row) -> None:
        """Take the row of kind "run" before the first step: model, layout, versions, "resumed_from" …"""

    def on_step(self, training: Training, row: Row) -> None:
        """Take the row of an update: "step", "loss", "grad_norm", "learning_rate" …"""

    def on_eval(self, training: Training, row: Row) -> None:
        """Take the row of an evaluation: "step", "loss", "perplexity" …"""

    def on_end(self, training: Training, row: Row) -> None:
        """Take the row of kind "end", after the model is written: "step" and "status", finished or what
        stopped the run. Not called where an error ends it.
        """


@dataclass(frozen=True)
class Hooks:
    """Functions of a Python program that a run calls."""

    loss: "LossFunction | None" = None  # None: the cross entropy
    callbacks: Sequence[Callback] = ()


class Callbacks:
    """The callbacks of a run as a tracker; see trackers.Tracker."""

    def __init__(self, callbacks: Sequence[Callback], training: Training) -> None:
        self.callbacks, self.training = callbacks, training

    def log(self, row: Row) -> None:
        self.training.step = row.get("step", row.get("resumed_from")) or 0
        for callback in self.callbacks:
            match row["kind"]:
                case "run":
                    callback.on_start(self.training, row)
                case "train":
                    callback.on_step(self.training, row)
                case "eval":
                    callback.on_eval(self.training, row)
                case "end":
                    callback.on_end(self.training, row)

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: there is no file or connection to close."""
