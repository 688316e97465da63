"""A predicted step in the parts that a run measures (meter/parts.py), and a finished run's measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.meter.causes import imbalance_of
from meshtune.meter.parts import PARTS
from meshtune.meter.rows import fullest_memory
from meshtune.placement.columns import Columns
from meshtune.plan.seconds.step import Seconds, StepTime
from meshtune.rundir import Row
from meshtune.units import Number, counted

if TYPE_CHECKING:
    from meshtune.plan.machine import Machine
    from meshtune.plan.workload import Workload

EXPOSED = ("tensor", "context", "experts", "data")  # parts of Seconds that are `communication`


def predicted_parts(workload: Workload, layout: Layout, machine: Machine) -> dict[str, float]:
    """Predicted seconds of a step by part; they add up to it."""
    arrays = parts_of_layouts(workload, Columns.of([layout]), machine)
    return {name: float(np.squeeze(value)) for name, value in arrays.items()}


def parts_of_layouts(workload: Workload, layouts: Columns, machine: Machine) -> dict[str, Number]:
    """Predicted seconds of a step by part, one element per layout."""
    time = StepTime(workload.work, layouts, machine, workload.seq_len, workload.document_tokens)
    return parts_of(time.seconds, time.passes)


def parts_of(seconds: Seconds, split: Mapping[str, Number]) -> dict[str, Number]:
    """Seconds by part.

    split: of forward, backward and recomputation; what of `compute` and `host` is in none of them is the
    rest: the host's work once a step.
    """
    return dict(split) | {
        "communication": sum(getattr(seconds, name) for name in EXPOSED),
        "bubble": seconds.pipeline + seconds.bubble + seconds.imbalance,
        "waiting": 0.0,
        "optimizer": seconds.optimizer,
        "loading": 0.0,
        "rest": np.maximum(seconds.compute + seconds.host - sum(split.values()), 0.0),
    }


def median_parts(rows: Sequence[Row]) -> tuple[float, dict[str, float]]:
    """(Median seconds of the steps, their mean parts scaled to add up to it).

    rows: of kind "time".
    """
    seconds = median(row["seconds"] for row in rows)
    means = {part: fmean([row["parts"][part] for row in rows]) for part in PARTS}
    scale = seconds / (sum(means.values()) or 1.0)
    return seconds, {part: scale * value for part, value in means.items()}


@dataclass(frozen=True)
class MeasuredRun:
    """Timed steps of the last start of a finished run."""

    name: str  # its folder, as the user named it
    facts: Row  # its run row
    layout: Layout
    steps: int  # that were timed
    seconds: float  # of the median step
    parts: Mapping[str, float]  # of the median step, by meter.parts.PARTS
    memory: Mapping[str, float]  # bytes by category and "peak" where it is highest; {}: not counted
    imbalance: float = 1.0  # as of meter.causes.imbalance_of

    @classmethod
    def of(cls, name: str, rows: Sequence[Row]) -> MeasuredRun:
        """Return the run of these rows of metrics.jsonl.

        Raises UserError where its layout or its steps' time by part are missing, or all steps warm up.
        """
        starts = [number for number, row in enumerate(rows) if row.get("kind") == "run"]
        if not starts or "layout" not in rows[starts[-1]]:
            raise UserError(
                f"{name} has no run row, with layout and machine: it was not written by this version of "
                "`meshtune train` or `meshtune bench --out`. Run it again."
            )
        timed = [row for row in rows[starts[-1] :] if row.get("kind") == "time"]
        if not timed:
            raise UserError(
                f"{name} has no time rows: no step of its last start was measured by part. Run it again."
            )
        warm = [row for row in timed if not row.get("warm_up")]
        if not warm:
            raise UserError(
                f"{name} has only warm-up steps ({counted(len(timed), 'step')}), whose times say nothing. "
                "Run more steps."
            )
        facts = rows[starts[-1]]
        seconds, parts = median_parts(warm)
        memory, loads = (
            [row for row in rows[starts[-1] :] if row.get("kind") == kind] for kind in ("memory", "experts")
        )
        layout, peaks = Layout.parse(facts["layout"]), fullest_memory(memory)
        return cls(name, facts, layout, len(warm), seconds, parts, peaks, imbalance_of(loads))

    @property
    def nodes(self) -> int:
        """Number of machines that it was on."""
        return self.facts.get("nodes", 1)

    def as_dict(self) -> dict[str, Any]:
        """The run in a calibrated cluster file."""
        names = ("id", "started", "layout", "world", "data_digest", "meshtune", "torch")
        known = {name: self.facts[name] for name in names if self.facts.get(name) is not None}
        return {"run": self.name, **known, "steps": self.steps, "step_seconds": self.seconds}
