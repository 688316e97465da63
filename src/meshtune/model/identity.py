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

from meshtune.config import Config
from meshtune.data.files import BLOCK, kept_digest
from meshtune.errors import UserError, expanded, explained
from meshtune.model.files import resolve, weight_files, weights_here
from meshtune.units import notice

BASE_DIGEST = "base_digest"  # key in the metadata of an adapter's file, and in the row of a run
FORM = "xxh3-"  # first letters of a digest; those of other forms (versions before 2026-12) are not compared


class Entry(NamedTuple):
    """A tensor in a safetensors file."""

    text: str  # name, type and shape
    begin: int  # its first byte in the file
    size: int  # in bytes


def base_digest(config: Config, *, download: bool = True) -> str | None:
    """Digest of the weights that a run starts from; None for random ones. Raises UserError as `resolve`.

    download: False returns None for weights that are not on this machine.
    """
    model = config.model
    if model.init == "random":
        return None
    if download:
        trust = model.trust_remote_code
        files = weight_files(
            resolve(model.name, revision=model.revision, weights=True, trust_remote_code=trust)
        )
    else:
        files = weights_here(model.name, model.revision)
    return digest(files, expanded(config.data.cache, "data.cache")) if files else None


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


def check_base(
    config: Config, recorded: str | None, subject: str, *, named: bool, download: bool = True
) -> None:
    """Compare the base with the weights that `subject`, an adapter or a run, was trained on.

    recorded: their digest; None: not known, as of adapters by peft, and nothing is compared. named: True if
    the user chose the base for this command: another one is then used, with a line on stderr. download: see
    `base_digest`; weights that are not on this machine are not compared, and a line reports it.

    Raises UserError for another one where its name was recorded with the adapter or the run.
    """
    model = config.model
    if recorded is None or not recorded.startswith(FORM) or model.init == "random":
        return
    here = base_digest(config, download=download)
    if here is None:
        notice(
            f"The weights of {model.name} are not on this machine: whether {subject} was trained on them was "
            "not compared."
        )
    if here in (None, recorded):
        return
    other = f"{subject} was trained on other weights than {model.name} holds now"
    if not named:
        raise UserError(
            f"{other}: they were changed or replaced since. Name a folder with the weights of before: "
            "model.name=FOLDER (of a hub model, model.revision=REVISION)."
        )
    notice(f"{other}; they are used, since model.name names them.")
