"""Boundaries of a micro-batch's documents, as attention kernels read them: tensors, made with the batch.

    documents ((5, 3), (6,)) in rows of 8     queries 0 5 8 14 16, longest 6; the last is padding

Made before a step's passes, they cost no copy to the device inside them, and a compiled block is the same for
every set of documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Lengths = tuple[tuple[int, ...], ...]  # tokens of each document, row by row; the rest of a row is padding

# Padding is cut into documents of this many tokens: it is computed too, and so costs little.
PADDING_LENGTH = 128


@dataclass(eq=False)  # not frozen: torch 2.11 would read all fields of a frozen one into its graphs
class Boundaries:
    """Documents of flattened tokens, as attention/op.py takes them.

    The queries of a document may be fewer than its keys, where other ranks have the others (cp).
    """

    queries: Tensor  # int32 [documents + 1]: where each document begins; the last one: where all end
    keys: Tensor  # the same of the keys
    longest_query: Tensor  # int64 [], on the CPU: most queries of a document
    longest_key: Tensor
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each document
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)  # what kernels made of them, by its key

    def map(self, function: Callable[[Tensor], Tensor]) -> "Boundaries":
        """The same with `function` of the boundaries; the longest lengths stay on the CPU."""
        return replace(self, queries=function(self.queries), keys=function(self.keys), _made={})

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


def row_boundaries(documents: Sequence[Sequence[int]], seq: int) -> Boundaries:
    """Boundaries of documents in rows of `seq` columns, on the CPU. documents: their lengths in each row.

    The padding of each row is cut into documents of PADDING_LENGTH tokens.
    """
    lengths: list[int] = []
    for row in documents:
        rest = seq - sum(row)
        lengths += [*row, *[PADDING_LENGTH] * (rest // PADDING_LENGTH), rest % PADDING_LENGTH]
    return boundaries_of([(length, length) for length in lengths if length])


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
