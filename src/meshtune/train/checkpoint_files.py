"""The files of a checkpoint on the disk: which are there, and whether they are as they were written.

    manifest.json ─> read_manifest ─> damage of each file, misnamed ─> sentences

checkpoint.py writes and reads them; nothing here talks to other ranks.
"""

import hashlib
import io
import json
import math
import os
import pickle
import shutil
import stat
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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

from meshtune.errors import UserError, explained
from meshtune.filesystem import replace, sync
from meshtune.model.pieces import Piece
from meshtune.rundir import saved_steps
from meshtune.units import human

HASH = "xxh3_128"  # finds damage; sha256 takes 20 times as long where the CPU has no SHA instructions
CANNOT_BE_READ = "cannot be read"  # unlike damage, this may pass: a network disk, permissions


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: {"hash", "files": {name: {"size", "hash"}}, "tied": {name: name}}.

    Raises UserError if it is missing or damaged.
    """
    path = folder / "manifest.json"
    if not folder.is_dir():
        steps = ", ".join(str(other) for other in saved_steps(folder.parent)) or "none"
        raise UserError(f"{folder} does not exist. Checkpoints there: {steps}.")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe waits for ever
            raise ValueError("no regular file")
        manifest = json.loads(path.read_text())
        files, tied = manifest["files"], manifest["tied"]
        plain = all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files)
        sized = all(facts.keys() == {"size", "hash"} for facts in files.values())
        complete = {".metadata", "values.json"} <= files.keys() and manifest["hash"] == HASH
        if not (plain and sized and complete and all(isinstance(name, str) for name in tied.values())):
            raise ValueError("not a manifest of this version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}: {error}).") from error
    return manifest


def misnamed(folder: Path, step: int) -> str | None:
    """Sentence on a whole checkpoint in `folder` whose values are not those of `step`; None if they are.

    Whoever renames a folder, or writes one, may give it any name and any values.
    """
    file = folder / "values.json"
    with explained(f"{file} is damaged"):
        values = json.loads(file.read_text())
    saved = values.get("step") if isinstance(values, dict) else None
    if type(saved) is int and saved == step:
        return None
    return f"{folder} holds values of step {str(saved)[:40]}; its folder has another name."


def damage(path: Path, facts: dict[str, Any]) -> str | None:
    """Sentence on the damage of one file; None if it is whole. facts: its `size_and_hash` when written."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is damaged: it is not a regular file."
        if status.st_size != facts["size"]:
            return f"{path} is damaged: it has {status.st_size} bytes, {facts['size']} were written."
        if size_and_hash(path) != facts:
            return f"{path} is damaged: its content is not what was written ({HASH} differs)."
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} {CANNOT_BE_READ}: {error.strerror or error}."
    return None


def size_and_hash(path: Path) -> dict[str, Any]:
    """{"size": bytes, "hash": hexadecimal digest by HASH} of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
        return {"size": file.tell(), "hash": digest}


class NotSaved(Exception):
    """A checkpoint could not be written; the message is the reason. The run continues.

    full: True if the disk is, or may be.
    """

    def __init__(self, reason: str, *, full: bool) -> None:
        super().__init__(reason)
        self.full = full

    def sentence(self, step: int, size_bytes: int, folder: Path, earlier: Sequence[int]) -> str:
        """Sentences for the log. size_bytes: of the checkpoint; earlier: steps of whole ones in `folder`."""
        size, remedy = "", "Write elsewhere (output) if this lasts."
        if self.full:
            free = human(free_bytes(folder))
            size = f"It needs about {human(size_bytes)}, and {free} are free in {folder}. "
            remedy = "Free some space, or keep fewer (checkpoint.keep) or write elsewhere (output)."
        return (
            f"The checkpoint of step {step} was not saved: {self}. {size}The earlier ones are whole (steps: "
            f"{', '.join(map(str, earlier)) or 'none'}) and the run continues. {remedy}"
        )


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds the folder, or would hold it; no bound for a mount without sizes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize


def reason_of(error: BaseException) -> str:
    """Text of the disk's error behind `error`: torch wraps failures of ranks, and raises its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror.lower() if cause.strerror else str(cause)
        cause = cause.__context__
    return f"{type(error).__name__}: {error}".strip().rstrip(".")


# Reading .metadata without running code #

# `.metadata` is a pickle, and a pickle may call anything that it can name. A checkpoint needs few names:
# shapes, dtypes, and the dataclasses with the file and place of each piece of a tensor. The unpickler here
# admits exactly those. The reader then checks the result: only tensors (bytes entries would be pickles
# again), and every piece in a file of this folder that the manifest lists. The tensors themselves are read by
# torch with `weights_only=True`.


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata")
_CLASSES += ("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
_ADMITTED = {
    *((_METADATA, name) for name in _CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # a table look-up: "torch.strided" -> torch.strided
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}


def _memory_format(of: Any, name: str) -> Any:
    """The member of a name of the only enum that metadata has. Raises UnpicklingError for all else."""
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it names an attribute {name}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    """Resolves the admitted names and no others, so no dotted ones (`Size.__init__`).

    Paths become text. Any other name raises UnpicklingError.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:  # where the checkpoint was written: not used, so it stays text
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # of an enum's member, as Python 3.11.0 to 3.11.3 write it
            return _memory_format
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(data: bytes, files: Collection[str], where: str) -> Metadata:
    """Read and check the content of a `.metadata` file.

    files: names of the files that data may be in; where: name of the metadata file in errors. Raises
    UserError if `data` isn't a pickle of plain checkpoint metadata, has anything but tensors, or names any
    other file.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        problems = list(_problems(metadata, files))
    except Exception as error:  # a broken pickle raises nearly anything
        problems = [str(error) or type(error).__name__]
    if problems:
        remedy = "It is damaged or malicious: use a checkpoint from a source that you trust."
        raise UserError([f"{where} was refused: {problem}. {remedy}" for problem in problems[:10]])
    return metadata


def _problems(metadata: Any, files: Collection[str]) -> Iterator[str]:
    """Yield reasons why unpickled metadata can't be used; none if it can.

    files: names of the files that data may be in.
    """
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        yield "it holds no checkpoint metadata"
        return
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            yield f"{name!r} is a pickled object, not a tensor"
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            yield "its table of places has entries that aren't places"
        elif info.relative_path not in files:
            yield f"it puts {index.fqn!r} in {info.relative_path!r}, which is not a file of this checkpoint"
        elif info.transform_descriptors:
            yield f"it wants {index.fqn!r} to be read through {info.transform_descriptors!r}"


class SafeReader(FileSystemReader):
    """torch's reader of checkpoint folders, with the metadata read by `read_metadata` above.

    files: names in the folder that data may be read from: plain names of regular files. read_metadata raises
    UserError if the metadata is damaged or names another file.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, frozenset(files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / ".metadata"
        metadata = read_metadata(path.read_bytes(), self._files, str(path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


# Tables of a checkpoint that several ranks write #

#     tensors ─> separate_tied ─> this rank's pieces
#     sizes of each rank's pieces ─> dealt ─> the pieces that this rank writes
#     this rank's pieces ─> write ─> Written ─┬─ all ranks' ─> metadata: the bytes of `.metadata`
#                                             └─ as at the last save? then those bytes again
#     pieces of any cut <─ read ─ the parts of stored pieces that overlap with them
#
# At 512 ranks both tables have some 600,000 rows, and seconds of work; a layout is fixed for a run, so both
# are made once. Files have the format of torch.distributed.checkpoint.


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
