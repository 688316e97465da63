"""A finished run next to its prediction, and the constants that explain parts of its step that are off.

For each constant the planner predicts the run's step with the constant times SWEPT factors. Of those with
which a group of parts takes the seconds that were measured, the one that leaves the other parts nearest is
named; of equals, the one that changes least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from meshtune.meter.parts import PARTS
from meshtune.placement.columns import Columns
from meshtune.plan.calibration import CAPPED, CONSTANTS, FACTOR, GROUPS, Planned
from meshtune.plan.step_parts import parts_of_layouts, predicted_parts

SWEPT = 257  # factors of a constant, from 1 / FACTOR to FACTOR
NOTABLE = 0.02  # of the measured step: smaller errors need no other constant


@dataclass(frozen=True)
class Explanation:
    """A constant that makes a group of parts agree."""

    constant: str
    before: float
    factor: float
    left: float  # seconds by which all parts are still off, with the constant changed


@dataclass(frozen=True)
class Off:
    """A group of parts whose prediction is off."""

    parts: Sequence[str]
    measured: float  # seconds of all of them
    predicted: float
    # the best first, with those as good up to NOTABLE; none: no constant within FACTOR makes the parts agree
    explanations: Sequence[Explanation]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self) | {"parts": list(self.parts)}


def parts_off(planned: Planned) -> list[Off]:
    """The groups of parts that are off by NOTABLE of the measured step or more, the largest error first."""
    run = planned.measured
    predicted = predicted_parts(planned.workload, run.layout, planned.machine)
    sums = {
        group: [sum(parts[name] for name in group) for parts in (run.parts, predicted)]
        for group in (*GROUPS, ("loading",))
    }
    off = {group: pair for group, pair in sums.items() if abs(pair[0] - pair[1]) >= NOTABLE * run.seconds}
    if not off:
        return []
    sweeps = {name: _swept(planned, name) for name in CONSTANTS if getattr(planned.machine, name)}
    return [
        Off(
            _present(group, run.parts, predicted),
            measured=off[group][0],
            predicted=off[group][1],
            explanations=_explanations(planned, group, sweeps),
        )
        for group in sorted(off, key=lambda group: -abs(off[group][0] - off[group][1]))
    ]


def _present(group: Sequence[str], *seconds: Mapping[str, float]) -> list[str]:
    """Parts of the group that take time."""
    return [name for name in group if any(parts[name] for parts in seconds)]


def _swept(planned: Planned, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(Logarithms of factors of a constant, predicted seconds by part with each). A share stays at most 1."""
    value = float(getattr(planned.machine, name))
    most = max(1.0, min(FACTOR, 1 / value)) if name in CAPPED else FACTOR
    factors = np.geomspace(1 / FACTOR, most, SWEPT)
    machine = replace(planned.machine, **{name: value * factors})
    parts = parts_of_layouts(planned.workload, Columns.of([planned.measured.layout] * SWEPT), machine)
    return np.log(factors), {part: np.broadcast_to(parts[part], SWEPT) for part in PARTS}


def _explanations(
    planned: Planned, group: Sequence[str], sweeps: Mapping[str, tuple[np.ndarray, dict[str, np.ndarray]]]
) -> list[Explanation]:
    """Constants with which the group takes the measured seconds, the one that leaves least error first."""
    run, found = planned.measured, []
    for name, (logs, parts) in sweeps.items():
        error = np.sum([parts[part] - run.parts[part] for part in group], axis=0)
        places = np.flatnonzero(np.sign(error[:-1]) != np.sign(error[1:]))
        if not len(places):
            continue
        place = min(places, key=lambda place: abs(logs[place]))
        share = error[place] / (error[place] - error[place + 1])
        log = logs[place] + share * (logs[place + 1] - logs[place])
        left = sum(abs(np.interp(log, logs, parts[part]) - run.parts[part]) for part in PARTS)
        before = float(getattr(planned.machine, name))
        found.append(Explanation(name, before, float(np.exp(log)), float(left)))
    found.sort(key=lambda one: (round(one.left / run.seconds, 3), abs(np.log(one.factor))))
    return [one for one in found if one.left <= found[0].left + NOTABLE * run.seconds]
