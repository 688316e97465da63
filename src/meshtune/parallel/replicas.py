"""Data parallelism over whole replicas (`dp`): gradients are all-reduced while the backward pass still runs.

A group of parameters (a block, or all that lies outside the blocks) is one flat buffer and one all-reduce per
optimizer step: as soon as the step's last backward pass has computed its gradients, and while that pass
continues to the next group (Li et al. 2020, arXiv:2006.15704). Nothing is stored twice: the gradients become
views of it.

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
    """Accumulated gradients of a step, by parameter."""

    in_backward: bool  # a gradient that is complete is to be used and freed at once

    def gradient(self, parameter: nn.Parameter) -> Tensor | None: ...

    def replace_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...

    def complete(self, parameter: nn.Parameter) -> None: ...


class InFlight(NamedTuple):
    """One group's all-reduce, not waited for yet."""

    work: Any  # of torch.distributed
    # Parameters without a gradient here: (parameter, its view of the sum, number of ranks with a gradient).
    without: list[tuple[nn.Parameter, Tensor, Tensor]]


class Replicas:
    """All-reduces of the gradients of parameters that other ranks hold copies of.

    `watch` once; then for each step `begin`, the backward passes, `finish`. groups: (parameters that are
    reduced together, 1-D mesh of the ranks with copies, None without others), in the order in which a
    backward pass ends with them; frozen ones are left out. Every rank starts its all-reduces in that order,
    or different groups would be added up. dtype: that gradients are summed in; None: their own.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], DeviceMesh | None]],
        dtype: torch.dtype | None = None,
    ) -> None:
        trained = [([p for p in group if p.requires_grad], mesh) for group, mesh in groups]
        self.groups = [group for group, _ in trained if group]
        self.meshes = [mesh for group, mesh in trained if group]
        self.dtype = dtype
        self.missing: list[int] = []  # gradients of each group that this step's passes have still to compute
        self.in_flight: list[InFlight] = []  # all-reduces of the first groups
        self.waited = 0  # number of them that are over

    def watch(self, gradients: Gradients) -> None:
        """Add hooks that all-reduce a group once all of its gradients of a step are computed.

        Call it once, after `gradients` has added its hooks, which must run first.
        """
        self.gradients = gradients
        for index, group in enumerate(self.groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(partial(self._computed, index))

    def begin(self, passes: int) -> None:
        """Prepare a step of `passes` backward passes."""
        self.missing, self.in_flight = [len(group) * passes for group in self.groups], []
        self.waited = 0

    def finish(self) -> None:
        """Wait until the gradients are the sums over all replicas; call it after the step's passes.

        Groups without a hook's call for every gradient (backward passes for weights only run none) are
        all-reduced now.
        """
        while len(self.in_flight) < len(self.groups):
            self._all_reduce()
        while self.waited < len(self.in_flight):
            self._wait()
        self.in_flight = []

    def _wait(self) -> None:
        """Wait for the first all-reduce that is not over; its gradients are then complete."""
        reduction, group = self.in_flight[self.waited], self.groups[self.waited]
        self.in_flight[self.waited] = InFlight(None, [])  # a view would keep the memory of all
        self.waited += 1
        if reduction.work is not None:
            reduction.work.wait()
        for parameter, summed, ranks in reduction.without:
            if ranks > 0:
                self.gradients.replace_gradient(parameter, summed)
        del reduction
        for parameter in group:
            self.gradients.complete(parameter)

    def _computed(self, index: int, _: Tensor) -> None:
        """Hook after a pass has added one gradient of group `index`: start the all-reduces that are ready, in
        the order of the groups.
        """
        self.missing[index] -= 1
        while len(self.in_flight) < len(self.groups) and self.missing[len(self.in_flight)] == 0:
            self._all_reduce()
            if self.gradients.in_backward and len(self.in_flight) > self.waited + 1:
                self._wait()  # behind the next group's backward

    def _all_reduce(self) -> None:
        """Start the next group's all-reduce; its gradients become views of the buffer, valid after `finish`.

        A parameter that a rank's passes did not reach (layerdrop, experts) is zeros there. The end of the
        buffer counts the ranks that reached each: for 0 it has no gradient, as on one device.
        """
        group, mesh = self.groups[len(self.in_flight)], self.meshes[len(self.in_flight)]
        if mesh is None:
            self.in_flight.append(InFlight(None, []))
            return
        gradients = [self.gradients.gradient(parameter) for parameter in group]
        flat = [
            torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()
            for parameter, gradient in zip(group, gradients, strict=True)
        ]
        reached = flat[0].new_ones(len(group))
        if any(gradient is None for gradient in gradients):
            reached = reached.new_tensor([float(gradient is not None) for gradient in gradients])
        buffer = torch.cat([*flat, reached]).to(self.dtype or flat[0].dtype)
        *sums, ranks = buffer.split([*(parameter.numel() for parameter in group), len(group)])
        without = []
        for index, (parameter, summed) in enumerate(zip(group, sums, strict=True)):
            if gradients[index] is None:
                without.append((parameter, summed.view(parameter.shape), ranks[index]))
            else:
                self.gradients.replace_gradient(parameter, summed.view(parameter.shape))
        work = dist.all_reduce(buffer, group=mesh.get_group(), async_op=True)
        self.in_flight.append(InFlight(work, without))
