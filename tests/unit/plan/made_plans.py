"""Clusters, workloads of known models and configs, and the answer of one plan."""

from dataclasses import replace
from typing import Any

from known import known

from meshtune import config
from meshtune.config import Config
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.cost import UNPLANNED, RunLength
from meshtune.plan.search import Plan
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig


def machines(gpus: int = 8, gpu: str = "h100-sxm", **settings: Any) -> Cluster:
    return cluster_of(ClusterConfig(gpu=gpu, gpus=gpus, **settings))


def workload(model: str = "llama-3.1-8b", size: int = 64, seq_len: int = 4096, **settings: Any) -> Workload:
    """A known model, with uncompiled blocks if `settings` have no compile."""
    settings = {"compile": False} | settings
    return replace(known(model), seq_len=seq_len, global_batch_size=size, **settings)


def load(*words: str) -> Config:
    return config.load(None, ["model.name=x", *words])


def answered(plan: Plan, sort: str = "speed", length: RunLength = UNPLANNED) -> Answer:
    offer = offer_of(plan, sort, length)
    return Answer(plan.workload, (offer,), offer, sort, length=length)
