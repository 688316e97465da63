"""Updates that read and write each weight and its states once: AdamW with 16-bit moments, and Lion.

    gradient · factor ─┬─> rule, in fp32 ─┬─> weight, states, each in its own dtype
    weight, states ────┘                  └─> the weight as the passes compute with it

Where the compiler is at hand that is one kernel a parameter; else the same operations run on slices. A value
that is kept in bf16 is rounded to nearest, or stochastically (up or down with the probabilities that keep its
mean) where a step's change is smaller than its last bit: AdamW's second moment, and weights without masters.

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
from meshtune.optimizers import OPTIMIZERS
from meshtune.parallel.noise import GAMMA, mixed

SLICES, SMALLEST_SLICE = 256, 2**16  # of a rank's elements, each updated at a time where nothing is compiled
LOW_BITS = 2**16 - 1  # that bf16 has less than fp32


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


RULES: dict[str, Rule] = {"adamw-bf16": adamw, "lion": lion}  # by the name in OPTIMIZERS


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
        self.update = _compiled() if compiled else self._sliced
        self.slice = max(SMALLEST_SLICE, sum(piece.tensor.numel() for piece in pieces) // SLICES)
        self.moments = [state for state in OPTIMIZERS[row].states if state.kind == "element"]

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
                moments = [state[moment.name] for moment in self.moments]
                weight, *moments = (t.detach().view(len(rows), -1) for t in (piece.tensor, *moments))
                own = rounded[index]
                self.update(
                    RULES[self.row], weight, gradient.reshape(weight.shape), moments,
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

    def _sliced(
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
        """`update` on some rows, or of one row some elements, at a time: what it makes in fp32 is small."""
        dim = int(len(rows) == 1)
        count = max(1, self.slice * weight.shape[dim] // weight.numel())
        for start in range(0, weight.shape[dim], count):
            size = min(count, weight.shape[dim] - start)
            own = None if rounded is None else rounded.narrow(dim, start, size)
            cut, its, *moments = (t.narrow(dim, start, size) for t in (weight, gradient, *states))
            places = rows + _signed(start * GAMMA) if dim else rows[start : start + count]
            update(rule, cut, its, moments, rounded=own, rows=places, **rest)


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
    return torch.compile(update, dynamic=True)


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
    """Update a parameter and its states in place, all [rows, columns].

    rounded: gets the new weight in its own dtype. rows: of `places`. constants: the values of Constants. key:
    of the update, and GAMMA: as a constant the compiler would multiply an index by it, and C++ lets an index
    that overflows do anything. stochastic: whether each state is rounded by chance where it is kept in bf16,
    as the weight is.
    """
    wide, by = constants.dtype, Constants(*constants.unbind()[: len(Constants._fields)])
    new, moments = rule(weight.to(wide), gradient.to(wide) * by.factor, [s.to(wide) for s in states], by)
    by_chance = [chance and s.dtype == torch.bfloat16 for s, chance in zip(states, stochastic, strict=True)]
    bits = key
    if any(by_chance) or weight.dtype == torch.bfloat16:
        columns = torch.arange(weight.shape[1], device=weight.device)
        bits = mixed(rows[:, None] + columns * key[1] + key[0])
    for state, moment, chance in zip(states, moments, by_chance, strict=True):
        state.copy_(_rounded(moment, bits >> 40) if chance else moment)
    weight.copy_(_rounded(new, bits >> 20) if weight.dtype == torch.bfloat16 else new)
    if rounded is not None:
        rounded.copy_(weight)


def _rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Values in bf16, rounded up or down by 16 of the bits."""
    # The next multiple of 2^16 in the size of the number, as sign and size are apart; then the rest goes.
    values = values.float()
    upwards = values.view(torch.int32) + (bits & LOW_BITS).to(torch.int32)
    return torch.where(values.isfinite(), (upwards & ~LOW_BITS).view(torch.float32), values).bfloat16()
