"""Clusters that are compared: `--gpus 16,32,8xmi300x`.

A number alone is of the config's kind. Settings of the cluster describe the config's kind: another one comes
in its usual machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.plan.cluster import Cluster, cluster_for, cluster_of
from meshtune.plan.kinds import kind_named, kinds_of
from meshtune.sections import ClusterConfig
from meshtune.setting import MOST_GPUS

# Settings that describe the machines of one kind.
OF_ONE_KIND = ("gpus_per_node", "memory_gib", "link", "network", "efficiency")


class Size(NamedTuple):
    """A number of GPUs of one kind."""

    gpus: int
    kind: str | None = None  # None: the config's


def sizes_of(given: int | str | Iterable[int | str], config: Config) -> list[Size]:
    """`8,16x mi300x` as sizes, each once, ascending within a kind, the kinds in their order.

    Raises UserError with every number that is not from 1 to MOST_GPUS and every unknown kind.
    """
    parts = [given] if isinstance(given, int | str) else list(given)
    words = [word.strip() for part in parts for word in str(part).split(",") if word.strip()]
    settings = config.cluster_config
    kinds, sizes, problems = kinds_of(settings.hardware), [], []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:\s*x\s*(\S.*))?", word)
        if not match or len(match[1]) > len(str(MOST_GPUS)) or not 1 <= int(match[1]) <= MOST_GPUS:
            problems.append(
                f"--gpus: '{word}' is no number of GPUs, 1 to {MOST_GPUS:,}; write --gpus 8,16,32 or "
                "8xh100-sxm,8xmi300x."
            )
            continue
        try:
            kind = match[2] and kind_named(match[2], kinds, "--gpus").name
        except UserError as error:
            problems += error.problems
        else:
            sizes.append(Size(int(match[1]), kind))
    if problems:
        raise UserError(dict.fromkeys(problems))
    own = settings.gpu and kind_named(settings.gpu, kinds).name
    sizes = [size._replace(kind=None) if size.kind == own else size for size in sizes]
    order = list(dict.fromkeys(size.kind for size in sizes))
    return sorted(set(sizes), key=lambda size: (order.index(size.kind), size.gpus))


def clusters_of(sizes: Sequence[Size], config: Config) -> tuple[list[Cluster], list[str], list[str]]:
    """(The clusters that are possible, sentences on those that are not, sentences on settings not used)."""
    settings, clusters, problems, unused = config.cluster_config, [], [], []
    bases = {kind: _base(kind, config, several=len({size.kind for size in sizes}) > 1) for _, kind in sizes}
    for size in sizes:
        try:
            clusters.append(bases[size.kind].of_size(size.gpus))
        except UserError as error:
            problems += error.problems
    others = [kind for kind in bases if kind]
    if others and settings.gpu:
        given = [f"cluster.{name}" for name in OF_ONE_KIND if getattr(settings, name)]
        if given:
            describe = "describes" if len(given) == 1 else "describe"
            unused.append(
                f"{', '.join(given)} {describe} {settings.gpu} alone; {', '.join(others)}: as in the kind's "
                "usual machine."
            )
    return clusters, problems, unused


def _base(kind: str | None, config: Config, *, several: bool) -> Cluster:
    """A cluster of one kind, of any size. several: several kinds are compared."""
    if kind is None:
        return cluster_for(config)
    settings = config.cluster_config
    changed: dict[str, object] = {"gpu": kind, "gpus": None}
    if settings.gpu:
        changed |= {name: ClusterConfig.model_fields[name].get_default() for name in OF_ONE_KIND}
    if isinstance(settings.price_per_gpu_hour, float) and (settings.gpu or several):
        changed["price_per_gpu_hour"] = None  # it is the price of another kind
    return cluster_of(settings.model_copy(update=changed))
