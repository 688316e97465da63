"""The cluster of a run: GPUs of one kind in equal nodes, from the settings or from this machine's driver;
its prices, and other sizes to compare.

cluster: {gpu: h100-sxm, gpus: 64}      a kind of hardware.toml, in its usual machine
cluster: my-cluster.yaml                the same keys in a file, such as one that was measured
cluster: my-cluster.toml                what `meshtune probe` measured on a machine: its settings and its kind
cluster: auto                           the GPUs of this machine, times its nodes
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import psutil

from meshtune.config import Config
from meshtune.errors import UserError, did_you_mean, expanded, nearest, written
from meshtune.plan.hardware import GIGA, Gpu, catalogue, kind_named, kinds_of, named, out_of_range
from meshtune.sections import ClusterConfig
from meshtune.setting import MOST_GPUS
from meshtune.units import GIB, bytes_of, counted, human, speed_unit
from meshtune.yaml_tree import read_toml, read_yaml

MARGIN = 0.04  # share of a GPU's memory that a plan leaves free, on a kind with a measured matmul rate
UNMEASURED_MARGIN = 0.10  # on any other kind
ON_PROCESSORS = ("memory_margin", "memory_budget_gib")  # settings that count for ranks on a processor
FOR_SUBMIT = ("storage", "time_limit", "slurm", "sky", "kubeflow", "dstack", "ray")  # of jobs, not of plans
NETWORK_SHARE = 0.7  # of the network's bandwidth that collectives reach, until it is measured


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes."""

    gpu: Gpu
    gpus: int  # in all nodes
    node: int  # GPUs in a node
    memory: float  # bytes of each GPU
    link: float  # between the GPUs of a node, bytes/s in one direction
    network: float  # between nodes, each GPU's part of it, bytes/s in one direction
    network_share: float = NETWORK_SHARE  # of `network` that collectives reach
    price: float | None = None  # of a GPU-hour, in `currency`
    currency: str = ""  # as the user named it; "": not named
    memory_budget: float | None = (
        None  # bytes of each GPU that a plan fills at most; None: as the margin says
    )
    memory_margin: float | None = None  # share of `memory` left free; None: MARGIN or UNMEASURED_MARGIN
    host_memory: float | None = None  # bytes that all ranks of a node share; None: each has its own
    ram: float | None = None  # bytes of the machine's memory outside its GPUs; None: it isn't this machine

    def of_size(self, gpus: int) -> Cluster:
        """The same nodes, more or fewer of them: `gpus` in all, which may be a part of one node.

        This machine's processor stays one machine, however many ranks share it.
        Raises UserError if they need more than one node and don't fill whole ones.
        """
        one_machine = self.gpu is catalogue()["cpu"] and self.node == self.gpus
        node = gpus if one_machine else self.node
        if gpus > node and gpus % node:
            below = gpus // node * node
            raise UserError(
                f"{gpus} GPUs do not fill machines of {node}; use {below} or {below + node}, or "
                "set cluster.gpus_per_node."
            )
        memory = self.memory if self.host_memory is None else self.host_memory / min(gpus, node)
        return replace(self, gpus=gpus, node=node, memory=memory)

    @property
    def ranks_in_node(self) -> int:
        """Ranks that work on one machine at once."""
        return min(self.gpus, self.node)

    @property
    def title(self) -> str:
        """Number and kind, as "8 x mi300x (not measured)" for a kind without a matmul rate of its own."""
        return f"{self.gpus:,} x {self.gpu.name}{' (not measured)' * (not self.gpu.measured)}"

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)

    @property
    def speed_unit(self) -> str:
        """Unit of one GPU's tokens per second; processors have no predicted speed."""
        return speed_unit(self.gpus, "cpu" if self.gpu.processor else "cuda")

    @property
    def timed(self) -> bool:
        """Whether predicted times are this kind's: those of a processor only after `meshtune probe`."""
        return self.gpu.measured or not self.gpu.processor

    @property
    def usable_memory(self) -> float:
        """Bytes of each GPU that a plan may use."""
        within_margin = self.memory * (1 - self.margin)
        return within_margin if self.memory_budget is None else min(within_margin, self.memory_budget)

    @property
    def margin(self) -> float:
        """Share of each GPU's memory that a plan leaves free."""
        if self.memory_margin is not None:
            return self.memory_margin
        return MARGIN if self.gpu.measured else UNMEASURED_MARGIN


def cluster_of(
    settings: ClusterConfig,
    *,
    gpus: int | None = None,
    seen: Callable[[], list[tuple[str, float]]] | None = None,
) -> Cluster:
    """The cluster of these settings.

    Fields that the settings leave out are the GPU kind's usual machine's; without a kind, this machine's.

    gpus: their number, if the settings leave it out; None: those here if no kind is set, else 1. seen:
    returns (driver's name, bytes) of each GPU here, called only if no kind is set; None: asks the driver.
    Where it returns none, the cluster is this machine's processor. Raises UserError for an unknown kind or
    efficiency, a cluster.hardware that can't be read, GPUs that don't fill whole nodes, and as `prices_of`.
    """
    kinds = kinds_of(settings.hardware)
    memory = settings.memory_gib * GIB if settings.memory_gib else None
    here = 0
    if settings.gpu is None:
        gpu, here, seen_memory = _seen_kind((seen or gpus_here)(), kinds)
        memory = memory or seen_memory
    else:
        gpu = kind_named(settings.gpu, kinds)
    this_processor = gpu is catalogue()["cpu"]
    host = psutil.virtual_memory().total if this_processor else gpu.memory if gpu.shared else None
    if settings.efficiency:
        problems = [
            f"cluster.efficiency.{name} is not an efficiency of a GPU; there are "
            f"{', '.join(sorted(gpu.efficiency))}."
            for name in sorted(settings.efficiency.keys() - gpu.efficiency.keys())
        ]
        ranges = (out_of_range(name, value) for name, value in settings.efficiency.items())
        problems += [f"cluster.{problem}" for several in ranges for problem in several]
        if problems:
            raise UserError(problems)
        measured = gpu.measured or "matmul" in settings.efficiency
        shared = {
            ranks: {name: value for name, value in table.items() if name not in settings.efficiency}
            for ranks, table in gpu.shared.items()
        }
        efficiency = {**gpu.efficiency, **settings.efficiency}
        gpu = replace(gpu, efficiency=efficiency, measured=measured, shared=shared)
    prices, currency = prices_of(settings.price_per_gpu_hour, gpu.name, kinds)
    count = settings.gpus or gpus or here or 1
    node = here if settings.gpu is None and here else count if this_processor else gpu.node
    return Cluster(
        gpu=gpu,
        gpus=1,
        node=settings.gpus_per_node or node,
        memory=memory or gpu.memory,
        link=settings.link * GIGA if settings.link else gpu.link,
        network=settings.network * GIGA if settings.network else gpu.network,
        network_share=settings.network_share or NETWORK_SHARE,
        price=prices.get(gpu.name),
        currency=currency,
        memory_budget=settings.memory_budget_gib and settings.memory_budget_gib * GIB,
        memory_margin=settings.memory_margin,
        host_memory=host if memory is None else None,
        ram=psutil.virtual_memory().total if here else None,
    ).of_size(count)


def cluster_for(config: Config) -> Cluster:
    """The cluster of the settings; without a number of GPUs, the number that a fixed layout has.

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


def gpus_here() -> list[tuple[str, float]]:
    """(name, bytes of memory) of each visible NVIDIA GPU here, from nvidia-smi; none without it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in listing.splitlines() if "," in line]
    gpus = [(name.strip(), float(mib) * 2**20) for name, mib in rows if mib.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    indices = (index.strip() for index in visible.split(","))
    return gpus[: len(list(takewhile(lambda index: index not in ("", "-1"), indices)))]


def _seen_kind(seen: list[tuple[str, float]], kinds: Mapping[str, Gpu]) -> tuple[Gpu, int, float | None]:
    """(kind, number, bytes of each) of the GPUs seen here, by the first one's name; bytes of the smallest.

    seen: (driver's name, bytes) of each. Empty: (cpu, 0, None).
    Raises UserError for a GPU that is not in the catalogue.
    """
    if not seen:
        return kinds["cpu"], 0, None
    name = seen[0][0]
    gpu = named(name)
    if gpu is None:
        raise UserError(
            f"The GPU '{name}' is not in the catalogue; name the kind nearest to it as cluster.gpu "
            f"({', '.join(kinds)}), or describe it in a file named by cluster.hardware."
        )
    return gpu, len(seen), min(memory for _, memory in seen)


def cluster_here(config: Config, ranks: int, gpus: Sequence[tuple[str, float]]) -> Cluster:
    """The devices of `ranks` ranks; the settings say what can't be seen, such as the network.

    gpus: (driver's name, bytes) of each GPU of this machine; empty: the ranks are on the processor, and of
    the cluster's settings only the memory's margin and budget count, unless they name a processor that was
    measured. cluster.gpus never counts. Raises as `cluster_of`.
    """
    settings = config.cluster_config
    if not gpus and not _measured_processor(settings):
        settings = ClusterConfig(**{name: getattr(settings, name) for name in ON_PROCESSORS})
    return cluster_of(settings.model_copy(update={"gpus": ranks}), seen=lambda: list(gpus))


def unused_here(config: Config, ranks: int, gpus: Sequence[tuple[str, float]]) -> list[str]:
    """Sentence on the settings of the cluster that are other than those of the devices here, which count.

    The arguments are those of `cluster_here`.
    """
    settings = config.cluster_config
    default = ClusterConfig()
    wanted = {name for name, value in settings if value != getattr(default, name)} - {*FOR_SUBMIT}
    unused = {"gpus"} if gpus or _measured_processor(settings) else wanted - {*ON_PROCESSORS}
    if settings.gpus == ranks:
        unused -= {"gpus"}
    if settings.gpu and kind_named(settings.gpu, kinds_of(settings.hardware)).processor:
        unused -= {"gpu"}
    names = [f"cluster.{name}" for name, _ in settings if name in wanted & unused]
    if not names:
        return []
    where = "the GPUs here" if gpus else "this machine's processor"
    effect = f"{', '.join(names)} ha{'s' if len(names) == 1 else 've'} no effect"
    return [f"{effect}: the run has {counted(ranks, 'rank')} on {where}."]


def _measured_processor(settings: ClusterConfig) -> bool:
    """True if the settings name a processor whose speed was measured. Raises UserError as `kinds_of`."""
    if settings.gpu is None:
        return False
    gpu = kind_named(settings.gpu, kinds_of(settings.hardware))
    return gpu.processor and gpu.measured


def with_memory_budget(config: Config, budget: str | float | None) -> Config:
    """The config with `cluster.memory_budget_gib`.

    budget: such as "70GiB" or "75 GB"; a number is in GiB; None: the config as it is. Raises UserError for
    something that isn't a size.
    """
    if budget is None:
        return config
    size = bytes_of(str(budget), unit="GiB")
    if not size:
        raise UserError(f"--memory-budget {budget} is not a size; write --memory-budget 70GiB, or 75GB.")
    cluster = config.cluster_config.model_copy(update={"memory_budget_gib": size / GIB})
    return config.model_copy(update={"cluster": cluster})


# Prices of a GPU-hour #

# price_per_gpu_hour: 2.5                            of cluster.gpu
# price_per_gpu_hour: {h100-sxm: 2.5, mi300x: 1.9, currency: USD}
# price_per_gpu_hour: prices.toml                    the same keys in a file, TOML or YAML


SETTING = "cluster.price_per_gpu_hour"


def prices_of(
    given: float | Mapping[str, Any] | str | None, kind: str, kinds: Collection[str]
) -> tuple[dict[str, float], str]:
    """(Prices that the setting gives by kind, their currency as the user wrote it, or "").

    A number is the price of `kind`. kinds: all names that a price may have. Raises UserError for a file that
    can't be read, and with every name and price that is wrong.
    """
    if given is None:
        return {}, ""
    if isinstance(given, int | float):
        return {kind: given}, ""
    table, source = (given, SETTING) if isinstance(given, Mapping) else (_read(given), f"{SETTING} = {given}")
    if problems := list(_problems(table, source, kinds)):
        raise UserError(problems)
    prices = {name: float(price) for name, price in table.items() if name != "currency"}
    return prices, table.get("currency", "")


def _read(file: str) -> Mapping[str, Any]:
    path = expanded(file)
    if path.suffix.lower() != ".toml":
        return read_yaml(path)
    return read_toml(path, SETTING)


def _problems(table: Mapping[str, Any], source: str, kinds: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each entry that isn't a price of a known kind and not the currency."""
    for name, price in table.items():
        if name == "currency":
            if not isinstance(price, str):
                yield f"{source}: currency = {written(price)} is not text; write it as USD."
            continue
        if name not in kinds:
            word = str(name).lower().replace("_", "-")
            near = [kind for kind in kinds if kind.startswith(word)] or nearest(word, kinds)
            yield f"{source}: {written(name)} is not a GPU kind{did_you_mean(near)}"
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not (number and 0 < price < math.inf):
            yield f"{source}: {written(name)} = {written(price)}: write a number above 0."


# Sizes that are compared #

# A number without a kind is of the config's kind. Settings of the cluster describe the config's kind:
# another one comes in its usual machine.


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
                f"--gpus: '{word}' is not a number of GPUs, 1 to {MOST_GPUS:,}; write --gpus 8,16,32 or "
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
                f"{', '.join(given)} {describe} only {settings.gpu}; {', '.join(others)}: as in the kind's "
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


# Settings that are probably in other units #


# More than any GPU has; a kind's own limits are lower.
NETWORK = 100.0  # GB/s to other machines: 800 Gb/s
LINK = 1000.0  # GB/s to the others of its machine
MEMORY = 1000.0  # GiB
SLACK = 1.5  # times a kind's memory, which varies with the driver and the board


def other_units(settings: ClusterConfig) -> tuple[str, ...]:
    """Sentences on network, link and memory that are larger than the kind has, with what may be meant; on a
    processor, whose memory is planned with.

    Raises UserError for an unknown kind, and as `kinds_of`.
    """
    gpu = kind_named(settings.gpu, kinds_of(settings.hardware)) if settings.gpu else None
    if gpu is not None and gpu.processor:
        total = human(psutil.virtual_memory().total)
        sentence = (
            f"cluster.gpu=cpu is this machine's processor: its ranks share {total}. For another machine set "
            "cluster.memory_gib, the memory of one rank."
        )
        return (sentence,) if gpu is catalogue()["cpu"] and not settings.memory_gib else ()
    name = f"a usual {gpu.name}" if gpu else "no GPU"
    link, memory = (gpu.link / GIGA, gpu.memory / GIB * SLACK) if gpu else (LINK, MEMORY)
    sentences = []
    if settings.network and settings.network > min(NETWORK, link):
        limit = f"{name} has {link:g} in its own machine" if link < NETWORK else "800 Gb/s are 100"
        sentences.append(
            f"cluster.network={settings.network:g} is in GB/s per GPU; {limit}. If Gb/s are meant, write "
            f"cluster.network={settings.network / 8:g}."
        )
    if settings.link and settings.link > link:
        sentences.append(
            f"cluster.link={settings.link:g} is in GB/s in one direction; {name} has "
            f"{'more than ' * (gpu is None)}{link:g}. Halve a rate of both directions, and divide Gb/s by 8."
        )
    if settings.memory_gib and settings.memory_gib > memory:
        has = "has as much" if gpu is None else f"has {gpu.memory / GIB:.4g}"
        sentences.append(
            f"cluster.memory_gib={settings.memory_gib:g} is in GiB; {name} {has}. If MiB are meant, write "
            f"cluster.memory_gib={settings.memory_gib / 1024:.4g}."
        )
    return tuple(sentences)
