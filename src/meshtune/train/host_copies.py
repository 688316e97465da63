"""Copies in host memory of the tensors that a checkpoint in the background writes, while training goes on."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from meshtune.model.pieces import Piece


class HostCopies:
    """One buffer for each piece, page-locked where it lies on a GPU; every save uses them again."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def allocate(self, pieces: Mapping[str, Piece], *, touch: bool = False) -> str | None:
        """Have a buffer for each piece, by its name, and for no others.

        touch: write to it too, so that the system provides the memory now. Returns the reason if the memory
        can't be allocated, else None.
        """
        for name in self.buffers.keys() - pieces.keys():
            del self.buffers[name]
        for name, tensor in ((name, piece.tensor) for name, piece in pieces.items()):
            old = self.buffers.get(name)
            if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.is_cuda and tensor.numel() > 0  # page-locked: copied at the bus's speed
                try:
                    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                except (RuntimeError, MemoryError) as error:
                    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
                self.buffers[name] = fresh.zero_() if touch else fresh
        return None

    @torch.no_grad()
    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy pieces that have a buffer; returns the copies, once they are whole."""
        for name, piece in pieces.items():
            self.buffers[name].copy_(piece.tensor, non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return {name: replace(piece, tensor=self.buffers[name]) for name, piece in pieces.items()}
