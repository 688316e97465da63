"""The tables of a checkpoint that several ranks write: who writes what, and what is where.

    tensors ─> separate_tied ─> this rank's pieces
    sizes of each rank's pieces ─> dealt ─> the pieces that this rank writes
    this rank's pieces ─> write ─> Written ─┬─ all ranks' ─> metadata: the bytes of `.metadata`
                                            └─ as at the last save? then those bytes again
    pieces of any cut <─ read ─ the parts of stored pieces that overlap with them

At 512 ranks both tables have some 600,000 rows, and seconds of work; a layout is fixed for a run, so both are
made once. Files have the format of torch.distributed.checkpoint.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from meshtune.filesystem import replace, sync
from meshtune.model.pieces import Piece


def piece_of(tensor: Tensor | Piece) -> Piece:
    """The tensor as a Piece: a plain tensor is one piece, the whole."""
    if isinstance(tensor, Piece):
        return tensor
    return Piece(tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())


def separate_tied(tensors: Mapping[str, Tensor | Piece]) -> tuple[dict[str, Piece], dict[str, str]]:
    """Separate tied tensors: (pieces by name, name of each piece with the memory of an earlier one -> its
    name).
    """
    first_names: dict[Any, str] = {}
    pieces: dict[str, Piece] = {}
    tied: dict[str, str] = {}
    for name, piece in ((name, piece_of(tensor)) for name, tensor in tensors.items()):
        data = piece.tensor
        memory = (data.device, data.data_ptr(), data.dtype, data.shape, data.stride(), piece.shape)
        first = name if data.numel() == 0 or data.is_meta else first_names.setdefault(memory, name)
        if first == name:
            pieces[name] = piece
        else:
            tied[name] = first
    return pieces, tied


def dealt(sizes_by_rank: Sequence[Mapping[Hashable, int]], rank: int) -> set[Hashable]:
    """The pieces that `rank` writes. sizes_by_rank: bytes of the pieces that each rank has, by their keys.

    A piece that several ranks have goes to the one with the fewest bytes so far, largest first.
    """
    sizes = {key: size for part in sizes_by_rank for key, size in part.items()}
    owners: dict[Any, list[int]] = {key: [] for key in sizes}
    for owner, part in enumerate(sizes_by_rank):
        for key in part:
            owners[key].append(owner)
    loads, assigned = [0] * len(sizes_by_rank), set()
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        least = min(owners[key], key=loads.__getitem__)
        loads[least] += sizes[key]
        if least == rank:
            assigned.add(key)
    return assigned


class Written(NamedTuple):
    """A rank's pieces on the disk, with the file and place of each."""

    items: list[WriteItem]
    results: list[WriteResult]


def write(folder: Path, pieces: Mapping[str, Piece], rank: int) -> Written:
    """Write this rank's pieces into `folder`, as __<rank>_0.distcp. Raises the error of the file system, or
    torch's RuntimeError because of it.
    """
    writer = FileSystemWriter(folder, sync_files=False)  # `sync` also where there is no fsync
    items = [_write_item(name, block) for name, block in _blocks(pieces)]
    # The writer names files by the place of a plan among all ranks'.
    plans = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(items)])
    written = Written(items, writer.write_data(plans[rank], _Pieces(pieces)).value())
    for file in folder.glob(f"__{rank}_*"):
        sync(file)
    return written


def metadata(folder: Path, parts: Sequence[Written]) -> bytes:
    """Write `.metadata` into `folder` for what all ranks wrote; returns its bytes."""
    _, table = create_default_global_save_plan([SavePlan(part.items) for part in parts])
    writer = FileSystemWriter(folder, sync_files=False)
    # also where nothing is renamed
    writer.fs.rename = lambda path, new_path: replace(Path(path), Path(new_path))
    writer.finish(table, [part.results for part in parts])
    return (folder / ".metadata").read_bytes()


def read(reader: StorageReader, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Copy what `reader` has of these pieces into them; a collective of the group, None for one process.

    Raises CheckpointException if a file can't be read.
    """
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    planner = _LoadPieces(pieces)
    load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def mismatch(name: str, piece: Piece, stored: Any) -> str | None:
    """Reason why `piece` of the tensor `name` can't be read; None if it can.

    stored: the checkpoint's metadata of that tensor, None if it has no such tensor.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return f"it has no tensor {name}."
    if tuple(stored.size) != tuple(piece.shape):
        return f"{name} has shape {list(stored.size)} there and {list(piece.shape)} here."
    saved, wanted = stored.properties.dtype, piece.tensor.dtype
    if saved != wanted and not (saved.is_floating_point and wanted.is_floating_point):
        return f"{name} is {saved} there and {wanted} here."
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
        return f"{name} is incomplete there."
    return None


def _chunk(block: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.shape)


def empty_here(piece: Piece) -> bool:
    """Whether this rank has no element of the tensor, while others have some."""
    return piece.tensor.numel() == 0 and math.prod(piece.shape) > 0


def _blocks(pieces: Mapping[str, Piece]) -> Iterator[tuple[str, Piece]]:
    """Yield (name, block) for each block of this rank's pieces that has an element."""
    for name, piece in pieces.items():
        for block in piece.blocks():
            if not empty_here(block):
                yield name, block


def _index(name: str, block: Piece) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(block.offsets))


class _Pieces(DefaultSavePlanner):
    """Finds the tensors of this rank's blocks for torch's writer."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = {_index(name, block): block.tensor for name, block in _blocks(pieces)}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index]


def _write_item(name: str, block: Piece) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(block),
        properties=TensorProperties.create_from_tensor(block.tensor),
        size=torch.Size(block.shape),
    )
    return WriteItem(index=_index(name, block), type=WriteItemType.SHARD, tensor_data=data)


class _LoadPieces(DefaultLoadPlanner):
    """Plans to read the parts of stored pieces, of any cut, that overlap with this rank's pieces."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = list(_blocks(pieces))
        self._tensors = {_index(name, block): block.tensor for name, block in self._blocks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, block in self._blocks
                for item in create_read_items_for_chunk_list(name, stored[name], [_chunk(block)])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index]
