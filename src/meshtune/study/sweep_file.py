"""The file of a sweep: a base config, axes, conditions; and the experiments that it stands for.

    base + axes (product) + together + experiments ──> where ──> Experiment, each once

An axis is a setting of the config or a field of the layout (`layout.tp`). Reading is strict, as a config's:
all problems at once, an unknown key with the nearest one.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

from meshtune.config import laid_over
from meshtune.errors import UserError, did_you_mean, expanded, nearest, written
from meshtune.layout import AUTO, AXES, DATA_AXES, Layout, parse_fields
from meshtune.plan.cluster import FOR_SUBMIT
from meshtune.study.conditions import Condition
from meshtune.study.sweep_settings import (
    LAYOUT_FIELDS,
    LEFT_TO_THE_SWEEP,
    SETTINGS,
    axis_problems,
    base_problems,
    default_of,
    key_problems,
    value_problems,
)
from meshtune.yaml_tree import merge, nested, read_yaml, undotted, without

# Axes #


Change = dict[str, Any]  # dotted setting -> value
MOST_VALUES = 100_000  # of a range
RANGE = "{from: 8, to: 512, times: 2}"


@dataclass(frozen=True)
class Best:
    """A value of the axis `layout`: the planner's best layouts of each combination of the other axes."""

    number: int


def values_of(key: str, value: Any, problems: list[str]) -> list[Any]:
    """The values of the axis `key` as the file writes them; a sentence is added to `problems` for each one
    that is wrong.
    """
    if unknown := axis_problems(key, value if isinstance(value, list) else [value]):
        problems += unknown
        return []
    if isinstance(value, Mapping) and key == "layout" and value.keys() == {"best"}:
        return [_best(value, problems)]
    if isinstance(value, Mapping):
        try:
            return [*_range(key, value)]
        except UserError as error:
            problems += error.problems
            return []
    if not isinstance(value, list) or not value:
        problems.append(f"axes.{key} = {written(value)}: write a list of values, or a range such as {RANGE}.")
        return []
    values = [number_of(one) for one in value]
    for place, one in enumerate(values):
        if any(one == other and type(one) is type(other) for other in values[:place]):
            problems.append(f"axes.{key} has {written(one)} twice.")
        problems += value_problems(key, one)
    return values


def changes_of(name: str, entries: Any, problems: list[str]) -> list[Change]:
    """The mappings of settings under `together` or `experiments`; problems: as `values_of`."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and entry for entry in entries):
        problems.append(
            f"{name} = {written(entries)}: write a list of mappings, [{{train.seed: 1, layout: tp2-mb1}}]."
        )
        return []
    changes = []
    for entry in entries:
        change = {str(key): number_of(value) for key, value in entry.items()}
        for key, value in change.items():
            if unknown := axis_problems(key, [value]):
                problems += unknown
            elif name == "experiments" and key == "layout" and isinstance(value, Mapping) and "best" in value:
                change[key] = _best(value, problems)
            else:
                problems += value_problems(key, value)
        changes.append(change)
    return changes


def number_of(value: Any) -> Any:
    """The number that 1e-4 means, which YAML reads as text; any other value as it is."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}", value):
        return float(value)
    return value


def _best(value: Mapping[str, Any], problems: list[str]) -> Best:
    number = value["best"]
    if type(number) is not int or number < 1:
        problems.append(f"layout.best = {written(number)}: write a number of layouts, such as 3.")
    return Best(number)


def _range(key: str, value: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of {from, to} with `times` or `step`; `to` is included where a step ends on it."""
    allowed = {"from", "to", "times", "step"}
    given = {str(name): number_of(one) for name, one in value.items()}
    if not {"from", "to"} <= given.keys() <= allowed or {"times", "step"} <= given.keys():
        raise UserError(f"axes.{key} = {written(dict(value))}: write a list, or a range such as {RANGE}.")
    for name, one in given.items():
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise UserError(f"axes.{key}.{name} = {written(one)}: write a number.")
    start, end, step = (Decimal(str(given.get(name, 1))) for name in ("from", "to", "step"))
    times = Decimal(str(given["times"])) if "times" in given else None
    if end < start or step <= 0 or (times is not None and (times <= 1 or start <= 0)):
        raise UserError(
            f"axes.{key} = {written(dict(value))} has no values: `to` is from `from` on, `times` above 1 and "
            "`step` above 0."
        )
    whole = all(isinstance(one, int) for one in given.values())
    at, count = start, 0
    while at <= end:
        yield int(at) if whole else float(at)
        count += 1
        if count > MOST_VALUES:
            raise UserError(f"axes.{key} has more than {MOST_VALUES:,} values; write a larger step.")
        at = at * times if times is not None else at + step


# The file #


Tree = dict[str, Any]
BestOf = Callable[[Tree, int], Sequence[str]]  # returns the planner's best layouts of a config

RUNS = ("bench", "train")  # commands that an experiment may be
STEPS, LIMIT = 10, 600.0  # defaults of `steps` and `limit`
KEYS = {
    "base": "a config file, or a mapping of sections",
    "run": "bench or train",
    "steps": "timed steps of a bench",
    "limit": "seconds for one experiment",
    "axes": "settings with their values",
    "together": "a list of mappings of settings that change together",
    "experiments": "a list of mappings of settings",
    "where": "a list of conditions",
    "slurm": "options of sbatch, such as {partition: gpu}",
}
MOST = 100_000  # experiments of a sweep
MOST_COMBINATIONS = 2_000_000  # of the axes, before the conditions
DERIVED = ("layout.world", "layout.data_ranks")  # further names that a condition may have


@dataclass(frozen=True)
class Experiment:
    """One experiment: what is changed of the base, and the settings that this makes."""

    settings: Change  # dotted key -> value
    tree: Tree  # the base with the settings laid over it
    key: str  # digest of all that decides the result


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file says it."""

    name: str  # of the file, without its suffix
    base: Tree
    run: str  # of RUNS
    steps: int  # timed steps of a bench
    limit: float  # seconds for one experiment
    factors: tuple[tuple[Change, ...], ...]  # changes of each axis; their product is the grid
    explicit: tuple[Change, ...]  # experiments besides the grid
    where: tuple[Condition, ...]
    slurm: Mapping[str, Any]  # long options of sbatch
    submission: Mapping[str, Any]  # settings of FOR_SUBMIT in the base's cluster: no experiment reads them
    document: Mapping[str, Any]  # the file, with its base written out

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Dotted keys of all settings that experiments change, in the order of the file."""
        changes = [change for factor in (*self.factors, self.explicit) for change in factor]
        return tuple(dict.fromkeys(key for change in changes for key in change))

    @property
    def replaced_fields(self) -> str:
        """Fields of the base's layout that whole layouts of experiments replace; "" if there are none."""
        base, changes = self.base.get("layout"), [*chain(*self.factors), *self.explicit]
        if not isinstance(base, Mapping) or not any(isinstance(one.get("layout"), str) for one in changes):
            return ""
        return ", ".join(f"{key}: {value}" for key, value in base.items())

    def experiments(self, best_of: BestOf) -> list[Experiment]:
        """All experiments that hold the conditions, each once, in the order of the file.

        best_of: called for each combination of the other axes where the layouts are the planner's best ones.
        Raises UserError for more than MOST of them, for none, and as `Condition.holds`.
        """
        found: dict[str, Experiment] = {}
        for change in self._changes():
            for experiment in self._expanded(change, best_of):
                found.setdefault(experiment.key, experiment)
            if len(found) > MOST:
                raise UserError(
                    f"The sweep has more than {MOST:,} experiments; shorten its axes, or add a condition to "
                    "`where`."
                )
        if not found:
            texts = "; ".join(condition.text for condition in self.where)
            raise UserError(f"No experiment is left: none holds all conditions ({texts}); change `where`.")
        return list(found.values())

    def _changes(self) -> Iterator[Change]:
        """Yield the changes of the grid, the first axis changing slowest, then the explicit ones."""
        if self.factors:
            for combination in product(*self.factors):
                yield {key: value for change in combination for key, value in change.items()}
        yield from self.explicit

    def _expanded(self, change: Change, best_of: BestOf) -> Iterator[Experiment]:
        """Yield the experiments of one change that hold the conditions: several for the planner's best."""
        best = change.get("layout")
        if not isinstance(best, Best):
            if all(self._holds(condition, change) for condition in self.where):
                yield self._experiment(change)
            return
        later = [condition for condition in self.where if any(map(of_layout, condition.names))]
        if not all(self._holds(condition, change) for condition in self.where if condition not in later):
            return
        left_open = change | {"layout": AUTO}
        layouts = best_of(self._tree(left_open), best.number)
        if not layouts:  # its result is the reason
            yield self._experiment(left_open)
        for layout in layouts:
            named = {key: value for key, value in change.items() if not key.startswith("layout.")}
            if all(self._holds(condition, named | {"layout": layout}) for condition in later):
                yield self._experiment(named | {"layout": layout})

    def _experiment(self, change: Change) -> Experiment:
        tree = self._tree(change)
        decisive: Any = [tree, self.run, self.steps if self.run == "bench" else None]
        text = json.dumps(decisive, sort_keys=True, default=str)
        return Experiment(change, tree, hashlib.sha256(text.encode()).hexdigest()[:32])

    def _tree(self, change: Change) -> Tree:
        """The base with a change laid over it; fields of the layout are laid over its layout."""
        tree, layout = self.base, {}
        for key, value in change.items():
            if key in LAYOUT_FIELDS:
                layout[key.removeprefix("layout.")] = value
            else:
                tree = merge(tree, nested(key.split("."), value))
        if layout:
            tree = {**tree, "layout": with_fields(tree.get("layout", AUTO), layout)}
        return tree

    def _holds(self, condition: Condition, change: Change) -> bool:
        tree = self._tree(change)
        return condition.holds(lambda name: setting_of(tree, name))


def of_layout(name: str) -> bool:
    return name.split(".")[0] == "layout"


def with_fields(layout: Any, changed: Mapping[str, Any]) -> Tree:
    """A layout as a mapping, with other values of some fields. layout: auto, a layout string or a mapping.

    A mode of recomputation without a number of blocks is of all of them, whatever the layout.
    """
    if layout == AUTO:
        all_blocks = {"recompute_blocks"} if changed.get("recompute", AUTO) != AUTO else set()
        return {row.name: AUTO for row in fields(Layout) if row.name not in all_blocks} | dict(changed)
    return {**(parse_fields(layout) if isinstance(layout, str) else layout), **changed}


def setting_of(tree: Mapping[str, Any], name: str) -> Any:
    """The value of a setting in a tree, or its default; names in DERIVED are of the layout.

    Raises UserError for a field of the layout that the planner is to choose.
    """
    if of_layout(name) and name != "layout":
        field = name.removeprefix("layout.")
        layout = with_fields(tree.get("layout", AUTO), {})
        axes = {"world": AXES, "data_ranks": DATA_AXES}.get(field)
        return math.prod(_field(layout, axis) for axis in axes) if axes else _field(layout, field)
    value: Any = tree
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default_of(name)
        value = value[part]
    return value


def _field(layout: Mapping[str, Any], name: str) -> Any:
    value = layout.get(name, getattr(Layout, name))
    if value == AUTO or (name not in layout and name in ("micro_batch_size", "gradient_accumulation_steps")):
        raise UserError(
            f"where: layout.{name} is left to the planner in some experiments; fix it in each, or leave it "
            "out of the condition."
        )
    return value


# reading #


def read_sweep(
    source: Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, name: str = "sweep"
) -> SweepFile:
    """Read a sweep from its YAML file, or from the mapping that such a file holds.

    overrides: section.key=value each, laid over the base. name: of a sweep that is given as a mapping. Raises
    UserError with every problem.
    """
    if isinstance(source, Mapping):
        document, folder = dict(source), Path()
    else:
        document, folder = read_yaml(Path(source)), Path(source).parent
        name = Path(source).name.partition(".")[0] or name
    problems = [unknown_key(key) for key in document if key not in KEYS]
    base = _base(document.get("base"), folder, overrides, problems)
    factors, explicit = _factors(document, problems), _experiments(document, problems)
    where = [*_conditions(document.get("where"), problems)]
    run = document.get("run", RUNS[0])
    if run not in RUNS:
        near = did_you_mean(nearest(str(run), RUNS))
        problems.append(f"run = {written(run)}: write {' or '.join(RUNS)}{near}")
    steps = _number(document, "steps", STEPS, problems, whole=True)
    if run == "train" and "steps" in document:
        problems.append("steps is for run: bench; with run: train write train.max_steps into the base.")
    limit = _number(document, "limit", LIMIT, problems)
    slurm = document.get("slurm") or {}
    if not isinstance(slurm, Mapping) or any(isinstance(value, Mapping | list) for value in slurm.values()):
        problems.append(f"slurm = {written(slurm)}: write options of sbatch, such as {{partition: gpu}}.")
        slurm = {}
    if not (factors or explicit) and not problems:
        problems.append("The sweep has no experiments: add `axes`, such as {train.seed: [1, 2, 3]}.")
    if (combinations := math.prod(map(len, factors))) > MOST_COMBINATIONS:
        problems.append(
            f"The axes have {combinations:,} combinations; at most {MOST_COMBINATIONS:,} are looked at: "
            "shorten them."
        )
    if problems:
        raise UserError(problems)
    written_out = {**document, "base": base} if base else document
    cluster, submission = base.get("cluster"), dict[str, Any]()
    if isinstance(cluster, Mapping):
        submission = {name: value for name, value in cluster.items() if name in FOR_SUBMIT}
        rest = {name: value for name, value in cluster.items() if name not in FOR_SUBMIT}
        base = {**base, "cluster": rest} if rest else without(base, ["cluster"])
    return SweepFile(
        name, base, run, int(steps), limit, tuple(factors), tuple(explicit), tuple(where), slurm, submission,
        written_out,
    )  # fmt: skip


def unknown_key(key: Any) -> str:
    """Sentence on a key of the file that is none of KEYS."""
    known = ", ".join(KEYS)
    if near := nearest(str(key), KEYS):
        return f"{key} is not a key of a sweep{did_you_mean(near)}"
    if not key_problems(str(key)) or str(key).split(".")[0] in SETTINGS:
        return f"{key} is not a key of a sweep: settings go into `base` or `axes`. Its keys: {known}."
    return f"{key} is not a key of a sweep; its keys: {known}."


def _base(value: Any, folder: Path, overrides: Sequence[str], problems: list[str]) -> Tree:
    """The base as a tree of sections, with overrides laid over it, but for LEFT_TO_THE_SWEEP."""
    try:
        if isinstance(value, str):
            tree = read_yaml(folder / expanded(value), SETTINGS)
        elif isinstance(value, Mapping) or value is None:
            tree = undotted(dict(value or {}), SETTINGS, name="base")
        else:
            problems.append(f"base = {written(value)}: write {KEYS['base']}.")
            tree = {}
        tree = laid_over(tree, overrides)
    except UserError as error:
        problems += error.problems
        return {}
    for key in LEFT_TO_THE_SWEEP:
        tree = without(tree, [key])
    problems += base_problems(tree)
    return tree


def _factors(document: Mapping[str, Any], problems: list[str]) -> list[tuple[Change, ...]]:
    """The changes of each axis, and those that change together."""
    axes, factors = document.get("axes") or {}, []
    if not isinstance(axes, Mapping):
        problems.append(f"axes = {written(axes)}: write settings with their values, {{train.seed: [1, 2]}}.")
        axes = {}
    for key, value in axes.items():
        factors.append(tuple({str(key): one} for one in values_of(str(key), value, problems)))
    together = document.get("together") or []
    several = isinstance(together, list) and together and all(isinstance(one, list) for one in together)
    for group in together if several else [together] if together else []:
        factors.append(tuple(changes_of("together", group, problems)))
    seen: set[str] = set()
    for factor in factors:
        named = {key for change in factor for key in change}
        problems += [f"{key} is changed by two axes; keep one." for key in sorted(named & seen)]
        seen |= named
    return factors


def _experiments(document: Mapping[str, Any], problems: list[str]) -> list[Change]:
    given = document.get("experiments")
    return changes_of("experiments", given, problems) if given else []


def _conditions(value: Any, problems: list[str]) -> Iterator[Condition]:
    """Yield the conditions, and add a sentence for each that can't be read or names no setting."""
    for text in [] if value is None else value if isinstance(value, list) else [value]:
        try:
            condition = Condition.parse(text)
        except UserError as error:
            problems += error.problems
            continue
        for name in condition.names:
            if name not in DERIVED:
                problems += [f"where: {problem}" for problem in key_problems(name)]
        yield condition


def _number(
    document: Mapping[str, Any], key: str, default: float, problems: list[str], *, whole: bool = False
) -> float:
    value = document.get(key, default)
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 10**9:
        problems.append(f"{key} = {written(value)}: write a {'whole ' * whole}number above 0.")
        return default
    return value
