"""GPU, software and network as one value: the constants that the formulas of seconds/ read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshtune.optimizers import OPTIMIZERS
from meshtune.placement.states import copies_of
from meshtune.plan.hardware import Gpu, stacks
from meshtune.precision import PRECISIONS
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload


@dataclass(frozen=True)
class Machine:
    """Constants of a GPU kind, its links and a software stack.

    Efficiencies of the kind and constants of the software are keys of hardware.toml and stacks.toml.
    """

    # the GPU and its cluster
    flops: Number  # dense peak of matmuls with weights, FLOP/s
    core_flops: Number  # dense peak of attention, FLOP/s in 16 bits
    bandwidth: Number  # of the GPU's memory, bytes/s
    link: Number  # from a GPU to the others of its node, bytes/s in one direction
    network: Number  # from a whole node to other nodes, bytes/s in one direction
    node: Number  # GPUs in a node
    multiprocessors: Number
    weight_bytes: Number  # of an element of the weights that ZeRO gathers
    element: Number  # bytes of an element of activations and compute weights
    # efficiencies of the GPU kind
    matmul: Number  # share of the peak that large matmuls reach
    depth: Number  # inner size at which a matmul reaches half of that
    tiles: Number  # cost of an incomplete last wave of tiles, in waves
    misaligned: Number  # slowdown of matmuls whose rows are no multiples of 128 bytes
    unloaded: Number  # slowdown of matmuls whose rows are not even multiples of 16 bytes
    attention: Number  # share of the peak that the attention kernel reaches in the forward
    memory: Number  # share of the memory's bandwidth that is reached
    # of its links
    link_share: Number  # of the link's bandwidth that rings reach
    network_share: Number  # of the network's bandwidth that rings reach
    link_latency: Number  # seconds of a ring's step inside a node
    network_latency: Number  # seconds of a ring's step between nodes
    # of the software
    stack_matmul: Number  # factor on `matmul`
    stack_attention: Number  # factor on `attention`
    attention_backward: Number  # time per FLOP of attention's backward, over its forward's
    flash: Number  # 1: attention scores stay on chip; 0: they are written to memory
    score_bytes: Number  # moved for each score that is written, in the forward
    batched: Number  # share of `matmul` that the batched matmuls of written scores reach
    context_attention: Number  # factor on attention's time where cp cuts the sequence
    elementwise_hidden: Number  # tensors of [tokens, hidden] that a block's forward moves
    elementwise_wide: Number  # tensors of [tokens, widened] that a block's forward moves
    logit_bytes: Number  # moved for each logit, forward and backward
    selective: Number  # share of the forward's matmuls that selective recomputation repeats
    host_block: Number  # seconds in which the host launches a block's forward
    launch_blocking: Number  # 1: the host waits for each kernel before it launches the next; 0: it runs ahead
    host_micro_batch: Number  # seconds of the host for each micro-batch
    host_step: Number  # seconds of the host for each optimizer step
    gradient_bytes: Number  # of an element of gradients that data parallelism and ZeRO-1 reduce
    scatter_bytes: Number  # of an element of gradients that ZeRO-2 and -3 reduce-scatter
    tensor_overlap: Number  # share of tensor-parallel collectives that computation hides
    shard_overlap: Number  # share of ZeRO-2's and -3's collectives that computation hides
    shard_share: Number  # of the links' speed that ZeRO-2's and -3's collectives reach
    ends_apart: Number  # 1: ZeRO gathers embedding and head once, and reduces the head beside the backward
    data_overlap: Number  # share of the gradients' all-reduce that the backward hides
    optimizer_bytes: Number  # that an update reads and writes per parameter
    send_share: Number  # of a GPU's part of the network that a send between stages reaches
    send_split: Number  # 1: each tensor-parallel rank sends its part, gathered again; 0: each sends all of it
    balanced: Number  # 1: stages are cut by cost with the head's; 0: into equal numbers of blocks
    block_update: Number = 0.0  # seconds of the matmuls (Newton-Schulz, in bf16) of one block's update

    @classmethod
    def of(
        cls, gpu: Gpu, stack: Mapping[str, float], *, network_share: float = 0.7, fp8: bool = False
    ) -> Machine:
        """Return the GPU kind's usual machine with a stack of stacks.toml, in 16 bits.

        stack: its constants, from `hardware.stacks`. network_share: share of the network's bandwidth that
        rings reach. fp8: matmuls and gathered weights in 8 bits; a kind without such units has bf16's peak.
        """
        efficiency = dict(gpu.efficiency)
        fp8_matmul = efficiency.pop("matmul_fp8")
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
        return cls(**facts | efficiency | dict(stack) | ({"matmul": fp8_matmul} if fp8 else {}))


def machine_of(workload: Workload, cluster: Cluster) -> Machine:
    """The cluster with the workload's stack on it, in the workload's precision.

    The stack's `optimizer_bytes` is bf16's with AdamW, and scales with the bytes that an update of this
    precision and optimizer moves.
    """
    stack = stacks()[workload.stack]
    machine = Machine.of(cluster.gpu, stack, network_share=cluster.network_share)
    copies = copies_of(workload.precision, workload.reduce_dtype, workload.optimizer)
    measured = copies_of("bf16", "fp32", "adamw")
    work, matrices = workload.work, workload.work.trained_matrices
    of_matrices = work.blocks * sum(w.elements * w.trainable for w in matrices)
    state = copies.optimizer - copies.matrix_saving * of_matrices / np.maximum(work.trained_parameters, 1.0)
    updated = 2 * (copies.trained + state) + copies.accumulated + copies.weight
    updated_in_bf16 = 2 * (measured.trained + measured.optimizer) + measured.accumulated + measured.weight
    return replace(
        machine,
        node=float(cluster.node),
        link=cluster.link,
        network=cluster.network * cluster.node,
        element=copies.weight,
        weight_bytes=copies.weight,
        gradient_bytes=copies.accumulated,
        scatter_bytes=copies.accumulated,
        optimizer_bytes=machine.optimizer_bytes * updated / updated_in_bf16,
        block_update=OPTIMIZERS[workload.optimizer].newton_schulz_steps
        * sum(w.count * w.trainable * newton_schulz_flops(w.rows, w.cols) for w in matrices)
        / (cluster.gpu.bf16 * machine.matmul * machine.stack_matmul),
        **rates(cluster, workload.precision),
    )


def newton_schulz_flops(rows: Number, cols: Number) -> Number:
    """FLOPs of one Newton-Schulz iteration, X <- a X + (b G + c G²) X with G = X Xᵀ: three matmuls.

    rows, cols: of the matrix X, which is transposed if it has more rows than columns.
    """
    short, long = np.minimum(rows, cols), np.maximum(rows, cols)
    return 4 * short**2 * long + 2 * short**3


def rates(cluster: Cluster, precision: str) -> dict[str, float]:
    """Peak FLOP/s of matmuls (`flops`) and of attention (`core_flops`), which are equal, by name.

    precision: as in the settings; UserError for another. torch computes fp32 without TF32 unless told
    otherwise.
    """
    rate = getattr(cluster.gpu, PRECISIONS[precision].rate) * PRECISIONS[precision].rate_share
    return {"flops": rate, "core_flops": rate}
