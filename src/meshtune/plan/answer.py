"""One answer to `meshtune plan`: a config in, the best layouts with their reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import as_mapping
from meshtune.plan import advice, fits
from meshtune.plan.advice import Alternative
from meshtune.plan.batches import batch_sentences, batch_sizes, best_of_batches, nearest_sentences
from meshtune.plan.changes import changes
from meshtune.plan.cluster import Cluster, cluster_of, gpus_here
from meshtune.plan.cost import RunCost, RunLength, run_length
from meshtune.plan.fits import Lighter
from meshtune.plan.search import Choice, Plan, search
from meshtune.plan.workload import Workload

UNPLANNED = RunLength(None, None)
GOALS = ("speed", "cost", "gpus", "memory")


@dataclass(frozen=True)
class Answer:
    """The plans of all cluster sizes that were asked for, and the layout chosen from them."""

    workload: Workload
    plans: Mapping[int, Plan]  # by number of GPUs
    gpus: int  # of the chosen layout
    choice: Choice  # the best by the goal
    goal: str  # one of GOALS
    run: RunCost  # of the whole run under it
    length: RunLength = UNPLANNED
    left_out: tuple[str, ...] = ()  # sentences on cluster sizes that are impossible

    @property
    def plan(self) -> Plan:
        """The plan of the chosen cluster size."""
        return self.plans[self.gpus]

    def best(self, most: int) -> list[Choice]:
        """The chosen layout, then the others by step time, for the goal memory by peak: `most` in all."""
        places = self.plan.by_memory() if self.goal == "memory" else range(len(self.plan))
        ranked = (self.plan.choice(place) for place in islice(places, most))
        others = [choice for choice in ranked if choice.layout != self.choice.layout]
        return [self.choice, *others][:most]

    @cached_property
    def reasoning(self) -> list[str]:
        return advice.reasoning(self.plan, self.choice)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        return advice.alternatives(self.plan, self.choice)

    @cached_property
    def changes(self) -> list[str]:
        nearest = nearest_sentences(self.plan, self.choice)
        return [*nearest, *changes(self.plan, self.choice, double_batch=not nearest)]

    @cached_property
    def batch_advice(self) -> list[str]:
        """Sentences on smaller and larger global batches; of this one, the fastest layout."""
        current = self.workload.global_batch_size
        plan, others = self.plan, [size for size in batch_sizes(self.workload) if size != current]
        choices = best_of_batches(self.workload, plan.cluster, others, plan.fixed)
        return batch_sentences(self.workload, dict(sorted({**choices, current: plan.choice(0)}.items())))

    def batches(self) -> dict[tuple[int, int], Choice | None]:
        """The best layout by (global batch size, GPUs), around the workload's batch; None: none fits."""
        sizes = sorted({*self.plans, *cluster_sizes(self.plan.cluster)[-4:]})
        return {
            (size, gpus): choice
            for gpus in sizes
            for size, choice in best_of_batches(
                self.workload, self.plan.cluster.of_size(gpus), batch_sizes(self.workload)
            ).items()
        }

    def as_dict(self, most: int = 10) -> dict[str, Any]:
        """The document that `plan --json` prints, with `most` layouts; bytes and seconds."""
        plan = self.plan
        document: dict[str, Any] = {
            "model": model_facts(self.workload),
            "cluster": cluster_facts(plan.cluster),
            "workload": workload_facts(self.workload),
            "tool": self.workload.tool.name,
            "stack": self.workload.stack,
            "goal": self.goal,
            "considered": plan.considered,
            "fitting": len(plan),
            "layouts": [choice.as_dict() for choice in self.best(most)],
            "pareto": [str(plan.choice(place).layout) for place in plan.pareto()],
            "rejected": [rejected._asdict() for rejected in plan.rejected],
            "reasoning": self.reasoning,
            "alternatives": [
                {
                    "name": alternative.name,
                    "sentence": alternative.sentence,
                    "layout": alternative.choice and str(alternative.choice.layout),
                }
                for alternative in self.alternatives
            ],
            "changes": self.changes,
            "batches": self.batch_advice,
            "run": vars(self.run) | {"notes": list(self.length.notes)},
            "notes": list(self.workload.notes),
        }
        if len(self.plans) > 1:
            document["sizes"] = {
                gpus: sized.choice(0).as_dict() if len(sized) else None for gpus, sized in self.plans.items()
            }
        if self.left_out:
            document["left_out"] = list(self.left_out)
        return document


def ask(
    config: Config,
    workload: Workload,
    *,
    sizes: Sequence[int] = (),
    goal: str = "speed",
    lighter: Lighter = dict,
) -> Answer:
    """Plan the workload on the config's cluster, or on clusters of these sizes, and choose by the goal.

    sizes: in GPUs; empty: the config's, or for the goals cost and gpus all `cluster_sizes` up to it. Those
    that are impossible are left out (`Answer.left_out`). goal: as in `by_goal`. lighter: returns
    workloads to offer where nothing fits. Raises UserError for bad settings and if every size is impossible,
    NothingFits or Refused as `by_goal`.
    """
    cluster = cluster_for(config)
    if not sizes and goal in ("cost", "gpus"):
        sizes = cluster_sizes(cluster)
    plans, problems = {}, []
    for gpus in sizes or (cluster.gpus,):
        try:
            plans[gpus] = search(workload, cluster.of_size(gpus), fixed=config.partial_layout.given)
        except UserError as error:
            problems += error.problems
    if not plans:
        raise UserError(problems)
    gpus, choice = by_goal(plans, goal, lighter)
    length = run_length(config)
    return Answer(workload, plans, gpus, choice, goal, RunCost.of(choice, length), length, tuple(problems))


def by_goal(plans: Mapping[int, Plan], goal: str, lighter: Lighter = dict) -> tuple[int, Choice]:
    """(GPUs, best layout) of the cluster size that serves the goal best.

    speed: the shortest step; cost: the fewest GPU-seconds per token; gpus: the fewest GPUs; memory: the
    lowest peak. plans: by number of GPUs; empty ones are passed over. Raises UserError for another goal,
    NothingFits or Refused (`fits.empty_plan_error`, which uses `lighter`) where all plans are empty.
    """
    if goal not in GOALS:
        raise UserError(f"--goal {goal} is no goal; goals: {', '.join(GOALS)}.")
    choices = {
        gpus: plan.choice(plan.by_memory()[0] if goal == "memory" else 0)
        for gpus, plan in plans.items()
        if len(plan)
    }
    if not choices:
        raise fits.empty_plan_error(plans[max(plans)], lighter)
    keys = {
        "speed": lambda gpus: choices[gpus].seconds.total,
        "cost": lambda gpus: choices[gpus].seconds.total * gpus,
        "gpus": lambda gpus: gpus,
        "memory": lambda gpus: choices[gpus].memory.peak,
    }
    gpus = min(choices, key=keys[goal])
    return gpus, choices[gpus]


def largest(config: Config, workload: Workload, what: str) -> tuple[Any, Choice]:
    """(value, best layout) of the largest `what` that fits the config's cluster: see `fits.largest`.

    The config's layout is not regarded.
    """
    return fits.largest(workload, cluster_for(config), what)


def cluster_for(config: Config) -> Cluster:
    """The cluster of the settings; without a number of GPUs, as many as a fixed layout has.

    Raises UserError where neither the settings nor this machine have GPUs.
    """
    settings = config.cluster_config
    seen = gpus_here() if settings.gpu is None else []
    if settings.gpu is None and not seen:
        raise UserError(
            "There is no GPU here to plan for; name a kind and how many, as in cluster.gpu=h100-sxm "
            "cluster.gpus=8, or cluster.gpu=cpu."
        )
    return cluster_of(settings, gpus=config.partial_layout.world, seen=lambda: seen)


def cluster_sizes(cluster: Cluster) -> list[int]:
    """Cluster sizes up to the cluster's own, in GPUs: halves of a node, and doublings of nodes."""
    inside = [cluster.node // 2**power for power in range(8) if cluster.node % 2**power == 0]
    across = [cluster.node * 2**power for power in range(1, 16)]
    return sorted({*(gpus for gpus in (*inside, *across) if gpus < cluster.gpus), cluster.gpus})


def plan_yaml(choice: Choice, workload: Workload) -> str:
    """Text of a run folder's plan.yaml: the layout and its prediction.

    For a processor, whose speed nobody has measured, the prediction is of memory alone.
    """
    predicted = choice.as_dict()
    if not choice.cluster.timed:
        predicted = {key: predicted[key] for key in ("layout", "world", "memory")}
    tree = {
        "layout": str(choice.layout),
        "fields": as_mapping(choice.layout),
        "cluster": cluster_facts(choice.cluster),
        "workload": workload_facts(workload),
        "predicted": predicted,
    }
    return yaml.safe_dump(tree, sort_keys=False)


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
        "usable_memory": cluster.usable_memory,
        "link": cluster.link,
        "network": cluster.network,
        "network_share": cluster.network_share,
        "price_per_gpu_hour": cluster.price,
        "efficiency_as_of": cluster.gpu.as_of or cluster.gpu.name,
    }


def workload_facts(workload: Workload) -> dict[str, Any]:
    """`workload` of the JSON document: sizes in sequences and tokens."""
    return {
        "global_batch_size": workload.global_batch_size,
        "seq_len": workload.seq_len,
        "tokens": workload.tokens,
        "mean_document_tokens": workload.document_tokens or workload.seq_len,
        "precision": workload.precision,
        "compile": workload.compile,
        "attention": workload.attention,
    }
