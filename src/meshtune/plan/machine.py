"""GPU, software and network as one value: the constants that the formulas of seconds/ read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from meshtune.errors import UserError
from meshtune.optimizers import OPTIMIZERS, updated_by
from meshtune.placement.states import Copies, copies_of
from meshtune.plan.cluster import NETWORK_SHARE
from meshtune.plan.hardware import Gpu, attention_kernel, kernel_on, stacks
from meshtune.precision import DTYPE_BYTES, PRECISIONS
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload

HOST_SHARE = 0.8  # of a link to the host that copies reach: 25 of 31 GB/s by an A100 (ZaidQureshi/bam#54)


@dataclass(frozen=True)
class Machine:
    """Constants of a GPU kind, its links and a software stack.

    Efficiencies of the kind and constants of the software are keys of hardware.toml and stacks.toml.
    """

    # the GPU and its cluster
    matmul_max: Number  # of the fastest matmul, in the precision of matmuls with weights, FLOP/s
    core_matmul_max: Number  # the same in the precision of attention and head
    bandwidth: Number  # of the GPU's memory, bytes/s
    link: Number  # from a GPU to the others of its node, bytes/s in one direction
    network: Number  # from a whole node to other nodes, bytes/s in one direction
    host_bandwidth: Number  # between a GPU and host memory that is pinned, bytes/s in one direction
    node: Number  # GPUs in a node
    multiprocessors: Number
    weight_bytes: Number  # of an element of the weights that ZeRO gathers
    element: Number  # bytes of an element of activations and compute weights
    # its attention kernel (kernels.toml): FLOP/s of the forward of long causal sequences, by head size
    attention_64: Number
    attention_128: Number
    attention_256: Number
    attention_keys: Number  # time of a query compared with that of the keys that it sees, in keys
    attention_backward: Number  # time per FLOP of the backward, over the forward's
    # efficiencies of the GPU kind
    clock: Number  # share of the fastest matmul's rate that its power limit sustains
    matmul: Number  # share of the fastest matmul's rate that large matmuls of a step reach
    depth: Number  # inner size at which a matmul reaches half of that
    tiles: Number  # cost of an incomplete last wave of tiles, in waves
    misaligned: Number  # slowdown of matmuls whose rows aren't multiples of 128 bytes
    unloaded: Number  # slowdown of matmuls whose rows are not even multiples of 16 bytes
    attention: Number  # rate of attention kernels in a step, as a share of that in a benchmark of the kernel
    memory: Number  # share of the memory's bandwidth that is reached
    # of its links
    link_share: Number  # of the link's bandwidth that rings reach
    network_share: Number  # of the network's bandwidth that rings reach
    link_latency: Number  # seconds of a ring's step inside a node
    network_latency: Number  # seconds of a ring's step between nodes
    # of the software
    stack_matmul: Number  # factor on `matmul`
    flash: Number  # 1: attention scores stay on chip; 0: they are written to memory
    score_bytes: Number  # moved for each score that is written, in the forward
    batched: Number  # share of `matmul` that the batched matmuls of written scores reach
    stack_attention: Number  # factor on `attention`
    ring_attention: Number  # 1: under cp keys come in cp parts, a kernel for each; 0: one kernel for all
    elementwise_hidden: Number  # tensors of [tokens, hidden] that a block's forward moves
    elementwise_wide: Number  # tensors of [tokens, widened] that a block's forward moves
    elementwise_rotary: Number  # tensors of [tokens, features of queries and keys] that it moves
    elementwise_norm: (
        Number  # tensors that a norm moves: of queries and keys, a third of hidden states or the last
    )
    hidden_backward: Number  # traffic of elementwise_hidden and _norm in the backward, over the forward's
    wide_backward: Number  # the same of elementwise_wide
    rotary_backward: Number  # the same of elementwise_rotary
    adapter_launches: Number  # kernels of an adapted matrix's forward besides its own
    adapter_passes: Number  # tensors that move as B's outputs are scaled and added, in the forward
    adapter_sums: Number  # tensors that move as gradients of its inputs, from W and A, are added
    dropout_passes: (
        Number  # tensors that move as the inputs of an adapter are dropped, a mask of 1 byte among them
    )
    dropout_backward: Number  # tensors that move as gradients of dropped inputs are masked
    logit_bytes: Number  # moved for each logit, forward and backward
    split_logit_bytes: Number  # moved next to them where tp splits the vocabulary
    selective: Number  # share of the forward's matmuls that selective recomputation repeats
    launch: Number  # seconds in which the host launches a kernel
    block_launches: Number  # kernels of a block's forward, without adapters
    launch_blocking: Number  # 1: the host waits for each kernel before it launches the next; 0: it runs ahead
    host_micro_batch: Number  # seconds of the host for each micro-batch
    host_step: Number  # seconds of the host for each optimizer step
    ahead: (
        Number  # 1: the host runs ahead of collectives and of micro-batches; 0: of the kernels between them
    )
    tensor_hold: Number  # seconds of a block's pass for each of tp's ranks, as `held_seconds` says
    gradient_bytes: Number  # of an element of gradients that data parallelism and ZeRO-1 reduce
    scatter_bytes: Number  # of an element of gradients that ZeRO-2 and -3 reduce-scatter
    tensor_overlap: Number  # share of tensor-parallel collectives that runs during computation
    context_overlap: Number  # share of context-parallel collectives that runs during attention
    shard_overlap: Number  # share of ZeRO's reduce-scatters and -3's gathers that runs during computation
    shard_share: Number  # of the links' speed that ZeRO-2's and -3's collectives reach
    ends_apart: Number  # 1: ZeRO gathers embedding and head once, and reduces the head during the backward
    gather_overlap: Number  # share of ZeRO-1's and -2's weight gathers that runs during the forward
    data_overlap: Number  # share of the gradients' all-reduce that runs during the backward
    torch_stages: Number  # 1: a pipeline's are torch's, which reduce ZeRO-1's gradients after all backwards
    contention: Number  # share of the time of a collective by which computation takes longer
    optimizer_bytes: Number  # that an update of a ZeRO shard reads and writes per parameter
    rounding_bytes: Number  # that it moves without ZeRO to round weights from their masters, per parameter
    unsummed_bytes: Number  # more, or if negative fewer, where gradients are not summed
    counted: Number  # 1: this engine's copies, sums and updates, by their dtypes; 0: in fitted constants
    send_share: Number  # of a GPU's part of the network that a send between stages reaches
    send_split: Number  # 1: each tensor-parallel rank sends its part, gathered again; 0: each sends all of it
    balanced: Number  # 1: stages are cut by cost with the head's; 0: into equal numbers of blocks
    grouped: Number  # share of a dense matmul's rate that one of experts reaches with full tiles
    expert_passes: Number  # tensors of rows for experts that a pass moves to order and weight them
    expert_launches: Number  # kernels of a block's forward for experts besides those of a dense MLP
    expert_overlap: Number  # share of the exchanges of rows that runs during computation
    expert_share: Number  # share of the links' speed that these exchanges reach, over that of rings
    expert_once: Number  # 1: a token goes once to each rank, and to each other node; 0: to each expert
    mlp_tile: Number = math.inf  # tokens of a rank that an MLP runs on at a time
    loss_memory: Number = 0.0  # of states.loss_chunk_tokens
    update_memory: Number = 1.0  # factor on `memory` that the optimizer's update reaches
    host_states: Number = 0.0  # bytes per parameter that an update copies to or from host memory, one by one
    host_master: Number = 0.0  # the same without ZeRO
    # of the fastest matmul in 8-bit floats, FLOP/s, where linear layers multiply in them; 0: they don't
    fp8_matmul_max: Number = 0.0
    fp8_rowwise: Number = 0.0  # 1: each row of an operand has a scale
    block_update: Number = 0.0  # seconds of the matmuls (Newton-Schulz, in bf16) of one block's update

    @classmethod
    def of(
        cls, gpu: Gpu, stack: str, *,
        network_share: float = NETWORK_SHARE, ranks: int = 1, kernel: str = "",
    ) -> Machine:  # fmt: skip
        """Return the GPU kind's usual machine with a stack of stacks.toml, in 16 bits.

        network_share: share of the network's bandwidth that rings reach. ranks: at work on one machine.
        kernel: of kernels.toml; "": the newest attention that the stack has for the kind.
        """
        facts = {
            "matmul_max": gpu.matmul_max,
            "core_matmul_max": gpu.matmul_max,
            "bandwidth": gpu.bandwidth,
            "link": gpu.link,
            "network": gpu.network * gpu.node,
            "host_bandwidth": gpu.host_link * HOST_SHARE,
            "node": float(gpu.node),
            "multiprocessors": gpu.multiprocessors,
            "weight_bytes": 2.0,
            "element": 2.0,
            "flash": 1.0,
            "network_share": network_share,
        }
        rates = kernel_on(kernel or attention_kernel(stack, gpu), gpu)
        return cls(**facts | rates | stacks()[stack] | gpu.efficiency_among(ranks))


def machine_of(workload: Workload, cluster: Cluster) -> Machine:
    """The cluster with the workload's stack on it, in the workload's precision.

    The `optimizer_bytes` of another tool's stack is bf16's with AdamW, and scales with the bytes that an
    update of this precision and optimizer moves.
    """
    machine = Machine.of(
        cluster.gpu, workload.stack, network_share=cluster.network_share, ranks=cluster.ranks_in_node,
        kernel=workload.attention_kernel(cluster.gpu),
    )  # fmt: skip
    copies = copies_of(workload.precision, workload.reduce_dtype, workload.optimizer)
    measured = copies_of("bf16", "fp32", "adamw")
    work, matrices = workload.work, workload.work.trained_matrices
    of_matrices = work.blocks * sum(w.elements * w.trainable for w in matrices)
    state = copies.optimizer - copies.matrix_saving * of_matrices / np.maximum(work.trained_parameters, 1.0)
    updated = 2 * (copies.trained + state) + copies.accumulated + copies.weight
    updated_in_bf16 = 2 * (measured.trained + measured.optimizer) + measured.accumulated + measured.weight
    optimizer_bytes, unsummed_bytes = machine.optimizer_bytes * updated / updated_in_bf16, 0.0
    fused = workload.fuses(cluster)
    read = 0 if fused and OPTIMIZERS[workload.optimizer].one_pass else copies.master  # to round from it
    if machine.counted:
        share = of_matrices / np.maximum(work.trained_parameters, 1.0)
        moved = partial(update_bytes, workload.precision, copies, workload.optimizer, share, fused=fused)
        optimizer_bytes = moved(copies.accumulated)
        unsummed_bytes = moved(copies.gradient) - optimizer_bytes
    # One parameter at a time in the backward: its copies do not run at once.
    streams = (workload.offload != "none") * (1 + workload.step_in_backward)
    return replace(
        machine,
        node=float(cluster.node),
        mlp_tile=workload.mlp_tile or math.inf,
        loss_memory=workload.loss_memory(cluster),
        link=cluster.link,
        network=cluster.network * cluster.node,
        element=copies.weight,
        weight_bytes=copies.weight,
        gradient_bytes=copies.accumulated,
        scatter_bytes=copies.accumulated,
        optimizer_bytes=optimizer_bytes,
        rounding_bytes=machine.counted * (copies.master and read + copies.weight),
        unsummed_bytes=unsummed_bytes,
        host_states=state * streams,
        host_master=copies.master * streams,
        block_update=OPTIMIZERS[workload.optimizer].newton_schulz_steps
        * sum(w.count * w.trainable * newton_schulz_flops(w.rows, w.cols) for w in matrices)
        / (cluster.gpu.matmul_max * machine.clock * machine.matmul * machine.stack_matmul),
        **in_precision(machine, cluster.gpu, workload.precision),
    )


def update_bytes(
    precision: str, copies: Copies, optimizer: str, matrices: Number, gradient: float, *, fused: bool
) -> Number:
    """Bytes that this engine's update of a parameter reads and writes, without rounding masters to weights.

    Gradients are read for their norm, and cast where the optimizer wants the trained weights' dtype; then its
    kernels run.

    matrices: share of the trained parameters that are the blocks' matrices. gradient: bytes of an element of
    a gradient. fused: updates are compiled.
    """
    trained, dtype = copies.trained, PRECISIONS[precision].trained

    def moved(name: str) -> float:
        row = OPTIMIZERS[updated_by(name, dtype)]
        own = trained * (row.moved_in_16 if trained == 2 and row.moved_in_16 else row.moved)
        if row.one_pass:
            between = row.in_blocks * DTYPE_BYTES["float32"]  # as inductor fuses for a processor
            kept = trained + row.bytes_per_parameter(dtype) + between
            return gradient + (2 * kept if fused else own)
        return own + (gradient + trained if gradient != trained else 0)

    rest = OPTIMIZERS[optimizer].but_matrices
    return gradient + matrices * moved(optimizer) + (1 - matrices) * moved(rest or optimizer)


def in_precision(machine: Machine, gpu: Gpu, precision: str) -> dict[str, Number]:
    """Rates of matmuls and attention, which reach the same shares of another precision's peak, by field;
    under fp8 those of bf16, and that of linear layers.
    """
    if PRECISIONS[precision].fp8:
        if gpu.fp8 is None and not gpu.processor:
            raise UserError(
                f"train.precision={precision}: {gpu.name} multiplies no 8-bit floats; use "
                "train.precision=bf16."
            )
        rowwise = PRECISIONS[precision].fp8 == "rowwise"
        return {"fp8_matmul_max": gpu.matmul_max_fp8, "fp8_rowwise": float(rowwise)}
    faster = peak_flops(gpu, precision) / gpu.bf16
    of_peak = ("matmul_max", "core_matmul_max", "attention_64", "attention_128", "attention_256")
    return {name: getattr(machine, name) * faster for name in of_peak}


def newton_schulz_flops(rows: Number, cols: Number) -> Number:
    """FLOPs of one Newton-Schulz iteration, X <- a X + (b G + c G²) X with G = X Xᵀ: three matmuls.

    rows, cols: of the matrix X, which is transposed if it has more rows than columns.
    """
    short, long = np.minimum(rows, cols), np.maximum(rows, cols)
    return 4 * short**2 * long + 2 * short**3


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Dense peak FLOP/s of matmuls in a precision of the settings; UserError for another.

    torch computes fp32 without TF32 unless told otherwise. A processor computes fp8 in wider floats.
    """
    row = PRECISIONS[precision]
    return getattr(gpu, "bf16" if row.fp8 and gpu.processor else row.rate) * row.rate_share
