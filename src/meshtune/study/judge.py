"""The planner on a sweep's experiments before they run: layouts, refusals, memory, seconds.

    experiments ──> groups of one model, workload and cluster ──> layouts as columns ──> Judged, each

The layouts of a group are predicted together, so that thousands of experiments take seconds.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from meshtune.config import Config, load
from meshtune.errors import NothingFits, UserError
from meshtune.layout import AUTO, DATA_AXES, Layout, PartialLayout
from meshtune.placement.columns import Columns, at, joined
from meshtune.placement.experts import splittable
from meshtune.plan.changes import empty_plan_error
from meshtune.plan.cluster import Cluster
from meshtune.plan.facts import model_facts
from meshtune.plan.phrases import memory_limit
from meshtune.plan.search import Choice, choice_of, chunks, peak, search, times
from meshtune.plan.workload import Uncounted, Workload
from meshtune.study.store import DOES_NOT_FIT, REFUSED, WAITING
from meshtune.study.sweep_file import Experiment
from meshtune.units import human

BATCH = ("global_batch_size", "global_batch_tokens")  # of train
SIZES = {"micro_batch_size", "gradient_accumulation_steps"}
# What neither the planner nor a layout's refusal depends on, so that experiments share a group.
NOT_IN_GROUP_KEY = {
    "seed", "learning_rate", "max_steps", "num_epochs", "total_tokens", "weight_decay", "warmup_ratio",
    "warmup_steps", "lr_scheduler", "min_lr_ratio", "lr_scheduler_kwargs", "lr_decay_steps", "adam_betas",
    "adam_eps", "max_grad_norm", "label_smoothing", "neftune_alpha", *BATCH,
}  # fmt: skip  # of train
T = TypeVar("T")


@dataclass(frozen=True)
class Judged:
    """One experiment as the planner sees it."""

    status: str  # WAITING: it can run; REFUSED or DOES_NOT_FIT
    reason: str | None = None
    layout: Layout | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)  # for the database, known before it runs
    choice: Choice | None = None  # the prediction; None: the planner can't count the model


@dataclass(frozen=True)
class Here:
    """The place of the experiments: devices of this machine, or those that the settings name."""

    cluster: Callable[[Config, int | None], Cluster]  # of a number of ranks; None: of all devices
    workload: Callable[[Config], Workload]  # raises Uncounted for a model that can't be planned


@dataclass(frozen=True)
class Asked:
    """An experiment whose settings are valid."""

    place: int  # among the experiments
    config: Config  # without its layout
    partial: PartialLayout
    own_batch: bool  # its global batch counts, whatever its layout makes


def judge(
    experiments: Sequence[Experiment], run: str, here: Here, count: Callable[[str], None] = lambda _: None
) -> list[Judged]:
    """Judge each experiment by the planner, in their order. run: as of the sweep. count: called with the
    number of those that are judged.
    """
    result: dict[int, Judged] = {}
    groups: dict[tuple[str, str], list[Asked]] = {}
    configs: dict[str, Config | UserError] = {}
    for place, experiment in enumerate(experiments):
        try:
            asked = _asked(place, experiment, run, configs)
            groups.setdefault(_group_key(asked.config), []).append(asked)
        except UserError as error:
            result[place] = Judged(REFUSED, " ".join(error.problems))
    workloads: dict[str, Workload | UserError] = {}
    for (model, _), group in groups.items():
        count(f"predicting experiments: {len(result):,} of {len(experiments):,} done")
        batches = group[0].config.train.model_copy(update=dict.fromkeys(BATCH))
        config = group[0].config.model_copy(update={"train": batches})
        try:
            result |= _judged(
                group, _once(workloads, model, lambda config=config: here.workload(config)), here
            )
        except Uncounted:  # nothing is predicted
            result |= _judged(group, None, here)
        except UserError as error:
            result |= {asked.place: Judged(REFUSED, " ".join(error.problems)) for asked in group}
    return [result[place] for place in range(len(experiments))]


def _once(made: dict[Any, T | UserError], key: Any, make: Callable[[], T]) -> T:
    """The value that `make` returns, made once for each key; raises its UserError again."""
    if key not in made:
        try:
            made[key] = make()
        except UserError as error:
            made[key] = error
    value = made[key]
    if isinstance(value, UserError):
        raise value
    return value


def _asked(place: int, experiment: Experiment, run: str, configs: dict[str, Config | UserError]) -> Asked:
    """Validate an experiment's settings. configs: those read before, by their tree without the layout.

    The base's global batch does not count where layouts are benched, as under `meshtune bench --layouts`.
    """
    tree = {name: value for name, value in experiment.tree.items() if name != "layout"}
    text = json.dumps(tree, sort_keys=True, default=str)
    config = _once(configs, text, lambda: load(defaults=tree))
    if run == "train" and not config.data.train:
        raise UserError("No data is named; add data: {train: rows.jsonl} to the base.")
    own_batch = any(f"train.{name}" in experiment.settings for name in BATCH)
    own_batch |= run == "train" and any(getattr(config.train, name) is not None for name in BATCH)
    layout = PartialLayout.parse(experiment.tree.get("layout", AUTO))
    return Asked(place, config, layout, own_batch)


def _group_key(config: Config) -> tuple[str, str]:
    """Key of the experiments with the same cluster and, but for the global batch, the same workload."""
    names = {"model", "method", "lora", "data", "train"}
    return config.model_dump_json(include=names, exclude={"train": NOT_IN_GROUP_KEY}), str(config.cluster)


def _judged(group: Sequence[Asked], workload: Workload | None, here: Here) -> dict[int, Judged]:
    """The planner's verdicts on experiments of one workload and cluster, by their place.

    workload: None for a model that can't be planned.
    """
    config, result = group[0].config, {}
    facts = {"seq_len": config.data.seq_len, "model": config.model.name}
    if workload is not None:
        facts["parameters"] = model_facts(workload)["parameters"]
    searched: dict[Any, Layout | UserError] = {}
    of_world: dict[int, list[tuple[Asked, Layout]]] = {}
    for asked in group:
        try:
            layout = _completed(asked, workload, here, searched)
            of_world.setdefault(layout.world, []).append((asked, layout))
        except UserError as error:
            status = DOES_NOT_FIT if isinstance(error, NothingFits) else REFUSED
            gpus = asked.partial.world or asked.config.cluster_config.gpus
            result[asked.place] = Judged(status, " ".join(error.problems), figures=facts | {"gpus": gpus})
    for world, several in of_world.items():
        layouts = [layout for _, layout in several]
        try:
            cluster = here.cluster(config, world)
            verdicts = (
                [Judged(WAITING, layout=layout) for layout in layouts]
                if workload is None
                else [*predicted(workload, cluster, layouts)]
            )
        except UserError as error:
            verdicts = [Judged(REFUSED, " ".join(error.problems), layout) for layout in layouts]
        for (asked, layout), verdict in zip(several, verdicts, strict=True):
            known = {"layout": str(layout), "world": world, "gpus": world}
            known["global_batch_size"] = layout.global_batch_size
            result[asked.place] = replace(verdict, figures={**verdict.figures, **facts, **known})
    return result


def _completed(
    asked: Asked, workload: Workload | None, here: Here, searched: dict[Any, Layout | UserError]
) -> Layout:
    """The whole layout of an experiment: data ranks and batch sizes where only one value is possible, else
    the planner's choice.

    searched: layouts that the planner chose for equal settings. Raises UserError for a global batch that the
    layout does not make, and NothingFits or Refused if the planner finds none.
    """
    partial, config = asked.partial, asked.config
    sizes = SIZES & partial.fixed.keys()
    if not partial.open and sizes == SIZES and not asked.own_batch:
        return partial.known

    def chosen() -> Layout:
        one_way = workload is None or not splittable(workload.traits)
        cluster = here.cluster(config, partial.world)
        if workload is None or (sizes and partial.open <= {*DATA_AXES, *["ep"] * one_way}):
            return partial.complete(devices=cluster.gpus, global_batch_size=config.global_batch_size)
        plan = search(workload.of_batch(config.global_batch_size), cluster, fixed=partial.given)
        if not len(plan):
            raise empty_plan_error(plan, None)
        return plan.choice(0).layout

    key = (*map(str, sorted(partial.given.items())), *sorted(partial.open), config.global_batch_size)
    return _once(searched, key, chosen)


def predicted(workload: Workload, cluster: Cluster, layouts: Sequence[Layout]) -> Iterator[Judged]:
    """Yield what is predicted for each layout, whose worlds are the cluster's size: refused, too large, or
    its seconds and bytes.
    """
    columns = Columns.of(layouts)
    seconds = joined([times(workload, cluster, part) for part in chunks(columns)])
    memory = joined([peak(workload, cluster, part) for part in chunks(columns)])
    rules = [(rule, np.broadcast_to(rule.refuses(columns), len(layouts))) for rule in workload.rules()]
    for place, layout in enumerate(layouts):
        if against := [rule.sentence(layout) for rule, refused in rules if refused[place]]:
            yield Judged(REFUSED, " ".join(against), layout)
            continue
        batch = workload.of_batch(layout.global_batch_size)
        choice = choice_of(batch, cluster, layout, at(seconds, place), at(memory, place))
        facts, need, reason = choice.as_dict(), choice.memory.peak, None
        names = ("step_seconds", "mfu", "tokens_per_second_per_gpu")
        figures = {f"predicted_{name}": facts[name] for name in names} | {"predicted_peak_bytes": need}
        if not choice.fits and not limitless(cluster):
            over = human(need - cluster.usable_memory)
            reason = f"It needs {human(need)}, {over} too much: {memory_limit(cluster)}."
        yield Judged(DOES_NOT_FIT if reason else WAITING, reason, layout, figures, choice)


def limitless(cluster: Cluster) -> bool:
    """True for ranks on a processor without a memory budget: they share what the machine has."""
    return cluster.gpu.processor and cluster.memory_budget is None
