"""Facts of a plan as plain values: for `plan --json` and a run folder's plan.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from meshtune.layout import as_mapping
from meshtune.plan.cluster import Cluster
from meshtune.plan.machine import machine_of
from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.search import Choice
from meshtune.plan.step_parts import predicted_parts
from meshtune.plan.workload import Workload


def plan_yaml(choice: Choice, workload: Workload) -> str:
    """Text of a run folder's plan.yaml: the layout and its prediction.

    It has the values of `plan --json` and the seconds of a step by the parts that a run measures. For a
    processor, whose speed nobody has measured, only memory is predicted.
    """
    predicted, workload = choice.as_dict(), choice.decided(workload)
    if not choice.cluster.timed:
        predicted = {key: predicted[key] for key in ("layout", "world", "memory")}
    else:
        from meshtune.plan.over_time import step_over_time  # here: the longest chain of imports ends in it

        machine = machine_of(workload, choice.cluster)
        predicted["parts"] = predicted_parts(workload, choice.layout, machine)
        drawn = step_over_time(workload, choice) if choice.layout.pp > 1 else None
        if drawn and drawn.layout == drawn.whole:
            predicted["passes"] = [[*one] for one in drawn.timed if one.stage >= 0]
    tree = {
        "layout": str(choice.layout),
        "fields": as_mapping(choice.layout),
        "cluster": cluster_facts(choice.cluster),
        "workload": workload_facts(workload),
        "predicted": predicted,
    }
    return yaml.safe_dump(tree, sort_keys=False)


def tensors(memory: Mapping[str, Any]) -> dict[str, float]:
    """Bytes by category without what isn't a tensor (overhead), and their sum as "peak"."""
    sizes: dict[str, float] = {
        name: memory[name] for name in CATEGORIES if name != "overhead" and memory.get(name)
    }
    return sizes | {"peak": sum(sizes.values())}


def model_facts(workload: Workload) -> dict[str, Any]:
    """`model` of the JSON document: parameters, and model FLOPs per token without recomputation."""
    parameters = float(workload.work.parameters)
    return {
        "name": workload.model,
        "family": workload.traits.name,
        "parameters": round(parameters),
        "trainable_parameters": round(parameters * float(workload.work.trainable)),
        "flops_per_token": workload.flops_per_token,
    }


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """`cluster` of the JSON document: bytes, and bytes per second in one direction."""
    return {
        "gpu": cluster.gpu.name,
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.node,
        "memory": cluster.memory,
        "memory_margin": cluster.margin,
        "memory_budget": cluster.memory_budget,
        "usable_memory": cluster.usable_memory,
        "link": cluster.link,
        "network": cluster.network,
        "network_share": cluster.network_share,
        "price_per_gpu_hour": cluster.price,
        "currency": cluster.currency,
        "measured": cluster.gpu.measured,
        "efficiency_as_of": cluster.gpu.as_of or cluster.gpu.name,
    }


def workload_facts(workload: Workload) -> dict[str, Any]:
    """`workload` of the JSON document: sizes in sequences and tokens."""
    return {
        "objective": workload.objective,
        "global_batch_size": workload.global_batch_size,
        "seq_len": workload.seq_len,
        "tokens": workload.tokens,
        "mean_document_tokens": workload.document_tokens or workload.seq_len,
        "precision": workload.precision,
        "compile": workload.compile,
        "attention": workload.attention,
    }
