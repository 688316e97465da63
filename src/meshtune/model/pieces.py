"""A rank's part of a tensor that several ranks hold together."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """`tensor` is what this rank holds of a whole of `shape`, from `offsets` on, along each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
