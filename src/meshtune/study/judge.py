"""The planner on a sweep's experiments before they run: layouts, refusals, memory, seconds.

    experiments ──> groups of one model, workload and cluster ──> layouts as columns ──> Judged, each

The layouts of a group are predicted together, so that thousands of experiments take seconds.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshtune.config import Config, load
from meshtune.errors import NothingFits, UserError
from meshtune.layout import AUTO, DATA_AXES, Layout, PartialLayout
from meshtune.placement.columns import Columns, at, joined, rows
from meshtune.plan.changes import empty_plan_error
from meshtune.plan.cluster import Cluster
from meshtune.plan.facts import model_facts
from meshtune.plan.phrases import memory_limit
from meshtune.plan.search import Choice, choice_of, chunks, peak, search, times
from meshtune.plan.workload import Uncounted, Workload
from meshtune.study.store import DOES_NOT_FIT, REFUSED, WAITING
from meshtune.study.sweep_file import Experiment
from meshtune.units import human

BATCH = ("train.global_batch_size", "train.global_batch_tokens")
SIZES = ("micro_batch_size", "gradient_accumulation_steps")
# What neither the planner nor a layout's refusal depends on, so that experiments share a group.
FREE = (
    "seed", "learning_rate", "max_steps", "num_epochs", "total_tokens", "weight_decay", "warmup_ratio",
    "warmup_steps", "lr_scheduler", "min_lr_ratio", "lr_scheduler_kwargs", "lr_decay_steps", "adam_betas",
    "adam_eps", "max_grad_norm", "label_smoothing", "neftune_alpha", "global_batch_size",
    "global_batch_tokens",
)  # fmt: skip  # of train


@dataclass(frozen=True)
class Judged:
    """One experiment as the planner sees it."""

    status: str  # WAITING: it can run; REFUSED or DOES_NOT_FIT
    reason: str | None = None
    layout: Layout | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    choice: Choice | None = None  # the prediction; None: the planner can't count the model

    @property
    def columns(self) -> dict[str, Any]:
        """Values for the database that are known before the experiment runs."""
        layout = self.layout
        known = {} if layout is None else {"layout": str(layout), "world": layout.world}
        return {**known, **self.figures}


@dataclass(frozen=True)
class Here:
    """The place of the experiments: devices of this machine, or those that the settings name."""

    cluster: Callable[[Config, int | None], Cluster]  # of a number of ranks; None: of all devices
    workload: Callable[[Config], Workload]  # raises Uncounted for a model that can't be planned


@dataclass(frozen=True)
class Asked:
    """An experiment whose settings are valid."""

    place: int  # among the experiments
    experiment: Experiment
    config: Config  # without its layout
    partial: PartialLayout


def judge(experiments: Sequence[Experiment], run: str, here: Here) -> list[Judged]:
    """Judge each experiment by the planner, in their order. run: as of the sweep."""
    result: dict[int, Judged] = {}
    groups: dict[tuple[str, str], list[Asked]] = {}
    configs: dict[str, Config | UserError] = {}
    for place, experiment in enumerate(experiments):
        try:
            asked = _asked(place, experiment, run, configs)
            groups.setdefault(_group(asked.config), []).append(asked)
        except UserError as error:
            result[place] = Judged(REFUSED, " ".join(error.problems))
    workloads: dict[str, Workload | UserError] = {}
    for (model, _), group in groups.items():
        if model not in workloads:
            workloads[model] = _workload(group[0].config, here)
        result |= dict(_judged(group, workloads[model], run, here))
    return [result[place] for place in range(len(experiments))]


def _asked(place: int, experiment: Experiment, run: str, configs: dict[str, Config | UserError]) -> Asked:
    """Validate an experiment's settings. configs: those read before, by their tree without the layout."""
    tree = {name: value for name, value in experiment.tree.items() if name != "layout"}
    text = json.dumps(tree, sort_keys=True, default=str)
    if text not in configs:
        try:
            configs[text] = load(defaults=tree)
        except UserError as error:
            configs[text] = error
    config = configs[text]
    if isinstance(config, UserError):
        raise config
    if run == "train" and not config.data.train:
        raise UserError("No data is named; add data: {train: rows.jsonl} to the base.")
    return Asked(place, experiment, config, PartialLayout.parse(experiment.tree.get("layout", AUTO)))


def _group(config: Config) -> tuple[str, str]:
    """Texts that are equal for experiments with the same workload but for the global batch, and cluster."""
    tree = config.model_dump(mode="json", include={"model", "method", "lora", "data", "train"})
    tree["train"] = {name: value for name, value in tree["train"].items() if name not in FREE}
    return json.dumps(tree), str(config.cluster)


def _workload(config: Config, here: Here) -> Workload | UserError:
    """The workload of a config, whatever its global batch; or why there is none."""
    batch = {"global_batch_size": None, "global_batch_tokens": None}
    train = config.train.model_copy(update=batch)
    try:
        return here.workload(config.model_copy(update={"train": train}))
    except UserError as error:
        return error


def _judged(
    group: Sequence[Asked], found: Workload | UserError, run: str, here: Here
) -> Iterator[tuple[int, Judged]]:
    """Yield (place, what the planner says) for experiments of one workload and cluster.

    found: the workload, or why there is none: for a model that can't be planned nothing is predicted.
    """
    if isinstance(found, UserError) and not isinstance(found, Uncounted):
        yield from ((asked.place, Judged(REFUSED, " ".join(found.problems))) for asked in group)
        return
    workload = None if isinstance(found, UserError) else found
    facts = {"seq_len": group[0].config.data.seq_len, "model": group[0].config.model.name}
    if workload is not None:
        facts["parameters"] = model_facts(workload)["parameters"]
    completed: dict[tuple[Any, ...], Layout | UserError] = {}
    of_world: dict[int, list[tuple[Asked, Layout]]] = {}
    for asked in group:
        try:
            layout = _completed(asked, workload, run, here, completed)
            of_world.setdefault(layout.world, []).append((asked, layout))
        except UserError as error:
            status = DOES_NOT_FIT if isinstance(error, NothingFits) else REFUSED
            gpus = asked.partial.world or asked.config.cluster_config.gpus
            yield asked.place, Judged(status, " ".join(error.problems), figures=facts | {"gpus": gpus})
    for world, several in of_world.items():
        try:
            cluster = here.cluster(group[0].config, world)
        except UserError as error:
            for asked, layout in several:
                reason = " ".join(error.problems)
                yield asked.place, Judged(REFUSED, reason, layout, facts | {"gpus": world})
            continue
        verdicts = (
            (Judged(WAITING, layout=layout) for _, layout in several)
            if workload is None
            else predicted(workload, cluster, [layout for _, layout in several])
        )
        for (asked, layout), verdict in zip(several, verdicts, strict=True):
            own = facts | {"gpus": world, "global_batch_size": layout.global_batch_size}
            yield asked.place, replace(verdict, figures={**verdict.figures, **own})


def _completed(
    asked: Asked,
    workload: Workload | None,
    run: str,
    here: Here,
    before: dict[tuple[Any, ...], Layout | UserError],
) -> Layout:
    """The whole layout of an experiment: the planner chooses what follows from nothing else.

    before: layouts completed for equal settings. Raises UserError for a global batch that the layout does not
    make, and NothingFits or Refused if the planner finds none.
    """
    partial, config = asked.partial, asked.config
    if not partial.open and {*SIZES} <= partial.fixed.keys():
        layout = partial.known
        if problem := _batch_problem(asked, layout, run):
            raise UserError(problem)
        return layout
    key = (*map(str, sorted(partial.given.items())), *sorted(partial.open), config.global_batch_size)
    if key not in before:
        try:
            before[key] = _chosen(partial, config, workload, here)
        except UserError as error:
            before[key] = error
    layout = before[key]
    if isinstance(layout, UserError):
        raise layout
    return layout


def _chosen(partial: PartialLayout, config: Config, workload: Workload | None, here: Here) -> Layout:
    """A layout with its open fields filled in: data ranks and batch sizes where only one value is possible,
    else the planner's choice.
    """
    by_rule = partial.open <= {*DATA_AXES} and {*SIZES} & partial.fixed.keys()
    cluster = here.cluster(config, partial.world)
    if by_rule or workload is None:
        return partial.complete(devices=cluster.gpus, global_batch_size=config.global_batch_size)
    plan = search(workload.of_batch(config.global_batch_size), cluster, fixed=partial.given)
    if not len(plan):
        raise empty_plan_error(plan)
    return plan.choice(0).layout


def _batch_problem(asked: Asked, layout: Layout, run: str) -> str | None:
    """A sentence for a layout whose micro-batches make another global batch than the experiment asks for.

    The base's isn't a question of it where layouts are benched, as under `meshtune bench --layouts`.
    """
    own = any(key in asked.experiment.settings for key in BATCH)
    train = asked.config.train
    given = train.global_batch_size is not None or train.global_batch_tokens is not None
    if not (own or (run == "train" and given)):
        return None
    wanted, made = asked.config.global_batch_size, layout.global_batch_size
    if wanted == made:
        return None
    return (
        f"{layout} makes {made} sequences a step, but the settings ask for {wanted}; leave its ga out, or "
        "leave the global batch to the layout."
    )


def predicted(workload: Workload, cluster: Cluster, layouts: Sequence[Layout]) -> Iterator[Judged]:
    """Yield what is predicted for each layout, whose worlds are the cluster's size: refused, too large, or
    its seconds and bytes.
    """
    columns = Columns.of(layouts)
    against: list[list[str]] = [[] for _ in layouts]
    for rule in workload.rules():
        for place in np.flatnonzero(np.broadcast_to(rule.refuses(columns), len(layouts))):
            against[int(place)].append(rule.sentence(layouts[int(place)]))
    allowed = np.array([not sentences for sentences in against])
    choices = iter(_choices(workload, cluster, columns, layouts, allowed))
    for place, layout in enumerate(layouts):
        if against[place]:
            yield Judged(REFUSED, " ".join(against[place]), layout)
            continue
        choice = next(choices)
        reason = None
        if not choice.fits and not limitless(cluster):
            need, limit = choice.memory.peak, cluster.usable_memory
            reason = f"It needs {human(need)}, {human(need - limit)} too much: {memory_limit(cluster)}."
        timed = cluster.timed
        figures = {
            "predicted_step_seconds": choice.seconds.total if timed else None,
            "predicted_peak_bytes": choice.memory.peak,
            "predicted_mfu": choice.mfu if timed else None,
            "predicted_tokens_per_second_per_gpu": choice.tokens_per_second_per_gpu if timed else None,
        }
        yield Judged(DOES_NOT_FIT if reason else WAITING, reason, layout, figures, choice)


def _choices(
    workload: Workload, cluster: Cluster, columns: Columns, layouts: Sequence[Layout], allowed: np.ndarray
) -> Iterator[Choice]:
    """Yield the prediction of each allowed layout, in their order, with its own global batch."""
    if not allowed.any():
        return
    parts = [*chunks(rows(columns, allowed))]
    seconds = joined([times(workload, cluster, part) for part in parts])
    memory = joined([peak(workload, cluster, part) for part in parts])
    for place, number in enumerate(np.flatnonzero(allowed)):
        layout = layouts[int(number)]
        batch = workload.of_batch(layout.global_batch_size)
        yield choice_of(batch, cluster, layout, at(seconds, place), at(memory, place))


def limitless(cluster: Cluster) -> bool:
    """True for ranks on a processor without a memory budget: they share what the machine has."""
    return cluster.gpu.processor and cluster.memory_budget is None
