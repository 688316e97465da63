"""Tensors in the files of a model: the digest that identifies them, and those that aren't weights to train
from, quantised ones and misnamed ones.

headers ─> stored_types ─> refuse_types     types that no weight is trained from: before transformers reads
names that the model has no place for ─┬─> scales        those of a quantisation
                                       └─> with_prefix   what a wrapper put into every name
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from meshtune.errors import UserError, explained
from meshtune.model.files import (
    SAFETENSORS_DTYPES,
    Quantisation,
    quantised,
    resolve,
    tensors_in,
    weight_files,
    weights_here,
)
from meshtune.quantised.deferred import Deferred
from meshtune.units import counted, few

if TYPE_CHECKING:
    from meshtune.model.pieces import Piece

logger = logging.getLogger(__name__)

FLOATS = {word for dtype, word in SAFETENSORS_DTYPES.items() if dtype.is_floating_point}
INTEGERS = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"}  # positions and masks may have them
# Tensors of GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt, HQQ and mxfp4, by the ends of their names.
QUANTISED = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|SCB|weight_format|weight_packed|weight_shape|quant_state(\..*)?|quant_map"
    r"|nested_quant_map|(\w+_)?absmax|\w*amax|(\w+_)?zero_points?|zeros|W_q|codebooks|\w*proj_(blocks|scales))$"
)
OF_CACHE = re.compile(r"(^|[._])(k|v|q|kv|prob|output)_scale$")  # of quantised keys: the weights are whole
OF_TOOL = re.compile(r"((\w+_)?weight_scale(_inv|_2)?|input_scale|scales)$")  # names only of quantisations
EIGHT_BITS = ("I8", "U8")  # besides the types that `refuse_types` refuses before
WRAPPERS = {  # parts that wrappers put into the names of a model's tensors
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


def stored_types(files: Iterable[Path]) -> dict[str, set[str]]:
    """Names of the tensors in safetensors files, by the format's word for their type."""
    stored: dict[str, set[str]] = {}
    for _, name, tensor in tensors_in(files):
        stored.setdefault(tensor.get_dtype(), set()).add(name)
    return stored


def deferred(
    folder: Path, files: Iterable[Path], found: Quantisation | None
) -> tuple[dict[str, Deferred], dict[str, set[str]]]:
    """Return (the tensors of safetensors files by name, each a mapping of its file, or in place of parts of a
    quantised matrix the matrix, which is made when it is read; their names by the format's word for their
    type).

    Warns of what is made. Raises UserError for types that no weight is trained from.
    """
    from meshtune.quantised.bases import matrices  # here: chains of imports stay short

    words = stored_types(files)
    if not found:
        refuse_types(folder, words)
    tensors: dict[str, Tensor] = {name: tensor[...] for _, name, tensor in tensors_in(files)}
    made, used = matrices(tensors, found.settings) if found else ({}, set())
    words = {word: names - used for word, names in words.items() if names - used}
    for name, tensor in made.items():
        words.setdefault(SAFETENSORS_DTYPES[tensor.dtype], set()).add(name)
    refuse_types(folder, words)
    if found and made:
        dtype = str(next(iter(made.values())).dtype).removeprefix("torch.")
        logger.warning(
            "%s: %s, quantised (%s), become %s as they are read.", folder, counted(len(made), "weight"),
            found.method, dtype,
        )  # fmt: skip
    whole = {name: tensor for name, tensor in tensors.items() if name not in used}
    return {name: Deferred(each, lambda each=each: each) for name, each in whole.items()} | made, words


@dataclass(frozen=True)
class StoredTable:
    """A matrix in a safetensors file, read row by row."""

    file: Path
    name: str  # there
    length: int  # its rows

    def __len__(self) -> int:
        return self.length

    @classmethod
    def find(cls, files: Iterable[Path], name: str) -> StoredTable | None:
        """The table that a model calls `name`, also under a name with another beginning; None without one."""
        ending = ".".join(name.split(".")[-2:])
        similar = [
            cls(file, key, tensor.get_shape()[0])
            for file, key, tensor in tensors_in(files)
            if f".{key}".endswith(f".{ending}")
        ]
        exact = [table for table in similar if table.name == name]
        return (exact or similar)[0] if exact or len(similar) == 1 else None

    def rows(self, numbers: Iterable[int]) -> Tensor:
        """Rows [number of them, columns], in the stored dtype."""
        with safe_open(self.file, framework="pt") as tensors:
            stored = tensors.get_slice(self.name)
            return torch.cat([stored[number : number + 1] for number in numbers])


def refuse_types(folder: Path, stored: Mapping[str, Collection[str]]) -> None:
    """Raise UserError if tensors are stored in a type that is neither a weight's nor a position's or mask's.

    stored: of `stored_types`.
    """
    if other := {word: names for word, names in stored.items() if word not in FLOATS | INTEGERS}:
        kinds = [f"{counted(len(names), 'tensor')} in {word}" for word, names in sorted(other.items())]
        first = sorted(name for names in other.values() for name in names)
        raise UserError(quantised(folder, f"{', '.join(kinds)}: {few(first)}"))


def refuse_misfits(
    folder: Path,
    model: PreTrainedModel,
    stored: Mapping[str, Collection[str]],
    report: Mapping[str, Collection[Any]],
) -> None:
    """Raise UserError if a model was loaded from quantised tensors, or from tensors under other names.

    stored: of `stored_types`. report: transformers' loading info.
    """
    weights = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    unused, missing = {*report["unexpected_keys"]}, {*report["missing_keys"]}
    if whole := whole_numbers(stored, weights):
        kinds = [f"{counted(len(found), 'weight')} in {word}" for word, found in sorted(whole.items())]
        first = sorted(name for found in whole.values() for name in found)
        raise UserError(quantised(folder, f"{', '.join(kinds)}: {few(first)}"))
    if found := scales(unused, stored):
        raise UserError(
            quantised(folder, f"it holds {counted(len(found), 'tensor')} of scales: {few(found)}")
        )
    if missing and (sentence := with_prefix(unused, missing)):
        raise UserError(f"{folder} is not saved under the model's names: {sentence}.")


def untied(folder: Path, model: PreTrainedModel) -> list[str]:
    """Sentences on tensors that the model's configuration ties, where the files hold two that differ.

    transformers leaves them apart, unlike the model that is built only from the configuration.
    """
    return [
        f"{folder}: config.json ties {target} to {source} (tie_word_embeddings), but the files hold both, "
        "and they differ. If both are meant, set model.overrides.tie_word_embeddings=false."
        for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items()
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source)
    ]


def whole_numbers(stored: Mapping[str, Collection[str]], weights: Collection[str]) -> dict[str, list[str]]:
    """Names of the weights that are stored as whole numbers, by the word for their type.

    weights: names of the model's parameters of floating point.
    """
    found = {
        word: sorted(name for name in names if name in weights or name.endswith(".weight"))
        for word, names in stored.items()
        if word in INTEGERS
    }
    return {word: names for word, names in found.items() if names}


def scales(unused: Iterable[str], stored: Mapping[str, Collection[str]]) -> list[str]:
    """Tensors of a quantisation, such as scales and zero points, among those that a model has no place for.

    stored: of `stored_types`. A scale counts where what it scales is stored too, in at most 8 bits unless the
    scale has a name that only tools of quantisation give: models have scales of their own.
    """
    all_names = {name for names in stored.values() for name in names}
    narrow = {name for word in EIGHT_BITS for name in stored.get(word, ())}

    def scales_one(name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        before, scale, _ = leaf.partition("scale")
        owners = (parent, f"{parent}.weight", f"{parent}._data", f"{parent}.{before.rstrip('_')}")
        scaled = all_names if OF_TOOL.match(leaf) else narrow
        return bool(scale) and not OF_CACHE.search(name) and any(owner in scaled for owner in owners)

    return sorted(name for name in unused if QUANTISED.search(name) or scales_one(name))


def with_prefix(unused: Collection[str], missing: Collection[str]) -> str | None:
    """Clause on what stands before or in the names of a model's own tensors; None if nothing does.

    unused: names that the model has no place for. missing: names of its tensors that the files lack.
    """
    for name in sorted(unused)[:20]:  # others are like them
        parts = name.split(".")
        plain = ".".join(part for part in parts if part not in WRAPPERS)
        if plain != name and plain in missing:
            wrapper = next(part for part in parts if part in WRAPPERS)
            return (
                f"its tensors have `{wrapper}.` in their names, which {WRAPPERS[wrapper]} puts there "
                f"({name} for {plain}); save it from the model inside of that wrapper"
            )
        for own in missing:
            if name.endswith(f".{own}"):
                prefix = name.removesuffix(own)
                if all(other.startswith(prefix) for other in unused):
                    return (
                        f"its tensors have `{prefix}` before their names ({name} for {own}); save it again "
                        "without that prefix"
                    )
    return None


# Tensors that files will hold #


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a model's files: a block of a parameter, such as one expert's matrix, or a buffer."""

    source: str  # name of the parameter; a buffer's own in the files
    tensor: Tensor  # a buffer's; a parameter's is on meta, in the dtype that the files get
    offsets: tuple[int, ...]  # where the block begins in each dimension of the parameter
    dims: tuple[int, ...]  # of the parameter that the tensor has; in the others the block has one element

    def blocks(self, piece: Piece) -> Iterator[Piece]:
        """Yield the parts of a rank's piece of the parameter that lie in this tensor, sharing memory."""
        sizes = dict(zip(self.dims, self.tensor.shape, strict=True))
        for block in piece.blocks():
            own = zip(self.offsets, block.offsets, block.tensor.shape, strict=True)
            ends = [
                (max(at, first), min(at + sizes.get(dim, 1), first + size))
                for dim, (at, first, size) in enumerate(own)
            ]
            if all(start < end for start, end in ends):
                within = zip(ends, block.offsets, strict=True)
                tensor = block.tensor[*(slice(start - at, end - at) for (start, end), at in within)]
                offsets = tuple(ends[dim][0] - self.offsets[dim] for dim in self.dims)
                tensor = tensor.reshape([tensor.shape[dim] for dim in self.dims])
                yield replace(block, shape=tuple(self.tensor.shape), offsets=offsets, tensor=tensor)


class _NoCopies(TorchFunctionMode):
    """Leaves tensors that transformers takes apart views of a parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def stored_parts(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, StoredPart] | None:
    """Return the tensors that transformers would write, by name: parameters, tied ones once, and persistent
    buffers. None if a tensor is made of several parameters, or transposed.

    dtype: of parameters of floating point in the files.
    """
    parameters = {
        name: torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype, device="meta")
        for name, p in model.named_parameters()
    }
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in names}
    with torch.no_grad(), _NoCopies():
        state = revert_weight_conversion(model, {**parameters, **buffers})
    sources, parts = {id(tensor): name for name, tensor in parameters.items()}, {}
    for name, tensor in state.items():
        whole = tensor if tensor._base is None else tensor._base
        if (source := sources.get(id(whole))) is None:
            if name in parameters:  # copied: it may be permuted
                return None
            whole = tensor = tensor.contiguous()
        dims, first = _dims(tensor, whole), int(tensor.storage_offset() - whole.storage_offset())
        if len(dims) < tensor.ndim:
            return None
        offsets = (
            first // step % max(size, 1) for step, size in zip(whole.stride(), whole.shape, strict=True)
        )
        parts[name] = StoredPart(source or name, tensor, tuple(offsets), tuple(dims))
    elements = sum(part.tensor.numel() for part in parts.values() if part.source in parameters)
    return parts if elements == sum(p.numel() for p in parameters.values()) else None


def _dims(view: Tensor, whole: Tensor) -> list[int]:
    """Map each dimension of `view` to one of `whole`; shorter than `view.ndim` if `view` is not a block of
    the contiguous `whole`.
    """
    dims, below = [], whole.ndim
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        fits = (dim for dim in range(below) if whole.stride(dim) == stride and size <= whole.shape[dim])
        below = max(fits, default=-1)
        if below < 0:
            break
        dims.insert(0, below)
    return dims


# Identity of a base model: a digest of its weights, whatever folder they are in #

# An adapter, and a checkpoint of a partly frozen model, fit the weights that they were trained on. A run
# records the digest of its base in its row, an adapter in the metadata of its safetensors file.


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
    from meshtune.data.files import kept_digest  # here: chains of imports stay short

    with ThreadPoolExecutor(8) as pool:
        sums = pool.map(lambda file: int(kept_digest(file, cache, lambda: _digest(file), FORM), 16), files)
    return f"{FORM}{sum(sums) % 2**128:032x}"


def _digest(file: Path) -> str:
    """Sum of the digests of a file's tensors."""
    from meshtune.data.files import BLOCK  # here: chains of imports stay short

    total, block = 0, memoryview(bytearray(BLOCK))  # one: those of a thread stay in its part of the heap
    with file.open("rb", buffering=0) as stream:
        for entry in sorted(entries_of(file), key=lambda entry: entry.begin):
            tensor, left = xxhash.xxh3_128(entry.text.encode()), entry.size
            stream.seek(entry.begin)
            while left and (read := stream.readinto(block[:left])):
                tensor.update(block[:read])
                left -= read
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
