"""Where a run meets the planner: a config's workload, and the layout that it leaves open.

Imports no torch by itself: `meshtune plan` asks here too, and has the model's numbers from the disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from meshtune.config import ClusterConfig, Config
from meshtune.errors import UserError
from meshtune.layout import Layout, as_mapping
from meshtune.model.census_cache import LoraShape, model_numbers
from meshtune.plan import fits
from meshtune.plan.answer import plan_yaml
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.memory import compiled
from meshtune.plan.search import explained, search
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload


class Uncounted(UserError):
    """A model whose work is unknown."""


def workload_of(config: Config, say: Callable[[str], None] = lambda _: None) -> Workload:
    """The workload of a config; its data need not exist. say: log of `model_numbers`. Raises UserError for a
    model that can't be planned.
    """
    model, lora = config.model, None
    if config.method == "lora":
        lora = LoraShape(config.lora.r, config.lora.target_modules)
    found = model_numbers(
        model.name,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        freeze=model.freeze,
        lora=lora,
        cache_dir=Path(config.data.cache).expanduser(),
        log=say,
    )
    if found.census.unsupported:
        raise Uncounted(
            f"{model.name} can't be planned: {found.census.unsupported}. Name a layout to train it "
            "(layout=zero3x8-mb1)."
        )
    work = Work.of(found.census)
    if config.train.compile:
        work = replace(work, kept={element: compiled(kept) for element, kept in work.kept.items()})
    return Workload(
        model=model.name,
        work=work,
        traits=found.traits,
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        document_tokens=config.data.mean_document_tokens,
        precision=config.train.precision,
        reduce_dtype=config.train.reduce_dtype,
        optimizer=config.train.optimizer,
        compile=config.train.compile,
        packing=config.data.packing,
        attention=found.attention if model.attention == "auto" else model.attention,
        lora_r=config.lora.r if config.method == "lora" else None,
    )


def chosen(config: Config, ranks: int, seen: Sequence[tuple[str, float]]) -> Layout:
    """The layout that the planner chooses for `ranks` ranks of the devices here; what the config fixes of it
    is kept. seen: (name, bytes) of each GPU of this machine; none: the ranks are on the processor.

    Raises NothingFits, with what would fit, where no layout does.
    """
    plan = search(workload_of(config), cluster_here(config, ranks, seen), fixed=config.partial_layout.given)
    if not len(plan):
        raise fits.empty_plan_error(plan, partial(lighter, config))
    return plan.choice(0).layout


def lighter(config: Config) -> dict[str, Workload]:
    """What could be trained instead of all weights: the settings for it, and its workload."""
    if config.method == "lora":
        return {}
    return {"method=lora": workload_of(config.model_copy(update={"method": "lora"}))}


def out_of_memory(config: Config, layout: Layout, seen: Sequence[tuple[str, float]]) -> list[str]:
    """What to tell a user whose run ran out of memory."""
    try:
        workload, cluster = workload_of(config), cluster_here(config, layout.world, seen)
    except UserError:
        return [
            "Try smaller micro-batches (mb1), recompute full, or a layout that cuts what is largest: zero "
            "for weights, gradients and optimizer state, tp with sp, or cp, for activations."
        ]
    return fits.out_of_memory(explained(workload, cluster, layout), workload, partial(lighter, config))


def prediction(config: Config, layout: Layout, seen: Sequence[tuple[str, float]]) -> str:
    """A run's plan.yaml: its layout, and what is predicted for it. A model or devices for which nothing can
    be predicted have the layout alone.
    """
    try:
        workload, cluster = workload_of(config), cluster_here(config, layout.world, seen)
    except UserError:
        return yaml.safe_dump({"layout": str(layout), "fields": as_mapping(layout)}, sort_keys=False)
    return plan_yaml(explained(workload, cluster, layout), workload)


def cluster_here(config: Config, ranks: int, seen: Sequence[tuple[str, float]]) -> Cluster:
    """The devices of `ranks` ranks: as the settings say what can't be seen, such as the network."""
    settings = config.cluster_config if seen else ClusterConfig()
    return cluster_of(settings.model_copy(update={"gpus": ranks}), seen=lambda: list(seen))
