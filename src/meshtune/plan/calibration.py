"""The planner's few constants, fitted to measured runs of one machine.

    runs ──> constants that they determine ──> fit of factors ──> Calibration: each before and after,
                                          └──> the same without each part of the runs ──> error on that part

A constant has one factor for all numbers of ranks: how it changes with them, the probe has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from meshtune.errors import UserError
from meshtune.meter.parts import PARTS
from meshtune.placement.columns import Columns
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import SHARES
from meshtune.plan.machine import Machine, machine_of
from meshtune.plan.step_parts import MeasuredRun, parts_of_layouts, predicted_parts
from meshtune.plan.workload import Workload
from meshtune.units import counted

CONSTANTS = {  # field of Machine -> what it is
    "matmul": "share of the fastest matmul that large ones reach",
    "attention": "share of the attention kernel's rate",
    "memory": "share of the memory's bandwidth",
    "update_memory": "factor on that in the optimizer's update",
    "link_share": "share of the links' bandwidth",
    "network_share": "share of the network's bandwidth that collectives reach",
    "link_latency": "seconds of a ring's step inside a machine",
    "launch": "seconds in which the host launches a kernel",
    "host_micro_batch": "seconds of the host for each micro-batch",
    "host_step": "seconds of the host for each step",
}
CAPPED = SHARES | {"network_share"}  # constants that are at most 1
GROUPS = (  # parts whose errors count; between the parts of one, clocks and formulas draw lines elsewhere
    ("forward", "backward", "recomputation", "rest"), ("communication", "bubble", "waiting"), ("optimizer",),
)  # fmt: skip
PART = 0.3  # weight of a group's error, as a share of the step, against the logarithm of the whole step's
FACTOR = 8.0  # by which a constant changes at most
EFFECT = 0.02  # change of a step, as a share, that a constant must make to be determined by it; e-fold
RUNS_EACH = 3  # runs that a constant needs
FOLDS = 4
LEAST_RANKED = 5  # runs from which their order is judged
SCALE = 0.1  # error that counts linearly


@dataclass(frozen=True)
class Planned:
    """A measured run with what the planner needs to predict it."""

    measured: MeasuredRun
    workload: Workload  # with the layout's global batch
    machine: Machine

    @classmethod
    def of(cls, measured: MeasuredRun, workload: Workload, cluster: Cluster) -> Planned:
        """Return the run on a cluster of the same kind. cluster: of any size; machines that a run was on
        together have equal parts of its ranks.
        """
        world = measured.layout.world
        if measured.nodes > 1:
            cluster = replace(cluster, node=world // measured.nodes)
        here = cluster.of_size(world)
        workload = workload.under(here.gpu, measured.layout)
        return cls(measured, workload, machine_of(workload, here))


class Runs:
    """Measured runs as columns, predicted together."""

    def __init__(self, runs: Sequence[Planned]) -> None:
        self.runs = runs
        self.measured = np.array([run.measured.seconds for run in runs])
        self._groups: list[tuple[np.ndarray, Workload, Columns, Machine]] = []
        left = [*range(len(runs))]
        while left:
            first = _alike(runs[left[0]])
            same = [number for number in left if _alike(runs[number]) == first]
            machines = [runs[number].machine for number in same]
            machine = Machine(
                **{f.name: np.array([getattr(one, f.name) for one in machines]) for f in fields(Machine)}
            )
            layouts = Columns.of([runs[number].measured.layout for number in same])
            self._groups.append((np.array(same), first, layouts, machine))
            left = [number for number in left if number not in same]

    def parts(self, factors: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Predicted seconds of each run by part, with some constants times a factor."""
        found = {name: np.zeros(len(self.runs)) for name in PARTS}
        for numbers, workload, layouts, machine in self._groups:
            changed = {name: getattr(machine, name) * factor for name, factor in factors.items()}
            for name, value in parts_of_layouts(workload, layouts, replace(machine, **changed)).items():
                found[name][numbers] = value
        return found

    def seconds(self, factors: Mapping[str, float]) -> np.ndarray:
        """Predicted seconds of a step of each run."""
        return np.sum([*self.parts(factors).values()], axis=0)

    def errors(self, factors: Mapping[str, float]) -> np.ndarray:
        """For each run: logarithm of the predicted step over the measured one, and the errors of GROUPS."""
        parts, rows = self.parts(factors), []
        for group in GROUPS:
            measured = [sum(run.measured.parts[name] for name in group) for run in self.runs]
            rows.append(PART * (sum(parts[name] for name in group) - np.array(measured)) / self.measured)
        total = np.sum([*parts.values()], axis=0)
        return np.stack([np.log(total / self.measured), *rows], axis=1)


def _alike(run: Planned) -> Workload:
    """The run's workload without its batch, which the layout has too."""
    return run.workload.of_batch(1)


class Score(NamedTuple):
    """How far predictions are from measured steps."""

    runs: int
    mean: float  # absolute error as a share of the measured step
    median: float
    spearman: float | None  # correlation with the measured order; None: fewer than LEAST_RANKED runs

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray) -> Score:
        wrong = abs(predicted / measured - 1)
        ranked = spearman(predicted, measured) if len(measured) >= LEAST_RANKED else float("nan")
        order = None if np.isnan(ranked) else ranked
        return cls(len(measured), float(wrong.mean()), float(np.median(wrong)), order)


class LeftOut(NamedTuple):
    """Step of a run that was left out of the fit, in seconds."""

    run: str  # its folder
    layout: str
    ranks: int
    measured: float
    before: float  # predicted by the constants of before
    after: float  # predicted by constants that other runs were fitted to


@dataclass(frozen=True)
class Calibration:
    """Constants fitted to runs, and the errors before and after on runs that were left out."""

    factors: Mapping[str, float]  # of the fitted constants
    runs_of: Mapping[str, Sequence[str]]  # fitted constant -> runs that determine it
    at_bound: Sequence[str]  # fitted constants that would go further
    left: Mapping[str, str]  # constants that stay -> why
    fitted_on: Sequence[MeasuredRun]
    left_out: Sequence[LeftOut]

    @property
    def scores(self) -> dict[str, tuple[Score, Score]]:
        """Errors before and after, of all runs that were left out ("all") and of each number of ranks."""
        ranks = sorted({run.ranks for run in self.left_out})
        groups = {"all": self.left_out}
        groups |= {counted(n, "rank"): [run for run in self.left_out if run.ranks == n] for n in ranks}
        found = {}
        for name, runs in groups.items():
            measured, before, after = np.array([run[3:] for run in runs]).reshape(-1, 3).T
            found[name] = (Score.of(before, measured), Score.of(after, measured))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "fitted": {
                name: {"factor": factor, "runs": list(self.runs_of[name]), "at_bound": name in self.at_bound}
                for name, factor in self.factors.items()
            },
            "left": dict(self.left),
            "held_out": {
                name: {"before": before._asdict(), "after": after._asdict()}
                for name, (before, after) in self.scores.items()
            },
            "left_out": [run._asdict() for run in self.left_out],
        }


def calibrated(
    runs: Sequence[Planned], highest: Mapping[str, float], hold_out: Sequence[bool] | None = None
) -> Calibration:
    """Fit the constants that the runs determine.

    highest: largest value of constants that are shares, with any number of ranks. hold_out: True for runs to
    be left out of the fit and predicted by it; None: all are fitted, and each of FOLDS parts is predicted by
    constants fitted to the others. Raises UserError for runs of several machines, and for too few.
    """
    check_one_machine([run.measured for run in runs])
    kept = runs if hold_out is None else [*compress(runs, np.logical_not(hold_out))]
    names, left, runs_of = _determined(kept)
    if not names:
        raise UserError(
            f"{counted(len(kept), 'run')} can't determine any constant: each needs {RUNS_EACH} runs whose "
            "step it changes. Bench more layouts and micro-batches: meshtune bench --layouts … --out FOLDER."
        )
    ranges = {name: _range(name, highest) for name in CONSTANTS}
    factors = _fit(kept, names, ranges)
    if hold_out is None:
        kinds = np.array([run.measured.layout.world for run in runs])
        labels = folds(kinds, min(FOLDS, len(runs)))

        def predict(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
            others = [*compress(runs, inside)]
            found = _fit(others, _determined(others)[0], ranges)
            return Runs([*compress(runs, outside)]).seconds(found)

        out, after = runs, left_out(labels, predict)
    else:
        out = [*compress(runs, hold_out)]
        after = Runs(out).seconds(factors)
    at_bound = [name for name in names if not ranges[name][0] * 1.02 < factors[name] < ranges[name][2] / 1.02]
    return Calibration(
        factors, runs_of, at_bound, left, [run.measured for run in kept], _left_out(out, after)
    )


def check_one_machine(runs: Sequence[MeasuredRun]) -> None:
    """Raise UserError, with every difference, for runs of several machines, devices or versions of torch."""
    facts = {"device": "device", "cores": "number of cores", "torch": "version of torch"}
    problems = []
    for key, what in facts.items():
        values = dict.fromkeys(str(run.facts.get(key)) for run in runs)
        if len(values) > 1:
            problems.append((what, values))
    alone = dict.fromkeys(str(run.facts.get("host")) for run in runs if run.nodes == 1)
    if len(alone) > 1:
        problems.append(("machine", alone))
    if problems:
        raise UserError(
            f"The runs differ in the {what}: {', '.join(values)}. Calibrate each apart."
            for what, values in problems
        )


def _determined(runs: Sequence[Planned]) -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """(Constants that the runs determine, others with the reason, runs that determine each)."""
    nudge, columns = 1e-3, Runs(runs)
    base = columns.errors({})
    slopes = {name: (columns.errors({name: 1 + nudge}) - base) / nudge for name in CONSTANTS}
    runs_of = {
        name: [
            run.measured.name
            for run, row in zip(runs, slope, strict=True)
            if np.abs(row / [1, *[PART] * len(GROUPS)]).max() >= EFFECT
        ]
        for name, slope in slopes.items()
    }
    left = {
        name: _undetermined(name, runs) if not some else f"{counted(len(some), 'run')} of {RUNS_EACH} needed"
        for name, some in runs_of.items()
        if len(some) < RUNS_EACH
    }
    candidates = {name: slope.ravel() for name, slope in slopes.items() if name not in left}
    names = determined(candidates, EFFECT * PART * len(runs) ** 0.5)
    left |= {name: "the runs can't tell it from the others" for name in candidates if name not in names}
    most = len(runs) // RUNS_EACH
    left |= {name: f"too few runs: {counted(len(runs), 'run')} for {len(names)} constants, {RUNS_EACH} each"
             for name in names[most:]}  # fmt: skip
    names = names[:most]
    return names, left, {name: runs_of[name] for name in names}


def _undetermined(name: str, runs: Sequence[Planned]) -> str:
    """Reason why no run changes with a constant."""
    alone = name == "network_share" and all(run.measured.nodes == 1 for run in runs)
    return "each run is on one machine" if alone else "no run determines it"


def _range(name: str, highest: Mapping[str, float]) -> tuple[float, float, float]:
    """Bounds and guess of a constant's factor; a share stays at most 1."""
    most = min(FACTOR, 1 / highest[name]) if name in highest else FACTOR
    return 1 / FACTOR, 1.0, max(most, 1.0 + 1e-6)


def _fit(
    runs: Sequence[Planned], names: Sequence[str], ranges: Mapping[str, tuple[float, float, float]]
) -> dict[str, float]:
    """Factors of the named constants, fitted in logarithms."""
    if not names:
        return {}
    logs: dict[str, tuple[float, float, float]] = {
        name: (np.log(ranges[name][0]), 0.0, np.log(ranges[name][2])) for name in names
    }

    columns = Runs(runs)

    def errors(factors: Mapping[str, float]) -> np.ndarray:
        return columns.errors({name: float(np.exp(value)) for name, value in factors.items()}).ravel()

    weights = np.ones(len(runs) * (1 + len(GROUPS)))
    found = fitted(errors, logs, weights, scale=SCALE, rounds=20)
    return {name: float(np.exp(value)) for name, value in found.items()}


def _left_out(runs: Sequence[Planned], after: np.ndarray) -> list[LeftOut]:
    """Measured and predicted steps of runs that were left out of the fit."""
    before = Runs(runs).seconds({})
    return [
        LeftOut(run.name, str(run.layout), run.layout.world, run.seconds, float(old), float(new))
        for run, old, new in zip((each.measured for each in runs), before, after, strict=True)
    ]


# Fitting constants #

#     fitted ─> constants by name      folds, left_out ─> predictions of each part by the others' constants
#
# `meshtune calibrate` fits those of a machine, validation/fit.py those that are shipped.


Errors = Callable[[Mapping[str, float]], np.ndarray]  # constants -> errors, such as logarithms of ratios
# lowest, as one would guess before any fit, highest
Range = tuple[float, float, float]


def fitted(
    errors: Errors,
    free: Mapping[str, Range],
    weights: np.ndarray,
    *,
    scale: float,
    ridge: float = 1e-4,
    rounds: int = 40,
) -> dict[str, float]:
    """Values of the free constants that fit best, by Levenberg-Marquardt on logits between their bounds.

    errors: of constants by name. free: bounds and guess of each. weights: of each error. scale: of an error
    that counts linearly (a pseudo-Huber loss), or a few broken runs would decide. ridge: weight of the
    distance from the guess, so that what no measurement tells stays there. rounds: iterations at most; it
    ends before when the cost falls by less than 1e-6 of itself.
    """
    names = list(free)
    low, first, high = (np.array([free[name][end] for name in names]) for end in range(3))
    logits = np.clip(np.log((first - low + 1e-12) / np.maximum(high - first, 1e-12)), -4, 4)
    origin = logits.copy()

    def values(logits: np.ndarray) -> dict[str, float]:
        found = low + (high - low) / (1 + np.exp(-logits))
        return {name: float(value) for name, value in zip(names, found, strict=True)}

    def cost(wrong: np.ndarray, logits: np.ndarray) -> float:
        huber = 2 * scale**2 * (np.sqrt(1 + (wrong / scale) ** 2) - 1)
        return float(weights @ huber + ridge * np.sum((logits - origin) ** 2))

    damping, wrong = 1e-2, errors(values(logits))
    now = cost(wrong, logits)
    for _ in range(rounds):
        slope = np.stack(
            [(errors(values(logits + 1e-3 * unit)) - wrong) / 1e-3 for unit in np.eye(len(logits))], axis=1
        )
        w = weights / np.sqrt(1 + (wrong / scale) ** 2)
        normal = slope.T @ (slope * w[:, None]) + ridge * np.eye(len(logits))
        right = slope.T @ (w * wrong) + ridge * (logits - origin)
        before = now
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), right)
            there = logits - np.clip(move, -1.5, 1.5)
            wrong_there = errors(values(there))
            if (then := cost(wrong_there, there)) < now:
                logits, wrong, now, damping = there, wrong_there, then, max(damping / 3, 1e-7)
                break
            damping *= 4
        if before - now < 1e-6 * before:
            break
    return values(logits)


def determined(slopes: Mapping[str, np.ndarray], least: float) -> list[str]:
    """Names of constants that can be told apart, the clearest first.

    A constant is left out where its effect is that of those before it, in some mixture, up to less than
    `least` (the length of a vector): Gram-Schmidt with pivots.

    slopes: change of every error with each constant.
    """
    left, found = dict(slopes), []
    while left:
        name = max(left, key=lambda name: float(np.linalg.norm(left[name])))
        length = float(np.linalg.norm(left[name]))
        if length < least:
            break
        unit = left.pop(name) / length
        found.append(name)
        left = {other: slope - (slope @ unit) * unit for other, slope in left.items()}
    return found


def folds(kinds: np.ndarray, count: int) -> np.ndarray:
    """Number of a part, below `count`, for each measurement, at random; each kind is spread evenly over the
    parts.

    kinds: of each measurement. The seed is fixed: the same kinds get the same parts.
    """
    found, draw = np.zeros(len(kinds), dtype=int), np.random.default_rng(0)
    for kind in dict.fromkeys(kinds):
        own = draw.permutation(np.flatnonzero(kinds == kind))
        found[own] = (np.arange(len(own)) + draw.integers(count)) % count
    return found


def left_out(labels: np.ndarray, predict: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Predictions of every measurement by constants fitted to those with other labels.

    labels: of each measurement, such as its part of `folds`; one fit for each distinct label. predict: from
    two masks, those to fit to and those to predict, to the predictions of the latter.
    """
    found = np.zeros(len(labels))
    for label in dict.fromkeys(labels):
        found[labels == label] = predict(labels != label, labels == label)
    return found


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation: that of the ranks, equal values sharing their mean rank. NaN where either does
    not vary.
    """
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (one, other)]
    deviations = [each - each.mean() for each in ranks]
    size = float(np.prod([np.linalg.norm(each) for each in deviations]))
    return float(deviations[0] @ deviations[1]) / size if size else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value from 1, the mean of ranks for equal values."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal + 1) / 2


# A finished run next to its prediction #

# For each constant the planner predicts the run's step with the constant times SWEPT factors. Of those with
# which a group of parts takes the seconds that were measured, the one that leaves the other parts nearest is
# named; of equals, the one that changes least.


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
