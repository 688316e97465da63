"""GPU, software and network as one value that the formulas of seconds/ read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshtune.placement.columns import Number
from meshtune.plan.accounting import PRECISIONS, stack_accounting
from meshtune.plan.hardware import Gpu, stacks

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload


@dataclass(frozen=True)
class Machine:
    """GPU, software and network, as the formulas want them.

    flops: dense peak of products with weights, core_flops: of attention (16 bits). bandwidth: of the GPU's
    memory. link: from a GPU to the others of its node. network: of a whole node to others. node: its GPUs.
    """

    flops: Number
    core_flops: Number
    bandwidth: Number
    link: Number
    network: Number
    node: Number
    multiprocessors: Number
    weight_bytes: Number  # of an element of the weights that ZeRO gathers
    element: Number  # bytes of what computes and of hidden states
    # efficiencies of the GPU kind
    matmul: Number  # share of the peak that large products reach
    depth: Number  # inner size at which a product loses half of that
    tiles: Number  # how much a last, incomplete wave of tiles costs
    misaligned: Number  # how much slower products are whose rows are not multiples of 128 bytes
    unloaded: Number  # and not even of 16
    attention: Number  # share of the peak of the attention kernel
    memory: Number  # share of the memory's bandwidth
    # of its links
    link_share: Number
    network_share: Number
    link_latency: Number
    network_latency: Number
    # of the software
    stack_matmul: Number
    stack_attention: Number
    attention_backward: Number  # its backward's time per FLOP over its forward's
    flash: Number  # 1: scores stay on chip; 0: they are written out
    score_bytes: Number  # moved for each score that is written out, forward
    batched: Number  # share of `matmul` that products of scores reach
    context_attention: Number  # how much longer attention takes when cp cuts the sequence
    elementwise_hidden: Number  # tensors of [tokens, hidden] moved in a block's forward
    elementwise_wide: Number  # and of [tokens, widened]
    logit_bytes: Number  # moved for each logit, there and back
    selective: Number  # share of a forward's products that recompute "selective" repeats
    host_block: Number  # seconds in which the host launches a block's forward
    launch_blocking: Number  # 1: the host waits for each kernel before it launches the next; 0: it runs ahead
    host_micro_batch: Number
    host_step: Number
    gradient_bytes: Number  # of an element of a gradient message of dp and ZeRO-1
    scatter_bytes: Number  # of ZeRO-2 and -3
    tensor_overlap: Number  # share of tensor messages that computing hides
    shard_overlap: Number  # share of ZeRO-3's
    shard_share: Number  # of the links' speed that ZeRO-3's messages reach
    data_overlap: Number  # share of the gradients' all-reduce
    optimizer_bytes: Number  # read and written per parameter
    send_share: Number  # of a GPU's part of the network that a pipeline's message reaches
    send_split: Number  # 1: tensor ranks send a part each, and gather it again; 0: each sends all of it
    balanced: Number  # 1: stages are balanced with the head's cost; 0: equal numbers of blocks

    @classmethod
    def of(
        cls, gpu: Gpu, stack: Mapping[str, float], *, network_share: float = 0.7, fp8: bool = False
    ) -> Machine:
        """A usual machine of this GPU with a stack of stacks.toml. network_share: a network's, unmeasured."""
        own = dict(gpu.efficiency)
        eighths = own.pop("matmul_fp8")
        facts = {
            "flops": gpu.fp8 if fp8 and gpu.fp8 else gpu.bf16,
            "core_flops": gpu.bf16,
            "bandwidth": gpu.bandwidth,
            "link": gpu.link,
            "network": gpu.network * gpu.node,
            "node": float(gpu.node),
            "multiprocessors": gpu.multiprocessors,
            "weight_bytes": 1.0 if fp8 else 2.0,
            "element": 2.0,
            "flash": 1.0,
            "network_share": network_share,
        }
        return cls(**facts | own | dict(stack) | ({"matmul": eighths} if fp8 else {}))


def machine_of(workload: Workload, cluster: Cluster) -> Machine:
    """The cluster with our engine on it."""
    stack = stacks()["meshtune-compiled" if workload.compile else "meshtune"]
    machine = Machine.of(cluster.gpu, stack, network_share=cluster.network_share)
    kept = stack_accounting("meshtune", workload.precision, workload.reduce_dtype).precision
    mixed = PRECISIONS["bf16"]  # what the stack's figures are of
    moved = 2 * (kept.trained + kept.moments) + kept.accumulated + kept.weight
    usual = 2 * (mixed.trained + mixed.moments) + mixed.accumulated + mixed.weight
    return replace(
        machine, node=float(cluster.node), link=cluster.link, network=cluster.network * cluster.node,
        element=kept.weight, weight_bytes=kept.weight, gradient_bytes=kept.accumulated,
        scatter_bytes=kept.accumulated, optimizer_bytes=machine.optimizer_bytes * moved / usual,
        **rates(cluster, workload.precision),
    )  # fmt: skip


def rates(cluster: Cluster, precision: str) -> dict[str, float]:
    """Peak FLOP/s of products and attention. torch multiplies fp32 without TF32 unless told otherwise; fp64
    runs at half of that, where a GPU has it at all.
    """
    gpu = cluster.gpu
    rate = {"fp32": gpu.fp32, "fp64": gpu.fp32 / 2}.get(precision, gpu.bf16)
    return {"flops": rate, "core_flops": rate}
