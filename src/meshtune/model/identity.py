"""Identity of a base model: a digest of its weights, whatever folder they are in.

An adapter, and a checkpoint of a model of which a part is frozen, fit the weights that they were trained on.
A run records the digest of its base in its row, an adapter in the metadata of its safetensors file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from meshtune.errors import UserError, explained
from meshtune.model.files import resolve, weight_files
from meshtune.sections import ModelConfig
from meshtune.units import notice

BASE_DIGEST = "base_digest"  # key in the metadata of an adapter's file, and in the row of a run
SAMPLE = 256  # bytes read at a place of a tensor
MOST_SAMPLED = 4_000  # tensors that are read at three places; of a model with more, each at one


class Entry(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    text: str  # name, type and shape
    begin: int  # its first byte in the file
    size: int  # in bytes


def base_digest(model: ModelConfig) -> str | None:
    """Digest of the weights that a run starts from; None for random ones. Raises UserError as `resolve`."""
    if model.init == "random":
        return None
    folder = resolve(
        model.name, revision=model.revision, weights=True, trust_remote_code=model.trust_remote_code
    )
    return digest(weight_files(folder))


def digest(files: Iterable[Path]) -> str:
    """Digest of the names, types and shapes of the tensors in safetensors files, and of SAMPLE bytes at the
    start, the middle and the end of each.

    It does not depend on which file a tensor is in. Of a 70B model it reads 1 MiB.
    """
    entries = [entry for file in files for entry in entries_of(file)]
    places = (0.0, 0.5, 1.0) if len(entries) <= MOST_SAMPLED else (0.5,)
    sums: list[bytes] = []
    opened: dict[Path, BinaryIO] = {}
    with ExitStack() as stack:
        for entry in entries:
            if entry.file not in opened:
                opened[entry.file] = stack.enter_context(entry.file.open("rb"))
            tensor = hashlib.blake2b(entry.text.encode(), digest_size=16)
            for place in places:
                opened[entry.file].seek(entry.begin + int(place * max(0, entry.size - SAMPLE)))
                tensor.update(opened[entry.file].read(min(SAMPLE, entry.size)))
            sums.append(tensor.digest())
    return hashlib.blake2b(b"".join(sorted(sums)), digest_size=16).hexdigest()


def entries_of(file: Path) -> Iterator[Entry]:
    """Yield the tensors in a safetensors file. Raises UserError if its header is damaged."""
    with explained(f"{file} is damaged"), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        for name, facts in json.loads(stream.read(length)).items():
            if name != "__metadata__":
                begin, end = facts["data_offsets"]
                yield Entry(
                    file, f"{name} {facts['dtype']} {facts['shape']}", 8 + length + begin, end - begin
                )


def check_base(model: ModelConfig, recorded: str | None, subject: str, *, named: bool) -> None:
    """Compare the base with the weights that `subject`, an adapter or a run, was trained on.

    recorded: their digest; None: not known, as of adapters by peft, and nothing is compared. named: True if
    the user chose the base for this command: another one is then used, with a line on stderr.

    Raises UserError for another one where its name was recorded with the adapter or the run.
    """
    if recorded is None or model.init == "random" or base_digest(model) == recorded:
        return
    other = f"{subject} was trained on other weights than {model.name} holds now"
    if not named:
        raise UserError(
            f"{other}: they were changed or replaced since. Name a folder with the weights of before: "
            "model.name=FOLDER (of a hub model, model.revision=REVISION)."
        )
    notice(f"{other}; they are used, since model.name names them.")
