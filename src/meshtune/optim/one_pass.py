"""Updates that read and write each weight and its states once: AdamW with moments in 16 or 8 bits, and Lion.

    gradient · factor ─┬─> rule, in fp32 ─┬─> weight, states, each in its own dtype
    weight, states ────┘                  └─> the weight as the passes compute with it

Where the compiler is at hand that is one kernel a parameter; else the same operations run on slices. A value
that is kept in bf16 is rounded to nearest, or stochastically (up or down with the probabilities that keep its
mean) where a step's change is smaller than its last bit: AdamW's second moment, and weights without masters.

In 8 bits a value is a power of its code's share of the largest code, times the largest size that it and its
neighbours have in a block of SCALE_BLOCK, which is kept in fp32. The fourth power reaches from 1 to 4e-9 of
that size and the eighth to 6e-20, its square, so that a mean never lasts longer than the square of its size,
which divides it. Steps of codes are 3 % of a value near the largest.

The bits that decide are SplitMix64 of the run's seed, the parameter's name, its number of updates and the
element's place in the whole parameter: the same in every layout, and after a checkpoint is resumed.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtune.model.pieces import Piece
from meshtune.optim.updates import zeros
from meshtune.optimizers import BUCKET_ELEMENTS, OPTIMIZERS, SLICES, SMALLEST_SLICE
from meshtune.parallel.noise import GAMMA, mixed
from meshtune.precision import SCALE_BLOCK

LOW_BITS = 2**16 - 1  # that bf16 has less than fp32
SQUARES = {torch.int8: 2, torch.uint8: 3}  # how many times the share of a code is squared to get the value's


class Constants(NamedTuple):
    """Scalars of one parameter's update, as tensors on its device."""

    factor: Tensor  # on the gradient
    kept: Tensor  # share of the weight that decay leaves
    rate: Tensor
    corrected_rate: Tensor  # over 1 - β1^step
    root: Tensor  # 1 / √(1 - β2^step)
    first: Tensor  # β1
    first_rest: Tensor  # 1 - β1
    second: Tensor  # β2
    second_rest: Tensor  # 1 - β2
    eps: Tensor


# (weight, gradient, states, constants) -> (weight, states)
Rule = Callable[[Tensor, Tensor, Sequence[Tensor], Constants], tuple[Tensor, Sequence[Tensor]]]


def adamw(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], by: Constants
) -> tuple[Tensor, Sequence[Tensor]]:
    """Loshchilov and Hutter 2019 (arXiv:1711.05101), as torch computes it."""
    mean, square = states
    mean = by.first * mean + by.first_rest * gradient
    square = by.second * square + by.second_rest * (gradient * gradient)
    return by.kept * weight - by.corrected_rate * (mean / (square.sqrt() * by.root + by.eps)), (mean, square)


def lion(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], by: Constants
) -> tuple[Tensor, Sequence[Tensor]]:
    """The sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""
    (mean,) = states
    update = (by.first * mean + by.first_rest * gradient).sign()
    return by.kept * weight - by.rate * update, (by.second * mean + by.second_rest * gradient,)


RULES: dict[str, Rule] = {"adamw-bf16": adamw, "adamw-8bit": adamw, "lion": lion}  # by the name in OPTIMIZERS


class OnePass:
    """The update of some parameters by a row of OPTIMIZERS, with its state.

    pieces: of the trained tensors, in the whole parameters. names: of these, the same on all ranks. decays:
    weight decay of each. seed: of the bits that round. compiled: one kernel for each parameter.
    """

    def __init__(
        self,
        row: str,
        names: Sequence[str],
        pieces: Sequence[Piece],
        decays: Sequence[float],
        *,
        betas: tuple[float, float],
        eps: float = 0.0,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.row, self.pieces, self.decays, self.betas, self.eps = row, pieces, decays, betas, eps
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        digests = (hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in names)
        self.keys = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests])
        self.kernel: Callable[..., None] = _compiled() if compiled else update
        elements = sum(piece.tensor.numel() for piece in pieces)
        # Compiled, one kernel needs no memory; on processors two, with a tensor between them, read blocks.
        self.slice = BUCKET_ELEMENTS if compiled else max(SMALLEST_SLICE, elements // SLICES)
        self.moments = [state for state in OPTIMIZERS[row].states if state.kind == "element"]
        self.scales = [state.name for state in OPTIMIZERS[row].states if state.kind == "block"]
        self.block = (SCALE_BLOCK,) if self.scales else ()

    def step(
        self, gradients: list[Tensor | None], rounded: Sequence[Tensor | None], rate: float, factor: float
    ) -> None:
        """Make one update. Gradients leave their list one by one, so that each is freed behind its update.

        gradients, rounded: by parameter; in any dtype, None: there is none. rounded: gets the new weight.
        """
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return
        trained = [self.pieces[index].tensor for index in present]
        for tensor in trained:
            if not self.state[tensor]:
                self.state[tensor].update(zeros(self.row, tensor))
        steps = [self.state[tensor]["step"] for tensor in trained]
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        number = torch.stack(steps)
        constants = self._constants(present, number.double(), rate, factor).to(trained[0].device)
        keys = mixed(self.keys[present] + number.long() * GAMMA)
        keys = torch.stack([keys, torch.full_like(keys, GAMMA)], 1).to(trained[0].device)
        for row, index in enumerate(present):
            gradient, gradients[index] = gradients[index], None
            piece, state = self.pieces[index], self.state[self.pieces[index].tensor]
            if gradient is not None and piece.tensor.numel():
                rows = places(piece)
                moments, shape = [state[moment.name] for moment in self.moments], (len(rows), -1, *self.block)
                weight, *moments = (t.detach().view(shape) for t in (piece.tensor, *moments))
                own, scales = rounded[index], [state[name].view(len(rows), -1, 1) for name in self.scales]
                self.update(
                    RULES[self.row], weight, gradient.reshape(weight.shape), [*moments, *scales],
                    rounded=own if own is None else own.view(weight.shape), rows=rows,
                    constants=constants[row], key=keys[row],
                    stochastic=[moment.stochastic for moment in self.moments],
                )  # fmt: skip

    def _constants(self, indices: Sequence[int], steps: Tensor, rate: float, factor: float) -> Tensor:
        """Constants of each parameter, [parameters, 12]: rows of 16 bytes, as the compiler wants."""
        first, second = self.betas
        decays = torch.tensor([self.decays[index] for index in indices], dtype=steps.dtype)
        values = Constants(*(
            torch.as_tensor(value, dtype=steps.dtype).expand(len(steps)) for value in (
                factor, 1 - rate * decays, rate, rate / (1 - first**steps), (1 - second**steps).rsqrt(),
                first, 1 - first, second, 1 - second, self.eps,
            )
        ))  # fmt: skip
        wide = torch.promote_types(self.pieces[0].tensor.dtype, torch.float32)
        return torch.stack([*values, *values[:2]], 1).to(wide)

    def update(
        self,
        rule: Rule,
        weight: Tensor,
        gradient: Tensor,
        states: Sequence[Tensor],
        *,
        rounded: Tensor | None,
        rows: Tensor,
        **rest: Any,
    ) -> None:
        """`update` on some rows, or a part of the one row, at a time: what it makes in fp32 is small."""
        dim = int(len(rows) == 1)
        count, columns = max(1, self.slice * weight.shape[dim] // weight.numel()), math.prod(weight.shape[2:])
        for start in range(0, weight.shape[dim], count):
            size = min(count, weight.shape[dim] - start)
            own = None if rounded is None else rounded.narrow(dim, start, size)
            cut, its, *kept = (t.narrow(dim, start, size) for t in (weight, gradient, *states))
            places = rows + _signed(start * columns * GAMMA) if dim else rows[start : start + count]
            self.kernel(rule, cut, its, kept, rounded=own, rows=places, **rest)


def places(piece: Piece) -> Tensor:
    """Split a piece into rows of equal lengths that are consecutive in the whole parameter, and return the
    place of the first element of each there, times GAMMA. A whole parameter is one row.
    """
    shape, sizes, offsets = (*piece.shape, 1), (*piece.tensor.shape, 1), (*piece.offsets, 0)
    runs = piece.rows or (range(offsets[0], offsets[0] + sizes[0]),)
    # The last dimension that is cut; those behind it are whole, and with it one row.
    last = max(int(len(runs) > 1), *(dim for dim, size in enumerate(sizes) if size != shape[dim]), 0)
    stride, device = math.prod(shape[last + 1 :]), piece.tensor.device
    found = torch.full((1,), offsets[last] * stride, device=device)  # not torch.tensor: it would wait
    for dim in reversed(range(last)):
        stride *= shape[dim + 1]
        own = range(offsets[dim], offsets[dim] + sizes[dim])
        indices = [torch.arange(run.start, run.stop, device=device) for run in (runs if dim == 0 else [own])]
        found = (torch.cat(indices)[:, None] * stride + found).flatten()
    return found * GAMMA


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@cache
def _compiled() -> Callable[..., None]:
    # A mean is read by the largest of its block and by its codes: computed twice, it needs no memory.
    options: dict[str, Any] = {"realize_reads_threshold": 1000, "realize_opcount_threshold": 1000}
    return torch.compile(update, dynamic=True, options=options)


def update(
    rule: Rule,
    weight: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    *,
    rounded: Tensor | None,
    rows: Tensor,
    constants: Tensor,
    key: Tensor,
    stochastic: list[bool],
) -> None:
    """Update a parameter and its states in place, all [rows, columns]; in 8 bits [rows, blocks, SCALE_BLOCK],
    so that one kernel has the largest of a block and what it scales.

    states: the rule's, then in 8 bits the scales of each, [rows, blocks, 1]. rounded: gets the new weight in
    its own dtype. rows: of `places`. constants: the values of Constants. key: of the update, and GAMMA: as a
    constant the compiler would multiply an index by it, and C++ lets an index that overflows do anything.
    stochastic: whether each state is rounded by chance where it is kept in fewer
    bits than 32, as the weight is in bf16.
    """
    wide, by = constants.dtype, Constants(*constants.unbind()[: len(Constants._fields)])
    states, scales = states[: len(stochastic)], [*states[len(stochastic) :]] or [None] * len(stochastic)
    kept = [_values(s, scale, wide) for s, scale in zip(states, scales, strict=True)]
    new, moments = rule(weight.to(wide), gradient.to(wide) * by.factor, kept, by)
    by_chance = [
        chance and s.dtype in (torch.bfloat16, *SQUARES) for s, chance in zip(states, stochastic, strict=True)
    ]
    bits = key
    if any(by_chance) or weight.dtype == torch.bfloat16:
        columns = torch.arange(weight[0].numel(), device=weight.device).view(weight.shape[1:])
        bits = mixed(rows.view(-1, *[1] * columns.ndim) + columns * key[1] + key[0])
    for state, scale, moment, chance in zip(states, scales, moments, by_chance, strict=True):
        if scale is None:
            state.copy_(_rounded(moment, bits >> 40) if chance else moment)
        else:
            _encode(moment, state, scale, bits >> 40 if chance else None)
    weight.copy_(_rounded(new, bits >> 20) if weight.dtype == torch.bfloat16 else new)
    if rounded is not None:
        rounded.copy_(weight)


def _rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Values in bf16, rounded up or down by 16 of the bits."""
    # The next multiple of 2^16 in the size of the number, as sign and size are apart; then the rest goes.
    values = values.float()
    upwards = values.view(torch.int32) + (bits & LOW_BITS).to(torch.int32)
    return torch.where(values.isfinite(), (upwards & ~LOW_BITS).view(torch.float32), values).bfloat16()


def _values(state: Tensor, scales: Tensor | None, wide: torch.dtype) -> Tensor:
    """A state's values in `wide`; scales: of its blocks, if it is in 8 bits."""
    if scales is None:
        return state.to(wide)
    share = state.to(wide) / torch.iinfo(state.dtype).max
    return _power(share, SQUARES[state.dtype]) * scales.to(wide)


def _encode(values: Tensor, state: Tensor, scales: Tensor, bits: Tensor | None) -> None:
    """Write values into a state in 8 bits and the scales of its blocks.

    bits: 16 of each that decide whether it is rounded up or down; None: to the nearest code.
    """
    squares, top = SQUARES[state.dtype], torch.iinfo(state.dtype).max
    sizes = values.abs()
    largest = sizes.amax(-1, keepdim=True)
    share = code = torch.where(largest > 0, sizes / largest, 0)
    for _ in range(squares):
        code = code.sqrt()
    code = code * top
    if bits is None:
        code = code.round()
    else:
        code = code.floor()
        low, high = (_power(each / top, squares) for each in (code, code + 1))
        code = code + (share - low > (bits & LOW_BITS) / (LOW_BITS + 1) * (high - low))
    scales.copy_(largest)
    state.copy_(code.copysign(values))


def _power(share: Tensor, squares: int) -> Tensor:
    """Square the size of `share` some times; its sign stays."""
    size = share.abs()
    for _ in range(squares):
        size = size * size
    return size.copysign(share)
