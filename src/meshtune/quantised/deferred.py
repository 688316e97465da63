"""Deferred: a tensor whose values are made each time that they are read, and not held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from meshtune.quantised.nf4 import Codes

Make = Callable[[], Tensor]
MakeCodes = Callable[[], "Codes"]


class Deferred(Tensor):
    """A matrix that is made each time that its values are read, from the tensors that files hold of it."""

    make: Make
    codes: MakeCodes | None  # the matrix in 4 bits as the files hold it, None for other formats

    @staticmethod
    def __new__(cls, like: Tensor, make: Make, codes: MakeCodes | None = None) -> Deferred:
        """like: of its shape and dtype, on meta."""
        made: Any = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.make, made.codes = make, codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def made() -> Any:
            return func(*tree_map_only(cls, lambda x: x.make(), args), **kwargs)

        if func not in DEFERRED or kwargs.get("device", torch.device("cpu")) != torch.device("cpu"):
            return made()
        on_meta = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), args)
        like = func(*on_meta, **{key: value for key, value in kwargs.items() if key != "device"})
        return cls(like, made, args[0].codes if isinstance(args[0], cls) else None)


# What transformers does with a tensor while it loads a model; experts are stacked.
DEFERRED = {getattr(torch.ops.aten, name).default for name in ("detach", "alias", "_to_copy", "stack", "cat")}
