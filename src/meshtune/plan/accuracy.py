"""Error bars: how far predictions are from published runs on average, by software stack and GPU kind."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

LEAST_ROWS = 5  # published runs of a stack on a GPU kind from which they have a mean error of their own
UNMEASURED = "unmeasured"  # table of accuracy.toml for stacks and kinds without rows of their own


class Accuracy(NamedTuple):
    """Mean errors of predictions for one stack on one GPU kind, as shares."""

    time: float | None  # None: a processor: there are no published runs
    memory: float
    time_rows: int  # published runs of this stack on this kind; 0: the error is that of a source left out
    memory_rows: int

    def as_dict(self) -> dict[str, Any]:
        """`error` of a layout in the JSON document."""
        return self._asdict()

    def sentence(self, stack: str, gpu: str) -> str:
        """Say what the error bars of this stack on this GPU kind are."""
        quantities = [("memory", self.memory, self.memory_rows)]
        if self.time is not None:
            quantities.insert(0, ("time", self.time, self.time_rows))
        measured = [
            f"±{share:.0%} of {name}: the mean error for {rows} published runs of {stack} on {gpu}."
            for name, share, rows in quantities
            if rows
        ]
        guessed = [f"±{share:.0%} of {name}" for name, share, rows in quantities if not rows]
        if guessed:
            lacking = "runs" if not measured else "peaks" if self.time_rows else "step times"
            measured.append(
                f"{' and '.join(guessed)}: nobody has published {LEAST_ROWS} {lacking} of {stack} on {gpu}; "
                "assumed as the mean error over sources, each predicted by constants fitted to the others."
            )
        return " ".join(measured)


def accuracy(stack: str, gpu: str) -> Accuracy:
    """Error bars of predictions for a stack of stacks.toml on a kind of hardware.toml; cpu: any processor."""
    tables = _tables()
    measured = tables.get(stack, {}).get(gpu, {})
    percent = tables[UNMEASURED] | measured
    return Accuracy(
        None if gpu == "cpu" else percent["time"] / 100,
        percent["memory"] / 100,
        measured.get("time_rows", 0),
        measured.get("memory_rows", 0),
    )


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("meshtune.plan").joinpath("accuracy.toml").read_text("utf-8"))
