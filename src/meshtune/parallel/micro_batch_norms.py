"""Squared norms of each micro-batch's gradients on this data rank, before anything is added up.

A hook on each trained parameter sees the gradient of one backward pass before autograd accumulates it, and
before replicas or ZeRO reduce it over data ranks. Only its norm is kept: no gradient is copied, but those
that tensor-parallel ranks have parts of (norms and biases under sequence parallelism).

Under ZeRO the hooks are on the gathered parameters: on those a backward pass leaves the whole gradient of
this data rank, in every stage, which FSDP2 then reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshtune import compat
from meshtune.parallel import tensor, zero
from meshtune.placement.split import Split

if TYPE_CHECKING:
    from meshtune.parallel.apply import Parallel


class MicroBatchNorms:
    """Mean squared norm of the micro-batches' gradients of one step, weighted by their label tokens.

    `watch` between each forward and its backward pass, `add` after it, `close` after the last one. names:
    (name, parameter) of the trained parameters, as the optimizer has them. label_tokens: of the global batch,
    by which the loss was divided. For layouts without pp and cp.
    """

    def __init__(
        self, parallel: Parallel, names: Iterable[tuple[str, nn.Parameter]], label_tokens: int
    ) -> None:
        self.parallel, self.label_tokens = parallel, label_tokens
        self.names = {parameter: name for name, parameter in names}
        self.squares: Tensor | float = 0.0  # this rank's share of the mean
        self.micro_batches = 0  # with label tokens, on this data rank
        self._handles: list[Any] = []
        # A forward pass has gradients, too: the loss makes the head's there, not yet divided by label tokens.
        self._in_backward = False
        self._seen: list[tuple[str, Tensor]] = []  # (name, norm) of this backward pass
        self._parts: list[tuple[str, Tensor]] = []  # (name, gradient) of those that tp ranks have parts of

    def watch(self) -> None:
        """Take the gradients of the backward pass that comes now. The first call adds the hooks: gathered
        parameters exist only after a forward pass.
        """
        self._in_backward = True
        if self._handles:
            return
        for name, parameter in self._where_gradients_arrive():
            self._handles.append(parameter.register_hook(partial(self._hook, name)))

    def _where_gradients_arrive(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, tensor whose gradient autograd computes) of each trained parameter."""
        groups = zero.groups(self.parallel.stages[0])
        gathered = {
            record.sharded_param: record.unsharded_param
            for group in groups
            for record in compat.fsdp_parameters(group)
        }
        for parameter, name in self.names.items():
            yield name, gathered.get(parameter, parameter)

    def _hook(self, name: str, gradient: Tensor) -> None:
        if not self._in_backward:
            return
        if name in self.parallel.partial and self.parallel.world.tp.size > 1:
            self._parts.append((name, gradient.detach().clone()))
        else:
            self._seen.append((name, _norm(gradient)))

    def add(self, label_tokens: int) -> None:
        """Add the micro-batch whose backward pass has just ended. label_tokens: its own."""
        self._in_backward = False
        seen, parts = self._seen, sorted(self._parts, key=lambda part: part[0])
        self._seen, self._parts = [], []
        tensor.reduce_partial([gradient for _, gradient in parts], self.parallel.world.tp)
        seen += [(name, _norm(gradient)) for name, gradient in parts]
        if not label_tokens:
            return
        self.micro_batches += 1
        if seen:
            copies = [self._copies(name) for name, _ in seen]
            squares = torch.stack([norm for _, norm in seen]).double().square()
            # The gradients are label_tokens/N of the micro-batch's own; its weight in the mean is that, too.
            self.squares = self.squares + (squares / squares.new_tensor(copies)).sum() * (
                self.label_tokens / label_tokens
            )

    def _copies(self, name: str) -> int:
        """Number of tensor-parallel ranks that have the same gradient of a parameter."""
        split = self.parallel.splits.get(self.parallel.tied.get(name, name), Split())
        return self.parallel.world.tp.size if split.dim is None else 1

    def close(self) -> tuple[Tensor | float, int]:
        """Remove the hooks. Returns (this rank's share of the mean, a scalar; the micro-batches with label
        tokens on this data rank).
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self.squares, self.micro_batches


def _norm(gradient: Tensor) -> Tensor:
    gradient = zero.local(gradient)
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
