"""Which queries see which keys, as kernel calls: a `QueryRun` is one call.

    documents ((5, 3), (8,))      2 rows of 8 columns: two documents in row 0, one in row 1
    runs_of(documents, None)      row 0: queries 0-4 see keys 0-4; row 0: 5-7, 5-7; row 1: 0-7, 0-7

Neighbouring rows with equal lengths share their runs. A document longer than its sliding window becomes
several runs, each with the keys that its window reaches, so that time and mask grow with length × window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from meshtune.model.body import Documents

Lengths = tuple[tuple[int, ...], ...]  # tokens of each document, row by row; the rest of a row is padding

WINDOW_BLOCK = 512  # queries of one masked call, at most


class QueryRun(NamedTuple):
    """Neighbouring queries of neighbouring rows and the keys that they see: one kernel call. Always causal.

    The last query stands at the last key.
    """

    rows: slice  # of the micro-batch
    queries: slice  # columns of the queries
    keys: slice  # columns of the keys
    window: int | None  # keys that a query sees at most, its own included; None: all earlier ones
    first: int | None = None  # column of the first query among the keys' columns; None: queries.start

    @property
    def first_query(self) -> int:
        """Column of the first query, counted among the keys' columns."""
        return self.queries.start if self.first is None else self.first

    @property
    def masked(self) -> bool:
        """True if a plain causal kernel call would give another result."""
        return self.window is not None or self.first_query != self.keys.start


@dataclass(frozen=True, eq=False)  # by identity: slices have no hash before Python 3.12
class QueryRuns:
    """Runs on a rank whose queries are other columns than its keys (parallel/context.py).

    Each run is of one document in one row; its keys end at its last query. All runs have the same window.
    """

    runs: tuple[QueryRun, ...]


def checked_lengths(documents: Documents | Sequence[Sequence[int]], batch: int, seq: int) -> Lengths:
    """Document lengths, row by row, as tuples.

    Raises ValueError if there are not `batch` rows, a length is below 1, or a row is longer than `seq`.
    """
    rows = documents.lengths if isinstance(documents, Documents) else documents
    lengths = tuple(tuple(row) for row in rows)
    if len(lengths) != batch:
        raise ValueError(f"`documents` describes {len(lengths)} rows, the micro-batch has {batch}.")
    for row, inside in enumerate(lengths):
        if sum(inside) > seq or any(length < 1 for length in inside):
            raise ValueError(
                f"`documents[{row}]` is {inside}: lengths must be at least 1 and their sum at most {seq}."
            )
    return lengths


@lru_cache(maxsize=32)
def runs_of(documents: Lengths, window: int | None) -> tuple[QueryRun, ...]:
    """The kernel calls of a micro-batch; neighbouring rows with equal lengths share theirs.

    window: keys that a query sees at most, its own included; None: all earlier ones of its document.
    """
    runs, row = [], 0
    for lengths, alike in groupby(documents):
        rows = slice(row, row + len(list(alike)))
        row = rows.stop
        for stop in accumulate(lengths):
            start = stop - lengths[0]
            lengths = lengths[1:]
            runs.extend(_runs_inside(rows, start, stop, window))
    return tuple(runs)


def _runs_inside(rows: slice, start: int, stop: int, window: int | None) -> list[QueryRun]:
    """The runs of one document in columns start … stop - 1: one, or several if it exceeds the window."""
    if window is None or stop - start <= window:
        return [QueryRun(rows, slice(start, stop), slice(start, stop), None)]
    size = min(max(window, 64), WINDOW_BLOCK)
    blocks = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    return [
        QueryRun(rows, slice(first, last), slice(max(start, first - window + 1), last), window)
        for first, last in blocks
    ]


def blocks_of(runs: QueryRuns) -> Iterator[QueryRun]:
    """Cut runs into at most WINDOW_BLOCK queries, each block with the keys that it sees."""
    for run in runs.runs:
        shift = run.first_query - run.queries.start
        for start in range(run.queries.start, run.queries.stop, WINDOW_BLOCK):
            stop, first = min(start + WINDOW_BLOCK, run.queries.stop), start + shift
            begin = run.keys.start if run.window is None else max(run.keys.start, first - run.window + 1)
            yield QueryRun(run.rows, slice(start, stop), slice(begin, stop + shift), run.window, first)


def additive_mask(run: QueryRun, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [queries, keys] of a run: 0, or -inf where hidden; None if a causal call does without.

    Query i sees keys i - window + 1 … i: as in Hugging Face, a window counts the query itself.
    """
    if not run.masked:
        return None
    length = run.queries.stop - run.queries.start
    queries = torch.arange(run.first_query, run.first_query + length, device=device)[:, None]
    keys = torch.arange(run.keys.start, run.keys.stop, device=device)[None, :]
    hidden = keys > queries
    if run.window is not None:
        hidden |= keys <= queries - run.window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
