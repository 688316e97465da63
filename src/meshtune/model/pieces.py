"""Piece: one rank's part of a tensor that is sharded over ranks, and how it is filled from a model's files.

    mapped(folder), or one that is drawn ─> StoredTensors ─> fill: this rank's slices of each parameter, read
                                                             and cast in place

The files are memory-mapped: only the pages of a rank's own slices are read, into the page cache instead of
the process's own memory. Adapters are passed in as tensors; rows of added tokens are computed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.errors import UserError
from meshtune.precision import SCALE_BLOCK
from meshtune.quantised import nf4
from meshtune.quantised.deferred import Deferred

MEAN_CHUNK_ROWS = 1024  # rows of an embedding that are summed in fp64 at a time


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor: one block, or several blocks of rows, one after the other."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the (first) block begins in each dimension of the whole tensor
    tensor: Tensor  # the part
    rows: tuple[range, ...] = ()  # of the whole tensor, of each block; (): it is one block

    def blocks(self) -> "Iterator[Piece]":
        """Yield each block as a piece of its own, sharing memory."""
        if not self.rows:
            yield self
            return
        tensors = self.tensor.split([len(rows) for rows in self.rows])
        for rows, tensor in zip(self.rows, tensors, strict=True):
            yield Piece(self.shape, (rows.start, *self.offsets[1:]), tensor)

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of the same block of `whole`, another tensor of that shape. Only for one block."""
        assert not self.rows
        for dim, (start, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole

    def in_blocks(self, tensor: Tensor) -> "Piece":
        """Piece of a tensor with a value for each SCALE_BLOCK elements of a row; `tensor` is this rank's."""
        shape, offsets = ((*cut[:-1], cut[-1] // SCALE_BLOCK) for cut in (self.shape, self.offsets))
        return Piece(shape, offsets, tensor, self.rows)

    def copy_from(self, whole: Tensor) -> None:
        """Overwrite the part with that of `whole`, another tensor of that shape, in the part's dtype."""
        whole = whole.make() if isinstance(whole, Deferred) and not whole.parts else whole
        for block in self.blocks():
            block.tensor.copy_(block.of(whole))


@dataclass(frozen=True)
class QuantisedPiece(Piece):
    """This rank's part of a matrix that it holds in 4 bits, or of stacked ones."""

    codes: tuple[Piece, ...] = ()  # its parts of the Codes
    dtype: torch.dtype = torch.float32  # that the matrix has before it is quantised

    def copy_from(self, whole: Tensor) -> None:
        packed, first = self.codes[0].tensor, 0
        if len(self.shape) == 3:  # other ranks' matrices are not quantised; this rank may have none
            first = self.offsets[0]
            whole = whole[first : first + len(packed)]
            if not len(whole):
                return
        codes = nf4.codes_of(whole, self.dtype, packed.device)
        for part, values in zip(self.codes, codes, strict=True):
            offsets = part.offsets[0] - first, *part.offsets[1:]
            Piece((*values.shape,), offsets, part.tensor, part.rows).copy_from(values)


class StoredTensors:
    """Stored tensors of a model, whole, by name; pieces are copied from them.

    A stored tensor with fewer rows than its parameter is an embedding (or head) that got rows for new tokens
    after it was saved: they are filled with the mean of the old rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: whole, by the name of their parameter or buffer; mapped from files or in memory."""
        self._tensors = dict(tensors)
        self._means: dict[str, Tensor] = {}
        self._aliases: dict[tuple[int, torch.Size], list[str]] = {}
        for name, tensor in tensors.items():
            self._aliases.setdefault(self._address(tensor), []).append(name)

    @staticmethod
    def _address(tensor: Tensor) -> tuple[int, torch.Size]:
        """Equal for the names of one tied tensor."""
        return id(tensor) if isinstance(tensor, Deferred) else tensor.data_ptr(), tensor.shape

    @torch.no_grad()
    def copy_into(self, piece: Piece, name: str) -> None:
        """Overwrite `piece.tensor`, a part of the parameter `name`, with the stored values in its own dtype.

        Rows that are not stored get the mean of those stored.
        """
        stored = self._tensors[name]
        if tuple(stored.shape) == piece.shape:
            piece.copy_from(stored)
            return
        first, rows = piece.offsets[0], len(stored)
        old = max(0, min(len(piece.tensor), rows - first))
        if old:
            piece.tensor[:old].copy_(Piece(piece.shape, piece.offsets, piece.tensor[:old]).of(stored))
        if old < len(piece.tensor):
            mean = Piece(piece.shape[1:], piece.offsets[1:], piece.tensor[0]).of(self._mean(name))
            piece.tensor[old:] = mean.to(piece.tensor.dtype)

    def free(self, name: str) -> None:
        """Drop a stored tensor and its tied names, so that its memory is freed."""
        for alias in self._aliases.pop(self._address(self._tensors[name])):
            del self._tensors[alias]

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


def whole_pieces(model: nn.Module) -> Iterator[tuple[str, Piece]]:
    """Each parameter of an unsharded model as one piece, live, by name."""
    for name, parameter in model.named_parameters():
        yield name, Piece(tuple(parameter.shape), (0,) * parameter.ndim, parameter.detach())


def joined(named: Iterable[tuple[str, Piece]], dtype: torch.dtype) -> Iterator[tuple[str, Piece]]:
    """Yield pieces by name, those of the codes of one matrix, or of one stack, as one under its name.

    A name may come twice: a rank of a V schedule has both copies of a tied embedding. dtype: that of the
    matrices before they are quantised.
    """
    pieces = [*named]
    found = dict(pieces)
    for name, part in pieces:
        codes = [found[name + suffix] for suffix in nf4.SUFFIXES if name + suffix in found]
        if len(codes) == len(nf4.SUFFIXES):
            shape = (*part.shape[:-1], 2 * part.shape[-1])
            numbers = codes[-1].tensor.view(torch.float32)
            yield name, QuantisedPiece(shape, part.offsets, numbers, (), tuple(codes), dtype)
        elif not name.endswith(nf4.SUFFIXES[1:]):
            yield name, part


def fill(pieces: Iterable[tuple[str, Piece]], weights: StoredTensors, *, free: bool = False) -> None:
    """Overwrite each (name of a parameter, this rank's piece of it) with stored values in the piece's dtype.

    free: True to remove a tensor from `weights`, under all its names, after its last piece, so that tensors
    which aren't a mapping of a file (drawn, or cast) never double a rank's memory. Raises UserError, naming
    them, if tensors have values that are NaN or infinite in the piece's dtype.
    """
    named, broken = list(pieces), dict[str, None]()
    last = {name: number for number, (name, _) in enumerate(named)}
    for number, (name, piece) in enumerate(named):
        weights.copy_into(piece, name)
        if not finite(piece.tensor):
            broken[name] = None
        if free and last[name] == number:
            weights.free(name)
    if broken:
        shown = ", ".join([*broken][:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
        raise UserError(
            f"{len(broken)} of the model's {len(last)} tensors have values that are NaN or infinite: "
            f"{shown}. No training mends them; take the weights from another source."
        )


def finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite; allocates nothing of the tensor's size."""
    if tensor.is_meta or tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor.detach()))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised memory on `device` for tensors on meta; move the others (buffers) there.

    In place; tied parameters stay tied.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                places.setdefault(parameter, []).append((child, name))
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device))
    for (owner, owner_name), *others in places.values():  # `_apply` makes two parameters of a tied one
        for child, name in others:
            child._parameters[name] = owner._parameters[owner_name]
