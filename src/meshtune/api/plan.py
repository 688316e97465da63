"""Plan: predict every layout, one layout, or the largest workload that fits. Needs no GPU and no data."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from meshtune.api.model_file import model_file
from meshtune.api.settings import Settings, config_of
from meshtune.config import Config
from meshtune.errors import NothingFits, UserError, expanded
from meshtune.model.census_cache import (
    LoraShape,
    Variant,
    config_file,
    inputs_of,
    inputs_of_fields,
    lora_shape,
    numbers_of,
    shipped,
    stored,
)
from meshtune.model.hub import is_stored, local_path
from meshtune.plan import answer
from meshtune.plan.answer import Answer
from meshtune.plan.changes import Lighter, silent
from meshtune.plan.cluster import (
    Cluster,
    cluster_for,
    cluster_here,
    other_units,
    sizes_of,
    with_memory_budget,
)
from meshtune.plan.cost import bounds_of
from meshtune.plan.explanation import Explanation, explain
from meshtune.plan.hardware import named
from meshtune.plan.models import by_size, known_config, tables
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import Choice, best_fitting
from meshtune.plan.step_parts import MeasuredRun
from meshtune.plan.work import Work
from meshtune.plan.workload import (
    UNDROPPED,
    Workload,
    imbalance_note,
    lighter_workloads,
    positions_note,
    workload_of,
)
from meshtune.precision import DTYPE_BYTES, NF4_BYTES, PRECISIONS
from meshtune.rundir import RunDir
from meshtune.tools.export import tool_for
from meshtune.units import human, on_screen, working

PLANNING = "counting the model and ranking layouts"  # while a command does

Log = Callable[[str], None]  # gets sentences on the model, and one while its numbers are derived
StrPath = str | os.PathLike[str]


def plan(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    gpus: int | str | Sequence[int | str] = (),
    sort: str = "speed",
    goal: str | None = None,
    by: str | timedelta | None = None,
    budget: float | None = None,
    tool: str = MESHTUNE.name,
    memory_budget: str | float | None = None,
    log: Log | None = None,
    count: Log = silent,
) -> Answer:
    """Predict every layout on the config's cluster, or on several clusters; choose the first by a column:
    speed, cost, gpus or memory.

    config: a Config, a mapping of its sections, or a YAML file. overrides: section.key=value each. gpus:
    numbers of GPUs, with or without a kind ("8xh100-sxm"). by: the longest time of the run, a timedelta or a
    text such as "48h"; budget: the most that it may cost. tool: that runs the layout, as in --for: memory and
    time are predicted for it, and only its layouts are considered. memory_budget: the most that is filled of
    each GPU, as "70GiB" or in GiB; None: what the margin leaves. goal: the old name of `sort`.
    `Answer.choice` is the chosen layout with its memory (bytes) and step time (seconds), `Answer.best(n)` the
    n best, `Answer.offers` all clusters. log: gets each line on the progress; None: they are printed on
    stderr if that is a notebook's, and in a terminal with the time so far. count: with `log`, gets one for
    each change that is tried where nothing fits. Raises UserError for bad settings, NothingFits if no layout
    fits or no run keeps `by` and `budget`.
    """
    shown = nullcontext(count) if log else working(PLANNING, on_screen)
    log = log or on_screen
    if goal:
        log("plan(goal=…) is read in this version, not in the next; write sort=….")
    config = with_memory_budget(config_of(config, overrides), memory_budget)
    bounds, sizes = bounds_of(by, budget), sizes_of(gpus, config)
    with shown as count, workloads(config, tool, log) as (workload, lighter):
        sort = goal or sort
        found = answer.ask(
            config, workload, sizes=sizes, sort=sort, bounds=bounds, lighter=lighter, count=count
        )
        undropped = lighter().get(UNDROPPED)
        return replace(found, undropped=undropped()) if undropped else found


def explained(
    config: Config, layouts: Sequence[str], *, tool: str = MESHTUNE.name, log: Log = silent
) -> list[Explanation]:
    """Predict each layout, in their order, and say why it can't run if it can't (`explanation.explain`).

    tool: that runs them, as in --for.
    """
    with workloads(config, tool, log) as (workload, _):
        explanations, problems = [], []
        for layout in layouts:
            try:
                explanations.append(explain(config, workload, layout))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(problems)
        sizes = {explanation.choice.layout.ep for explanation in explanations}
        uneven = (imbalance_note(config, workload.traits, ep) for ep in sizes)
        say(dict.fromkeys((*workload.notes, *uneven)), log)
        return explanations


def largest(
    config: Config, quantity: str, *, tool: str = MESHTUNE.name, log: Log = silent, count: Log = silent
) -> tuple[int | str, Choice]:
    """The largest `quantity` (model, seq_len or batch) that fits, and its best layout.

    model: of models.toml, see `known_workload`. tool: that runs it, as in --for. count: as in `plan`. Raises
    NothingFits if not even the smallest fits.
    """
    if quantity == "model":
        cluster, runner = cluster_for(config), tool_for(tool, config)
        for name in by_size():
            if not _weights_fit(name, cluster, config.method):
                continue
            workload = known_workload(config, name).run_by(runner)
            if choice := best_fitting(workload, cluster):
                say((*workload.notes, choice.attention, *_other_adapters(config, [config.method])), log)
                return name, choice
        raise _no_model(cluster)
    with workloads(config, tool, log) as (workload, lighter):
        value, choice = answer.largest(workload, cluster_for(config), quantity, lighter, count)
        say((*workload.notes, choice.attention), log)
        if quantity == "seq_len":
            documents = config.data.mean_document_tokens
            note = positions_note(config.model.name, int(value), workload.positions, documents)
            say([note], log)
        return value, choice


def longest_sequences(
    config: Config, *, tool: str = MESHTUNE.name, log: Log = silent
) -> tuple[Cluster, dict[str, dict[str, int | None]]]:
    """(The cluster, tokens of the longest sequence that fits it by model of models.toml and by method).

    The largest model comes first; None: not even the shortest of `answer.LENGTHS` fits. The config's own
    model and method don't count; see `known_workload`. tool: as in --for. Raises NothingFits if none fits.
    """
    say(other_units(config.cluster_config), log)
    cluster = cluster_for(config)
    by_method = [config.model_copy(update={"method": name}) for name in tool_for(tool, config).methods]
    runners = [(trained, tool_for(tool, trained)) for trained in by_method]

    def longest(name: str) -> dict[str, int | None]:
        return {
            trained.method: answer.longest_sequence(known_workload(trained, name).run_by(runner), cluster)
            if _weights_fit(name, cluster, trained.method)
            else None
            for trained, runner in runners
        }

    found = {name: longest(name) for name in by_size()}
    if not any(length for lengths in found.values() for length in lengths.values()):
        raise _no_model(cluster)
    say(_other_adapters(config, [trained.method for trained in by_method]), log)
    return cluster, found


def known_workload(config: Config, name: str) -> Workload:
    """The config's workload with a model of models.toml in place of its own, by the shipped counts.

    Adapters are those of LoRA's defaults: no others are shipped. Not packed where the model's attention can't
    keep documents apart.
    """
    variant = Variant(lora=LoraShape() if config.adapts else None)
    numbers = shipped(inputs_of_fields(known_config(name), variant))
    assert numbers, f"{name} is not in counts.xz"
    model = config.model.model_copy(update={"name": name})
    workload = workload_of(config.model_copy(update={"model": model}), numbers)
    return replace(workload, packing=workload.packing and workload.attention == "meshtune")


def _weights_fit(name: str, cluster: Cluster, method: str) -> bool:
    """False if the weights of a model of models.toml, in 16 or 4 bits, exceed the memory of all GPUs."""
    held = NF4_BYTES if method == "qlora" else 2
    return held * tables()[name]["parameters"] <= cluster.memory * cluster.gpus


def _other_adapters(config: Config, methods: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if the config has other adapters than `known_workload` counts."""
    if {"lora", "qlora"} & {*methods} and lora_shape(config) != LoraShape():
        yield (
            f"LoRA is counted with its defaults (lora.r={LoraShape().r}, all linear layers, no dropout), not "
            "with the settings given; for these, ask for one model: meshtune plan max seq_len model.name=…"
        )


def _no_model(cluster: Cluster) -> NothingFits:
    return NothingFits(f"None of the {len(tables())} models of plan/models.toml fits {cluster.title}.")


def say(notes: Iterable[str | None], log: Log) -> None:
    for note in filter(None, notes):
        log(note)


@contextmanager
def workloads(
    config: Config, tool: str = MESHTUNE.name, log: Log = silent
) -> Iterator[tuple[Workload, Lighter]]:
    """Give the config's workload as a tool runs it, and a function that returns workloads that need less.

    The model's config.json need not exist: see `model_file`. Raises UserError as that, as `numbers_of`, and
    if the tool can't train so.
    """
    units = other_units(config.cluster_config)  # a wrong cluster is refused before a model is built
    runner = tool_for(tool, config)
    with model_file(config.model.name, config.model.revision) as (file, notes):
        workload = workload_of(config, numbers_of(config, file=file, log=log)).run_by(runner)
        lighter = partial(lighter_workloads, config, partial(numbers_of, file=file), partial(tool_for, tool))
        others = reference_notes(config, workload.work, log)
        workload = replace(workload, notes=(*notes, *workload.notes, *others, *units))
        try:
            yield workload, lighter
        except UserError:  # there is no answer to say them
            say(workload.notes, log)
            raise


def other_reference(config: Config) -> str:
    """Name of another model that is the reference; "": there is none, or the model itself is."""
    name = getattr(getattr(config, config.objective, None), "reference", "base")
    return "" if name == "base" else name


def reference_notes(config: Config, work: Work, log: Log) -> tuple[str, ...]:
    """Sentences on the shape of another model that is the reference, and on its weights, which no plan
    counts, where they are more than those of the model to train. work: of that one.
    """
    if not (name := other_reference(config)):
        return ()
    fields = {"name": name, "revision": None, "overrides": {}, "freeze": ()}
    whole = {"model": config.model.model_copy(update=fields), "method": "full"}
    with model_file(name) as (file, notes):
        other = numbers_of(config.model_copy(update=whole), file=file, log=log).census.total
    if other <= (own := work.blocks * work.held_block_parameters + work.outside_parameters):
        return notes
    element = DTYPE_BYTES[PRECISIONS[config.train.precision].compute]
    return (
        *notes,
        f"{config.objective}.reference={name}: its weights, {human(other * element)} in all, are in memory "
        f"before the first step, shared out as the layout shares out the {human(own * element)} of the model "
        "to train. Peaks here are of steps; `meshtune dryrun` has both.",
    )


def layout_refused(config: Config, gpus: int) -> list[str] | None:
    """Sentences on why `gpus` GPUs can't train under the config's layout, by the placement rules, without
    torch; [] if they can, or if the planner chooses; None for a model that was not counted before.
    """
    name, variant = config.model.name, Variant(overrides=config.model.overrides)
    if not config.partial_layout.whole:
        return []
    try:
        layout = config.partial_layout.complete(devices=gpus, global_batch_size=config.global_batch_size)
    except UserError as error:
        return [*error.problems]
    with suppress(UserError):  # a file or a model that training refuses for another reason
        here = local_path(name) or is_stored(name)
        inputs = inputs_of(config_file(name, config.model.revision), variant) if here else None
        numbers = stored(inputs, expanded(config.data.cache, "data.cache"))
        if not numbers and (fields := known_config(name)):
            numbers = shipped(inputs_of_fields(fields, variant))
        return workload_of(config, numbers).refusals(layout) if numbers else None
    return None


def workload_of_run(config: Config, run: MeasuredRun, log: Log = silent) -> Workload:
    """Workload of a finished run. config: its settings. Raises UserError for a model that the planner can't
    count.
    """
    with workloads(config, log=log) as (workload, _):
        facts = run.facts
        workload = replace(workload, flash=facts.get("flash_attention", 2))  # earlier runs had torch's 2
        workload = workload.of_labels(facts.get("label_share"), facts.get("longest_sequence"))
        if run.imbalance > 1:
            workload = replace(workload, work=replace(workload.work, imbalance=run.imbalance))
        return workload.of_batch(run.layout.global_batch_size)


# Finished runs as they were measured, and the devices that they were on #


def read_runs(paths: Sequence[StrPath]) -> list[tuple[MeasuredRun, RunDir]]:
    """The timed steps of all run folders. Raises UserError with a sentence for each that has none."""
    found, problems = [], []
    for path in dict.fromkeys(folders_of(paths)):
        folder = RunDir(path)
        try:
            found.append((MeasuredRun.of(str(path), folder.rows()), folder))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return found


def folders_of(paths: Sequence[StrPath]) -> list[Path]:
    """The run folders among these, and in those that hold run folders. Raises UserError for any other."""
    found, problems = [], []
    for path in map(expanded, paths):
        below = (file.parent for file in path.glob("*/metrics.jsonl"))
        inside = [path] if RunDir(path).metrics_file.exists() else sorted(below)
        found += inside
        if not inside:
            problems.append(f"{path} holds no run: there is no metrics.jsonl in it or in its folders.")
    if problems:
        raise UserError(problems)
    return found


def cluster_of_run(config: Config, run: MeasuredRun) -> Cluster:
    """The devices that a run was on, by its run row. Raises as `cluster_here`."""
    if run.facts.get("device_type") != "cuda":
        return cluster_here(config, run.layout.world, [])
    device, ranks = str(run.facts["device"]), run.layout.world
    kind = named(device)
    here = ranks // run.nodes
    return cluster_here(config, ranks, [(device, kind.memory if kind else 0.0)] * here)
