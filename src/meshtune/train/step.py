"""One optimizer step's forward and backward passes on this rank.

The loss of a step is the sum of the losses over the global batch divided by its units: label tokens, or with
a loss on whole answers their pairs (Batch.units). Each
micro-batch adds its share of that one quotient, so neither loss nor gradients depend on how the batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshtune.meter.noise_scale import Noise, estimate
from meshtune.optim.optimizer import Optimizer, key_of, parts_of
from meshtune.parallel.micro_batch_norms import MicroBatchNorms
from meshtune.parallel.noise import Neftune, add_noise
from meshtune.train.loss import TokenLoss
from meshtune.train.preference import Preference, divergence

if TYPE_CHECKING:
    from meshtune.data.batch import Batch, MicroBatch
    from meshtune.meter.phases import Phase
    from meshtune.parallel.apply import Parallel
    from meshtune.routers.balance import Balance
    from meshtune.rundir import Row


@dataclass(frozen=True)
class Counts:
    """Counts of one batch."""

    units: int  # of all ranks: what the loss is a mean over (Batch.units)
    flops: float = 0.0  # this rank's share of what the model needs (mfu.flops_of); NaN: unknown
    flops_6n: float = 0.0  # by the 6N formula
    tokens: int = 0  # of all ranks, without padding: what a router's z-loss is a mean over


@dataclass(frozen=True)
class Outcome:
    """One step's result, the same on all ranks; numbers of all ranks."""

    loss: float  # per unit of the batch, before the update
    norm: float  # of the gradients before they are clipped
    finite: bool  # False: there was no update
    flops: float
    flops_6n: float
    noise: Noise | None = None  # of the gradients; None: not measured, or there was no update
    spoilt: bool = False  # True: parameters were updated with gradients that are not finite
    # By a loss on whole answers, and of the load of experts, by its name
    measured: Mapping[str, float] = field(default_factory=dict)
    experts: Row | None = None  # loads by layer; None: of a dense model


@dataclass(frozen=True)
class Passes:
    """This rank's part of the model on its part of the batch; collectives with other ranks run inside.

    Making one adds the hooks that all-reduce the optimizer's gradients over replicas, if there are any.
    """

    parallel: Parallel
    optimizer: Optimizer
    objective: TokenLoss | Preference | None = None  # None: the cross entropy
    neftune: Neftune | None = None  # noise on the embeddings; None: none
    balance: Balance | None = None  # of the experts of a mixture

    def __post_init__(self) -> None:
        if self.parallel.replicas is not None:
            self.parallel.replicas.watch(self.optimizer)
        elif self.optimizer.in_backward:
            self.optimizer.watch()

    def localise(self, batch: Batch) -> list[MicroBatch]:
        """This rank's columns of the batch's micro-batches, with their noise, on its device."""
        return [self.parallel.to_device(each) for each in self.columns_of(batch)]

    def columns_of(self, batch: Batch) -> list[MicroBatch]:
        """This rank's columns of the batch's micro-batches, with their noise, in host memory."""
        micro_batches = list(batch.micro_batches)
        if self.neftune is not None:
            micro_batches = [add_noise(each, self.neftune, batch.place) for each in micro_batches]
        return [self.parallel.columns_of(micro_batch) for micro_batch in micro_batches]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        units: int,
        phase: Phase,
        norms: MicroBatchNorms | None = None,
        before_backward: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Leave the gradients of a batch in `optimizer`, summed over ranks; returns this rank's share of the
        batch's loss, a scalar.

        The shares of all ranks add up to the loss. micro_batches: of `localise`. units: of the batch.
        `phase(name)` is a context around each "forward" and each "backward", with a pipeline around all of
        them ("forward and backward"), for meters. norms: gets each micro-batch's gradients; not with a
        pipeline. before_backward: called with what is returned, before the only micro-batch's backward.
        """
        parallel, scale = self.parallel, 1 / max(1, units)
        parallel.begin(len(micro_batches))
        if parallel.pipeline is not None:
            with phase("forward and backward"):
                total = parallel.pipeline.forward_backward(micro_batches, scale, self.optimizer.add_up)
        else:
            total = torch.zeros((), device=parallel.world.device)
            for number, micro_batch in enumerate(micro_batches, 1):
                parallel.before_backward(last=number == len(micro_batches))
                with phase("forward"):
                    loss = parallel.stages[0](None, micro_batch) * scale
                    total = total + loss.detach()
                if self.balance is not None:
                    self.balance.pool()
                if before_backward is not None:
                    before_backward(total / parallel.world.tp.size)
                if norms is not None:
                    norms.watch()
                with phase("backward"):
                    loss.backward()
                if norms is not None:
                    norms.add(micro_batch.label_tokens)
                del loss  # its graph holds the head's gradient, which would outlive the next forward
        parallel.finish_gradients(self.optimizer.named_gradients)
        return total / parallel.world.tp.size  # every tensor rank has the whole loss of its tokens

    def in_flight(self) -> float:
        """The most micro-batches whose activations this rank of a pipeline held at once; without one, 1."""
        pipeline = self.parallel.pipeline
        return pipeline.in_flight() if pipeline is not None else 1.0

    def sums(self) -> list[Tensor | float]:
        """This rank's share of what the objective added up in `forward_backward`: the count of a TokenLoss,
        or what a Preference measured; [0] of the cross entropy.
        """
        taken = self.objective.take() if self.objective else [0.0]
        return [each / self.parallel.world.tp.size for each in taken]

    def per_count(self, units: int, sums: Sequence[float]) -> float:
        """Factor from a loss and gradients per unit of the batch to those per count of a TokenLoss.

        units: of the batch. sums: of all ranks. Where the count is 0 the factor is NaN.
        """
        if not isinstance(self.objective, TokenLoss) or sums[0] == units:
            return 1.0
        return max(1, units) / sums[0] if sums[0] else math.nan

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        counts: Counts,
        phase: Phase,
        *,
        learning_rate: float,
        max_grad_norm: float,
        measure_noise: bool = False,
        mismatched: Sequence[MicroBatch] = (),
    ) -> Outcome:
        """Make one update from a batch, or none if its loss or a gradient is not finite. An optimizer that
        works in the backward has made it by the time a gradient is seen not to be finite.

        micro_batches: of `localise`. counts: of the batch. phase: as in `forward_backward`; the update is
        "optimizer". learning_rate: of the update. max_grad_norm: 0 for no clipping. measure_noise: measure
        the gradient noise too, in a layout and with a loss that `noise_refusals` has nothing against.
        mismatched: of the batch (Batch.mismatched).
        """
        norms = None
        if isinstance(self.objective, Preference) and mismatched:
            with phase("forward"):
                self.objective.kl = divergence(self.parallel, self.objective, iter(mismatched))
        if measure_noise:
            norms = MicroBatchNorms(self.parallel, self.optimizer.named_parameters(), counts.units)
        world, optimizer, early = self.parallel.world, self.optimizer, list[Tensor | float]()

        def begin(share: Tensor) -> None:
            """Agree, by an all-reduce of few numbers, on whether the loss is finite, and on its count."""
            early.extend(self.sums())
            loss, *sums = world.sum_over_ranks(share, *early)
            factor = self.per_count(counts.units, sums)
            optimizer.begin(learning_rate if math.isfinite(loss * factor) else None, factor)

        if self.balance is not None:
            self.balance.begin(counts.tokens)
        before = begin if optimizer.in_backward else None
        share = self.forward_backward(micro_batches, counts.units, phase, norms, before)
        # One all-reduce for all that the ranks must agree on before the update.
        own = early or self.sums()
        loss, squares, flops, flops_6n, *rest = world.sum_over_ranks(
            share, optimizer.local_squared_norm(), counts.flops, counts.flops_6n, *own,
            *(norms.close() if norms is not None else ()),
        )  # fmt: skip
        sums, small = rest[: len(own)], rest[len(own) :]
        factor = self.per_count(counts.units, sums)
        loss, norm = loss * factor, math.sqrt(squares) * abs(factor)
        finite = math.isfinite(loss) and math.isfinite(norm)
        noise = self._noise(small[0], small[1], squares) if small and finite else None
        if finite:
            if not early:
                optimizer.scale(factor)
            optimizer.clip(norm, max_grad_norm)
            with phase("optimizer"):
                optimizer.step(learning_rate)
        else:
            optimizer.zero_grad()
        spoilt = bool(early) and math.isfinite(loss) and not finite
        measured = self.objective.means(sums) if isinstance(self.objective, Preference) else {}
        loads, row = self.balance.measured() if self.balance is not None else ({}, None)
        if self.balance is not None and finite:
            self.balance.move()
        return Outcome(loss, norm, finite, flops, flops_6n, noise, spoilt, {**measured, **loads}, row)

    def _noise(self, small: float, number: float, big: float) -> Noise | None:
        """The gradient noise of a step. small: mean squared norm of its micro-batches' gradients; number: of
        those micro-batches, counted once by each tp rank; big: squared norm of the step's gradients.
        """
        world = self.parallel.world
        micro_batches = round(number / world.tp.size)
        return estimate(small, big, micro_batches=micro_batches, sequences=world.layout.global_batch_size)

    @torch.no_grad()
    def share_tied(self) -> None:
        """After a checkpoint was read: copy the original's values into a tied copy on the same rank."""
        state, tied = self.optimizer.state(), self.parallel.tied
        for key, tensor in state.items():
            kind, name, state_name = parts_of(key)
            source = state.get(key_of(kind, tied[name], state_name)) if name in tied else None
            if source is not None:  # both are here: only the original was read
                tensor.copy_(source)
