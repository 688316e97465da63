"""Data parallelism over whole replicas (`dp`): gradients are all-reduced while the backward pass still runs.

A group of parameters (a block, or all that lies outside the blocks) travels as one flat message, once per
optimizer step: as soon as the step's last backward pass has made its gradients, and while that pass goes on
to the next group (Li et al. 2020, arXiv:2006.15704). Nothing is held twice: the gradients become its pieces.

Context ranks see other tokens with the same parameters, so here they are data ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Gradients(Protocol):
    """Where the gradients of a step add up."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None: ...

    def replace_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...


class Sent(NamedTuple):
    """A message that is under way.

    without: parameters that this rank has no gradient of, with their piece of it, and how many ranks have.
    """

    work: Any
    without: list[tuple[nn.Parameter, Tensor, Tensor]]


class Replicas:
    """This rank's copy of parameters that other ranks have copies of, over the 1-D `mesh`.

    groups: parameters that travel together, in the order in which a backward pass ends with them. Messages
    leave in that order on every rank, or they would be added to others. dtype: of the messages; None: as the
    gradients are.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], mesh: DeviceMesh, dtype: torch.dtype | None = None
    ) -> None:
        self.groups = [own for group in groups if (own := [p for p in group if p.requires_grad])]
        self.mesh, self.dtype = mesh, dtype
        self.missing: list[int] = []  # gradients of each group that this step's passes are still to make
        self.sent: list[Sent] = []  # messages of the first groups

    def watch(self, gradients: Gradients) -> None:
        """Send gradients from now on as they come; to be called when `gradients` has its own hooks."""
        self.gradients = gradients
        for index, group in enumerate(self.groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def begin(self, passes: int) -> None:
        """Before a step of so many backward passes."""
        self.missing, self.sent = [len(group) * passes for group in self.groups], []

    def finish(self) -> None:
        """After the step's passes: the gradients are the sums over all replicas.

        What no hook has told of (backward passes of weights alone run none) is sent now.
        """
        while len(self.sent) < len(self.groups):
            self._send()
        for sent in self.sent:
            sent.work.wait()
            for parameter, piece, others in sent.without:
                if others > 0:
                    self.gradients.replace_gradient(parameter, piece)
        self.sent = []

    def _arrived(self, index: int, _: Tensor) -> None:
        self.missing[index] -= 1
        while len(self.sent) < len(self.groups) and self.missing[len(self.sent)] == 0:
            self._send()

    def _send(self) -> None:
        """The next group's message; its gradients are views of it, to be read when it has arrived.

        A parameter that a rank's passes did not reach (layerdrop, experts) sends zeros. How many ranks
        reached each stands at the end of the message: none, and it has no gradient, as on one device.
        """
        group = self.groups[len(self.sent)]
        found = [self.gradients.gradient(parameter) for parameter in group]
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(group, found, strict=True)
        ]
        reached = flat[0].new_ones(len(group))
        if any(g is None for g in found):
            reached = reached.new_tensor([float(g is not None) for g in found])
        message = torch.cat([*flat, reached]).to(self.dtype or flat[0].dtype)
        *pieces, ranks = message.split([*(p.numel() for p in group), len(group)])
        without = []
        for place, (parameter, piece) in enumerate(zip(group, pieces, strict=True)):
            if found[place] is None:
                without.append((parameter, piece.view(parameter.shape), ranks[place]))
            else:
                self.gradients.replace_gradient(parameter, piece.view(parameter.shape))
        work = dist.all_reduce(message, group=self.mesh.get_group(), async_op=True)
        self.sent.append(Sent(work, without))
