"""The machines of a run: GPUs of one kind, in equal nodes, as a config says or as they are found here.

cluster: {gpu: h100-sxm, gpus: 64}      a kind of hardware.toml, in its usual machine
cluster: my-cluster.yaml                the same keys in a file, such as one that was measured
cluster: auto                           the GPUs of this machine, times its nodes
"""

from __future__ import annotations

import difflib
import os
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from meshtune.config import ClusterConfig
from meshtune.errors import UserError
from meshtune.plan.hardware import GIGA, Gpu, catalogue, gpu_of, named
from meshtune.units import GIB, human

MARGIN = 0.04  # of a GPU's memory that a plan leaves free
NETWORK_SHARE = 0.7  # of a network's speed, until it is measured


@dataclass(frozen=True)
class Cluster:
    """gpus of one kind, `node` of them in each machine. memory: bytes of each; network: bytes per second and
    direction of each GPU's part of its node's, of which `network_share` is reached. price: of a GPU-hour.
    """

    gpu: Gpu
    gpus: int
    node: int
    memory: float
    link: float
    network: float
    network_share: float = NETWORK_SHARE
    price: float | None = None

    def of_size(self, gpus: int) -> Cluster:
        """The same machines, more or fewer of them. Raises UserError for a number that doesn't fill them."""
        if gpus > self.node and gpus % self.node:
            below = gpus // self.node * self.node
            raise UserError(
                f"{gpus} GPUs do not fill machines of {self.node}; use {below} or {below + self.node}, or "
                "set cluster.gpus_per_node."
            )
        return replace(self, gpus=gpus)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)


def room(cluster: Cluster) -> str:
    """What a GPU has, and what of it a plan uses."""
    return f"{human(cluster.memory)}, of which {human(cluster.memory * (1 - MARGIN))} are used at most"


def cluster_of(
    settings: ClusterConfig,
    *,
    gpus: int | None = None,
    seen: Callable[[], list[tuple[str, float]]] | None = None,
) -> Cluster:
    """The cluster that the settings describe; what they leave out is as in the GPU kind's usual machine, or,
    where no kind is named, as it is `seen`.

    gpus: how many there are, where the settings don't say. seen: (driver's name, bytes) of each GPU here.
    Raises UserError, every problem at once, for unknown kinds and impossible numbers.
    """
    kinds = catalogue() | _own_kinds(settings)
    memory = settings.memory_gib * GIB if settings.memory_gib else None
    here = 0
    if settings.gpu is None:
        gpu, here, found = _found((seen or gpus_here)(), kinds, settings.gpus or gpus or 1)
        memory = memory or found
    else:
        gpu = _kind(settings.gpu, kinds)
    if settings.efficiency:
        if unknown := sorted(settings.efficiency.keys() - gpu.efficiency.keys()):
            raise UserError(
                f"cluster.efficiency.{name} is no efficiency of a GPU; there are "
                f"{', '.join(sorted(gpu.efficiency))}."
                for name in unknown
            )
        gpu = replace(gpu, efficiency={**gpu.efficiency, **settings.efficiency})
    count = settings.gpus or gpus or here or 1
    here_alone = settings.gpu is None and here > 0
    return Cluster(
        gpu=gpu,
        gpus=1,
        node=settings.gpus_per_node or (here if here_alone else gpu.node),
        memory=memory or gpu.memory,
        link=settings.link * GIGA if settings.link else gpu.link,
        network=settings.network * GIGA if settings.network else gpu.network,
        network_share=settings.network_share or NETWORK_SHARE,
        price=settings.price_per_gpu_hour,
    ).of_size(count)


def gpus_here() -> list[tuple[str, float]]:
    """(name, bytes of memory) of each NVIDIA GPU of this machine, by its driver's tool; none without one."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    found = [(name.strip(), float(mib) * 2**20) for name, mib in rows if mib.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = takewhile(lambda each: each not in ("", "-1"), (each.strip() for each in visible.split(",")))
    return found[: len(list(named))]


def _found(seen: list[tuple[str, float]], kinds: Mapping[str, Gpu], ranks: int) -> tuple[Gpu, int, float]:
    """(kind, how many, bytes of each); the smallest where they differ. Without a GPU: this processor, whose
    memory the ranks share.
    """
    if not seen:
        return kinds["cpu"], ranks, psutil.virtual_memory().total / ranks
    name = seen[0][0]
    gpu = named(name)
    if gpu is None:
        raise UserError(
            f"The GPU '{name}' is not in the catalogue; name the kind nearest to it as cluster.gpu "
            f"({', '.join(kinds)}), or describe it in a file named by cluster.hardware."
        )
    return gpu, len(seen), min(memory for _, memory in seen)


def _kind(name: str, kinds: Mapping[str, Gpu]) -> Gpu:
    if name not in kinds:
        word = name.lower().replace("_", "-")
        near = [kind for kind in kinds if kind.startswith(word)]
        near = near or difflib.get_close_matches(word, kinds, n=1, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"cluster.gpu = {name} is no kind that is known; {hint + ' ' if hint else ''}Kinds: "
            f"{', '.join(kinds)}. Others can be described in a file named by cluster.hardware."
        )
    return kinds[name]


def _own_kinds(settings: ClusterConfig) -> dict[str, Gpu]:
    """Kinds from the user's own file, in hardware.toml's form."""
    if settings.hardware is None:
        return {}
    file = Path(settings.hardware).expanduser()
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cluster.hardware = {file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cluster.hardware = {file} is not TOML: {error}.") from None
    found, problems = {}, []
    for name, table in tables.items():
        try:
            found[name] = gpu_of(name, table)
        except (KeyError, TypeError) as error:
            problems.append(f"cluster.hardware = {file}: [{name}] lacks or misspells {error}.")
        except ValueError as error:
            problems.append(f"cluster.hardware = {file}: [{name}]: {error}.")
    if problems:
        raise UserError(problems)
    return found
