"""Cut a dimension into a part for each rank: arithmetic, without torch.

one matrix       ──> piece    rows 0–63 of 256 on rank 0 of 4
fused matrices   ──> pieces   rows 0–31, 128–159 …: a piece of each
a shard of these ──> within   the rows of it at some places
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Split:
    """How tensor or expert parallelism cuts one parameter."""

    dim: int | None = None  # the tensor dimension that is cut; None: every rank holds all of it
    partial: bool = False  # each rank's gradient is a part of the sum over the tp ranks
    parts: tuple[int, ...] = ()  # sizes along `dim` of what is fused in it, each cut separately; (): one
    axis: str = "tp"  # whose ranks have the pieces: tp or ep


def piece(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of piece `index` of `parts`, from 0, by torch.chunk's rule.

    All pieces have ceil(size / parts) elements, the last ones fewer or none (start == stop).
    """
    longest = -(-size // parts)
    return min(index * longest, size), min((index + 1) * longest, size)


def pieces(parts: Sequence[int], ranks: int, index: int) -> tuple[range, ...]:
    """The elements of rank `index` of `ranks` along a dimension that is several parts, one after the other: a
    piece of each.
    """
    starts = accumulate(parts, initial=0)
    cut = (piece(size, ranks, index) for size in parts)
    return tuple(range(at + start, at + stop) for at, (start, stop) in zip(starts, cut, strict=False))


def within(runs: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """Return the elements at the places start … stop - 1 of all `runs`, one after the other: at least one
    run, which is empty where there is no such element.
    """
    starts = accumulate(map(len, runs), initial=0)
    cut = [run[max(0, start - at) : max(0, stop - at)] for at, run in zip(starts, runs, strict=False)]
    return tuple(run for run in cut if run) or (runs[-1][:0],)
