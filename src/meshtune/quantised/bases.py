"""Bases that are quantised already: the tensors that files hold of each matrix -> the matrix.

    bitsandbytes        4 bits: levels by code, a magnitude for each block, which may itself be 8-bit codes
                        8 bits: whole numbers times a number for each row
    fp8, whole numbers  times a scale for the matrix, each row or each block
    GPTQ                whole numbers in words of 32 bits along the inputs, less a zero, times a scale;
                        g_idx: the group of each input
    AWQ                 the same along the outputs, in an order of its own
    compressed-tensors  the same along the inputs of each row, less half of their range

A matrix is dequantised each time that it is read, and not held: a model is in memory as its files are.
Arithmetic is in fp32, rounded once.
"""

import json
import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtune.precision import NF4_SCALES, SCALE_BLOCK
from meshtune.quantised import nf4
from meshtune.quantised.deferred import Deferred, Make, MakeCodes

OF_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
OF_4_BITS += ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
PARTS = (  # ends of the names of tensors that are a part of a matrix, longer ones first
    *(f"weight.{part}" for part in OF_4_BITS), "weight_scale_inv", "weight_scale", "input_scale", "SCB",
    "weight_format", "weight_packed", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
    "weight",
)  # fmt: skip
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of the numbers of 8 neighbours
Parts = Mapping[str, Tensor]
Settings = Mapping[str, Any]


def matrices(tensors: Parts, settings: Settings) -> tuple[dict[str, Deferred], set[str]]:
    """Return (the quantised matrices among a model's stored tensors, by name; names of the tensors that they
    are made of). Tensors in formats that are not read are in neither.

    settings: of the quantisation, as the model's configuration has them. The matrices have the dtype that the
    other tensors promote to.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if part := next((part for part in PARTS if name.endswith(f".{part}")), None):
            parts.setdefault(name.removesuffix(part), {})[part] = tensor
    found = {stem: made for stem, group in parts.items() if (made := _matrix(group, settings))}
    used = {stem + part for stem in found for part in parts[stem]}
    others = {tensor.dtype for name, tensor in tensors.items() if name not in used}
    dtype = reduce(torch.promote_types, [one for one in others if one.is_floating_point] or [torch.float32])
    deferred = {}
    for stem, (shape, make, codes) in found.items():
        like = torch.empty(shape, dtype=dtype, device="meta")
        cast = lambda make=make: make().to(dtype).contiguous()  # noqa: E731
        deferred[f"{stem}weight"] = Deferred(like, cast, codes)
    return deferred, used


# Formats #


class Matrix(NamedTuple):
    """A matrix that is not made yet."""

    shape: tuple[int, ...]
    make: Make  # in fp32
    codes: MakeCodes | None = None  # as `Deferred` has them


def _matrix(parts: Parts, settings: Settings) -> Matrix | None:
    """Return the matrix of stored tensors, by the ends of their names.

    None if they are not quantised, or in a format that is not read.
    """
    method, weight = settings.get("quant_method"), parts.get("weight")
    if {"qweight", "qzeros", "scales"} <= parts.keys():
        if method == "gptq" and settings.get("bits") in (2, 4, 8) and not settings.get("is_marlin_format"):
            versions = {None: 1, "gptq": 1, "gptq_v2": 0}  # what zeros are stored less
            less = versions.get(settings.get("checkpoint_format"))
            return None if less is None else _gptq(parts, settings, less)
        is_gemm = settings.get("bits") == 4 and str(settings.get("version", "gemm")).lower() == "gemm"
        return _awq(parts, settings) if method == "awq" and is_gemm else None
    if {"weight_packed", "weight_shape", "weight_scale"} <= parts.keys():
        return _packed(parts)
    if weight is None or weight.ndim < 2:
        return None
    if "weight.absmax" in parts:
        return _bitsandbytes(parts)
    if "SCB" in parts:
        return Matrix((*weight.shape,), lambda: weight * parts["SCB"][:, None] * (1 / 127))
    # fp8 with whole numbers has two of 4 bits in a byte
    fits = weight.dtype in EIGHT_BIT_FLOATS or (weight.dtype == torch.int8 and method == "compressed-tensors")
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    return _scaled(weight, scale, settings) if fits and scale is not None else None


def _bitsandbytes(parts: Parts) -> Matrix:
    packed = parts["weight"].view(-1).view(torch.uint8)  # stored as another dtype for FSDP
    scales, levels = parts["weight.absmax"], parts["weight.quant_map"]
    state = next(tensor for part, tensor in parts.items() if "quant_state" in part)
    facts = json.loads(bytes(state.tolist()))
    shape, block, nested = tuple(facts["shape"]), facts["blocksize"], parts.get("weight.nested_absmax")
    eight_bits = parts.get("weight.nested_quant_map")

    def make() -> Tensor:
        largest = scales
        if nested is not None and eight_bits is not None:
            constants = nested.repeat_interleave(facts["nested_blocksize"])[: len(scales)]
            largest = eight_bits[scales.int()] * constants + facts["nested_offset"]
        values = torch.stack([levels[(packed >> 4).int()], levels[(packed & 15).int()]], 1).view(-1)
        return (values * largest.repeat_interleave(block)[: len(values)])[: math.prod(shape)].view(shape)

    def codes() -> nf4.Codes:
        constants = torch.cat([torch.tensor([facts["nested_offset"]], dtype=torch.float32), nested])  # type: ignore[list-item]
        rows = shape[0]
        return nf4.Codes(packed.view(rows, -1), scales.view(rows, -1), constants.view(torch.int32))

    ours = (
        len(shape) == 2
        and shape[1] % SCALE_BLOCK == 0
        and (block, facts.get("nested_blocksize")) == (SCALE_BLOCK, NF4_SCALES)
        and torch.equal(levels, torch.tensor(nf4.LEVELS))
        and eight_bits is not None
        and torch.equal(eight_bits, nf4.eight_bits())
    )
    return Matrix(shape, make, codes if ours else None)


def _scaled(weight: Tensor, scale: Tensor, settings: Settings) -> Matrix | None:
    """Read a matrix that has a scale for all of it, for each row, or for each block."""
    scale = scale.view(*scale.shape, *(1,) * (weight.ndim - scale.ndim))
    usual = (1, *(settings.get("weight_block_size") or (128, 128)))[-weight.ndim :]
    blocks = []
    for size, scales, block in zip(weight.shape, scale.shape, usual, strict=True):
        exact = size // scales if size % scales == 0 else 0
        blocks.append(block if -(-size // block) == scales else exact)
    if not all(blocks):
        return None

    def make() -> Tensor:
        wide = scale.float()
        for dim, (size, block) in enumerate(zip(weight.shape, blocks, strict=True)):
            wide = wide.repeat_interleave(block, dim).narrow(dim, 0, size) if block < size else wide
        return weight.float() * wide

    return Matrix((*weight.shape,), make)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Return the whole numbers in words of 32 bits, the lowest first, along a new last dimension."""
    return words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & (1 << bits) - 1


def _groups(size: int, settings: Settings) -> Tensor:
    """Return the group of each of a matrix' inputs, in their order."""
    in_one = settings.get("group_size") or -1
    return torch.arange(size, dtype=torch.int32) // (in_one if in_one > 0 else size)


def _gptq(parts: Parts, settings: Settings, less: int) -> Matrix:
    words, bits = parts["qweight"], settings["bits"]
    inputs, outputs = len(words) * 32 // bits, words.shape[1]

    def make() -> Tensor:
        numbers = _numbers(words, bits).transpose(1, 2).flatten(0, 1)
        zeros = _numbers(parts["qzeros"], bits).flatten(1) + less & (1 << bits) - 1
        group = parts.get("g_idx", _groups(inputs, settings)).int()
        return ((numbers - zeros[group]) * parts["scales"].float()[group]).T

    return Matrix((outputs, inputs), make)


def _awq(parts: Parts, settings: Settings) -> Matrix:
    words = parts["qweight"]

    def make() -> Tensor:
        numbers, zeros = (_numbers(x, 4)[..., AWQ_ORDER].flatten(1) for x in (words, parts["qzeros"]))
        group = _groups(len(words), settings)
        return ((numbers - zeros[group]) * parts["scales"].float()[group]).T

    return Matrix((words.shape[1] * 8, len(words)), make)


def _packed(parts: Parts) -> Matrix:
    words, scales = parts["weight_packed"], parts["weight_scale"]
    rows, columns = parts["weight_shape"].tolist()
    bits = 32 // -(-columns // words.shape[1])

    def make() -> Tensor:
        numbers = _numbers(words, bits).flatten(1)[:, :columns] - (1 << bits - 1)
        group = parts.get("weight_g_idx", torch.arange(columns) // (columns // scales.shape[1])).int()
        return numbers * scales.float()[:, group]

    return Matrix((rows, columns), make)
