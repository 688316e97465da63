"""Read torch.distributed.checkpoint's `.metadata` without running code that it may contain.

`.metadata` is a pickle, and a pickle may call anything that it can name. A checkpoint needs few names:
shapes, dtypes, and the dataclasses with the file and place of each piece of a tensor. The unpickler here
admits exactly those. The reader then checks the result: only tensors (bytes entries would be pickles again),
and every piece in a file of this folder that the manifest lists. The tensors themselves are read by torch
with `weights_only=True`.
"""

import io
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from meshtune.errors import UserError

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


class _Unpickler(pickle.Unpickler):
    """Resolves the admitted names and no others, so no dotted ones (`Size.__init__`).

    Paths become text. Any other name raises UnpicklingError.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:  # where the checkpoint was written: not used, so it stays text
            return lambda *parts: "/".join(map(str, parts))
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(data: bytes, files: Collection[str], where: str) -> Metadata:
    """Read and check the content of a `.metadata` file.

    files: names of the files that data may be in; where: name of the metadata file in errors. Raises
    UserError if `data` is no pickle of plain checkpoint metadata, has anything but tensors, or names any
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
            yield "its table of places has entries that are no places"
        elif info.relative_path not in files:
            yield f"it puts {index.fqn!r} in {info.relative_path!r}, which is no file of this checkpoint"
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
