"""One answer to `meshtune plan`: a config in, the best layouts with their reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import yaml

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import PartialLayout, as_mapping
from meshtune.plan import advice, fits
from meshtune.plan.advice import Alternative
from meshtune.plan.cluster import Cluster, cluster_of, gpus_here, room
from meshtune.plan.cost import Run
from meshtune.plan.fits import Others
from meshtune.plan.search import Choice, Plan, explained, search
from meshtune.plan.workload import Workload
from meshtune.units import human

GOALS = ("speed", "cost", "gpus", "memory")


@dataclass(frozen=True)
class Answer:
    """plans: by number of GPUs. choice: the best of all by the goal, on `gpus` of them. run: the whole run,
    where its steps are known. left_out: why other sizes can't be.
    """

    workload: Workload
    plans: Mapping[int, Plan]
    gpus: int
    choice: Choice
    goal: str
    run: Run | None
    left_out: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """Of the cluster size that was chosen."""
        return self.plans[self.gpus]

    def best(self, most: int) -> list[Choice]:
        """The choice, then the quickest of the others."""
        others = [each for each in self.plan.best(most) if each.layout != self.choice.layout]
        return [self.choice, *others][:most]

    @cached_property
    def reasoning(self) -> list[str]:
        return advice.steps(self.plan, self.choice)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        return advice.alternatives(self.plan, self.choice)

    @cached_property
    def changes(self) -> list[str]:
        return advice.changes(self.plan, self.choice)

    @cached_property
    def batch_advice(self) -> list[str]:
        own = self.workload.global_batch_size
        others = [size for size in advice.batch_sizes(self.workload) if size != own]
        found = fits.batches(self.workload, self.plan.cluster, others) | {own: self.plan.choice(0)}
        return advice.batch_sentences(self.workload, dict(sorted(found.items())))

    def batches(self) -> dict[tuple[int, int], Choice | None]:
        """The best layout by (global batch size, GPUs), around what was asked."""
        sizes = sorted({*self.plans, *smaller(self.plan.cluster)[-4:]})
        return {
            (size, gpus): choice
            for gpus in sizes
            for size, choice in fits.batches(
                self.workload, self.plan.cluster.of_size(gpus), advice.batch_sizes(self.workload)
            ).items()
        }

    def as_dict(self, most: int = 10) -> dict[str, Any]:
        """What `plan --json` prints."""
        plan, w = self.plan, self.workload
        found: dict[str, Any] = {
            "model": model_facts(w),
            "cluster": cluster_facts(plan.cluster),
            "workload": workload_facts(w),
            "goal": self.goal,
            "considered": plan.considered,
            "fitting": len(plan),
            "layouts": [each.as_dict() for each in self.best(most)],
            "pareto": [str(plan.choice(place).layout) for place in plan.pareto()],
            "rejected": [each._asdict() for each in plan.rejected],
            "reasoning": self.reasoning,
            "alternatives": [
                {
                    "name": each.name,
                    "sentence": each.sentence,
                    "layout": each.choice and str(each.choice.layout),
                }
                for each in self.alternatives
            ],
            "changes": self.changes,
            "batches": self.batch_advice,
            "run": None if self.run is None else vars(self.run),
        }
        if len(self.plans) > 1:
            found["sizes"] = {
                gpus: each.choice(0).as_dict() if len(each) else None for gpus, each in self.plans.items()
            }
        if self.left_out:
            found["left_out"] = list(self.left_out)
        return found


def ask(
    config: Config,
    workload: Workload,
    *,
    sizes: Sequence[int] = (),
    goal: str = "speed",
    steps: int | None = None,
    others: Others = dict,
) -> Answer:
    """The best layout of the config's workload on its cluster, or on clusters of these sizes.

    steps: of the whole run; None: train.max_steps. others: what could be trained instead where nothing fits.
    Raises UserError for bad settings, NothingFits where no
    layout of any size fits.
    """
    cluster = cluster_for(config)
    if not sizes and goal in ("cost", "gpus"):
        sizes = smaller(cluster)
    plans, problems = {}, []
    for gpus in sizes or (cluster.gpus,):
        try:
            plans[gpus] = search(workload, cluster.of_size(gpus), fixed=config.partial_layout.given)
        except UserError as error:
            problems += error.problems
    if not plans:
        raise UserError(problems)
    gpus, choice = by_goal(plans, goal, others)
    steps = steps or config.train.max_steps
    run = Run.of(choice, steps) if steps else None
    return Answer(workload, plans, gpus, choice, goal, run, tuple(problems))


def explain(config: Config, workload: Workload, text: str) -> tuple[Choice, list[str]]:
    """What is predicted for one layout, and what speaks against it. A layout without micro-batch and
    accumulation gets the best ones; one that makes another global batch is predicted for that.
    """
    partial = PartialLayout.parse(text)
    layout, cluster = partial.known, cluster_for(config)
    if partial.world:
        cluster = cluster.of_size(partial.world)
    if not partial.whole:
        plan = search(workload, cluster, fixed=partial.given)
        if len(plan):
            return plan.choice(0), []
        if not (near := plan.nearest(1)):
            raise fits.nothing(plan)
        layout = near[0].layout
    elif {"micro_batch_size", "gradient_accumulation_steps"} - partial.fixed.keys():
        layout = partial.complete(devices=layout.world, global_batch_size=workload.global_batch_size)
    against = workload.refusals(layout)
    if layout.global_batch_size != workload.global_batch_size:
        against.append(
            f"{layout} makes {layout.global_batch_size} sequences a step, but train.global_batch_size is "
            f"{workload.global_batch_size}; the prediction is for {layout.global_batch_size}."
        )
        workload = workload.of_batch(layout.global_batch_size)
    choice = explained(workload, cluster, layout)
    if not choice.fits:
        against.append(f"It needs {human(choice.memory.peak)}; {cluster.gpu.name}: {room(cluster)}.")
    return choice, against


def largest(config: Config, workload: Workload, what: str) -> tuple[Any, Choice]:
    """The largest `what` (model, seq_len, batch) that fits the config's cluster, with its best layout."""
    return fits.largest(workload, cluster_for(config), what)


def cluster_for(config: Config) -> Cluster:
    """The cluster of the settings; without a number of GPUs as many as a fixed layout has. Raises UserError
    where neither the settings nor this machine say what GPUs.
    """
    settings = config.cluster_config
    seen = gpus_here() if settings.gpu is None else []
    if settings.gpu is None and not seen:
        raise UserError(
            "There is no GPU here to plan for; name a kind and how many, as in cluster.gpu=h100-sxm "
            "cluster.gpus=8, or cluster.gpu=cpu."
        )
    return cluster_of(settings, gpus=config.partial_layout.world, seen=lambda: seen)


def smaller(cluster: Cluster) -> list[int]:
    """Numbers of GPUs up to the cluster's: halves of a machine, and doublings of machines."""
    inside = [cluster.node // 2**n for n in range(8) if cluster.node % 2**n == 0]
    across = [cluster.node * 2**n for n in range(1, 16)]
    return sorted({*(n for n in (*inside, *across) if n < cluster.gpus), cluster.gpus})


def plan_yaml(choice: Choice, workload: Workload) -> str:
    """What a run folder keeps as plan.yaml: the layout and what was predicted for it; of a processor, whose
    speed nobody has measured, the memory alone.
    """
    predicted = choice.as_dict()
    if choice.cluster.gpu.name == "cpu":
        predicted = {key: predicted[key] for key in ("layout", "world", "memory")}
    tree = {
        "layout": str(choice.layout),
        "fields": as_mapping(choice.layout),
        "cluster": cluster_facts(choice.cluster),
        "workload": workload_facts(workload),
        "predicted": predicted,
    }
    return yaml.safe_dump(tree, sort_keys=False)


def model_facts(w: Workload) -> dict[str, Any]:
    parameters = float(w.work.parameters)
    return {
        "name": w.model,
        "family": w.traits.name,
        "parameters": round(parameters),
        "trainable_parameters": round(parameters * float(w.work.trainable)),
        "flops_per_token": w.flops_per_token,
    }


def cluster_facts(c: Cluster) -> dict[str, Any]:
    return {
        "gpu": c.gpu.name, "gpus": c.gpus, "gpus_per_node": c.node, "memory": c.memory, "link": c.link,
        "network": c.network, "network_share": c.network_share, "price_per_gpu_hour": c.price,
        "efficiency_as_of": c.gpu.as_of or c.gpu.name,
    }  # fmt: skip


def workload_facts(w: Workload) -> dict[str, Any]:
    return {
        "global_batch_size": w.global_batch_size, "seq_len": w.seq_len, "tokens": w.tokens,
        "mean_document_tokens": w.document_tokens or w.seq_len, "precision": w.precision,
        "compile": w.compile, "attention": w.attention,
    }  # fmt: skip


def by_goal(plans: Mapping[int, Plan], goal: str, others: Others = dict) -> tuple[int, Choice]:
    """(GPUs, the best layout) of these cluster sizes: the quickest step, the fewest GPU-seconds a token, the
    fewest GPUs, or the least memory. Raises NothingFits where no size has a layout that fits.
    """
    if goal not in GOALS:
        raise UserError(f"--goal {goal} is no goal; goals: {', '.join(GOALS)}.")
    found = {
        gpus: _by_memory(plan) if goal == "memory" else plan.best(1)[0]
        for gpus, plan in plans.items()
        if len(plan)
    }
    if not found:
        raise fits.nothing(plans[max(plans)], others)
    keys = {
        "speed": lambda gpus: found[gpus].seconds.total,
        "cost": lambda gpus: found[gpus].seconds.total * gpus,
        "gpus": lambda gpus: gpus,
        "memory": lambda gpus: found[gpus].memory.peak,
    }
    gpus = min(found, key=keys[goal])
    return gpus, found[gpus]


def _by_memory(plan: Plan) -> Choice:
    return plan.choice(int(np.argmin(plan.memory.peak)))
