"""A router's choices, which the recomputation of its block repeats in place of choosing again.

Another kernel or a tie could send a token elsewhere in the recomputation: the sizes of its saved tensors, and
of the messages between ranks, would then not be those of the forward.
"""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from meshtune.experts.products import experts_of


class _Choose(torch.autograd.Function):
    """Scores at the numbers in `index`, along `dim`: topk's values, once its choice is made."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor, dim: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.dim, ctx.shape = dim, scores.shape
        return scores.gather(dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(ctx.dim, index, grad), None, None


class _Choices(TorchFunctionMode):
    """Note the choices of topk in rows of tokens, or, where some were noted, repeat them."""

    def __init__(self, noted: list[Tensor]) -> None:
        super().__init__()
        self.noted, self.repeated = noted, iter([*noted]) if noted else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        chooses = func is torch.topk or func is Tensor.topk
        # Routers choose in [tokens, experts]; indexers of attention, which choose more, keep the batch apart.
        if not chooses or (scores := args[0] if args else options["input"]).ndim != 2:
            return func(*args, **options)
        if self.repeated:
            index = next(self.repeated)
        else:
            with torch.no_grad():
                index = func(*args, **options).indices
            self.noted.append(index)
        dim = args[2] if len(args) > 2 else options.get("dim", -1)
        return torch.return_types.topk((_Choose.apply(scores, index, dim), index))


_pass: ContextVar[_Choices | None] = ContextVar("_pass", default=None)  # of the block that runs


def keep_choices(block: nn.Module) -> None:
    """Make the part of a block that has its router and experts heed `with_choices`, in place.

    Only that part: a mode around attention would reach the compiler of its kernels.
    """
    experts = {*experts_of(block)}
    for module in block.modules():
        if experts & {*module.children()}:
            module.forward = partial(_choosing, module.forward)  # type: ignore[method-assign]


def _choosing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _pass.get() or nullcontext():
        return forward(*args, **kwargs)


def with_choices(noted: list[Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block's `forward`; its choices are those `noted` by an earlier call, if there was one."""
    token = _pass.set(_Choices(noted))
    try:
        return forward(*args, **kwargs)
    finally:
        _pass.reset(token)
