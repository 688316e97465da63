"""Deferred: a tensor whose values are made each time that they are read, and not held.

Files hold many small tensors where the model has a large one: a matrix for each expert. Joined, they stay
apart: a slice is of the tensors that it touches, and a copy reads one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from meshtune.quantised.nf4 import Codes

Make = Callable[[], Tensor]
MakeCodes = Callable[[], "Codes"]


class Deferred(Tensor):
    """A tensor that is made each time that its values are read, from what files hold of it."""

    make: Make
    codes: MakeCodes | None  # the matrix in 4 bits as the files hold it, None for other formats
    parts: Sequence[Tensor]  # that are joined; (): it is one
    along: int  # the dimension in which they are

    @staticmethod
    def __new__(
        cls, like: Tensor, make: Make, codes: MakeCodes | None = None, parts: Sequence[Tensor] = (),
        along: int = 0,
    ) -> Deferred:  # fmt: skip
        """like: of its shape and dtype."""
        made: Any = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.make, made.codes, made.parts, made.along = make, codes, parts, along
        return made

    @classmethod
    def joined(cls, parts: Sequence[Tensor], dim: int) -> Deferred:
        """Concatenate tensors."""
        make = lambda: torch.cat([p.make() if isinstance(p, cls) else p for p in parts], dim)  # noqa: E731
        like = torch.cat([_on_meta(part) for part in parts], dim)
        return cls(like, make, None, parts, dim % like.ndim)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def made() -> Any:
            return func(*tree_map_only(cls, lambda x: x.make(), args), **kwargs)

        if func is ATEN.copy_.default and isinstance(args[1], cls) and args[1].parts:
            return args[1]._copy_into(args[0])
        if func not in DEFERRED or kwargs.get("device", torch.device("cpu")) != torch.device("cpu"):
            return made()
        whole, *rest = args
        if func is ATEN.cat.default:
            return cls.joined(whole, *(rest or [0]))
        if func is ATEN.stack.default:
            dim = rest[0] if rest else 0
            return cls.joined([part.unsqueeze(dim) for part in whole], dim)
        if func in SAME:
            return cls(whole, whole.make, whole.codes, whole.parts, whole.along)
        if whole.parts and func is ATEN._to_copy.default:
            return cls.joined([func(part, *rest, **kwargs) for part in whole.parts], whole.along)
        if whole.parts and func is SLICE and len(rest) == 3:
            return whole._slice(*rest)
        if whole.parts and func is ATEN.select.int:
            dim, place = rest[0], rest[1] % whole.shape[rest[0]]
            args = SLICE(whole, dim, place, place + 1), dim, 0
        on_meta = tree_map_only(Tensor, _on_meta, args)
        like = func(*on_meta, **{key: value for key, value in kwargs.items() if key != "device"})
        return cls(like, made, whole.codes if func is ATEN._to_copy.default else None)

    def _slice(self, dim: int, start: int, end: int) -> Tensor:
        """The slice of joined tensors, without those that it doesn't touch."""
        dim, first, chosen = dim % self.ndim, 0, []
        start, end, _ = slice(start, end).indices(self.shape[dim])
        if dim != self.along:
            return self.joined([SLICE(part, dim, start, end) for part in self.parts], self.along)
        for part in self.parts:
            low, high = max(start - first, 0), min(end - first, part.shape[dim])
            if low < high:
                chosen.append(SLICE(part, dim, low, high))
            first += part.shape[dim]
        nothing = torch.empty(*self.shape[:dim], 0, *self.shape[dim + 1 :], dtype=self.dtype)
        return self.joined(chosen, dim) if chosen else nothing

    def _copy_into(self, target: Tensor) -> Tensor:
        """Overwrite `target`, one of the joined tensors after the other."""
        places = target.split([part.shape[self.along] for part in self.parts], self.along)
        for part, place in zip(self.parts, places, strict=True):
            place.copy_(part)
        return target


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


ATEN = torch.ops.aten
SLICE = ATEN.slice.Tensor  # which `narrow` does not become below autograd
SAME = (ATEN.detach.default, ATEN.alias.default)
# What transformers does with a tensor while it loads a model (experts are stacked), and a rank with its part.
DEFERRED = {
    *SAME, ATEN._to_copy.default, ATEN.stack.default, ATEN.cat.default, ATEN.unsqueeze.default,
    SLICE, ATEN.select.int,
}  # fmt: skip
