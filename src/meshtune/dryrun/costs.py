"""Seconds of each operation of a traced step on a GPU kind, by the planner's formulas and constants.

    matmuls       from their shapes                        plan/seconds/gpu.py
    attention     from the FLOPs of the keys that are seen  plan/seconds/gpu.py
    collectives   from bytes, ranks and nodes              plan/seconds/collectives.py
    host copies   from bytes, over the link to the host    plan/hardware.toml
    all else      bytes moved, over the bandwidth that is reached

A dry run is a second opinion on which operations run and when, not on how fast a matmul is. Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshtune.meter.trace import (
    BACKWARD,
    GATHERED,
    GRADIENT_COPIES,
    OFFLOADS,
    WEIGHTS,
    Collective,
    Operation,
    Storage,
)
from meshtune.plan.machine import Machine, machine_of
from meshtune.plan.seconds.collectives import (
    all_to_alls,
    exchange_links,
    message_latency,
    ranks_in_node,
    ring_collectives,
    tree_all_reduce,
)
from meshtune.plan.seconds.gpu import attention_rate, matmul, matmul_rate
from meshtune.plan.seconds.pipeline import send_seconds
from meshtune.precision import UNMIXED

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload

# Operations that read some rows of a tensor: what they move is what they write, twice.
ROWS = ("embedding", "index", "index_select", "gather", "take")
# Operations that write some elements of their first argument, which a trace counts as a whole: a source's.
SCATTERS = ("scatter_", "scatter_add_", "index_copy_", "index_add_")
# Operations that make a tensor of constants, and read nothing of the one whose dtype they take.
FILLS = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
# Operations that overwrite an argument, which a trace counts among what they read.
OVERWRITES = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "zero_", "fill_", *GRADIENT_COPIES)

FP8_MATMUL = "_scaled_mm"
FORWARD_MATMULS, BACKWARD_MATMULS = 2, 5
# Operator of an attention kernel -> (position of q, of k, which v follows, number of matmuls).
ATTENTION = {
    f"{kernel}{suffix}": arguments
    for kernel in (
        "meshtune.attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "meshtune_dryrun.flex_attention",
    )
    for suffix, arguments in (("", (0, 1, FORWARD_MATMULS)), ("_backward", (1, 2, BACKWARD_MATMULS)))
}


def base_name(operation: str) -> str:
    """Name of an operation without its namespace and overload: "aten.mm.default" -> "mm"."""
    parts = operation.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def runs(operation: Operation) -> bool:
    """True for what runs on a GPU or between GPUs."""
    return operation.kernels > 0 or operation.collective is not None


def is_attention(operation: Operation) -> bool:
    """True for the kernel of an attention core, forward or backward."""
    return operation.name.rpartition(".")[0] in ATTENTION


@dataclass(frozen=True)
class Costs:
    """Seconds of operations and collectives on one machine."""

    machine: Machine  # in the precision of the workload
    by_dtype: Mapping[str, Machine]  # the same in the precision of each dtype that matmuls can have
    _seconds: dict[tuple, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster) -> Costs:
        """Return the costs on a cluster, with the workload's software stack."""
        by_dtype = {
            dtype: machine_of(replace(workload, precision=precision), cluster)
            for dtype, precision in UNMIXED.items()
        }
        return cls(machine_of(workload, cluster), by_dtype)

    def compute(self, operation: Operation, storages: Sequence[Storage] = ()) -> float:
        """Seconds of an operation on an idle device, without its launch, but on a processor, which launches
        nothing ahead; 0 if it has no kernel.

        storages: of its step, by which a matmul of the backward is known to make the gradient of a weight.
        """
        if not operation.kernels or operation.collective is not None:
            return 0.0
        sizes = operation.shapes, operation.read, operation.written, operation.flops, operation.pairs
        of_weight = makes_weight_gradient(operation, storages)
        alike = operation.name, operation.dtype, *sizes, of_weight
        if alike not in self._seconds:  # a step has many of each kind
            self._seconds[alike] = self._compute(operation, of_weight=of_weight)
        return self._seconds[alike] + self.blocking * self.machine.launch * operation.kernels

    def _compute(self, operation: Operation, *, of_weight: bool) -> float:
        machine = self.by_dtype.get(operation.dtype, self.machine)
        traffic = moved_bytes(operation) / (machine.bandwidth * machine.memory)
        if is_attention(operation):
            return _attention(machine, operation)
        if operation.name in OFFLOADS:
            return float(operation.written / machine.host_bandwidth)
        if (sizes := matmul_sizes(operation)) is not None:
            count, rows, cols, inner = sizes
            lying = (rows, cols) if of_weight else (cols, inner)
            added = added_bytes(operation, rows, cols) / (machine.bandwidth * machine.memory)
            in_fp8 = base_name(operation.name) == FP8_MATMUL
            fastest = self.machine.fp8_matmul_max if in_fp8 else None
            seconds = matmul(machine, rows, cols, inner, contiguous=lying, fastest=fastest)
            return float(count * seconds + added)
        return float(max(operation.flops / matmul_rate(machine), traffic))

    def collective(self, collective: Collective) -> float:
        """Seconds of a collective, or of a send, on idle links."""
        machine, size, ranks = self.machine, collective.bytes, collective.ranks
        in_node = ranks_in_node(ranks, collective.stride, machine)
        axes = collective.axis.split("+")
        match collective.op:
            case "send" | "receive":
                return float(send_seconds(size, collective.stride, machine))
            case "all_reduce" if not collective.waits:  # of gradients, while the backward runs
                return float(2 * ring_collectives(machine, size, ranks, in_node))
            case "all_reduce":
                return float(tree_all_reduce(machine, size, ranks, in_node))
            case "all_gather" | "reduce_scatter" if "dp_shard" in axes:
                return float(ring_collectives(machine, size / machine.shard_share, ranks, in_node))
            case "all_to_all" if axes == ["ep"]:
                (link, network), nodes = exchange_links(machine), ranks / in_node
                seconds = max(size * (1 / nodes - 1 / ranks) / link, size * (1 - 1 / nodes) / network)
                return float(seconds + message_latency(machine, ranks, in_node))
            case "all_to_all":
                return float(all_to_alls(machine, size, ranks, in_node))
            case _:
                return float(ring_collectives(machine, size, ranks, in_node))

    def launch(self, operation: Operation) -> float:
        """Seconds in which the host, ahead of the device, launches an operation's kernels; a collective is
        one.
        """
        collective = operation.collective is not None
        return float(self.machine.launch * (collective or operation.kernels * (not self.blocking)))

    @property
    def blocking(self) -> bool:
        """Whether the host waits for each kernel before it launches the next one, as a processor does."""
        return self.machine.launch_blocking > 0


def moved_bytes(operation: Operation) -> int:
    """Bytes that an operation reads and writes in the GPU's memory."""
    name, read, written = base_name(operation.name), operation.read, operation.written
    if name in ROWS:
        return min(read, written) + written
    if name in SCATTERS:
        return 3 * max(read - written, 0)  # the source is read, its elements' places are read and written
    if name in FILLS:
        return written
    if name in OVERWRITES:
        return max(read - written, 0) + written
    if name == "all_gather_copy_in":  # its last argument is the whole buffer; it fills one shard of it
        sizes = [math.prod(shape) for shape in operation.shapes]
        return 2 * read * sum(sizes[:-1]) // sum(sizes)
    return read + written


def added_bytes(operation: Operation, rows: int, cols: int) -> int:
    """Bytes that an addmm moves besides its matmul's: it reads the matrix that it adds to, which it copies
    into the output first unless it is that. A bias, of one dimension, is added as the output is written.
    """
    name = base_name(operation.name)
    if not name.startswith("addmm") or operation.shapes[0] != (rows, cols):
        return 0
    return operation.written * (1 if name == "addmm_" else 3)


def matmul_sizes(operation: Operation) -> tuple[int, int, int, int] | None:
    """(Count, rows, columns, inner size) of the matmuls of an operation; None for all others."""
    first, second = {
        "mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2),
        "_grouped_mm": (0, 1), FP8_MATMUL: (0, 1),
    }.get(base_name(operation.name), (0, 0))  # fmt: skip
    if second == 0 or len(operation.shapes) <= second:
        return None
    left, right = operation.shapes[first], operation.shapes[second]
    count = math.prod(left[:-2])
    return count, left[-2], right[-1], left[-1]


def makes_weight_gradient(operation: Operation, storages: Sequence[Storage]) -> bool:
    """True for a matmul of the backward that reads no weight: its inner size is the tokens, along which no
    operand lies in memory.
    """
    read = (storages[number].category for number in operation.reads if number < len(storages))
    return operation.phase == BACKWARD and {WEIGHTS, GATHERED}.isdisjoint(read)


def _attention(machine: Machine, operation: Operation) -> float:
    """Seconds of an attention kernel: FLOPs of the keys that are seen and of some more for each query."""
    backward = "backward" in operation.name
    queries = operation.shapes[1 if backward else 0]  # [..., heads, head size] or [..., heads, tokens, size]
    rate = attention_rate(machine, queries[-1]) * machine.attention * machine.stack_attention
    more = 4 * machine.attention_keys * math.prod(queries)
    if not backward:
        return float((operation.flops + more) / rate)
    # 5 matmuls against 2; gpu.py, attention_passes
    return float((operation.flops + 2.5 * more) * machine.attention_backward / rate)
