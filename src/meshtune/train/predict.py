"""The planner's prediction for a run: its plan.yaml, and what to change when memory runs out."""

from collections.abc import Sequence
from functools import partial

import yaml

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout, as_mapping
from meshtune.model.census_cache import numbers_of
from meshtune.plan import fits
from meshtune.plan.cluster import cluster_here
from meshtune.plan.facts import plan_yaml
from meshtune.plan.search import explained
from meshtune.plan.workload import lighter_workloads, workload_of

SMALLER = (
    "Try smaller micro-batches (mb1), recompute full, or a layout that cuts what is largest: zero "
    "for weights, gradients and optimizer state, tp with sp, or cp, for activations."
)


def prediction(
    config: Config, layout: Layout, gpus: Sequence[tuple[str, float]], label_share: float | None
) -> str:
    """A run's plan.yaml: its layout, and memory and time that are predicted for it; the layout alone for a
    model or devices that the planner can't predict.

    gpus: (name, bytes) of each GPU of this machine; none: the run is on the processor. label_share: labelled
    tokens of the data as a share of sequences of data.seq_len; None: not known, all are counted.
    """
    try:
        workload = workload_of(config, numbers_of(config)).of_labels(label_share)
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
        return [SMALLER]
    choice = explained(workload, cluster, layout)
    return fits.out_of_memory(choice, workload, partial(lighter_workloads, config, numbers_of))
