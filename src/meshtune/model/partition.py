"""Who holds what under a layout: arithmetic on a Census, without torch.

    stages of blocks (pp)  ->  pieces of each matrix (tp)  ->  shards of what is left (dp_shard · cp)

The engine applies it, the planner counts it, the pictures draw it; nobody works it out again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshtune.layout import Layout

V_SCHEDULES = ("zbv", "dualpipev")  # two stages a rank: down the ranks and up again


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts one parameter.

    dim: the tensor dimension that is cut; None: every rank holds all of it. partial: each rank's gradient is
    a part of the sum over the tp ranks.
    """

    dim: int | None = None
    partial: bool = False


def piece(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of piece `index` of `parts`, by torch.chunk's rule: pieces of ceil(size / parts), the
    last ones shorter or empty.
    """
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


# stages #


def stage_count(layout: Layout) -> int:
    """Stages of the whole pipeline; several a rank under virtual stages and the V schedules."""
    return layout.pp * (2 if layout.schedule in V_SCHEDULES else layout.virtual_stages)


def stage_of_rank(schedule: str, pp: int, virtual_stages: int, pp_rank: int) -> tuple[int, ...]:
    """The stages of one pipeline rank, in the order of the layers.

    A V schedule goes down the ranks and up again, so that rank 0 has the first and the last stage; all
    others go round.
    """
    if schedule in V_SCHEDULES:
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, pp * virtual_stages, pp))


def stage_blocks(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """The blocks of each stage: contiguous, at least one each, the largest stage cost as small as can be.

    costs: of each block, in any unit; first and last: what the first stage (embedding) and the last one
    (norm, head, loss) cost beside their blocks. Among the cuts with the same largest cost, that with the
    smallest sum of squares. Raises ValueError
    for fewer blocks than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} blocks do not make {stages} stages of at least one block each.")
    before = list(accumulate(costs, initial=0.0))

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (start == 0) + last * (stop == len(costs))

    largest, _ = _best_cuts(len(costs), stages, lambda value, *cut: max(value, cost(*cut)))

    def squares(value: float, start: int, stop: int) -> float:
        own = cost(start, stop)
        return value + own * own if own <= largest else math.inf

    _, cuts = _best_cuts(len(costs), stages, squares)
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _best_cuts(
    blocks: int, stages: int, joined: Callable[[float, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """The smallest value, and the cuts (0, …, blocks) that give it, by dynamic programming.

    joined(value, start, stop): the value of stages with `value` and one more of the blocks start … stop - 1;
    it must grow with `value`. O(blocks² · stages).
    """
    values = {0: 0.0}  # of the best stages so far, by the block after them
    starts: list[dict[int, int]] = []  # of the last of them
    for stage in range(1, stages + 1):
        found = {
            stop: min((joined(value, start, stop), start) for start, value in values.items() if start < stop)
            for stop in range(stage, blocks - (stages - stage) + 1)
        }
        values = {stop: value for stop, (value, _) in found.items()}
        starts.append({stop: start for stop, (_, start) in found.items()})
    cuts = [blocks]
    for stage in reversed(starts):
        cuts.append(stage[cuts[-1]])
    return values[blocks], tuple(reversed(cuts))
