"""Seconds of collectives: rings on the link or the network, and those of tp, cp, ZeRO and data parallelism.

Per block and micro-batch: tp, cp, shards of ZeRO-2 and -3. Once a step: gradients, weights of ZeRO-1 and -2,
and the optimizer's update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.layout import ZERO_BUBBLE
from meshtune.plan.seconds.experts import rows_of
from meshtune.plan.seconds.groups import expert_shards, ranks_in_node, shard_groups
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.seconds.block import Block
    from meshtune.plan.work import Work

# rings #


def ring_bandwidth(machine: Machine, ranks: Number, in_node: Number) -> Number:
    """Bytes/s that a ring of `ranks` ranks, `in_node` of them in each node, moves past each rank.

    Inside a node the link's; between nodes the group's part of a node's network, as the node's other GPUs are
    in rings of their own.
    """
    inside = machine.link * machine.link_share
    across = machine.network * machine.network_share * in_node / machine.node
    return np.where(ranks > in_node, np.minimum(inside, across), inside)


def ring_traffic(machine: Machine, size: Number, ranks: Number, in_node: Number) -> Number:
    """Seconds for (n-1)/n of a tensor of `size` bytes to pass each rank of a ring of n (Chan et al. 2007).

    ranks, in_node: of the group, and of it in each node. Latency is not included; 0 for one rank.
    """
    return np.where(ranks > 1, size * (ranks - 1) / ranks / ring_bandwidth(machine, ranks, in_node), 0.0)


def ring_collectives(
    machine: Machine, size: Number, ranks: Number, in_node: Number, *, count: Number = 1.0
) -> Number:
    """Seconds of `count` all-gathers or reduce-scatters, one after the other; 0 for one rank.

    Each goes once around a ring, whose steps wait for one another: each takes as long as the slowest.

    size: bytes of their unsharded tensors, summed over all `count`. ranks, in_node: of the group, and of it
    in each node.
    """
    latency = count * (ranks - 1) * message_latency(machine, ranks, in_node)
    return ring_traffic(machine, size, ranks, in_node) + np.where(ranks > 1, latency, 0.0)


def message_latency(machine: Machine, ranks: Number, in_node: Number) -> Number:
    """Seconds of a message without bytes between two of `ranks` ranks, `in_node` of them in each node."""
    return machine.link_latency + np.where(ranks > in_node, machine.network_latency, 0.0)


def tree_all_reduce(machine: Machine, size: Number, ranks: Number, in_node: Number) -> Number:
    """Seconds of an all-reduce of `size` bytes: the traffic of two all-gathers, the latency of a tree.

    ranks, in_node: of the group, and of it in each node. 0 for one rank.
    """
    latency = np.where(ranks > 1, message_latency(machine, ranks, in_node) * (1 + np.log2(ranks)), 0.0)
    return 2 * ring_traffic(machine, size, ranks, in_node) + latency


def all_to_alls(
    machine: Machine, size: Number, ranks: Number, in_node: Number, *, count: Number = 1.0
) -> Number:
    """Seconds of `count` all-to-alls, one after the other; 0 for one rank.

    Each rank sends to all others at once: the latency is a message's, the traffic a ring's.

    size: bytes of a rank's tensors, summed over all `count`. ranks, in_node: as in `ring_collectives`.
    """
    latency = message_latency(machine, ranks, in_node)
    return ring_traffic(machine, size, ranks, in_node) + np.where(ranks > 1, count * latency, 0.0)


def exposed(machine: Machine, computing: Number, collective: Number, overlap: Number) -> Number:
    """Seconds that a collective adds to the computation that it overlaps with.

    computing, collective: seconds of each without the other. overlap: share, 0 to 1, of the time in which
    both could run that they do. What is longer than the computation is always exposed, and while it runs the
    computation takes `contention` longer: collectives take multiprocessors, memory bandwidth and power.
    """
    return collective - overlap * np.minimum(computing, collective / (1 + machine.contention))


# of a block, for one micro-batch #


def tensor_collectives(work: Work, layouts: Columns, machine: Machine, seq_len: Number) -> Number:
    """Seconds of tensor parallelism's collectives in one block for one micro-batch: all-reduces of hidden
    states.

    Two in the forward, two in the backward, two more where the backward repeats the forward (Shoeybi et al.
    2019, arXiv:1909.08053, section 3). With sp, an all-gather and a reduce-scatter in place of each
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). Where every rank computes all heads,
    all-gathers of queries, keys and values too, and of the gradient of the core's output. A mixture of
    experts has each rank's own tokens: shared experts are entered and left, and without sp its output and the
    gradient of its input are gathered.
    """
    token_bytes = machine.element * layouts.rank_tokens(seq_len)
    hidden_bytes = token_bytes * work.hidden
    in_node = ranks_in_node(layouts.tp, 1.0, machine)
    all_reduce = tree_all_reduce(machine, hidden_bytes, layouts.tp, in_node)
    split = ring_collectives(machine, 2 * hidden_bytes, layouts.tp, in_node, count=2.0)
    all_reduce = np.where(layouts.sp > 0, split, all_reduce)
    repeated = layouts.recomputation("matmuls") | (layouts.recomputation("block") & (machine.selective > 0))
    # The last reduction is not repeated where torch's checkpoint ends before it (gpu.py: unrepeated)
    last = machine.counted * sum(m.count for m in work.matrices if m.last and not m.adapted_last)
    stops = repeated * (last > 0)
    repeated = repeated * (1 - last / np.where(layouts.sp > 0, 4.0, 2.0))
    # An MLP in tiles repeats its own too (gpu.py), as smaller messages in each of its three passes.
    tiles = layouts.mlp_tiles(layouts.rank_tokens(seq_len), machine.mlp_tile)
    repeated = repeated + (tiles > 1) * np.where(stops, 1 - repeated, 0.5)
    short = ring_collectives(machine, 0.0, layouts.tp, in_node, count=2.0)
    short = np.where(layouts.sp > 0, short, tree_all_reduce(machine, 0.0, layouts.tp, in_node))
    runs = 1 + layouts.recomputation("block")  # of the forward's gathers
    entering = sum(core.count * (core.query_heads * core.qk_dim + core.keys) for core in work.cores)
    outputs = sum(core.count * core.query_heads * core.v_dim for core in work.cores)
    features = ring_collectives(
        machine, token_bytes * (runs * entering + outputs), layouts.tp, in_node, count=3 * runs + 1
    )
    features = np.where(work.head_shards(layouts.tp) < layouts.tp, features, 0.0)
    parts = work.entered + np.where(layouts.sp > 0, 0.0, 0.5 * work.mixtures)
    return parts * all_reduce * (2 + repeated) + 3 * (tiles - 1) * short + features


def regathering(work: Work, layouts: Columns, machine: Machine, seq_len: Number) -> Number:
    """Seconds to gather the inputs of attention and MLP again in one block's backward for one micro-batch,
    as `sp_regather` does: two all-gathers. Stacks that always do so hide them behind the gradients of inputs.
    """
    hidden_bytes = 2 * machine.element * layouts.rank_tokens(seq_len) * work.hidden
    in_node = ranks_in_node(layouts.tp, 1.0, machine)
    gathers = ring_collectives(machine, hidden_bytes, layouts.tp, in_node, count=2.0)
    return np.where(layouts.sp_regather > 0, gathers, 0.0)


def context_collectives(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, attention: Number
) -> Number:
    """Exposed seconds of context parallelism in one block for one micro-batch.

    All-gathers of keys and values, or with ulysses all-to-alls of sequences for heads (Jacobs et al. 2023,
    arXiv:2309.14509); once in the forward, once in the backward, once where the forward is repeated.

    attention: seconds of its forward in one block; its backward's are more. A ring can run meanwhile, an
    all-to-all before and after it.
    """
    tokens, cp = layouts.rank_tokens(seq_len), layouts.cp
    in_node = ranks_in_node(cp, layouts.tp, machine)
    keys = sum(core.count * core.key_heads * (core.qk_dim + core.v_dim) for core in work.cores)
    heads = sum(
        core.count * (core.query_heads + core.key_heads) * (core.qk_dim + core.v_dim) for core in work.cores
    )
    shards = work.head_shards(layouts.tp)
    gathered_bytes = machine.element * tokens * cp * (keys / shards)
    exchanged_bytes = machine.element * tokens * (heads / shards)
    all_gather = ring_collectives(machine, gathered_bytes, cp, in_node)
    # queries, keys, values and the output, one after the other
    all_to_all = all_to_alls(machine, exchanged_bytes, cp, in_node, count=4.0)
    times = np.where(layouts.recomputation("block") | layouts.recomputation("attention"), 3, 2)
    beside = exposed(machine, attention, all_gather, machine.context_overlap)
    once = np.where(layouts.ulysses > 0, all_to_all, beside)
    return once * times * (cp > 1)


def shard_collectives(
    work: Work, layouts: Columns, machine: Machine, forward: Number, backward: Number
) -> tuple[Number, Number]:
    """Exposed seconds in (forward, backward) of ZeRO-3's all-gathers and ZeRO-2's and -3's reduce-scatters of
    one block.

    ZeRO-3 gathers weights in the forward and again in the backward (Rajbhandari et al. 2020, section 7).

    forward, backward: seconds of a block's passes for one micro-batch, which hide a part of them.
    """
    gather, scatter = 0.0, 0.0
    for group in shard_groups(work, layouts, machine):
        weights, trained = (size / group.cut / machine.shard_share for size in (group.weights, group.trained))
        ranks = group.ranks, group.in_node
        gather = gather + ring_collectives(machine, machine.weight_bytes * weights, *ranks)
        scatter = scatter + ring_collectives(machine, machine.scatter_bytes * trained, *ranks)
    beside_backward = np.where(layouts.zero == 3, gather + scatter, np.where(layouts.zero == 2, scatter, 0.0))
    in_forward = exposed(machine, forward, gather, machine.shard_overlap)
    in_backward = exposed(machine, backward, beside_backward, machine.shard_overlap)
    return np.where(layouts.zero == 3, in_forward, 0.0), in_backward


# of a step #


def trained_on_rank(work: Work, layouts: Columns) -> Number:
    """Trained elements of a rank after tp and pp, before ZeRO, without experts that ep splits; in a pipeline,
    with embedding or head.
    """
    blocks = work.blocks / layouts.pp * work.shared_block(layouts, True)
    return (blocks + outside_blocks(work, layouts) * work.trained_outside) / layouts.tp


def outside_blocks(work: Work, layouts: Columns) -> Number:
    """Elements outside the blocks on a rank, before tp; in a pipeline, of a rank with embedding or head."""
    rows = np.maximum(work.vocabulary, work.embedded)
    return np.where(layouts.pp > 1, rows * work.hidden, work.outside_parameters)


def root_gather(work: Work, layouts: Columns, machine: Machine) -> Number:
    """Seconds of ZeRO-3's gathers of what is outside the blocks, in one forward and, unless a stack gathers
    it once, backward.
    """
    shards, root = layouts.shard_ranks, outside_blocks(work, layouts) / layouts.tp / machine.shard_share
    times = np.where(machine.ends_apart > 0, 1.0, 2.0)
    size, in_node = times * machine.weight_bytes * root, ranks_in_node(shards, layouts.tp, machine)
    return np.where(layouts.zero == 3, ring_collectives(machine, size, shards, in_node), 0.0)


def gradient_collectives(work: Work, layouts: Columns, machine: Machine, block: Block) -> Number:
    """Exposed seconds per step of data parallelism's collectives that `shard_collectives` does not count.

    Gradients are all-reduced between replicas and under ZeRO-1 reduce-scattered, a share of each hidden
    behind the last backward, none with a zero-bubble schedule or by torch's stages under ZeRO-1. ZeRO-1 and
    -2 gather weights once, a share of it during the first forward. ZeRO-2's and -3's collectives of what is
    outside the blocks come with each micro-batch and have nothing to hide behind.

    block: a mean block of the rank, for one micro-batch, whose passes hide a part of them.
    """
    zero, blocks = layouts.zero, work.blocks / layouts.pp
    shards, outside = layouts.shard_ranks, outside_blocks(work, layouts)
    shards_in_node = ranks_in_node(shards, layouts.tp, machine)
    whole = (work.blocks * work.shared_block(layouts) / layouts.pp + outside) / layouts.tp
    trained = trained_on_rank(work, layouts)
    replicas = np.where(zero > 0, layouts.dp_replicate, layouts.parameter_ranks)
    stride = layouts.tp * np.where(zero > 0, shards, 1.0)
    replicas_in_node = ranks_in_node(replicas, stride, machine)
    reduced = np.where(zero > 0, trained / shards, trained)
    count = np.where(machine.data_overlap > 0, blocks, 1.0)  # a collective for each block, or one for all

    reduce_bytes, scatter_bytes = machine.gradient_bytes * reduced, machine.gradient_bytes * trained
    all_reduce = 2 * ring_collectives(machine, reduce_bytes, replicas, replicas_in_node, count=count)
    reduce_scatter = ring_collectives(machine, scatter_bytes, shards, shards_in_node, count=count)
    reducing = all_reduce + np.where(zero == 1, reduce_scatter, 0.0)
    experts, trained_experts = (blocks * work.split_experts(layouts, some) for some in (False, True))
    reducing = reducing + expert_sums(trained_experts, layouts, machine, count)
    forward, backward = block.forward * blocks, block.backward * blocks
    # This engine reduces embedding and head together, once the embedding's gradient is there.
    last = machine.counted * outside / layouts.tp * work.trained_outside / np.maximum(trained, 1.0)
    beside = (1 - last) * reducing
    overlap = np.where(zero == 1, machine.shard_overlap, machine.data_overlap)
    hidden = beside - exposed(machine, backward, beside, overlap)
    # Their last backward is for weights only, and runs no hooks that could start a collective.
    behind = layouts.runs(*ZERO_BUBBLE)
    # torch's stages reduce in an action of their own, once all micro-batches are through (REDUCE_GRAD).
    behind = behind | ((machine.torch_stages > 0) & (layouts.pp > 1) & (zero == 1))
    hidden = np.where(behind, 0.0, hidden)
    weight_gather = ring_collectives(
        machine, machine.weight_bytes * whole, shards, shards_in_node, count=count
    )
    weight_gather = weight_gather + ring_collectives(
        machine, machine.weight_bytes * experts, *expert_shards(layouts, machine), count=count
    )
    weight_gather = exposed(machine, forward, weight_gather, machine.gather_overlap)
    gathered_once = np.where((zero == 1) | (zero == 2), weight_gather, 0.0)

    root = outside / layouts.tp / machine.shard_share
    # A head of its own is half of it, reduced during the backward; with a pipeline the first rank's counts.
    own_head = (work.vocabulary >= work.embedded) & (machine.ends_apart > 0) & (layouts.pp == 1)
    beside = np.where(own_head, 0.5 * (1 - work.tied), 0.0)
    root_gradients = machine.scatter_bytes * root * work.trained_outside * (1 - beside)
    root_scatter = ring_collectives(machine, root_gradients, shards, shards_in_node)
    of_root = root_gather(work, layouts, machine) + np.where(zero >= 2, root_scatter, 0.0)
    return reducing - hidden + gathered_once + layouts.gradient_accumulation_steps * of_root


def expert_gradients(work: Work, layouts: Columns, machine: Machine) -> Number:
    """Seconds per step to sum gradients over tp's ranks of what each has for its own tokens."""
    trained = work.blocks / layouts.pp * work.by_tokens(layouts, True)
    shard = trained / np.where(layouts.zero > 0, layouts.shard_ranks, 1.0)
    in_node = ranks_in_node(layouts.tp, 1.0, machine)
    seconds = tree_all_reduce(machine, machine.gradient_bytes * shard, layouts.tp, in_node)
    return np.where(trained > 0, seconds, 0.0)


def expert_sums(trained: Number, layouts: Columns, machine: Machine, count: Number) -> Number:
    """Seconds per step to sum the gradients of a rank's experts over the ranks that hold the same ones: an
    all-reduce between replicas, and under ZeRO-1 a reduce-scatter between shards; 0 without ep.

    trained: elements on the rank, before ZeRO. count: collectives of each kind.
    """
    shards, in_node = expert_shards(layouts, machine)
    size = machine.gradient_bytes * trained
    replicas = np.where(layouts.ep > 1, layouts.expert_replicas, 1.0)
    replicas_in_node = ranks_in_node(replicas, layouts.ep * layouts.expert_shards, machine)
    all_reduce = 2 * ring_collectives(
        machine, size / layouts.expert_shards, replicas, replicas_in_node, count=count
    )
    scatter = ring_collectives(machine, size, shards, in_node, count=count)
    return all_reduce + np.where(layouts.zero == 1, scatter, 0.0)


def optimizer_update(work: Work, layouts: Columns, machine: Machine) -> Number:
    """Seconds per step to update a rank's trained parameters, or its ZeRO shard of them: memory traffic, and
    the matmuls of an optimizer that has some, which is refused where matrices are split. Not less than copies
    of its states from host memory, and back at the same time.
    """
    trained = trained_on_rank(work, layouts)
    updated = np.where(layouts.zero > 0, trained / layouts.shard_ranks, trained)
    updated = updated + work.blocks / layouts.pp * work.split_experts(layouts, True) / layouts.expert_shards
    unsummed = (layouts.parameter_ranks == 1) & (layouts.gradient_accumulation_steps == 1)
    moved = machine.optimizer_bytes + np.where(layouts.zero > 0, 0.0, machine.rounding_bytes)
    moved = moved + np.where(unsummed, machine.unsummed_bytes, 0.0)
    traffic = updated * moved / (machine.bandwidth * machine.memory * machine.update_memory)
    streamed = machine.host_states + np.where(layouts.zero > 0, 0.0, machine.host_master)
    on_device = traffic + work.blocks / layouts.pp * machine.block_update
    return np.maximum(on_device, updated * streamed / machine.host_bandwidth)


# exchanges of experts #


class Exchange(NamedTuple):
    """Seconds of a block's exchanges of rows for one micro-batch; 0 without ep."""

    forward: Number  # there and back, and that of their sizes
    backward: Number  # gradients there and back, and the forward's where it runs again


def exchange_links(machine: Machine) -> tuple[Number, Number]:
    """Bytes per second that a rank sends in exchanges of rows to (ranks of its node, other nodes)."""
    network = machine.network * machine.network_share / machine.node
    return machine.link * machine.link_share * machine.expert_share, network * machine.expert_share


def exchange_seconds(work: Work, layouts: Columns, machine: Machine, tokens: Number) -> Exchange:
    """Seconds of all-to-alls inside a node and between nodes, which run at the same time.

    A rank has its part of the node's network. A dispatcher with `expert_once` sends a token once to each rank
    with an expert of it, and once to each other node; another one a copy for each expert. This engine
    exchanges their sizes before, once in a forward, and its host reads them: no kernel is launched ahead.
    Those of other stacks are in fitted constants. tokens: as in `rows_of`.
    """
    inside = ranks_in_node(layouts.ep, 1.0, machine)
    nodes, once = layouts.ep / inside, machine.expert_once
    size = machine.element * rows_of(work, layouts, tokens) * work.hidden * work.most_rows(layouts)

    def sent(places: Number) -> Number:
        """Bytes for other places, of `places` among which the experts are divided."""
        several = places * (1 - (1 - 1 / places) ** work.routed) / np.maximum(work.routed, 1e-9)
        return size * (places - 1) / places * np.where(once > 0, several, 1.0)

    link, network = exchange_links(machine)
    in_node = np.where(once > 0, sent(layouts.ep), sent(layouts.ep) - sent(nodes)) / link
    one = np.maximum(in_node, sent(nodes) / network)
    latency = message_latency(machine, layouts.ep, inside)
    one = np.where(layouts.ep > 1, one + latency, 0.0)
    sizes = np.where(layouts.ep > 1, machine.counted * (latency + machine.launch), 0.0)
    again = layouts.recomputation("matmuls") | (layouts.recomputation("block") & (machine.counted > 0))
    # Such a dispatcher weights rows before they return: a second forward ends at the experts.
    return Exchange(2 * one + sizes, one * (2 + again * np.where(once > 0, 1.0, 2.0)))
