"""Micro-batches: tokens -> input_ids, shifted labels, positions and document lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from meshtune.data.boundaries import row_boundaries
from meshtune.data.pack import LABELLED, Dataset

IGNORE = -100  # the label of a position without loss, as in torch's cross_entropy


class Noise(NamedTuple):
    """Keys and sizes of the noise on each column's embedding (parallel/noise.py), [batch, seq]."""

    keys: torch.Tensor  # int64
    sizes: torch.Tensor  # fp64: its largest value times √hidden

    def map(self, function: Callable[[Tensor], Tensor]) -> "Noise":
        """The same with `function` of each tensor."""
        return Noise(*map(function, self))


class Mapped(Protocol):
    """Tensors that attention reads of the documents, made with the batch."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Mapped": ...


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass; all tensors int64 [batch, seq].

    The columns of a row beyond its documents are padding: id 0, labels -100, positions from 0 on.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor  # shifted: the id of the document's next token if that is labelled, else -100
    position_ids: torch.Tensor  # from 0 in each document
    documents: tuple[tuple[int, ...], ...]  # of each row, the lengths of its documents from column 0 on
    tokens: int  # without padding
    label_tokens: int
    columns: torch.Tensor | None = None  # [seq]: this rank's columns of the rows (cp); None: all of them
    noise: Noise | None = None  # on the embeddings; None: none
    # The documents as attention reads them, of whole rows or, under all-gather context parallelism, of this
    # rank's columns (parallel/context.py). None: made of `documents`.
    boundaries: Mapped = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.boundaries is None:
            found = row_boundaries(self.documents, self.input_ids.shape[-1])
            object.__setattr__(self, "boundaries", found)

    def document_tokens(self) -> torch.Tensor:
        """Length of each column's document [batch, seq], on the CPU; padding has 0."""
        columns = torch.arange(self.input_ids.shape[1]) if self.columns is None else self.columns.cpu()
        rows = []
        for row in self.documents:
            lengths = torch.tensor([*row, 0])
            rows.append(lengths[torch.bucketize(columns, lengths[:-1].cumsum(0), right=True)])
        return torch.stack(rows)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """The same micro-batch with `function` of each tensor that the passes read."""
        return replace(
            self,
            input_ids=function(self.input_ids),
            labels=function(self.labels),
            position_ids=function(self.position_ids),
            noise=self.noise and self.noise.map(function),
            boundaries=self.boundaries.map(function),
        )


@dataclass(frozen=True)
class Batch:
    """One step: this rank's micro-batches, and the counts of the whole global batch."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int  # of all ranks, without padding
    label_tokens: int  # of all ranks
    origin: str  # epoch and rows of the batch, for messages

    @property
    def place(self) -> str:
        """The epoch and the place in it, without the names of files: the same wherever the data lie."""
        return self.origin.partition(": ")[0]


def micro_batch(rows: Sequence[Sequence[np.ndarray]], width: int = 0, multiple: int = 1) -> MicroBatch:
    """Make tensors of rows, each a list of documents in stored tokens (uint32, see pack.py).

    They are as wide as the longest row, at least `width` columns, and padded to a multiple of `multiple`.
    """
    lengths = tuple(tuple(len(document) for document in row) for row in rows)
    width = max(width, *(sum(row) for row in lengths))
    width += -width % multiple
    # One column more than `width`: the label of the last column is "no token".
    stored = np.zeros((len(rows), width + 1), dtype=np.uint32)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    for row, documents in enumerate(rows):
        flat = np.concatenate(documents)
        stored[row, : len(flat)] = flat
        starts = np.cumsum((0, *lengths[row]))
        positions[row] = np.arange(width) - np.repeat(starts, np.diff(starts, append=width))
    labelled = (stored & LABELLED) != 0
    ids = (stored & ~LABELLED).astype(np.int64)
    # A document's first token is never labelled, so only the shift keeps labels from crossing documents.
    labels = np.where(labelled[:, 1:], ids[:, 1:], IGNORE)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        documents=lengths,
        tokens=sum(map(sum, lengths)),
        label_tokens=int(labelled.sum()),
    )


def evaluation_batches(
    dataset: Dataset, *, micro_batch_size: int, data_rank: int = 0, data_ranks: int = 1, multiple: int = 1
) -> Iterator[MicroBatch]:
    """Yield micro-batches of every sequence once, longest first; the last micro-batch may be smaller.

    Micro-batch m goes to rank m % data_ranks; this is rank `data_rank`. multiple: see `Loader`. All ranks get
    the same number of micro-batches, because the ranks of a sharded model all-gather their weights together:
    a rank that has none left gets the last one again, with no label and counts of 0.
    """
    order = np.argsort(-dataset.sequence_tokens, kind="stable")
    cuts = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    width = dataset.width if dataset.packed else 0
    for first in range(0, len(cuts), data_ranks):
        number = first + data_rank
        picked = cuts[min(number, len(cuts) - 1)]
        micro = micro_batch([dataset.documents(sequence) for sequence in picked], width, multiple)
        yield micro if number < len(cuts) else _unlabelled(micro)


def _unlabelled(micro: MicroBatch) -> MicroBatch:
    """The same input without labels, counted as 0 tokens."""
    return replace(micro, labels=torch.full_like(micro.labels, IGNORE), tokens=0, label_tokens=0)
