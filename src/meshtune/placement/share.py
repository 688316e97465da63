"""The share of a model that each rank holds under a layout: arithmetic on a Census, without torch.

    stages of blocks (pp)  ->  pieces of each matrix (tp)  ->  shards of what is left (dp_shard · cp)

The engine applies it, the planner counts it, the pictures draw it. `share` puts it together for one rank.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from meshtune.layout import AXES, V_SCHEDULES, Layout
from meshtune.placement.census import Census, Parameter, attended_pairs, is_matrix
from meshtune.placement.collectives import (
    Collective,
    Shape,
    Unit,
    context_collectives,
    data_collectives,
    pipeline_collectives,
    tensor_collectives,
)
from meshtune.placement.columns import Columns
from meshtune.placement.ranks import coordinates, group
from meshtune.placement.split import piece
from meshtune.placement.states import Copies, Elements, States, copies_of, held_states

# stages #


def stage_of_rank(schedule: str, pp: int, virtual_stages: int, pp_rank: int) -> tuple[int, ...]:
    """The stages of one pipeline rank, in the order of the layers.

    A V schedule goes down the ranks and up again, so that rank 0 has the first and the last stage; all
    others go round. virtual_stages: stages per rank; a V schedule always has 2 and ignores it.
    """
    if schedule in V_SCHEDULES:
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, pp * virtual_stages, pp))


def stage_blocks(
    costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[range, ...]:
    """The blocks of each stage: contiguous, at least one each, the largest stage cost as small as can be.

    costs: of each block, in any unit; first and last: what the first stage (embedding) and the last one
    (norm, head, loss) cost besides their blocks, possibly below 0. Among the cuts with the same largest cost,
    that with the smallest sum of squares; among those, that whose later stages have more blocks, exactly so
    where the costs are integers. Raises ValueError for fewer blocks than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} blocks do not make {stages} stages of at least one block each.")
    cost = costs[-1]
    lead = first + (costs[0] - cost)  # of the first stage, compared with the same number of equal blocks
    if stages > 1 and -cost <= lead <= 0 and all(other == cost for other in costs[1:]):
        cuts = tuple(accumulate(_even_stages(len(costs), stages, cost, lead, last), initial=0))
    else:
        cuts = _cheapest_cuts(costs, stages, first, last)
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _even_stages(blocks: int, stages: int, cost: float, first: float, last: float) -> list[int]:
    """Number of blocks of each of two or more stages where each block costs `cost`, in O(blocks).

    first, last: cost of the first and the last stage besides their blocks. first is at most 0, and negative
    (down to -cost) where the first block is cheaper than the others.
    """
    inner = stages - 2

    def sizes(at_last: int) -> tuple[int, int, int]:
        """Blocks of the first stage, blocks of the others but the last, how many of these have one more."""
        even, more = divmod(blocks - at_last, stages - 1)
        at_first = even + (more > 0 and (first < 0 or stages == 2))
        return at_first, even, more - (at_first > even)

    def largest_and_squares(at_last: int) -> tuple[float, float]:
        at_first, even, more = sizes(at_last)
        ends = (at_last * cost + last, at_first * cost + first)
        largest = max(*ends, (even + (more > 0)) * cost * (inner > 0))
        squares = [more * ((even + 1) * cost) ** 2, (inner - more) * (even * cost) ** 2]
        return largest, sum([*squares, *(end * end for end in ends)])

    at_last = min(range(blocks - stages + 1, 0, -1), key=largest_and_squares)
    at_first, even, more = sizes(at_last)
    return [at_first, *[even] * (inner - more), *[even + 1] * more, at_last]


def _cheapest_cuts(costs: Sequence[float], stages: int, first: float, last: float) -> tuple[int, ...]:
    """The cuts (0, …, blocks) of `stage_blocks`, for blocks of any costs; the arguments are as there."""
    before = list(accumulate(costs, initial=0))

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (start == 0) + last * (stop == len(costs))

    largest, _ = _best_cuts(len(costs), stages, lambda value, *cut: max(value, cost(*cut)))

    def squares(value: float, start: int, stop: int) -> float:
        stage_cost = cost(start, stop)
        return value + stage_cost * stage_cost if stage_cost <= largest else math.inf

    _, cuts = _best_cuts(len(costs), stages, squares)
    return cuts


def _best_cuts(
    blocks: int, stages: int, joined: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """The smallest value, and the cuts (0, …, blocks) that give it, by dynamic programming.

    joined(value, start, stop): the value of some stages that have `value`, with one more stage behind them of
    the blocks start … stop - 1; it must not fall where `value` rises. The first stage joins the value 0.
    O(blocks² · stages).
    """
    values: dict[int, float] = {0: 0}  # of the best stages so far, by the block after them
    starts: list[dict[int, int]] = []  # of the last of them
    for stage in range(1, stages + 1):
        best = {
            stop: min((joined(value, start, stop), start) for start, value in values.items() if start < stop)
            for stop in range(stage, blocks - (stages - stage) + 1)
        }
        values = {stop: value for stop, (value, _) in best.items()}
        starts.append({stop: start for stop, (_, start) in best.items()})
    cuts = [blocks]
    for stage in reversed(starts):
        cuts.append(stage[cuts[-1]])
    return values[blocks], tuple(reversed(cuts))


def census_stages(census: Census, layout: Layout, seq_len: int) -> tuple[range, ...]:
    """The blocks of every stage of a model, by the FLOPs that each block and the head cost per document.

    Embedding and norm have next to none. Every position counts as labelled, each document as `seq_len` long.
    Where the FLOPs of a model are unknown, elements of its parameters stand for them. Raises ValueError for
    fewer blocks than stages.
    """
    head = census.vocabulary * census.hidden
    if census.unsupported or census.head is None:
        costs: list[float] = [sum(p.count for p in block.parameters) for block in census.blocks]
        return stage_blocks(costs, layout.stages, last=head)
    costs = []
    for block in census.blocks:
        cores = (
            a.forward(pairs) + a.backward(pairs)
            for a in block.attention
            for pairs in [attended_pairs([seq_len], a.window)]
        )
        costs.append(seq_len * sum(m.forward + m.backward for m in block.matrices) + sum(cores))
    head = seq_len * (census.head.forward + census.head.backward)
    return stage_blocks(costs, layout.stages, last=head)


# one rank #


@dataclass(frozen=True)
class Share:
    """One rank's part of a model and of a step's communication."""

    rank: int
    place: Mapping[str, int]  # its index on each of AXES
    stages: tuple[int, ...]
    blocks: tuple[range, ...]  # of each of its stages, in the order of `stages`
    embedding: bool  # it has the embedding
    head: bool  # it has the head
    parameters: Mapping[str, int]  # elements by kind, after pp and tp, before ZeRO
    bytes: States  # at the end of a step's last backward, see held_states
    groups: Mapping[str, tuple[int, ...]]  # its process groups of two or more, by axis or axes (dp_shard_cp)
    collectives: tuple[Collective, ...]  # of an optimizer step


def share(
    census: Census,
    layout: Layout,
    rank: int,
    *,
    precision: str = "bf16",
    reduce_dtype: str = "fp32",
    optimizer: str = "adamw",
    seq_len: int = 2048,
) -> Share:
    """The share of `rank`, as this engine holds it (parallel/zero.py, optim/).

    precision, reduce_dtype, optimizer and seq_len (tokens) are the settings of the same name. Raises
    ValueError for more pipeline stages than blocks, and for experts on several ranks, which it doesn't count.
    """
    if layout.ep > 1:
        raise ValueError(f"{layout}: the share of a rank with a part of the experts is not counted.")
    place = coordinates(layout, rank)
    stage_ranges = census_stages(census, layout, seq_len)
    stages = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, place["pp"])
    blocks = tuple(stage_ranges[stage] for stage in stages)
    units = [
        Unit([(_local_shape(p, layout.tp, place["tp"]), p) for p in unit], again)
        for stage in stages
        for unit, again in _units(
            census,
            stage_ranges[stage],
            first=stage == 0,
            last=stage == len(stage_ranges) - 1,
            sharded=layout.zero > 0,
        )
    ]
    parameters: Counter[str] = Counter()
    for unit in units:
        for shape, parameter in unit.parameters:
            parameters[parameter.kind] += math.prod(shape)
    axes: list[tuple[str, ...]] = [(axis,) for axis in AXES if getattr(layout, axis) > 1]
    if layout.cp > 1:  # a context rank is one more data rank
        axes.append(("dp_shard" if layout.zero else "dp_replicate", "cp"))
    copies = copies_of(precision, reduce_dtype, optimizer)
    tokens = layout.micro_batch_size * seq_len // layout.cp
    token_bytes = tokens * int(copies.weight)
    return Share(
        rank=rank,
        place=place,
        stages=stages,
        blocks=blocks,
        embedding=0 in stages,
        head=len(stage_ranges) - 1 in stages,
        parameters=dict(parameters),
        bytes=_states(copies, _elements(census, units, layout, place), layout),
        groups={"_".join(names): group(layout, rank, *names) for names in axes},
        collectives=(
            *data_collectives(copies, layout, units),
            *pipeline_collectives(layout, stages, hidden_bytes=token_bytes * census.hidden),
            *context_collectives(census, layout, blocks, token_bytes=token_bytes),
            *tensor_collectives(census, layout, stages, blocks, units=units, token_bytes=token_bytes),
        ),
    )


def _units(
    census: Census, blocks: range, *, first: bool, last: bool, sharded: bool
) -> Iterator[tuple[list[Parameter], bool]]:
    """Yield (parameters, whether ZeRO-3 gathers them again for the backward) of each group of one stage.

    Those outside the blocks, if it has any, then those of each block. sharded: by ZeRO, which has a group for
    an embedding that is not the head's, and takes the last norm to the last block (parallel/zero.py).

    blocks: indices of the stage's blocks. first, last: it is the first, or the last, stage of the model. A
    last stage that is not the first too has a copy of a tied embedding.
    """
    outside = [p for p in census.parameters_outside if (last if p.last else first)]
    if last and not first and census.tied:  # the head's own copy of the embedding
        table = (census.vocabulary, census.hidden)
        outside.append(next(p for p in census.parameters_outside if p.shape == table))
    inside = [list(census.blocks[block].parameters) for block in blocks]
    if sharded:
        norm = [p for p in outside if p.kind == "norm" and p.last]
        inside[-1] += norm
        outside = [p for p in outside if p not in norm]
        table = [p for p in outside if p.kind == "embedding" and p.shape[0] == census.vocabulary]
        if first and not census.tied:
            yield table[:1], False
            outside = [p for p in outside if p not in table[:1]]
    if outside:
        ends = all(p.kind == "head" or p.shape == (census.vocabulary, census.hidden) for p in outside)
        yield outside, not ends
    for parameters in inside:
        yield parameters, True


def _local_shape(parameter: Parameter, tp: int, index: int) -> Shape:
    """The shape of the piece of tensor-parallel rank `index`."""
    cut, shape = parameter.cut, parameter.shape
    if tp == 1 or cut is None or _repeated(parameter, tp):
        return shape
    start, stop = piece(shape[cut], tp, index)
    return (*shape[:cut], stop - start, *shape[cut + 1 :])


def _repeated(parameter: Parameter, tp: int) -> bool:
    """True if it has key-value heads, but fewer than tp ranks, so that each rank holds all of it."""
    return 0 < parameter.heads < tp


def _elements(census: Census, units: Iterable[Unit], layout: Layout, place: Mapping[str, int]) -> Elements:
    """Elements of parameters of one rank, and in its ZeRO shard, which cuts each along its first dimension.

    units: the rank's, with shapes after tp. place: its index on each of AXES.
    """
    shards = layout.shard_ranks if layout.zero else 1
    index = place["dp_shard"] * layout.cp + place["cp"] if layout.zero else 0
    whole, shard = Counter[bool](), Counter[bool]()  # by whether it is trained
    in_blocks, matrices = {p for block in census.blocks for p in block.parameters}, 0
    for unit in units:
        for shape, parameter in unit.parameters:
            start, stop = piece(shape[0], shards, index)
            whole[parameter.trainable] += math.prod(shape)
            shard[parameter.trainable] += math.prod((stop - start, *shape[1:]))
            if parameter.trainable and parameter in in_blocks and is_matrix(parameter.name, shape):
                matrices += math.prod(shape)
    return Elements(whole.total(), whole[True], shard.total(), shard[True], matrices)


def _states(copies: Copies, elements: Elements, layout: Layout) -> States:
    """Bytes of model states under one layout, as whole numbers."""
    states = held_states(copies, elements, Columns.of([layout]))
    return States(*(int(np.sum(column)) for column in states))
