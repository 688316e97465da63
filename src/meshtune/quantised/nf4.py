"""Frozen matrices in 4 bits: NF4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314).

    64 neighbours of a row: 4-bit codes, two in a byte     x.weight            [rows, columns / 2]
    their largest magnitude: an 8-bit code                 x.weight_scales     [rows, columns / 64]
    a number for 256 of those, after one for their mean    x.weight_constants  [1 + …]

    weight = LEVELS[code] · (EIGHT_BITS[scale] · constants[1 + scale's place / 256] + constants[0])

Codes and arithmetic are those of bitsandbytes, bit for bit. All three are frozen parameters of bytes and
integers, so that ZeRO shards them as they are. A rank that has part of a matrix (tp) has all constants: they
are those of the whole matrix. The matrix itself exists while it is multiplied, forward and backward.

Experts [experts, rows, columns] are a matrix each, with constants of its own: [experts, 1 + …]. A rank may
have some of them (ep); all that it has are dequantised for one product.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtune import compat
from meshtune.placement.split import Split, piece, pieces
from meshtune.precision import NF4_SCALES as SCALES
from meshtune.precision import SCALE_BLOCK as BLOCK
from meshtune.quantised.deferred import Deferred

Matmul = Callable[..., Tensor]  # of experts, as in experts/products.py

PART = 2**18  # elements
SUFFIXES = ("", "_scales", "_constants")  # of the names of the three parameters, after the weight's
# Quantiles of a normal distribution, from -1 to 1 with 0 (the paper's appendix E)
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


class Codes(NamedTuple):
    """A matrix in 4 bits: the parameters of the module's docstring, in their order."""

    packed: Tensor  # uint8
    scales: Tensor  # uint8
    constants: Tensor  # int32: the bits of fp32, which no cast to a passes' dtype must round


def code_shapes(*shape: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the Codes of a matrix, or of a stack of matrices."""
    *stack, rows, columns = shape
    scales = rows * columns // BLOCK
    return (*stack, rows, columns // 2), (*stack, rows, columns // BLOCK), (*stack, 1 + -(-scales // SCALES))


@cache
def eight_bits() -> Tensor:
    """The 256 values of a scale's code, fp32 [256]: signed, more of them near 0.

    (Dettmers 2016, arXiv:1511.04561: 7 - e bits of a linear fraction for each exponent 10^-e.)
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10.0 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def tables(device: torch.device) -> Tensor:
    """The values of each byte, fp32 [256, 3]: both of packed codes, and that of a scale."""
    values = torch.tensor(LEVELS)
    return torch.stack([values.repeat_interleave(16), values.repeat(16), eight_bits()], 1).to(device)


def _nearest(values: Tensor, among: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(Index of the value of `among` nearest to each of `values` over its block's largest magnitude; those
    magnitudes). values: fp32 [n], cut into blocks; the last may be shorter.
    """
    blocks = F.pad(values, (0, -len(values) % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    bounds = (among[:-1] + among[1:]) / 2
    return torch.bucketize(scaled, bounds, out_int32=True).view(-1)[: len(values)], largest


@torch.no_grad()
def quantise(weight: Tensor, dtype: torch.dtype | None = None) -> Codes:
    """Return a matrix [rows, columns] in 4 bits of its values in `dtype` (None: its own), on its device.

    Its columns are a multiple of BLOCK. It is read in parts, as in `_in_parts`: whole matrices in fp32 would
    leave gaps in the C library's heap, which made loading take twice the model's memory.
    """
    rows, columns = weight.shape
    device = weight.device
    levels, packed, magnitudes = torch.tensor(LEVELS, device=device), [], []
    for part in weight.reshape(-1).split(PART):
        codes, largest = _nearest(part.to(dtype or weight.dtype).float(), levels, BLOCK)
        pairs = codes.to(torch.uint8).view(-1, 2)
        packed.append(pairs[:, 0] << 4 | pairs[:, 1])
        magnitudes.append(largest)
    largest = torch.cat(magnitudes)
    mean = largest.mean()
    scales, constants = _nearest(largest - mean, eight_bits().to(device), SCALES)
    return Codes(
        torch.cat(packed).view(rows, columns // 2),
        scales.to(torch.uint8).view(rows, columns // BLOCK),
        torch.cat([mean[None], constants]).view(torch.int32),
    )


def codes_of(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Codes:
    """Return a matrix, or each of a stack, in 4 bits on a device: as the files hold it, or quantised from
    `dtype`.
    """
    if isinstance(weight, Deferred) and weight.codes:
        return Codes(*(part.to(device) for part in weight.codes()))
    if weight.ndim == 3:
        each = (codes_of(weight[place], dtype, device) for place in range(len(weight)))
        return Codes(*map(torch.stack, zip(*each, strict=True)))
    made = weight.make() if isinstance(weight, Deferred) else weight  # once, and not for each of its parts
    return quantise(made.to(device), dtype)


def dequantise(codes: Codes, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [rows, columns] of `codes`, a rank's part of it, or a stack of matrices.

    places: int32 [rows, columns / BLOCK], the place of each scale in the whole matrix, row by row.
    """
    packed, scales, constants = codes
    values, numbers = tables(packed.device), constants.view(torch.float32)
    means = numbers[..., :1, None]
    largest = values[:, 2][scales.int()] * numbers[..., 1 + places // SCALES] + means
    pairs = values[:, :2][packed.int()].view(*scales.shape, BLOCK)
    return (pairs * largest[..., None]).to(dtype).view(*packed.shape[:-1], -1)


def whole(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the matrix of `codes`, which are all of it."""
    places = torch.arange(codes.scales.numel(), dtype=torch.int32, device=codes.scales.device)
    return dequantise(codes, places.view_as(codes.scales), dtype)


def _in_parts(codes: Codes, places: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantise`, some rows after others, so that values in fp32 take little memory."""
    *stack, rows, half = codes.packed.shape
    whole = codes.packed.new_empty(*stack, rows, 2 * half, dtype=dtype)
    step = max(PART // max(math.prod(stack) * 2 * half, 1), 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = Codes(codes.packed[..., part, :], codes.scales[..., part, :], codes.constants)
        whole[..., part, :] = dequantise(some, places[part], dtype)
    return whole


@cache
def _fastest(device: str) -> Callable[[Codes, Tensor, torch.dtype], Tensor]:
    """`dequantise` as one kernel where it can be compiled for a GPU, else in parts."""
    return torch.compile(dequantise) if device == "cuda" and not compat.compiler_problem() else _in_parts


# One operator, or the compiler would take the backward's call for the forward's, whose result it would keep.
# `like` has the dtype, and nothing else; it puts the backward's call behind a gradient.
@torch.library.custom_op("meshtune::dequantise", mutates_args=())
def dequantise_op(
    packed: Tensor, scales: Tensor, constants: Tensor, place: Sequence[int], like: Tensor
) -> Tensor:
    """The matrix of Codes, or the stack. place: the first block of each row on this rank, and how many blocks
    a whole row has; then starts and ends of the rows on this rank. like: empty.
    """
    numbers = partial(torch.arange, dtype=torch.int32, device=packed.device)
    first, in_a_row, *ends = place
    rows = torch.cat([numbers(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True)])
    places = rows[:, None] * in_a_row + first + numbers(scales.shape[-1])
    return _fastest(packed.device.type)(Codes(packed, scales, constants), places, like.dtype)


@dequantise_op.register_fake
def _(packed, scales, constants, place, like):
    return packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=like.dtype)


class _Matmul(torch.autograd.Function):
    """x Wᵀ + b of rows x and a matrix in 4 bits. It keeps the codes for its backward, and neither W nor x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, place: tuple[int, ...], *codes: Tensor) -> Tensor:
        ctx.save_for_backward(*codes)
        ctx.place = place
        return F.linear(x, dequantise_op(*codes, place, x[:0]), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = dequantise_op(*ctx.saved_tensors, ctx.place, gradient[:0])
        return gradient @ weight, None, None, None, None, None


class Nf4Linear(nn.Linear):
    """nn.Linear whose weight, and bias if it has one, are frozen, with the weight in 4 bits."""

    weight_scales: nn.Parameter
    weight_constants: nn.Parameter
    weight_place: tuple[int, ...]  # as `dequantise_op` has it

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input, self.bias)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The matmul with the weight, plus the bias if it is given."""
        if not x.is_floating_point():  # its caller read the codes for the weight
            raise TypeError(f"a layer whose weight is in 4 bits was given {x.dtype}; use method=lora")
        return _Matmul.apply(x, bias, self.weight_place, *self.codes())  # type: ignore[return-value]

    def codes(self) -> Codes:
        return Codes(self.weight, self.weight_scales, self.weight_constants)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns]."""
        return dequantise_op(*self.codes(), self.weight_place, torch.empty(0, dtype=dtype))

    def restore(self, dtype: torch.dtype) -> None:
        """Hold the weight as [rows, columns] again, in place. The class stays."""
        self.weight = nn.Parameter(self.dequantised(dtype), requires_grad=False)
        del self.weight_scales, self.weight_constants


class _ExpertsMatmul(torch.autograd.Function):
    """Rows times their experts' matrices in 4 bits. It keeps the codes for its backward, and neither matrices
    nor rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Tensor, matmul: Matmul, transposed: bool, *codes: Tensor
    ) -> Tensor:
        ctx.save_for_backward(counts, *codes)
        ctx.matmul, ctx.transposed = matmul, transposed
        stack = _dequantised_stack(Codes(*codes), rows)
        return matmul(rows, stack if transposed else stack.mT, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        counts, *codes = ctx.saved_tensors
        stack = _dequantised_stack(Codes(*codes), gradient)
        rows = ctx.matmul(gradient.contiguous(), stack.mT if ctx.transposed else stack, counts)
        return rows, *[None] * 6


def _dequantised_stack(codes: Codes, like: Tensor) -> Tensor:
    """The experts' matrices, in the dtype of `like`."""
    rows, in_a_row = codes.scales.shape[1:]
    return dequantise_op(*codes, (0, in_a_row, 0, rows), like[:0])


def codes_of_experts(module: nn.Module, name: str) -> Codes | None:
    """The codes that experts have for their parameter `name`; None if they have the weights."""
    if not hasattr(module, f"{name}_scales"):
        return None
    return Codes(*(getattr(module, name + suffix) for suffix in SUFFIXES))


def restore_experts(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Hold the parameter `name` of experts as weights again, in place: those that `change` makes of each
    expert's matrix in fp32. Nothing for weights.
    """
    if codes := codes_of_experts(module, name):
        matrices = [change(whole(Codes(*each), torch.float32)) for each in zip(*codes, strict=True)]
        setattr(module, name, nn.Parameter(torch.stack(matrices), requires_grad=False))
        for suffix in SUFFIXES[1:]:
            delattr(module, name + suffix)


def multiply_experts(module: Any, codes: Codes, rows: Tensor, counts: Tensor, matmul: Matmul) -> Tensor:
    """Multiply rows by their experts' matrices in 4 bits; arguments as of experts/products.py."""
    rows = rows.to(module.dequantised_dtype)
    return _ExpertsMatmul.apply(rows, counts, matmul, module.is_transposed, *codes)  # type: ignore[return-value]


@cache
def _quantised_class(kind: Any) -> Any:
    return Nf4Linear if kind is nn.Linear else type(kind.__name__, (kind, Nf4Linear), {})


def quantise_weights(
    model: nn.Module,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    splits: Mapping[str, Split],
    tp: tuple[int, int] = (1, 0),
) -> tuple[dict[str, tuple[int, ...]], dict[str, Split]]:
    """Make a model on meta, cut for one tp and ep rank, hold weights in 4 bits, in place.

    names: of the weights of linear layers, and of stacked ones of experts, whose columns are a multiple of
    BLOCK. shapes, splits: of the whole model's parameters, by name. tp: (ranks, the index of this one).
    Returns shapes and splits with those of the codes.
    """
    shapes, splits = dict(shapes), dict(splits)
    ranks, index = tp
    for name in names:
        path, _, leaf = name.rpartition(".")
        (*stack, rows, columns), split = shapes[name], splits.get(name, Split())
        first = 0
        if split.dim == 1:
            assert columns % (BLOCK * ranks) == 0, f"{name} is cut inside a block, see placement/rules.py"
            first = piece(columns, ranks, index)[0] // BLOCK
        runs = pieces(split.parts or (rows,), ranks, index) if split.dim == 0 else (range(rows),)
        module: Any = model.get_submodule(path)
        local = getattr(module, leaf)
        kinds = torch.uint8, torch.uint8, torch.int32
        *whole, constants = code_shapes(*shapes[name])
        *own, _ = code_shapes(*local.shape)
        own.append((*local.shape[:-2], constants[-1]))
        of_codes = split, split, split if stack else Split()
        for suffix, size, kind in zip(SUFFIXES, own, kinds, strict=True):
            empty = torch.empty(size, dtype=kind, device="meta")
            module.register_parameter(leaf + suffix, nn.Parameter(empty, requires_grad=False))
        for suffix, size, how in zip(SUFFIXES, (*whole, constants), of_codes, strict=True):
            shapes[name + suffix], splits[name + suffix] = size, how
        if stack:
            module.dequantised_dtype = local.dtype
            continue
        ends = tuple(end for run in runs for end in (run.start, run.stop))
        module.weight_place = (first, columns // BLOCK, *ends)
        module.__class__ = _quantised_class(type(module))
    return shapes, splits
