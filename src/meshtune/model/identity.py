"""Identity of a base model: a digest of its weights, whatever folder they are in.

An adapter, and a checkpoint of a partly frozen model, fit the weights that they were trained on.
A run records the digest of its base in its row, an adapter in the metadata of its safetensors file.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from meshtune.data.files import BLOCK, kept_digest
from meshtune.errors import explained
from meshtune.model.files import resolve, weight_files, weights_here

BASE_DIGEST = "base_digest"  # key in the metadata of an adapter's file, and in the row of a run
FORM = "xxh3-"  # first letters of a digest; those of other forms (versions before 2026-12) are not compared


class Entry(NamedTuple):
    """A tensor in a safetensors file."""

    text: str  # name, type and shape
    begin: int  # its first byte in the file
    size: int  # in bytes


def base_digest(
    name: str, cache: Path, *, revision: str | None, trust_remote_code: bool, download: bool = True
) -> str | None:
    """Digest of a model's weights. Raises UserError as `resolve`.

    cache: as `digest` takes it. download: False returns None for weights that are not on this machine.
    """
    if download:
        folder = resolve(name, revision=revision, weights=True, trust_remote_code=trust_remote_code)
        files = weight_files(folder)
    else:
        files = weights_here(name, revision)
    return digest(files, cache) if files else None


def digest(files: Iterable[Path], cache: Path) -> str:
    """Digest of the names, types, shapes and all bytes of the tensors in safetensors files.

    It does not depend on which file a tensor is in. cache: folder that keeps the digests of files; each file
    is read once (1 to 4 GB/s on a core), and again after a change.
    """
    with ThreadPoolExecutor(8) as pool:
        sums = pool.map(lambda file: int(kept_digest(file, cache, lambda: _digest(file), FORM), 16), files)
    return f"{FORM}{sum(sums) % 2**128:032x}"


def _digest(file: Path) -> str:
    """Sum of the digests of a file's tensors."""
    total = 0
    with file.open("rb") as stream:
        for entry in sorted(entries_of(file), key=lambda entry: entry.begin):
            tensor, left = xxhash.xxh3_128(entry.text.encode()), entry.size
            stream.seek(entry.begin)
            while left and (block := stream.read(min(left, BLOCK))):
                tensor.update(block)
                left -= len(block)
            total += tensor.intdigest()
    return f"{total % 2**128:032x}"


def entries_of(file: Path) -> Iterator[Entry]:
    """Yield the tensors in a safetensors file. Raises UserError if its header is damaged."""
    with explained(f"{file} is damaged"), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        for name, facts in json.loads(stream.read(length)).items():
            if name != "__metadata__":
                begin, end = facts["data_offsets"]
                yield Entry(f"{name} {facts['dtype']} {facts['shape']}", 8 + length + begin, end - begin)
