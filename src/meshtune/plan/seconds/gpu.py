"""Seconds of one GPU for a block and the head: rooflines of matmuls, attention and elementwise passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshtune.plan.seconds.experts import grouped_passes, permutations
from meshtune.plan.seconds.groups import shard_groups
from meshtune.plan.work import Core, Gemm, Work, attended
from meshtune.precision import NF4_BYTES
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine

TILE = 128 * 128  # output elements of a matmul that one multiprocessor works on at a time
ALIGNED = 64  # elements (128 bytes of 16 bits) that tensor cores want the rows of operands to be multiples of
LOADED = 8  # elements (16 bytes) that they need; other matmuls run on slower kernels
NORMS = 2  # of hidden states in a block, which `elementwise_hidden` has; there are more in Gemma 2 and OLMo 2
ADDED = 3  # tensors that move as B's outputs are added; what `adapter_passes` has beyond them scales
WRITTEN_BACKWARD = 1.3  # traffic of written attention scores in the backward, over the forward's; assumed


# Rate of a forward's matmul with scales of rows over that with one scale: fitted to the speeds of Llama 3 8B
# on 8 H100 in pytorch/torchtitan@7a04053 (bf16 5,760 tokens/s, rowwise 6,424, tensorwise 7,186).
ROWWISE = 0.62
CAST_BYTES = 18  # of an element's cast from fp32 to 8 bits, and of its scale, beyond half of a cast to 16


def matmul_rate(machine: Machine, fastest: Number | None = None) -> Number:
    """FLOP/s of a large matmul. fastest: as of `matmul`."""
    fastest = machine.matmul_max if fastest is None else fastest
    return fastest * machine.clock * machine.matmul * machine.stack_matmul


def matmul(
    machine: Machine,
    rows: Number,
    cols: Number,
    inner: Number,
    *,
    contiguous: tuple[Number, ...] = (),
    fastest: Number | None = None,
) -> Number:
    """Seconds of [rows, inner] @ [inner, cols]: the longer of computing and memory traffic.

    Computing reaches a share of the peak, less for short inner sizes, an incomplete last wave of tiles and
    unaligned rows of operands.

    contiguous: sizes of the dimensions along which the operands lie in memory; empty: cols and inner.
    fastest: FLOP/s of the fastest matmul in this precision; None: `matmul_max`.
    """
    rate = matmul_rate(machine, fastest)
    tiled = rows * cols + machine.tiles * machine.multiprocessors * TILE
    slowdown = 1.0
    for size in contiguous or (cols, inner):
        unaligned = np.where(np.floor(size) % LOADED != 0, machine.unloaded, machine.misaligned)
        slowdown = np.maximum(slowdown, np.where(np.floor(size) % ALIGNED != 0, unaligned, 1.0))
    computing = 2 * tiled * (inner + machine.depth) / rate * slowdown
    elements = rows * inner + inner * cols + rows * cols
    traffic = machine.element * elements / (machine.bandwidth * machine.memory)
    return overlapped(computing, traffic)


def matrix_passes(
    machine: Machine, tokens: Number, gemm: Gemm, tp: Number, sharded: Number = False
) -> tuple[Number, Number, Number]:
    """Seconds of (forward, gradients of inputs, gradients of weights) of one kind of matrix in a block.

    All `gemm.count` of them, for `tokens` tokens; gradients count by the shares of them that are needed.
    sharded: by ZeRO, which casts weights to 8 bits before it gathers them.
    Operands in 8-bit floats are cast from 16 bits: read for their scale (2 bytes an element), then read and
    written (3), and again where a matmul needs them transposed. What makes an input finds its scale. Counted
    in the kernels that inductor writes for a block of Llama 3.1 8B, in meshtune dryrun: 1 % fewer bytes than
    there in the forward, 8 % fewer in the backward. With scales of rows a forward finds them as it casts; a
    backward finds those of weights anew, and multiplies their gradients by them (1 % more, 2 % fewer bytes).
    """
    tokens = tokens / tp if gemm.cut == "tokens" else tokens
    rows = gemm.rows / tp if gemm.cut == "rows" else gemm.rows
    cols = gemm.cols / tp if gemm.cut == "cols" else gemm.cols
    fastest = machine.fp8_matmul_max if gemm.fp8 and np.any(machine.fp8_matmul_max) else None
    inputs = gemm.input_gradient * matmul(machine, tokens, cols, rows, fastest=fastest)
    lying = (rows, cols) if fastest is None else ()  # fp8 operands are laid out anew as they are cast
    weights = gemm.trainable * matmul(machine, rows, cols, tokens, contiguous=lying, fastest=fastest)
    if fastest is not None:
        fastest = fastest * np.where(machine.fp8_rowwise > 0, ROWWISE, 1.0)
    forward = matmul(machine, tokens, rows, cols, fastest=fastest)
    if gemm.quantised:  # read in 4 bits, and written for the matmul to read
        written = rows * cols * (NF4_BYTES + machine.element) / (machine.bandwidth * machine.memory)
        forward, inputs = forward + written, inputs + gemm.input_gradient * written
    if fastest is not None:
        weight, output, read = (
            size / (machine.bandwidth * machine.memory)
            for size in (rows * cols, rows * tokens, cols * tokens)
        )
        by_row, cast = machine.fp8_rowwise, ~np.asarray(sharded) | (machine.fp8_rowwise > 0)
        forward = forward + cast * (5 - 2 * by_row) * weight + (3 - 1.5 * by_row) * read
        again = np.where(cast, 3 + 2 * by_row, 2) * weight  # transposed
        inputs = inputs + gemm.input_gradient * (again + (5 - 2 * by_row) * output)
        weights = weights + gemm.trainable * (3 * (output + read) + 4 * by_row * weight)
    return gemm.count * forward, gemm.count * inputs, gemm.count * weights


def passes_of(
    machine: Machine, tokens: Number, gemm: Gemm, work: Work, layouts: Columns
) -> tuple[Number, Number, Number]:
    """Return `matrix_passes`, or `grouped_passes` of experts."""
    if np.any(gemm.experts):
        return grouped_passes(machine, tokens, gemm, work, layouts)
    return matrix_passes(machine, tokens, gemm, layouts.tp, layouts.zero > 0)


def attention_passes(
    machine: Machine, queries: Number, seq_len: Number, document_tokens: Number, core: Core, layouts: Columns
) -> tuple[Number, Number]:
    """Seconds of (forward, backward) of one kind of attention core in a block, all `core.count` of them.

    Flash kernels compute QKᵀ again in the backward: 5 matmuls against 2 (Dao 2023, arXiv:2307.08691). Beside
    the keys that it sees, a query costs the time of some more (kernels.toml), once for each part of a ring.
    Without one, scores are all of [queries, seq_len], and pass through memory in softmax and dropout.

    queries: tokens of a micro-batch on this rank. document_tokens: mean length of the documents that tokens
    attend in; used only with a flash kernel. core: with the heads of this rank.
    """
    heads = core.query_heads
    width = heads * (core.qk_dim + core.v_dim)
    parts = np.where((machine.ring_attention > 0) & ~layouts.ulysses, layouts.cp, 1.0)
    keys = attended(document_tokens, core.window) + machine.attention_keys * parts
    rate = attention_rate(machine, core.qk_dim) * machine.attention * machine.stack_attention
    flash = 2 * queries * keys * width / rate
    scores = queries * seq_len * heads
    batched = machine.core_matmul_max * machine.clock * machine.matmul * machine.batched
    matmuls = 2 * queries * seq_len * width / batched * (1 + machine.depth / core.qk_dim)
    written = scores * machine.score_bytes / (machine.bandwidth * machine.memory)
    uses_flash = machine.flash > 0
    forward = np.where(uses_flash, flash, matmuls + written)
    flash_backward = 2.5 * machine.attention_backward * flash
    backward = np.where(uses_flash, flash_backward, 2 * matmuls + WRITTEN_BACKWARD * written)
    return core.count * forward, core.count * core.backward * backward


def attention_rate(machine: Machine, head_size: Number) -> Number:
    """FLOP/s of the attention kernel's forward for long causal sequences in a benchmark of the kernel.

    Between the head sizes that were measured in proportion, as above them; below less, in proportion to the
    size.
    """
    to_128, to_256 = np.clip((head_size - 64) / 64, 0, 1), np.clip((head_size - 128) / 128, 0, 1)
    rate = machine.attention_64 + to_128 * (machine.attention_128 - machine.attention_64)
    rate = rate + to_256 * (machine.attention_256 - machine.attention_128)
    return rate * np.minimum(head_size / 64, 1.0)


def elementwise(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> tuple[Number, Number]:
    """Seconds of (forward, backward) of norms, activation functions, residuals, rotary embeddings and dropout
    in a block: memory traffic.

    sp splits those outside the matrices that tp cuts (Korthikanti et al. 2022, section 4.2.2). tokens: of a
    micro-batch on this rank, before sp.
    """
    per_hidden = machine.elementwise_hidden + machine.elementwise_norm * (work.norms - NORMS)
    outside = per_hidden * work.hidden / np.where(layouts.sp > 0, layouts.tp, 1.0)
    wide = machine.elementwise_wide * work.wide * work.most_rows(layouts) / layouts.tp
    heads = work.head_shards(layouts.tp)
    rotary = machine.elementwise_rotary * work.rotary / heads
    norms = machine.elementwise_norm * work.normed_heads / heads
    seconds = machine.element * tokens / (machine.bandwidth * machine.memory)
    forward = outside + norms + wide + rotary
    backward = machine.hidden_backward * (outside + norms) + machine.wide_backward * wide
    return seconds * forward, seconds * (backward + machine.rotary_backward * rotary)


def adapter_sums(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> tuple[Number, Number]:
    """Seconds of (forward, backward) in a block of what LoRA adds to its matmuls: memory traffic.

    The inputs of A may be dropped. The outputs of B are scaled and added to those of the adapted matrix; in
    the backward gradients are scaled again, and those of its inputs are added up. tokens: of a micro-batch on
    this rank.
    """
    outputs = sum(
        b.count * b.rows / (layouts.tp if b.cut else 1.0) for b in work.matrices if b.adapter == "B"
    )
    read = [(a, a.count * a.cols / (layouts.tp if a.cut else 1.0)) for a in work.matrices if a.adapter == "A"]
    inputs = sum(a.input_gradient * elements for a, elements in read)
    seconds = machine.element * tokens / (machine.bandwidth * machine.memory)
    forward = machine.adapter_passes * outputs
    backward = np.maximum(machine.adapter_passes - ADDED, 0.0) * outputs + machine.adapter_sums * inputs
    if work.dropped:
        forward = forward + machine.dropout_passes * sum(elements for _, elements in read)
        backward = backward + machine.dropout_backward * inputs
    return forward * seconds, backward * seconds


def unrepeated(machine: Machine, tokens: Number, work: Work, layouts: Columns) -> tuple[Number, Number]:
    """Seconds of (matmuls, elementwise operations) of a block's forward that its backward does not repeat.

    torch's checkpoint ends as soon as it has what the backward needs: before the last matmul, whose output
    only the residual reads (two tensors of [tokens, hidden], one is written). Other stacks' constants were
    fitted to whole repetitions. tokens: of a micro-batch on this rank, before sp.
    """
    last = [gemm for gemm in work.matrices if gemm.last]
    matmuls = sum(passes_of(machine, tokens, gemm, work, layouts)[0] for gemm in last)
    outputs = sum(gemm.count * gemm.rows for gemm in last)
    moved = 3 * outputs / np.where(layouts.sp > 0, layouts.tp, 1.0)
    moved = moved + sum(machine.adapter_passes * gemm.count * gemm.rows for gemm in last if gemm.adapter)
    seconds = machine.element * tokens / (machine.bandwidth * machine.memory)
    return machine.counted * matmuls, machine.counted * seconds * moved


@dataclass(frozen=True)
class BlockCompute:
    """Seconds that a GPU computes for one block and one micro-batch, by kind."""

    matmul_forward: Number
    matmul_inputs: Number  # backward: gradients of inputs
    matmul_weights: Number  # backward: gradients of weights
    attention_forward: Number
    attention_backward: Number
    elementwise_forward: Number  # with those of adapters
    elementwise_backward: Number
    accumulation: Number  # adding gradients to the step's sum
    recomputation: Number  # what the backward repeats of the forward
    copies_forward: Number  # into and out of the buffers of ZeRO's collectives
    copies_backward: Number

    @property
    def forward(self) -> Number:
        return self.matmul_forward + self.attention_forward + self.elementwise_forward + self.copies_forward

    @property
    def weights(self) -> Number:
        """Seconds of the part of the backward that makes gradients of weights."""
        return self.matmul_weights + self.accumulation

    @property
    def backward(self) -> Number:
        """Seconds of the backward without recomputation."""
        matmuls = self.matmul_inputs + self.weights
        return matmuls + self.attention_backward + self.elementwise_backward + self.copies_backward

    @property
    def total(self) -> Number:
        return self.forward + self.backward + self.recomputation


def block_compute(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, document_tokens: Number
) -> BlockCompute:
    """Seconds that a GPU computes for one block and one micro-batch.

    document_tokens: mean length of the documents that tokens attend in, at most seq_len.
    """
    tokens = layouts.rank_tokens(seq_len)
    matmuls = [passes_of(machine, tokens, gemm, work, layouts) for gemm in work.matrices]
    heads = work.head_shards(layouts.tp)
    on_rank = [replace(core, query_heads=core.query_heads / heads) for core in work.cores]
    cores = [attention_passes(machine, tokens, seq_len, document_tokens, core, layouts) for core in on_rank]
    matmul_forward = sum(forward for forward, _, _ in matmuls)
    attention_forward = sum(forward for forward, _ in cores)
    in_block, in_block_backward = elementwise(machine, tokens, work, layouts)
    copies = [
        shard_copies(
            machine, group.weights, group.trained, layouts, cut=group.cut, shards=group.ranks,
            cast=group.cast,
        )
        for group in shard_groups(work, layouts, machine)
    ]  # fmt: skip
    gathering, scattering = (sum(pass_copies) for pass_copies in zip(*copies, strict=True))
    of_adapters, of_adapters_backward = adapter_sums(machine, tokens, work, layouts)
    of_experts = permutations(machine, tokens, work, layouts)
    elementwise_forward = in_block + of_adapters + of_experts
    shared, experts = work.shared_block(layouts, True) / layouts.tp, work.split_experts(layouts, True)
    accumulation = gradient_accumulation(machine, shared, layouts)
    copies = layouts.token_ranks / layouts.ep
    accumulation = accumulation + gradient_accumulation(machine, experts, layouts, copies)

    matmuls_again = np.where(layouts.recomputation("keeps_matmuls"), machine.selective, 0.0)
    matmuls_again = np.where(layouts.recomputation("matmuls"), 1.0, matmuls_again)
    last_matmul, last_elementwise = unrepeated(machine, tokens, work, layouts)
    recomputation = matmuls_again * (matmul_forward - last_matmul)
    recomputation = recomputation + np.where(layouts.recomputation("attention"), attention_forward, 0.0)
    again = elementwise_forward - last_elementwise
    recomputation = recomputation + np.where(layouts.recomputation("block"), again, 0.0)
    tiles = layouts.mlp_tiles(tokens, machine.mlp_tile)
    # A tile's forward runs again: under full in place of the block's, but for what that would leave out.
    in_mlp = sum(each for (each, _, _), gemm in zip(matmuls, work.matrices, strict=True) if gemm.mlp)
    of_mlp = in_mlp + machine.element * tokens / (machine.bandwidth * machine.memory) * (
        machine.elementwise_wide * work.wide / layouts.tp
    )
    stops = layouts.recomputation("matmuls") & (last_matmul > 0)
    recomputation = recomputation + (tiles > 1) * np.where(stops, last_matmul + last_elementwise, of_mlp)
    summed = work.trained_mlp(layouts.tp) * (machine.element + 2 * np.maximum(machine.element, 4.0))
    return BlockCompute(
        matmul_forward=matmul_forward,
        matmul_inputs=sum(inputs for _, inputs, _ in matmuls),
        matmul_weights=sum(weights for _, _, weights in matmuls),
        attention_forward=attention_forward,
        attention_backward=sum(backward for _, backward in cores),
        elementwise_forward=elementwise_forward,
        elementwise_backward=in_block_backward + of_adapters_backward + of_experts,
        accumulation=accumulation
        + np.where(tiles > 1, tiles * summed / (machine.bandwidth * machine.memory), 0.0),
        copies_forward=gathering,
        copies_backward=scattering,
        recomputation=recomputation,
    )


def gradient_accumulation(
    machine: Machine, gradients: Number, layouts: Columns, copies: Number | None = None
) -> Number:
    """Seconds to add one micro-batch's gradients to the sum that waits for the step's end.

    Where they are counted, the first are cast, and replicas copy all into a flat buffer
    (parallel/replicas.py).
    0 under ZeRO-2 and -3, whose shards are summed, and where a micro-batch is the whole step of one replica.

    gradients: trained elements of the rank before ZeRO. copies: ranks with the same ones; None: those
    with all others.
    """
    steps, summed = layouts.gradient_accumulation_steps, machine.gradient_bytes
    added = machine.element + 2 * summed
    cast = np.where(summed > machine.element, machine.element + summed, 0.0)
    several = (layouts.zero == 0) & (layouts.parameter_ranks > 1)
    replicated = several if copies is None else (layouts.zero == 0) & (copies > 1)
    once = np.where((steps > 1) | several | replicated, cast, 0.0) + np.where(replicated, 2 * summed, 0.0)
    counted = (once + (steps - 1) * added) / steps
    moved = np.where(machine.counted > 0, counted, np.where(steps > 1, added, 0.0))
    return np.where(layouts.zero < 2, gradients * moved / (machine.bandwidth * machine.memory), 0.0)


def shard_copies(
    machine: Machine,
    whole: Number,
    trained: Number,
    layouts: Columns,
    *,
    again: bool = True,
    cut: Number | None = None,
    shards: Number | None = None,
    cast: Number = 0.0,
) -> tuple[Number, Number]:
    """Seconds of (forward, backward) in one micro-batch of FSDP2's copies: memory traffic.

    Shards are cast and copied into the buffer of an all-gather, weights copied out of it; gradients are
    copied into the buffer of a reduce-scatter, in the dtype of their sum, and its results are added up.
    ZeRO-3 gathers in the forward and in the backward, ZeRO-1 and -2 once a step.

    whole, trained: elements before tp and ZeRO. again: whether ZeRO-3 gathers in the backward too. cut,
    shards: ranks that they are cut over before ZeRO, and sharded over by it; None: those of the layout. cast:
    elements that are cast to 8 bits.
    """
    steps = layouts.gradient_accumulation_steps
    cut = layouts.tp if cut is None else cut
    shards = layouts.shard_ranks if shards is None else shards
    element, summed = machine.element, machine.scatter_bytes
    narrowed = np.where(summed > element, summed + element, 0.0)
    gather = whole * (2 * element + (2 * element + narrowed) / shards) + CAST_BYTES * cast / shards
    adding = np.where(steps > 1, 3 * summed / shards, 0.0)
    scatter = trained * (element + summed + adding)
    seconds = machine.counted / (cut * machine.bandwidth * machine.memory)
    once = np.where(layouts.zero == 3, 1.0, 1 / steps)
    scatters = np.where(layouts.zero > 1, 1.0, 1 / steps)
    gathered_again = np.where(layouts.zero == 3, again * gather, 0.0)
    sharded = np.where(layouts.zero > 0, seconds, 0.0)
    return sharded * once * gather, sharded * (gathered_again + scatters * scatter)


def overlapped(seconds: Number, others: Number) -> Number:
    """Seconds of two things that run at the same time: the longer, up to 19 % more where equal (a 4-norm)."""
    return (seconds**4 + others**4) ** 0.25


def launch_seconds(machine: Machine, work: Work) -> Number:
    """Seconds in which the host launches the kernels of a block's forward; the backward has twice that.

    An adapted matrix has `adapter_launches` more.
    """
    return machine.launch * (
        machine.block_launches
        + machine.expert_launches * (work.routed > 0)
        + machine.adapter_launches * sum(b.count for b in work.matrices if b.adapter == "B")
    )


def launched(computing: Number, host: Number, machine: Machine) -> Number:
    """Seconds of computation with the host's launches: their sum if launches block, else `overlapped`.

    computing, host: seconds of each without the other.
    """
    return np.where(machine.launch_blocking > 0, computing + host, overlapped(computing, host))


def host_seconds(computing: Number, machine: Machine) -> tuple[Number, Number]:
    """(Seconds that the host's work for a micro-batch adds to its computation, those it adds once a step).

    With `ahead` it runs ahead of the kernels in all of a step's micro-batches but the first.
    """
    work = machine.host_micro_batch
    added = np.where(machine.ahead > 0, launched(computing, work, machine) - computing, work)
    return added, machine.host_step + work - added
