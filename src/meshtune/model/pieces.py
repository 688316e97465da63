"""Piece: one rank's part of a tensor that is sharded over ranks, and how it is filled from a model's files.

    mapped(folder) ─> Weights ─> fill: this rank's rows and columns of each parameter, read and cast in place

The files are memory-mapped: only the pages of a rank's own slices are read, into the page cache instead of
the process's own memory. Adapters are passed in as tensors; rows of added tokens are computed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MEAN_CHUNK_ROWS = 1024  # rows of an embedding that are summed in fp64 at a time


@dataclass(frozen=True)
class Piece:
    """This rank's block of a tensor, as DTensor's checkpoints describe it: shape, offsets, local tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the block begins in each dimension of the whole tensor
    tensor: Tensor  # the block

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of the same block of `whole`, another tensor of that shape."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole


class Weights:
    """Stored tensors of a model, whole, by name; pieces are copied from them.

    A stored tensor with fewer rows than its parameter is an embedding (or head) that got rows for new tokens
    after it was saved: they are filled with the mean of the old rows, as `load.resize_embeddings` does.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: whole, by the name of their parameter or buffer; mapped from files or in memory."""
        self._tensors = tensors
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy_into(self, piece: Piece, name: str) -> None:
        """Fill `piece`, a part of the parameter `name`, cast to its dtype."""
        stored = self._tensors[name]
        if tuple(stored.shape) == piece.shape:
            piece.tensor.copy_(piece.of(stored))
            return
        first, rows = piece.offsets[0], len(stored)
        old = max(0, min(len(piece.tensor), rows - first))
        if old:
            piece.tensor[:old].copy_(Piece(piece.shape, piece.offsets, piece.tensor[:old]).of(stored))
        if old < len(piece.tensor):
            mean = Piece(piece.shape[1:], piece.offsets[1:], piece.tensor[0]).of(self._mean(name))
            piece.tensor[old:] = mean.to(piece.tensor.dtype)

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Overwrite the buffers of `model` that are stored."""
        for name, buffer in model.named_buffers():
            if name in self._tensors:
                buffer.copy_(self._tensors[name])

    def _mean(self, name: str) -> Tensor:
        """Mean row of a stored tensor, in fp64; computed once."""
        if name not in self._means:
            stored = self._tensors[name]
            total = sum(part.sum(0, dtype=torch.float64) for part in stored.split(MEAN_CHUNK_ROWS))
            assert isinstance(total, Tensor)
            self._means[name] = total / len(stored)
        return self._means[name]


def fill(pieces: Iterable[tuple[str, Piece]], weights: Weights) -> None:
    """Fill each (name of a parameter, this rank's piece of it) from the stored tensors, cast to its dtype."""
    for name, piece in pieces:
        weights.copy_into(piece, name)
