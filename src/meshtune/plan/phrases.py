"""Phrases that several sentences of the planner share: memory that a layout needs, and the limit on it."""

from __future__ import annotations

from meshtune.plan.cluster import Cluster
from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES, Memory
from meshtune.plan.seconds.step import TIE
from meshtune.units import human


def largest_category(memory: Memory) -> str:
    """The category, one of CATEGORIES, with most bytes."""
    return max(CATEGORIES, key=lambda category: getattr(memory, category))


def memory_need(memory: Memory) -> str:
    """The peak and its largest category: "140.97 GiB, 89.75 GiB of it optimizer state"."""
    largest = largest_category(memory)
    return f"{human(memory.peak)}, {human(getattr(memory, largest))} of it {CATEGORY_NAMES[largest]}"


def device(cluster: Cluster) -> str:
    """The owner of `cluster.memory`: a GPU, or a rank where processors share one memory."""
    return "rank" if cluster.gpu.name == "cpu" else "GPU"


def memory_limit(cluster: Cluster) -> str:
    """A clause that says how much of each GPU's memory a plan may use."""
    usable, memory = human(cluster.usable_memory), human(cluster.memory)
    return f"the planner fills at most {usable} of a {device(cluster)}'s {memory}"


def longer(ratio: float) -> str:
    """A step's time against another one's, as a share of it: "takes 4% longer" for a ratio of 1.04."""
    if abs(ratio - 1) < TIE:
        return "takes as long"
    return f"takes {abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'less time'}"
