"""The device, layout and attention of a run, chosen once before anything is loaded, and what is predicted.

    config ─> device ─> layout (what it leaves open: the planner) ─> attention ─> refused, or Choice

Ranks that start together agree on the first one's choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import yaml

from meshtune import compat
from meshtune.config import Config, TrainConfig
from meshtune.errors import UserError
from meshtune.layout import Layout, as_mapping
from meshtune.model.capabilities import auto_attention, traits
from meshtune.model.census_cache import numbers_of
from meshtune.model.load import load_config, on_meta
from meshtune.objectives import OBJECTIVES
from meshtune.placement.columns import Columns
from meshtune.placement.experts import BalanceSpec
from meshtune.placement.rules import UNCOMPILED, Traits, compiles, refusals, uncompiled
from meshtune.plan import changes
from meshtune.plan.advice import nearest_batches, verdict
from meshtune.plan.changes import Refused
from meshtune.plan.cluster import cluster_here
from meshtune.plan.facts import plan_yaml
from meshtune.plan.search import explained, search
from meshtune.plan.workload import Uncounted, lighter_workloads, workload_of
from meshtune.precision import PRECISIONS
from meshtune.train.run_row import device_of, gpus_of
from meshtune.units import notice

T = TypeVar("T")
FP8_CAPABILITY = (8, 9)  # compute capability of NVIDIA's GPUs from which torch multiplies 8-bit floats


class Choice(NamedTuple):
    """Layout, attention function and compiler of a run."""

    layout: Layout
    attention: str  # the name of the attention function that the model is built with, never "auto"
    compile: bool  # whether the blocks are compiled


def choose(config: Config, ranks: int) -> Choice:
    """Choose layout and attention for `ranks` ranks of the devices here; no weights are loaded.

    Raises UserError, with every reason, where the model can't be trained so; NothingFits where no layout
    fits in memory.
    """
    layout = layout_of(config, ranks)
    attention, model_traits = attention_of(config, layout, ranks)
    device = device_of(config.train.device).type
    compiled, why = compiles_blocks(config.train, model_traits, layout, device)
    if device == "cuda" and PRECISIONS[config.train.precision].fp8:
        check_fp8(why)
    if why:
        notice(f"meshtune: {UNCOMPILED.format(why)}")
    return Choice(layout, attention, compiled)


def check_fp8(uncompiled: str) -> None:
    """Raise UserError if the GPU here has no units for 8-bit floats, or blocks run uncompiled on it.

    uncompiled: why they do; "": they do not.
    """
    capability = torch.cuda.get_device_capability()
    problems = []
    if torch.version.hip is None and capability < FP8_CAPABILITY:
        problems.append(
            f"{torch.cuda.get_device_name()} (compute capability "
            f"{'.'.join(map(str, capability))}) multiplies no 8-bit floats; GPUs do from "
            f"{'.'.join(map(str, FP8_CAPABILITY))} on (Ada, Hopper, Blackwell). Use train.precision=bf16."
        )
    if uncompiled:
        problems.append(f"Matmuls in 8-bit floats need compiled blocks, and {uncompiled}. Or use bf16.")
    if problems:
        raise UserError(problems)


def compiles_blocks(
    train: TrainConfig, model_traits: Traits, layout: Layout, device: str, *, simulated: bool = False
) -> tuple[bool, str]:
    """(Whether train.compile compiles the blocks, why "auto" does not on CUDA, or "").

    device: torch's kind. simulated: nothing runs on it, so that this machine needs no compiler for it.
    """
    setting, of_device = train.compile, {"processor": device == "cpu", "tiled": train.mlp_tile is not None}
    compiled = bool(compiles(setting, model_traits, Columns.of([layout]), **of_device)[0])
    why = uncompiled(setting, model_traits, layout, **of_device)
    if setting == "auto" and compiled:
        of_tensor = compat.compiled_tensor_problem() if layout.tp > 1 else ""
        why = of_tensor or ("" if simulated else compat.compiler_problem())
    return compiled and not why, why


def choose_together(config: Config) -> Choice:
    """Choose on the first of the ranks that run, for all of them; every rank calls it. Raises as `choose`."""
    if not dist.is_initialized():
        return choose(config, 1)
    return from_first_rank(lambda: choose(config, dist.get_world_size()))


def from_first_rank(make: Callable[[], T]) -> T:
    """Return what `make` returns on rank 0, or raise the UserError that it raises there, on every rank; every
    rank calls it.
    """
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            result = [make()]
        except UserError as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], UserError):
        raise result[0]
    return result[0]


def layout_of(config: Config, ranks: int) -> Layout:
    """The complete layout of `ranks` ranks. The planner chooses what the config leaves open; a model that it
    can't count, or that no layout can train, gets data parallelism there.

    Raises UserError if the sizes don't divide; NothingFits if no layout fits in memory. The result may still
    be refused, by `attention_of` with the reasons: it may also need another number of ranks.
    """
    if config.partial_layout.whole:
        return _completed(config, ranks)
    try:
        return planned_layout(config, ranks)
    except (Uncounted, Refused):
        return _completed(config, ranks)


def planned_layout(config: Config, ranks: int) -> Layout:
    """The planner's choice; what the config fixes of it is kept. Raises NothingFits, Refused or Uncounted.

    Prints the nearest global batches that more data ranks could share, if they are faster, and the plan's
    verdict on what is fixed and on a layout that fits barely; nothing where speeds were not measured.
    """
    workload = workload_of(config, numbers_of(config))
    cluster = cluster_here(config, ranks, gpus_of(device_of(config.train.device)))
    plan = search(workload, cluster, fixed=config.partial_layout.given)
    if not len(plan):
        raise changes.empty_plan_error(plan, partial(lighter_workloads, config, numbers_of))
    best = plan.choice(0)
    # Of a processor that nobody probed, speeds are another kind's, which a run does not say.
    for sentence in [*verdict(plan, best), *nearest_batches(plan, best)] if cluster.timed else ():
        notice(f"meshtune: {sentence}")
    return best.layout


def _completed(config: Config, ranks: int) -> Layout:
    """The layout of `ranks` ranks with data parallelism in what is open.

    Raises UserError if the sizes don't divide, with every other reason to refuse the fixed part.
    """
    fields = config.partial_layout
    try:
        return fields.complete(devices=ranks, global_batch_size=config.global_batch_size)
    except UserError as error:
        known = fields.known
        if "gradient_accumulation_steps" not in fields.fixed:  # the most that any schedule takes
            known = replace(known, gradient_accumulation_steps=2 * known.stages)
        *_, others = attention_and_refusals(config, known, None)
        raise UserError([*error.problems, *others]) from None


def attention_of(config: Config, layout: Layout, ranks: int) -> tuple[str, Traits]:
    """(The attention that the model is built with, its traits). Raises UserError, with every reason, where
    the model can't be trained by `ranks` ranks under the layout with these settings.
    """
    attention, model_traits, problems = attention_and_refusals(config, layout, ranks)
    if problems:
        raise UserError(problems)
    return attention, model_traits


def attention_and_refusals(
    config: Config, layout: Layout, ranks: int | None
) -> tuple[str, Traits, list[str]]:
    """(The attention that the model is built with, its traits, why it can't be trained under the layout).

    No reasons: an empty list. ranks: how many are started; None: those of the layout. The model is
    built on meta for it. Raises UserError if the model's configuration can't be read.
    """
    settings = config.model
    family = load_config(settings.name, **settings.access, overrides=settings.overrides)
    model = on_meta(family, name=settings.name, trust_remote_code=settings.trust_remote_code)
    model_traits = traits(model)
    auto = settings.attention == "auto"
    if config.adapts:
        model_traits = model_traits.with_adapters(config.lora.dropout)
    attention = auto_attention(model, model_traits) if auto else settings.attention
    problems = refusals(
        model_traits,
        layout,
        attention=attention,
        packing=together(config),
        shared_prompts=config.data.shared_prompts,
        compile=config.train.compile,
        optimizer=config.train.optimizer,
        step_in_backward=config.train.step_in_backward,
        tiled=config.train.mlp_tile is not None,
        quantised=bool(config.quantise),
        fp8=bool(PRECISIONS[config.train.precision].fp8),
        balance=BalanceSpec(**config.experts.balancing),
        ranks=ranks,
    )
    return attention, model_traits, problems


def together(config: Config) -> bool | str:
    """Whether several documents share a sequence; of pairs the setting that puts both sides into one."""
    pairs = OBJECTIVES[config.objective].rows == "pairs"
    return f"objective = {config.objective}" if pairs else config.data.packing


# The planner's prediction for a run #


LESS_MEMORY = (
    "Try smaller micro-batches (mb1), recompute full, or a layout that cuts what is largest: zero "
    "for weights, gradients and optimizer state, tp with sp, or cp, for activations."
)


def prediction(
    config: Config, layout: Layout, gpus: Sequence[tuple[str, float]], label_share: float | None,
    longest: int, flash: int | None,
) -> str:  # fmt: skip
    """A run's plan.yaml: its layout, and memory and time that are predicted for it; only the layout for a
    model or devices that the planner can't predict.

    gpus: (name, bytes) of each GPU of this machine; none: the run is on the processor. label_share: labelled
    tokens of the data as a share of sequences of data.seq_len; None: not known, all are counted. longest:
    tokens of the longest sequence. flash: as in Workload, the version that the run chose.
    """
    try:
        workload = workload_of(config, numbers_of(config)).of_labels(label_share, longest)
        workload = replace(workload, flash=flash)
        cluster = cluster_here(config, layout.world, gpus)
    except UserError:
        return yaml.safe_dump({"layout": str(layout), "fields": as_mapping(layout)}, sort_keys=False)
    return plan_yaml(explained(workload, cluster, layout), workload)


def out_of_memory(config: Config, layout: Layout, gpus: Sequence[tuple[str, float]]) -> list[str]:
    """Sentences with remedies for a run that ran out of memory under `layout`; general ones for a model or
    devices that the planner can't predict.

    gpus: as in `prediction`.
    """
    try:
        workload = workload_of(config, numbers_of(config))
        cluster = cluster_here(config, layout.world, gpus)
    except UserError:
        return [LESS_MEMORY]
    choice = explained(workload, cluster, layout)
    return changes.out_of_memory(choice, workload, partial(lighter_workloads, config, numbers_of))
