"""Compute in fp64 throughout: the casts to fp32 inside Hugging Face's models do nothing for a while.

A difference between two programs that is rounding alone is about 1e-13 here; any other is as in fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def double() -> Iterator[None]:
    """Make casts of fp64 tensors to fp32 do nothing inside the context, in every model and in ours."""
    plain_float, plain_to, plain_type, matmul = Tensor.float, Tensor.to, Tensor.type, Tensor.__matmul__

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        single = torch.float32 in (*args, *kwargs.values()) and x.dtype == torch.float64
        return x if single else plain_to(x, *args, **kwargs)

    def keep(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def kept(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
            wide = x.dtype == torch.float64 and dtype == torch.float32
            return function(x, *args, dtype=None if wide else dtype, **kwargs)

        return kept

    def product(x: Tensor, y: Tensor) -> Tensor:
        """Multiply fp64 by whole numbers cast to fp32 too: rotary embeddings of transformers 5.17 do."""
        wide = torch.promote_types(x.dtype, y.dtype)
        return matmul(plain_to(x, wide), plain_to(y, wide))

    functional = torch.nn.functional
    with ExitStack() as stack:
        for owner, name, replacement in (
            (Tensor, "float", lambda x: x if x.dtype == torch.float64 else plain_float(x)),
            (Tensor, "to", to),
            (Tensor, "type", lambda x, *to: x if to and x.dtype == torch.float64 else plain_type(x, *to)),
            (Tensor, "__matmul__", product),
            (Tensor, "softmax", keep(Tensor.softmax)),
            (torch, "softmax", keep(torch.softmax)),
            (functional, "softmax", keep(functional.softmax)),
            (torch, "zeros_like", keep(torch.zeros_like)),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield
