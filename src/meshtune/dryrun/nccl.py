"""Seconds of a collective by NCCL's own tuning model: a second opinion on the planner's formulas.

NCCL predicts each of its algorithms and protocols from tables, and runs the fastest. The tables and formulas
are those of NVIDIA/nccl src/tuning/cost_model.cc, ring.cc and nvls.cc (commit 1fc949c of 2026; 2.28 has the
same tables in src/graph/tuning.cc), speeds and channels those of src/graph/topo.h and search.cc:

    channels of a group     the fastest, up to what the links carry; nothing else is on the links
    ring, tree              in the protocols LL, LL128 and Simple; trees only for all-reduces
    NVLS, NVLS tree         the switch of a node adds up, from Hopper on
    PAT                     groups with one rank in each node
    all-to-alls, sends      are not in NCCL's model

Microseconds and GB/s, as there. Without torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from meshtune.meter.trace import Collective
from meshtune.units import counted, human, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshtune.plan.cluster import Cluster

GIGA, MICRO = 1e9, 1e-6
LL, LL128, SIMPLE = range(3)
PROTOCOLS = ("LL", "LL128", "Simple")
GENERATIONS = {"volta": 0, "ampere": 1, "ada": 1, "hopper": 2, "blackwell": 3}
HOPPER, BLACKWELL = 2, 3
DIFFERS = 0.2  # share by which two predictions differ that are named

# Tables, by protocol or by number of nodes: 1, 2, more #

BASE_LATENCY = {
    "tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0), "nvls tree": (0, 0, 0),
    "pat": (8.0, 8.0, 8.0),
}  # fmt: skip
LATENCY = {
    "nvlink": {
        "tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25), "nvls tree": (0, 0, 25),
        "pat": (0, 0, 4.0),
    },
    "pcie": {
        "tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0, 0, 0), "nvls tree": (0, 0, 0),
        "pat": (0, 0, 4.0),
    },
    "network": {
        "tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 18), "nvls tree": (0, 0, 20.9),
        "pat": (0, 0, 14.0),
    },
}  # fmt: skip
MOST_LL = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
RING_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3)  # of a channel
TREE_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
TREE_CORRECTION = (  # by protocol, from 64 bytes on for each power of two
    (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1),
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9),
)  # fmt: skip
LINK = ((20.0, 25.0), (20.0, 25.0), (20.6, 25.0), (40.1, 50.0))  # NCCL's speed of an NVLink, the data sheet's
PCIE = (12.0, 15.75)  # the same of PCIe 3.0 x16
SPEEDS = (  # of a channel in a node that are tried
    *((40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),) * 2,
    (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
)
ACROSS = (  # the same between nodes
    *((48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),) * 2,
    (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    (96, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
)
NETWORK_OVERHEAD = 1.0  # of each step on a host with Intel's processors, or ARM's
PLATEAU = 1.4  # latency of rings over the network, times the model's, from Ampere on
MOST_CHANNELS = 32  # of a search; MAXCHANNELS is 64, and each is doubled


class Timed(NamedTuple):
    """The fastest algorithm for a collective."""

    seconds: float
    algorithm: str
    protocol: str


class Group(NamedTuple):
    """Ranks of a communicator."""

    ranks: int
    nodes: int
    local: float  # ranks in a node
    channels: int
    speed: float  # of a channel, GB/s


@dataclass(frozen=True)
class Nccl:
    """NCCL on a cluster of NVIDIA's GPUs."""

    generation: int  # of GENERATIONS
    link_kind: str  # nvlink or pcie
    link: float  # of a GPU to the others of its node as NCCL counts it, GB/s
    network: float  # of a GPU to other nodes, GB/s
    node: int  # GPUs in a node
    switch: bool  # a node's GPUs are joined by switches that can add up

    @classmethod
    def of(cls, cluster: Cluster) -> Nccl | None:
        """Return NCCL on a cluster; None for GPUs that it does not run on."""
        gpu = cluster.gpu
        generation = GENERATIONS.get(gpu.architecture)
        if generation is None or gpu.link_kind not in ("nvlink", "pcie"):
            return None
        speed, nominal = LINK[generation] if gpu.link_kind == "nvlink" else PCIE
        return cls(
            generation, gpu.link_kind, cluster.link / GIGA * speed / nominal, cluster.network / GIGA,
            cluster.node, gpu.link_kind == "nvlink" and generation >= HOPPER and cluster.node >= 8,
        )  # fmt: skip

    def collective(self, collective: Collective) -> Timed | None:
        """Predict a collective; None for what NCCL has no model of, and for one rank."""
        op = {"broadcast": "broadcast", "all_gather": "gather", "reduce_scatter": "gather"}.get(collective.op)
        op = "reduce" if collective.op == "all_reduce" else op
        if op is None or collective.ranks < 2:
            return None
        local = min(collective.ranks, max(1, self.node // collective.stride))
        group = self._group(collective.ranks, local)
        algorithms: list[tuple[str, Callable[..., tuple[float, float] | None]]] = [("ring", self._ring)]
        if op == "reduce":
            algorithms += [("tree", self._tree), ("nvls", self._nvls), ("nvls tree", self._nvls_tree)]
        if op == "gather":
            algorithms += [("nvls", self._nvls), ("pat", self._pat)]
        size = max(collective.bytes, 1)
        timed = []
        for name, model in algorithms:
            for protocol in (LL, LL128, SIMPLE):
                if (found := model(group, op, protocol, size)) is not None and found[1] > 0:
                    latency, bandwidth = found
                    seconds = MICRO * (latency + size / (1000 * bandwidth))
                    timed.append(Timed(seconds, name, PROTOCOLS[protocol]))
        return min(timed)

    def _group(self, ranks: int, local: int) -> Group:
        """Channels of a group: in a node those that carry most, between nodes one for each network card."""
        nodes = math.ceil(ranks / local)
        if nodes == 1:
            tried = [
                (min(int(self.link // speed), MOST_CHANNELS), speed) for speed in SPEEDS[self.generation]
            ]
            channels, speed = max(tried, key=lambda pair: (pair[0] * pair[1], pair[1]))
            channels, speed = (channels, speed) if channels else (1, self.link)
        else:
            most = min(self.network, self.link / local)
            channels, speed = local, next((s for s in ACROSS[self.generation] if s <= most), most)
        many = self.generation >= HOPPER and speed < 50 and channels > 4
        if speed >= 25 and not many:
            channels, speed = 2 * channels, speed / 2
        return Group(ranks, nodes, ranks / nodes, channels, speed)

    def _column(self, group: Group) -> int:
        return min(group.nodes, 3) - 1

    def _latency(self, group: Group, algorithm: str, protocol: int) -> tuple[float, float]:
        """Latency of a step inside a node, and of one between nodes."""
        inside = LATENCY[self.link_kind][algorithm][protocol]
        exposed = "tree" if algorithm == "ring" and group.local == 1 else algorithm
        return inside, LATENCY["network"][exposed][protocol]

    def _ring(self, group: Group, op: str, protocol: int, size: int) -> tuple[float, float] | None:
        if protocol == LL128 and self.link_kind != "nvlink":
            return None
        ranks, nodes, _, channels, speed = group
        bus, column = channels * speed, self._column(group)
        if protocol == LL:
            bus = min(MOST_LL[self.generation if nodes == 1 else 0][column], bus / 2)
        if protocol == LL128:
            bus = min(0.92 * bus, channels * RING_LL128[self.generation][column])
        steps = {"reduce": 2 * (ranks - 1), "gather": ranks - 1, "broadcast": ranks}[op]
        inside, across = self._latency(group, "ring", protocol)
        if op == "broadcast":
            return BASE_LATENCY["ring"][protocol] + (inside if nodes == 1 else across), bus * ranks / steps
        if nodes > 1:
            inside = max(inside, NETWORK_OVERHEAD * (3 if protocol == SIMPLE else 1))
        between = (nodes - 1) * (2 if op == "reduce" else 1)
        latency = BASE_LATENCY["ring"][protocol] + (steps - between) * inside + between * across
        return latency * self._plateau(group, op, protocol, size, steps), bus * ranks / steps

    def _plateau(self, group: Group, op: str, protocol: int, size: int, steps: int) -> float:
        """Factor on the latency of long rings in the Simple protocol."""
        each = size / (2 * group.channels * group.ranks)
        if protocol != SIMPLE or each < 64:
            return 1.0
        if group.nodes > 1:
            return PLATEAU if op == "reduce" else 1.0
        if self.generation < BLACKWELL or self.link_kind != "nvlink":
            return 1.0
        most, least, half = PLATEAU - 1, 0.1, 256 * 1024
        beyond = least * min(1.0, max(0.0, (each - half) / half))
        return 1 + (1 - (least / most) ** max(0, steps - 1)) * (most - beyond)

    def _tree(self, group: Group, op: str, protocol: int, size: int) -> tuple[float, float] | None:
        if protocol == LL128 and self.link_kind != "nvlink":
            return None
        _, nodes, local, channels, speed = group
        column = self._column(group)
        bus = min(0.92 * channels * speed, channels * TREE[self.generation][column])
        if protocol == LL:
            bus = min(bus / 3.8, MOST_LL[self.generation if nodes == 1 else 0][column])
        if protocol == LL128:
            whole = bus * (7 / 9 if nodes == 1 else 120 / 128)
            bus = min(whole, channels * TREE_LL128[self.generation][column])
        inside, across = self._latency(group, "tree", protocol)
        latency = 2 * ((local - 1) * inside + int(math.log2(nodes)) * across)
        return BASE_LATENCY["tree"][protocol] + latency, bus / 2 * _corrected(protocol, size)

    def _switched(self, group: Group, op: str) -> float:
        """GB/s of each of a node's channels through its switch; each rank has one."""
        heads = int(group.local)
        speed = next((s for s in SPEEDS[self.generation] if s * heads <= self.link), 0)
        speed = speed * NVLS_EFFICIENCY[self.generation] * (heads - 1) / heads
        return 2 * speed if op == "reduce" else speed * (heads - 1) / heads

    def _nvls(self, group: Group, op: str, protocol: int, size: int) -> tuple[float, float] | None:
        if not self.switch or protocol != SIMPLE or group.nodes > 1 or group.local < 2:
            return None
        bandwidth = self._switched(group, op) * group.local
        steps = 2 * (group.ranks - 1)
        whole = bandwidth * group.ranks / steps if op == "reduce" else bandwidth
        return self._latency(group, "nvls", protocol)[0], whole

    def _nvls_tree(self, group: Group, op: str, protocol: int, size: int) -> tuple[float, float] | None:
        if not self.switch or protocol != SIMPLE or group.nodes == 1 or group.local < 2:
            return None
        across = min(self.network, ACROSS[self.generation][0]) * (2 if group.nodes == 2 else 1)
        each = min(self._switched(group, op), across, NVLS_TREE[self.generation][self._column(group)])
        inside, between = self._latency(group, "nvls tree", protocol)
        corrected = _corrected(protocol, size) if self.generation >= BLACKWELL else 1.0
        bandwidth = each * group.local * group.ranks / (2 * (group.ranks - 1)) * corrected
        return inside + 2 * int(math.log2(group.nodes)) * between, bandwidth

    def _pat(self, group: Group, op: str, protocol: int, size: int) -> tuple[float, float] | None:
        if protocol != SIMPLE or group.nodes != group.ranks:
            return None
        _, across = self._latency(group, "pat", protocol)
        latency = (
            BASE_LATENCY["pat"][protocol] + int(math.log2(group.nodes)) * across / 3.5 + 2.8 * group.ranks
        )
        return latency, 0.75 * group.channels * group.speed


def _corrected(protocol: int, size: int) -> float:
    """Share of a tree's bandwidth that it reaches at a size."""
    power = (size >> 6).bit_length() - 1
    return TREE_CORRECTION[protocol][power] if 0 <= power < 24 else 1.0


def differences(
    counts: Mapping[Collective, int], nccl: Nccl, seconds: Callable[[Collective], float]
) -> list[str]:
    """A sentence for each kind of collective that the two models predict differently, the longest first.

    counts: how often each runs in a step. seconds: the planner's, of one. A kind has one operation,
    one axis, and one size in the digits that are printed: those that differ by a norm's weight are one.
    """
    kinds: defaultdict[tuple, Counter[Collective]] = defaultdict(Counter)
    for each, count in counts.items():
        kinds[each.op, each.axis, each.ranks, human(each.bytes)][each] += count
    named: list[tuple[float, str]] = []
    for alike in kinds.values():
        (each, _), *_ = alike.most_common(1)
        count = alike.total()
        timed, planned = nccl.collective(each), seconds(each)
        if timed is None or abs(planned / timed.seconds - 1) <= DIFFERS:
            continue
        times = significant(planned / timed.seconds, 2)
        text = (
            f"{counted(count, each.op)} of {human(each.bytes)} over {each.axis} ({each.ranks:,} ranks) by "
            f"NCCL's tables {timed.seconds / MICRO:,.0f} µs ({timed.algorithm}, {timed.protocol}), by the "
            f"planner's formula {planned / MICRO:,.0f} µs: {times} times as long."
        )
        named.append((count * max(planned, timed.seconds), text))
    return [text for _, text in sorted(named, reverse=True)]
