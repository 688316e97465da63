"""The time of an optimizer step under a layout: closed forms, part by part.

    a block's products, attention, elementwise passes  ->  roofline on one GPU
    + what its ranks say to each other (tp, cp, ZeRO)   ->  rings, on the link or the network
    x blocks x micro-batches, + the pipeline's fill, + gradients, + the optimizer

Efficiencies are of a GPU kind, a software stack or a cluster (hardware.toml, stacks.toml), never of a layout.
All functions take floats or arrays; seconds, bytes, FLOPs and their rates per second throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.hardware import Gpu
from meshtune.plan.work import Core, Gemm, Work

TILE = 128 * 128  # elements of a product that one multiprocessor works on at a time
ALIGNED = 64  # elements (128 bytes of 16 bits): what tensor cores want rows to be multiples of
LOADED = 8  # elements (16 bytes): what they need, or the product runs on slower kernels
LINK_OF_ONE = 0.5  # of the link's speed that one message to one neighbour reaches; assumed
SMALL_HEADS = (
    10  # a flash kernel's time grows by this over the head size; assumed, with the fitted share of the peak
)
WRITTEN_BACKWARD = 1.3  # traffic of written-out scores there and back over there; assumed
PARTS = ("compute", "tensor", "context", "pipeline", "data", "optimizer", "bubble", "host")


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


@dataclass(frozen=True)
class Seconds:
    """One step; exposed time, so that the parts add up to the total."""

    compute: Number
    tensor: Number
    context: Number
    pipeline: Number
    data: Number
    optimizer: Number
    bubble: Number
    host: Number

    @property
    def total(self) -> Number:
        return sum(getattr(self, part.name) for part in fields(self))


# one GPU #


def product(m: Machine, rows: Number, cols: Number, inner: Number, along: tuple[Number, ...] = ()) -> Number:
    """[rows, inner] @ [inner, cols]: at the peak's share, less what short inner sizes, an incomplete wave of
    tiles and unaligned sizes cost; or as long as its operands take to be read and written.

    along: the sizes that memory runs along, where they are not cols and inner.
    """
    rate = m.flops * m.matmul * m.stack_matmul
    tiled = rows * cols + m.tiles * m.multiprocessors * TILE
    slower = 1.0
    for size in along or (cols, inner):
        off = np.where(np.floor(size) % LOADED != 0, m.unloaded, m.misaligned)
        slower = np.maximum(slower, np.where(np.floor(size) % ALIGNED != 0, off, 1.0))
    busy = 2 * tiled * (inner + m.depth) / rate * slower
    moved = m.element * (rows * inner + inner * cols + rows * cols) / (m.bandwidth * m.memory)
    return _longer(busy, moved)


def matrix(m: Machine, tokens: Number, gemm: Gemm, tp: Number) -> tuple[Number, Number, Number]:
    """(forward, backward of inputs, of weights) of one kind of matrix in a block, cut by tp."""
    rows = gemm.rows / tp if gemm.cut == "rows" else gemm.rows
    cols = gemm.cols / tp if gemm.cut == "cols" else gemm.cols
    inputs = gemm.input_gradient * product(m, tokens, cols, rows)
    weights = gemm.trainable * product(m, rows, cols, tokens, (rows, cols))
    return gemm.count * product(m, tokens, rows, cols), gemm.count * inputs, gemm.count * weights


def attended(document_tokens: Number, window: Number) -> Number:
    """Keys that a query sees on average: (n + 1) / 2 in a document of n tokens, fewer with a window."""
    n, w = document_tokens, np.minimum(window, document_tokens)
    return (w * (w + 1) / 2 + (n - w) * w) / n


def attention(
    m: Machine, queries: Number, seq_len: Number, document_tokens: Number, core: Core, tp: Number
) -> tuple[Number, Number]:
    """(forward, backward) of one kind of attention core in a block. Flash kernels compute QKᵀ once more in
    backward: 5 products against 2 (Dao 2023, arXiv:2307.08691). Scores that are written out are all of
    [queries, seq_len], and pass through memory in softmax and dropout.
    """
    heads = core.query_heads / tp
    width = heads * (core.qk_dim + core.v_dim)
    pairs = queries * attended(document_tokens, core.window)
    small_heads = 1 + SMALL_HEADS / core.qk_dim
    flash = 2 * pairs * width / (m.core_flops * m.attention * m.stack_attention) * small_heads
    scores = queries * seq_len * heads
    products = 2 * queries * seq_len * width / (m.core_flops * m.matmul * m.batched)
    products = products * (1 + m.depth / core.qk_dim)
    written = scores * m.score_bytes / (m.bandwidth * m.memory)
    forward = np.where(m.flash > 0, flash, products + written)
    backward = np.where(
        m.flash > 0, 2.5 * m.attention_backward * flash, 2 * products + WRITTEN_BACKWARD * written
    )
    return core.count * forward, core.count * core.backward * backward


def elementwise(m: Machine, tokens: Number, work: Work, c: Columns) -> Number:
    """Norms, activations, residuals, dropout of a block's forward: memory traffic. sp splits what is outside
    the matrices that tp cuts.
    """
    outside = m.elementwise_hidden * work.hidden / np.where(c.sp > 0, c.tp, 1.0)
    inside = m.elementwise_wide * work.wide / c.tp
    return m.element * tokens * (outside + inside) / (m.bandwidth * m.memory)


def head(m: Machine, tokens: Number, work: Work, tp: Number) -> Number:
    """Logits and loss of all tokens, there and back. A vocabulary that tp does not divide is padded."""
    rows = work.vocabulary / tp
    rows = np.where(rows % 1 > 0, np.ceil(rows / ALIGNED) * ALIGNED, rows)
    products = product(m, tokens, rows, work.hidden) + product(m, tokens, work.hidden, rows)
    products = products + work.head_trainable * product(m, rows, work.hidden, tokens, (rows, work.hidden))
    return products + tokens * rows * m.logit_bytes / (m.bandwidth * m.memory)


# messages #


def ring_bandwidth(m: Machine, ranks: Number, local: Number) -> Number:
    """Bytes per second that a ring of `ranks` with `local` of them in each node moves past each: the link's
    inside a node; between nodes the part of a node's network that falls to the group, its other GPUs being in
    rings of their own.
    """
    inside = m.link * m.link_share
    across = m.network * m.network_share * local / m.node
    return np.where(ranks > local, np.minimum(inside, across), inside)


def moved(m: Machine, size: Number, ranks: Number, local: Number) -> Number:
    """(n-1)/n of a tensor of `size` bytes past each rank of a ring (Chan et al. 2007)."""
    return np.where(ranks > 1, size * (ranks - 1) / ranks / ring_bandwidth(m, ranks, local), 0.0)


def gathered(m: Machine, size: Number, ranks: Number, local: Number, messages: Number = 1.0) -> Number:
    """All-gathers or reduce-scatters of tensors that have `size` bytes together as they are whole. Each of
    the messages goes once around a ring, whose steps between nodes and inside them wait for one another.
    """
    nodes = ranks / local
    turn = (nodes - 1) * m.network_latency + (ranks - nodes) * m.link_latency
    return moved(m, size, ranks, local) + np.where(ranks > 1, messages * turn, 0.0)


def all_reduced(m: Machine, size: Number, ranks: Number, local: Number) -> Number:
    """The sum of a small tensor: the traffic of two all-gathers, but along a tree."""
    each = np.where(ranks > local, m.network_latency, m.link_latency)
    tree = np.where(ranks > 1, each * (1 + np.log2(ranks)), 0.0)
    return 2 * moved(m, size, ranks, local) + tree


# a block, one micro-batch #


@dataclass(frozen=True)
class Passes:
    """What a GPU computes of one block for one micro-batch. again: what backward repeats of forward. weights:
    the part of backward that makes the gradients of weights.
    """

    forward: Number
    backward: Number
    again: Number
    weights: Number

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class Block:
    """One block and micro-batch on a rank: forward and backward with the messages between its tensor and
    context ranks (of which `tensor` and `context` are there and back) and the host's `waiting`; `sharding` is
    what ZeRO-2 and -3 add to them.
    """

    passes: Passes
    forward: Number
    backward: Number
    waiting: Number
    tensor: Number
    context: Number
    sharding: Number

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.sharding


def block_of(work: Work, c: Columns, m: Machine, seq_len: Number, documents: Number) -> Block:
    passes = computed(work, c, m, seq_len, documents)
    again = c.recomputes("full") | c.recomputes("selective")  # the whole block is gone through again
    hosts = np.where(again, 3, 2) * m.host_block
    forward = _launched(passes.forward, m.host_block, m)
    backward = _launched(passes.backward + passes.again, hosts, m)
    tensor, context = tensor_messages(work, c, m, seq_len), context_messages(work, c, m, seq_len)
    told = (tensor + context) / 2
    return Block(
        passes=passes,
        forward=forward + told,
        backward=backward + told,
        waiting=forward + backward - passes.total,
        tensor=tensor,
        context=context,
        sharding=shard_messages(work, c, m, forward + told, backward + told),
    )


def computed(work: Work, c: Columns, m: Machine, seq_len: Number, documents: Number) -> Passes:
    tokens = _tokens(c, seq_len)
    products = [matrix(m, tokens, gemm, c.tp) for gemm in work.matrices]
    slower = np.where(c.cp > 1, m.context_attention, 1.0)
    cores = [
        (slower * ahead, slower * back)
        for core in work.cores
        for ahead, back in [attention(m, tokens, seq_len, documents, core, c.tp)]
    ]
    passes = elementwise(m, tokens, work, c)
    core_forward = sum(ahead for ahead, _ in cores)
    product_forward = sum(ahead for ahead, _, _ in products)
    weights = sum(weights for _, _, weights in products) + accumulated(m, work, c)
    forward = product_forward + core_forward + passes
    backward = sum(inputs for _, inputs, _ in products) + weights
    backward = backward + sum(back for _, back in cores) + 2 * passes
    again = np.where(c.recomputes("full"), forward, 0.0)
    again = again + np.where(c.recomputes("attention"), core_forward, 0.0)
    again = again + np.where(c.recomputes("selective"), m.selective * product_forward + passes, 0.0)
    return Passes(forward, backward, again, weights)


def accumulated(m: Machine, work: Work, c: Columns) -> Number:
    """Gradients that each micro-batch makes (in 16 bits) are added to those that wait for the step's end."""
    gradients = work.trained_block_parameters / c.tp
    moved = (m.element + 2 * m.gradient_bytes) * gradients / (m.bandwidth * m.memory)
    return np.where((c.gradient_accumulation_steps > 1) & (c.zero < 2), moved, 0.0)


def tensor_messages(work: Work, c: Columns, m: Machine, seq_len: Number) -> Number:
    """Two sums of hidden states in forward, two in backward, two more where a forward is repeated."""
    hidden_bytes = m.element * _tokens(c, seq_len) * work.hidden
    reduced = all_reduced(m, hidden_bytes, c.tp, _local(c.tp, 1.0, m))
    repeated = c.recomputes("full") | (c.recomputes("selective") & (m.selective > 0))
    return 2 * reduced * (2 + repeated) * (1 - m.tensor_overlap)


def context_messages(work: Work, c: Columns, m: Machine, seq_len: Number) -> Number:
    """Keys and values of the whole sequence gathered, or (Ulysses) sequences exchanged for heads."""
    tokens = _tokens(c, seq_len)
    local = _local(c.cp, c.tp, m)
    widths = sum(k.count * k.key_heads * (k.qk_dim + k.v_dim) for k in work.cores) / c.tp
    heads = sum(k.count * (k.query_heads + k.key_heads) * (k.qk_dim + k.v_dim) for k in work.cores) / c.tp
    keys = gathered(m, m.element * tokens * c.cp * widths, c.cp, local)
    exchanged = gathered(m, m.element * tokens * heads, c.cp, local)
    times = np.where(c.recomputes("none"), 2, 3)
    return np.where(c.ulysses > 0, exchanged, keys) * times * (c.cp > 1)


def shard_messages(work: Work, c: Columns, m: Machine, forward: Number, backward: Number) -> Number:
    """What ZeRO's gathered parameters (3) and scattered gradients (2, 3) add to the passes beside which they
    travel.
    """
    shards = _shards(c)
    local = _local(shards, c.tp, m)
    weights = work.block_parameters / c.tp / m.shard_share
    gather = gathered(m, m.weight_bytes * weights, shards, local)
    trained = work.trained_block_parameters / c.tp / m.shard_share
    scatter = gathered(m, m.scatter_bytes * trained, shards, local)
    arriving = np.where(c.zero == 3, gather + scatter, np.where(c.zero == 2, scatter, 0.0))
    ahead = np.where(c.zero == 3, _exposed(forward, gather, m.shard_overlap), 0.0)
    return ahead + _exposed(backward, arriving, m.shard_overlap)


# a pipeline #


@dataclass(frozen=True)
class Pipeline:
    """sends: of one micro-batch, at one stage. bubble: of a step."""

    sends: Number
    bubble: Number


def pipeline_of(work: Work, c: Columns, m: Machine, seq_len: Number, block: Block, head: Number) -> Pipeline:
    """All stages wait for the first micro-batches and the last ones, and for the slowest stage, which may be
    the one with the head.
    """
    fullest = _fullest_stage(work.blocks, c.pp, head / block.total, m.balanced)
    hidden_bytes = m.element * _tokens(c, seq_len) * work.hidden
    cut = np.where((c.sp > 0) | (m.send_split > 0), c.tp, 1.0)
    send = _sent(hidden_bytes / cut, c.tp * c.cp * c.data_ranks, m)
    send = send + np.where(c.sp > 0, 0.0, gathered(m, hidden_bytes, cut, _local(cut, 1.0, m)))
    sends = 2 * send * c.virtual_stages * (c.pp > 1)
    blocks = work.blocks / c.pp
    stage = block.total * blocks + sends + m.host_micro_batch
    slowest = block.total * fullest + sends + m.host_micro_batch
    fill = _fill(c, stage, block.forward * blocks, block.passes.weights * blocks)
    uneven = np.where(c.pp > 1, c.gradient_accumulation_steps * (slowest - stage), 0.0)
    return Pipeline(sends, fill + uneven)


# once a step #


def gradients_and_update(work: Work, c: Columns, m: Machine, block: Block) -> tuple[Number, Number]:
    """(messages of gradients and parameters that are not each block's own, the optimizer's update)."""
    shards = _shards(c)
    local_shards = _local(shards, c.tp, m)
    outside = np.where(c.pp > 1, work.vocabulary * work.hidden, work.outside_parameters)
    own = (work.blocks * work.block_parameters / c.pp + outside) / c.tp
    blocks = work.blocks / c.pp * work.trained_block_parameters
    trained = (blocks + outside * work.trained_outside) / c.tp
    copies = np.where(c.zero > 0, c.dp_replicate, c.data_ranks * c.cp)
    local_copies = _local(copies, c.tp * np.where(c.zero > 0, shards, 1.0), m)
    kept = np.where(c.zero > 0, trained / shards, trained)
    messages = np.where(m.data_overlap > 0, work.blocks / c.pp, 1.0)  # each block's own, or all at once
    summed = 2 * gathered(m, m.gradient_bytes * kept, copies, local_copies, messages)
    scattered = gathered(m, m.gradient_bytes * trained, shards, local_shards, messages)
    summed = summed + np.where(c.zero == 1, scattered, 0.0)
    hidden = np.minimum(summed * m.data_overlap, block.backward * work.blocks / c.pp)
    whole = (c.zero == 1) | (c.zero == 2)  # weights are gathered once, before the first forward
    once = np.where(whole, gathered(m, m.weight_bytes * own, shards, local_shards, messages), 0.0)

    # what ZeRO-2 and -3 say of what is outside the blocks, with nothing beside it to hide behind
    root = outside / c.tp / m.shard_share
    root_gather = gathered(m, 2 * m.weight_bytes * root, shards, local_shards)
    root_scatter = gathered(m, m.scatter_bytes * root * work.trained_outside, shards, local_shards)
    rooted = np.where(c.zero == 3, root_gather, 0.0) + np.where(c.zero >= 2, root_scatter, 0.0)
    told = summed - hidden + once + c.gradient_accumulation_steps * rooted
    return told, kept * m.optimizer_bytes / (m.bandwidth * m.memory)


# a step #


def step(
    work: Work, c: Columns, m: Machine, seq_len: Number, document_tokens: Number | None = None
) -> Seconds:
    """The time of one optimizer step.

    document_tokens: mean length of what a token attends in (the sum of the squared lengths over the sum of
    the lengths); None: whole sequences.
    """
    documents = seq_len if document_tokens is None else np.minimum(document_tokens, seq_len)
    block = block_of(work, c, m, seq_len, documents)
    last = head(m, _tokens(c, seq_len), work, c.tp)
    pipeline = pipeline_of(work, c, m, seq_len, block, last)
    messages, update = gradients_and_update(work, c, m, block)
    micro_batches = c.gradient_accumulation_steps
    blocks = micro_batches * work.blocks / c.pp
    return Seconds(
        compute=blocks * block.passes.total
        + micro_batches * last / c.pp,  # the head's, shared out over ranks
        tensor=blocks * block.tensor,
        context=blocks * block.context,
        pipeline=micro_batches * pipeline.sends,
        data=blocks * block.sharding + messages,
        optimizer=update,
        bubble=pipeline.bubble - np.where(c.pp > 1, micro_batches * last / c.pp, 0.0),
        host=blocks * block.waiting + micro_batches * m.host_micro_batch + m.host_step,
    )


def _tokens(c: Columns, seq_len: Number) -> Number:
    """Of a micro-batch, on a rank."""
    return c.micro_batch_size * seq_len / c.cp


def _shards(c: Columns) -> Number:
    """Ranks that ZeRO cuts its state over."""
    return c.dp_shard * c.cp


def _local(ranks: Number, inside: Number, m: Machine) -> Number:
    """How many of a group's ranks are in one node, where each stands for `inside` neighbours."""
    return np.minimum(ranks, np.maximum(1.0, m.node / inside))


def _longer(a: Number, b: Number) -> Number:
    """The longer of two times that run side by side, a little more where they are alike."""
    return (a**4 + b**4) ** 0.25


def _launched(computing: Number, host: Number, m: Machine) -> Number:
    """Computing that the host launches: side by side, or one after the other."""
    return np.where(m.launch_blocking > 0, computing + host, _longer(computing, host))


def _exposed(computing: Number, message: Number, overlap: Number) -> Number:
    """What a message beside a computation adds to it."""
    return np.maximum(message - computing, 0.0) + (1 - overlap) * np.minimum(computing, message)


def _fullest_stage(blocks: Number, pp: Number, head_blocks: Number, balanced: Number) -> Number:
    """The cost of the slowest stage, in blocks. head_blocks: what the head costs, in blocks."""
    equal = np.ceil(blocks / pp - 1e-9) + np.where(pp > 1, head_blocks, 0.0)
    at_last = np.maximum(1.0, np.round((blocks + head_blocks) / pp - head_blocks))
    others = np.ceil((blocks - at_last) / np.maximum(pp - 1, 1.0) - 1e-9)
    even = np.where(pp > 1, np.maximum(at_last + head_blocks, others), blocks)
    return np.where(balanced > 0, even, equal)


def _sent(size: Number, inside: Number, m: Machine) -> Number:
    """Hidden states to the next stage: over the network once a stage fills a node or more."""
    across = m.network * m.network_share / m.node * m.send_share
    return np.where(inside >= m.node, size / across, size / (m.link * LINK_OF_ONE)) + m.network_latency


def _fill(c: Columns, stage: Number, forward: Number, weights: Number) -> Number:
    """Time in which a rank waits for the first micro-batches, and for the last ones.

    With F, B and W a rank's forward, backward of activations and backward of weights:
    (pp - 1)·(F + B + W) for GPipe and 1F1B, a v-th of it interleaved (Narayanan et al. 2021, section 2.2);
    (pp - 1)·(F + B - W) for ZB-H1 and (pp - 1)·(F + B - 2W) over half stages for ZBV (Qi et al. 2024,
    arXiv:2401.10241); (pp - 1)·(F + 2B - W) over half stages for DualPipeV (DeepSeek-AI 2024,
    arXiv:2412.19437, table 2, with no overlap inside a pair). Never less than half a forward: the three are
    not as equal as that. With fewer micro-batches than ranks a rank's next stage waits for the first of them
    to come round: pp - m stages more for each stage but the first.
    """
    chunk = stage / c.virtual_stages
    saved = np.where(c.runs("zb"), 2 * weights, np.where(c.runs("zbv"), 3 * weights, 0.0))
    saved = np.where(c.runs("dualpipev"), 3 * weights + forward - stage, saved) / c.virtual_stages
    each = np.where(c.runs("gpipe", "1f1b"), stage, chunk)
    floor = np.where(c.runs("zb", "zbv", "dualpipev"), forward / c.virtual_stages * 0.5, 0.0)
    short = np.maximum(c.pp - c.gradient_accumulation_steps, 0.0) * (c.virtual_stages - 1) * chunk
    return np.where(c.pp > 1, (c.pp - 1) * np.maximum(each - saved, floor) + short, 0.0)
