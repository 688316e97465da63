"""Boundaries of a micro-batch's documents, as attention kernels read them: tensors, made with the batch.

    documents ((5, 3), (6,)) in rows of 8     queries 0 5 8 14 16, longest 6; the last is padding
    the same, the second shares 2             keys 0 5 10 16 18 of columns 0 1 2 3 4 | 0 1 5 6 7 | 8 …

A document may begin with tokens of the one before that it does not have itself, as the rejected answer to a
prompt that both answers share. It sees them as keys: its last query stands at its last key, so that causal
attention and windows are those of the whole document.

Made before a step's passes, they cost no copy to the device inside them, and a compiled block is the same for
every set of documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor

Lengths = tuple[tuple[int, ...], ...]  # tokens of each document, row by row; the rest of a row is padding

# Padding is cut into documents of this many tokens: it is computed too, and so costs little.
PADDING_LENGTH = 128


@dataclass(eq=False)  # not frozen: torch 2.11 would read all fields of a frozen one into its graphs
class Boundaries:
    """Documents of flattened tokens, as attention/op.py takes them.

    The queries of a document may be fewer than its keys, where other ranks have the others (cp) or another
    document has its first tokens.
    """

    queries: Tensor  # int32 [documents + 1]: where each document begins; the last one: where all end
    keys: Tensor  # the same of the keys
    longest_query: Tensor  # int64 [], on the CPU: most queries of a document
    longest_key: Tensor
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each document
    # int64 [keys]: the flattened column of each key; None: keys are the queries' columns, or gathered before
    columns: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)  # what kernels made of them, by its key

    def map(self, function: Callable[[Tensor], Tensor]) -> "Boundaries":
        """The same with `function` of the boundaries; the longest lengths stay on the CPU."""
        columns = None if self.columns is None else function(self.columns)
        return replace(
            self, queries=function(self.queries), keys=function(self.keys), columns=columns, _made={}
        )

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, called once for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def boundaries_of(lengths: Sequence[tuple[int, int]]) -> Boundaries:
    """Boundaries of documents of these (queries, keys), one behind another, on the CPU.

    Two tensors also where queries are the keys: where two inputs are one, a compiled block is another graph.
    """
    sides = list(zip(*lengths, strict=True))
    ends = [torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in sides]
    longest = [torch.tensor(max(side), dtype=torch.int64) for side in sides]
    return Boundaries(ends[0], ends[1], longest[0], longest[1], tuple(lengths))


def row_boundaries(documents: Sequence[Sequence[int]], seq: int, shared: Lengths = ()) -> Boundaries:
    """Boundaries of documents in rows of `seq` columns, on the CPU. documents: their lengths in each row.

    shared: of each document, the tokens of the one before that it begins with; (): none. The padding of each
    row is cut into documents of PADDING_LENGTH tokens.
    """
    rows: list[list[int]] = []
    for row in documents:
        rest = seq - sum(row)
        rows.append([*row, *[PADDING_LENGTH] * (rest // PADDING_LENGTH), rest % PADDING_LENGTH])
    if not shared:
        return boundaries_of([(length, length) for row in rows for length in row if length])
    lengths, columns = [], []
    for number, (row, own) in enumerate(zip(rows, shared, strict=True)):
        for _, length, keys in key_columns(row, own):
            lengths += [(length, len(keys))] if length else []
            columns.append(keys + number * seq)
    return replace(boundaries_of(lengths), columns=torch.cat(columns))


def key_columns(documents: Sequence[int], shared: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first column, tokens, columns of its keys) of each document of a row.

    shared: as in `row_boundaries`; documents beyond these have no shared tokens.
    """
    before = start = 0
    for length, first in zip_longest(documents, shared, fillvalue=0):
        keys = torch.arange(start, start + length)
        yield start, length, torch.cat([torch.arange(before, before + first), keys]) if first else keys
        before, start = start, start + length


def checked_lengths(documents: Sequence[Sequence[int]], batch: int, seq: int) -> Lengths:
    """Document lengths, row by row, as tuples.

    Raises ValueError if there are not `batch` rows, a length is below 1, or a row is longer than `seq`.
    """
    lengths = tuple(tuple(row) for row in documents)
    if len(lengths) != batch:
        raise ValueError(f"`documents` describes {len(lengths)} rows, the micro-batch has {batch}.")
    for row, inside in enumerate(lengths):
        if sum(inside) > seq or any(length < 1 for length in inside):
            raise ValueError(
                f"`documents[{row}]` is {inside}: lengths must be at least 1 and their sum at most {seq}."
            )
    return lengths
