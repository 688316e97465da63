"""A loss function of the caller's in place of the cross entropy.

    def focal(logits, labels):                 # float [tokens, vocabulary], int64 [tokens]
        likelihood = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
        losses = -((1 - likelihood) ** 2) * likelihood.log()
        return losses.sum(), len(labels)       # sum of the token losses, their count

The loss of a step is the sum over the global batch divided by the count over the global batch. The function
gets labelled tokens alone, some thousand at a time, in no particular grouping into rows or micro-batches: a
sum over tokens is the same in every layout, however these are cut. Under tensor parallelism it gets the
logits of the whole vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshtune.errors import UserError
from meshtune.parallel.tensor import Vocabulary
from meshtune.rundir import RunDir

# (logits, labels) -> (sum of the token losses, a scalar tensor with a gradient; their count or weight)
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]


class TokenLoss:
    """The caller's function as `loss.head_loss` calls it, which adds up the counts on this rank."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        # Of the class where the function is an object: it tells runs apart.
        named = function if hasattr(function, "__qualname__") else type(function)
        self.name = f"{named.__module__}.{named.__qualname__}"
        self._count: Tensor | float = 0.0

    def __call__(
        self, logits: Tensor, targets: Tensor, *, vocabulary: Vocabulary | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(Sum of the token losses, its gradient by the logits of this rank, None unless `gradient`)."""
        whole = whole_logits(logits, vocabulary).detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            total, count = self._checked(self.function(whole, targets))
        self._count = self._count + (count.detach().double() if isinstance(count, Tensor) else count)
        if not gradient:
            return total.detach(), None
        if not total.requires_grad:
            raise UserError(f"loss={self.name} returned a sum that does not depend on the logits.")
        (logits_grad,) = torch.autograd.grad(total, whole)
        if vocabulary is not None:
            logits_grad = logits_grad[:, vocabulary.start : vocabulary.stop]
        return total.detach(), logits_grad.to(logits.dtype)

    def _checked(self, result: Any) -> tuple[Tensor, Tensor | float]:
        """The function's result. Raises UserError if it is not (scalar tensor, number)."""
        total, count = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        scalars = all(not isinstance(part, Tensor) or part.ndim == 0 for part in (total, count))
        if not isinstance(total, Tensor) or not isinstance(count, Tensor | int | float) or not scalars:
            raise UserError(
                f"loss={self.name} must return (sum of the token losses, their count): a scalar tensor and a "
                "number; take the sum of the losses, not their mean."
            )
        return total, count

    def take_count(self) -> Tensor | float:
        """Counts since the last call, added up over the calls on this rank."""
        count, self._count = self._count, 0.0
        return count


def whole_logits(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Logits [tokens, whole vocabulary] in fp32 (fp64 for an fp64 model), equal on all tp ranks."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is None:
        return wide
    whole = wide.new_zeros(len(wide), vocabulary.total)
    whole[:, vocabulary.start : vocabulary.stop] = wide
    dist.all_reduce(whole, group=vocabulary.tp.group)  # a sum with zeros: parts may differ in size
    return whole


def check_same(token_loss: TokenLoss | None, run: RunDir) -> None:
    """Raise UserError if the run, which is to go on, was trained with another loss function."""
    before = (run.rows("run") or [{}])[-1].get("loss_function")
    now = token_loss and token_loss.name
    if before != now:
        was, is_now = (f"loss={name}" if name else "the cross entropy" for name in (before, now))
        raise UserError(
            f"{run.path} was trained with {was}, and would go on with {is_now}; give the same loss, or "
            "another `output`."
        )
