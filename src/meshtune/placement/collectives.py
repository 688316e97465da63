"""Communication of one rank in an optimizer step, by axis and operation: counts and bytes.

    parameters, gradients (dp, ZeRO)   hidden states (pp, tp)   keys, values, heads (cp)

`share.share` puts them together for a rank; docs/parallelism.md draws them.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshtune.layout import BY_BLOCK, RECOMPUTATIONS, Layout
from meshtune.placement.census import Attention, Block, Census, Parameter, head_shards
from meshtune.placement.states import Copies

Shape = tuple[int, ...]


class Unit(NamedTuple):
    """Parameters that are gathered and reduced together."""

    parameters: list[tuple[Shape, Parameter]]  # with their shapes after tp
    again: bool = True  # ZeRO-3 gathers them for the backward too


def recomputed(layout: Layout, blocks: Iterable[range]) -> list[range]:
    """The blocks of each stage whose backward runs the block again, or its attention (`attention`)."""
    mode = RECOMPUTATIONS[layout.recompute]
    most = layout.recompute_blocks if mode.block or mode.attention else 0
    return [stage[:most] for stage in blocks]


class Collective(NamedTuple):
    """All collectives or sends of one kind that a rank takes part in during an optimizer step."""

    axis: str  # of the group: one of AXES, or two together as in dp_shard_cp
    op: str  # all_gather | reduce_scatter | all_reduce | all_to_all | send
    what: str  # parameters | gradients | hidden states | features | keys and values | heads
    count: int
    bytes: int  # of all `count` together, each as its gathered tensor, its reduction's input or what it sends


def data_collectives(copies: Copies, layout: Layout, units: Sequence[Unit]) -> Iterator[Collective]:
    """Gathered parameters and summed gradients, one flat buffer for each unit, as parallel/zero.py has it.

    units: of the rank, with shapes after tp. Nothing for a single data and context rank.
    """
    zero, steps = layout.zero, layout.gradient_accumulation_steps
    shards = layout.shard_ranks if zero else 1
    replicas = layout.parameter_ranks // shards

    def flat(shape: Shape) -> int:
        """Elements that a parameter takes in a flat buffer: all shards are as long as the longest."""
        return math.prod((-(-shape[0] // shards) * shards, *shape[1:]))

    trained = [unit for unit in units if any(p.trainable for _, p in unit.parameters)]
    weights = [sum(flat(shape) for shape, _ in unit.parameters) * int(copies.weight) for unit in units]
    gradients = sum(flat(shape) for unit in units for shape, p in unit.parameters if p.trainable)
    gradients *= int(copies.accumulated)
    context = "_cp" if layout.cp > 1 else ""
    if shards > 1:
        axis = f"dp_shard{context}"
        gathers = [steps * (1 + unit.again) if zero == 3 else 1 for unit in units]
        gathered = sum(map(operator.mul, gathers, weights))
        sums = steps if zero > 1 else 1
        yield Collective(axis, "all_gather", "parameters", sum(gathers), gathered)
        yield Collective(axis, "reduce_scatter", "gradients", sums * len(trained), sums * gradients)
    if replicas > 1:
        axis = "dp_replicate" if zero else f"dp_replicate{context}"
        yield Collective(axis, "all_reduce", "gradients", len(trained), gradients // shards)


def pipeline_collectives(layout: Layout, stages: Sequence[int], *, hidden_bytes: int) -> Iterator[Collective]:
    """Hidden states to the next stage and their gradients to the one before, unless this rank has it too.

    stages: of the rank. hidden_bytes: of one micro-batch's hidden states on the rank, before sp splits them.
    Nothing without a pipeline.
    """
    if layout.pp == 1:
        return
    away = [
        other
        for stage in stages
        for other in (stage - 1, stage + 1)
        if 0 <= other < layout.stages and other not in stages
    ]
    sends = layout.gradient_accumulation_steps * len(away)
    yield Collective(
        "pp", "send", "hidden states", sends, sends * hidden_bytes // (layout.tp if layout.sp else 1)
    )


def context_collectives(
    census: Census, layout: Layout, blocks: Sequence[range], *, token_bytes: int
) -> Iterator[Collective]:
    """Keys and values, or heads, exchanged by context ranks around each attention (parallel/context.py).

    blocks: of each of the rank's stages. token_bytes: bytes of one feature of all tokens that the rank has of
    a micro-batch (after cp). Nothing without cp.
    """
    if layout.cp == 1:
        return
    steps, mode = layout.gradient_accumulation_steps, RECOMPUTATIONS[layout.recompute]
    cores, again = (
        [core for stage in stages for block in stage for core in _cores(census.blocks[block], layout.tp)]
        for stages in (blocks, recomputed(layout, blocks))
    )
    if layout.cp_method == "ulysses":  # queries, keys, values, and what comes out; back again in the backward
        passed = 8 * cores + (4 if mode.block else 3) * again
        # keys and values are repeated until each rank gets the same number of their heads
        features = sum(
            (a.query_heads + math.lcm(a.key_heads, layout.cp)) * (a.qk_dim + a.v_dim) for a in passed
        )
        yield Collective(
            "cp", "all_to_all", "heads", steps * len(passed), steps * features * token_bytes // 4
        )
        return
    for op, passed in (("all_gather", cores + again), ("reduce_scatter", cores)):
        features = sum(a.key_heads * (a.qk_dim + a.v_dim) for a in passed)
        size = features * token_bytes * layout.cp
        yield Collective("cp", op, "keys and values", steps * len(passed), steps * size)


def _cores(block: Block, tp: int) -> list[Attention]:
    """Return a block's attention cores, with the heads of one of `tp` ranks."""
    shards = int(head_shards(block.whole_heads, tp))
    return [
        replace(core, query_heads=core.query_heads // shards, key_heads=max(core.key_heads // shards, 1))
        for core in block.attention
    ]


def _exchanges(block: Block, layout: Layout, *, again: bool) -> Counter[str]:
    """Collectives of hidden states over tp in one block and one micro-batch, by operation.

    Each part that is cut is entered and left, forward and backward. A mixture of experts has each rank's own
    tokens: without sp it takes a slice of them, and gathers its output, and in the backward both gradients.
    again: the block recomputes.
    """
    inside = int(block.cuts_mlp)  # the mlp, or shared experts
    inside_again = again * (inside - block.leaves_last)  # left again
    if layout.sp:
        entered_again = (1 + inside) * (again or layout.sp_regather)
        left_again = again + inside_again
        parts = 2 * (1 + inside)
        return Counter(all_gather=parts + entered_again, reduce_scatter=parts + left_again)
    if not block.mixture:
        return Counter(all_reduce=4 + again + inside_again)
    return Counter(
        all_reduce=2 + again,
        all_gather=2 + inside * (2 + again),
        reduce_scatter=2 * inside + inside_again,
    )


def tensor_collectives(
    census: Census,
    layout: Layout,
    stages: Sequence[int],
    blocks: Sequence[range],
    *,
    units: Sequence[Unit],
    token_bytes: int,
) -> Iterator[Collective]:
    """Hidden states summed or gathered over tensor-parallel ranks (parallel/tensor.py), in full fine-tuning.

    With frozen weights there are fewer: below the lowest trainable parameter there is no backward. Not
    counted: a few numbers per token for the loss, and once a step the gradients of what every rank holds
    whole, but for experts. Nothing without tp.

    stages, blocks (of each stage), units (shapes after tp): of the rank. token_bytes: bytes of one feature of
    all tokens that the rank has of a micro-batch (after cp, before sp).
    """
    if layout.tp == 1:
        return
    steps = layout.gradient_accumulation_steps
    hidden = token_bytes * census.hidden
    ends = (0 in stages) + (layout.stages - 1 in stages)  # after the lookup, before the head
    # Attention and mlp are entered and left, forward and backward. What runs again ends with the last matrix:
    # the sum of its outputs is not needed (but by families that normalise it, such as Olmo2 and Gemma2).
    # regather enters both once more, separately.
    whole = layout.recompute in BY_BLOCK
    again = [block for stage in recomputed(layout, blocks) for block in stage] if whole else []
    counts = Counter(dict.fromkeys(("all_gather", "reduce_scatter") if layout.sp else ("all_reduce",), ends))
    for number in (number for stage in blocks for number in stage):
        counts += _exchanges(census.blocks[number], layout, again=number in again)
    for op, count in counts.items():
        yield Collective("tp", op, "hidden states", steps * count, steps * count * hidden)
    experts = sum(math.prod(s) for unit in units for s, p in unit.parameters if p.experts and p.trainable)
    if experts:  # each rank's tokens', summed in fp32
        size = 4 * experts // (layout.shard_ranks if layout.zero else 1)
        yield Collective("tp", "all_reduce", "gradients", 1, size)
    parameters_again = {p for block in again for p in census.blocks[block].parameters}
    widths = [
        p.shape[cut]
        for unit in units
        for _, p in unit.parameters
        if p.gathered(layout.tp) and (cut := p.cut) is not None
        for _ in range(2 if p in parameters_again and cut == 0 else 1)
    ]
    if widths:
        yield Collective(
            "tp", "all_gather", "features", steps * len(widths), steps * sum(widths) * token_bytes
        )
