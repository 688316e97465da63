"""One optimizer step's forward and backward passes, on one device or on this rank of many.

The loss of a step is the sum of the token losses over the global batch divided by its label tokens. Each
micro-batch adds its share of that one quotient, so neither loss nor gradients depend on how the batch is cut.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from meshtune.data.loader import Batch, MicroBatch
from meshtune.model.anatomy import Anatomy
from meshtune.model.body import body_forward
from meshtune.parallel.apply import Finish, Parallel
from meshtune.train.loss import summed_loss
from meshtune.train.optim import Optimizer, key_of, parts_of

Phase = Callable[[str], AbstractContextManager[object]]
SummedLoss = Callable[[nn.Module, Anatomy, MicroBatch], Tensor]


class Passes(Protocol):
    """How a model is run; what the loop and the evaluation know of layouts."""

    def forward_backward(self, batch: Batch, phase: Phase) -> Tensor:
        """Leave the batch's gradients on the parameters; returns this rank's share of its loss, a scalar.

        The shares of all ranks add up to the loss. `phase(name)` is a context around each part, for those who
        watch.
        """
        ...

    def share_tied(self) -> None:
        """After a checkpoint was read: give a tied copy on the same rank what its original has now."""
        ...

    def forward(self, micro_batches: Iterable[MicroBatch], finish: Finish) -> list[Tensor]:
        """What `finish` makes of each micro-batch's last hidden states, without gradients; on the ranks of
        the last stage, and nothing on others.
        """
        ...


@dataclass(frozen=True)
class OneDevice:
    """The whole model here, one micro-batch after the other."""

    model: nn.Module
    anatomy: Anatomy
    device: torch.device
    loss_fn: SummedLoss = summed_loss

    def forward_backward(self, batch: Batch, phase: Phase) -> Tensor:
        losses = []
        for micro_batch in batch.micro_batches:
            micro_batch = micro_batch.to(self.device)
            with phase("forward"):
                loss = self.loss_fn(self.model, self.anatomy, micro_batch) / max(1, batch.label_tokens)
            with phase("backward"):
                loss.backward()
            losses.append(loss.detach())
            del loss  # its graph holds the head's gradient, which would otherwise outlive the next forward
        return torch.stack(losses).sum()

    def share_tied(self) -> None:
        """Tied parameters are one here."""

    @torch.no_grad()
    def forward(self, micro_batches: Iterable[MicroBatch], finish: Finish) -> list[Tensor]:
        found = []
        for micro_batch in micro_batches:
            micro_batch = micro_batch.to(self.device)
            hidden = body_forward(self.model, self.anatomy, micro_batch)
            found.append(finish(self.model, self.anatomy, hidden, micro_batch))
        return found


@dataclass(frozen=True)
class ManyRanks:
    """This rank's part of the model on its part of the batch; what other ranks need is exchanged inside."""

    parallel: Parallel
    optimizer: Optimizer

    def __post_init__(self) -> None:
        if self.parallel.replicas is not None:
            self.parallel.replicas.watch(self.optimizer)

    def forward_backward(self, batch: Batch, phase: Phase) -> Tensor:
        own, scale = self.parallel, 1 / max(1, batch.label_tokens)
        micro_batches = [own.localise(micro_batch) for micro_batch in batch.micro_batches]
        own.begin(len(micro_batches))
        if own.pipeline is not None:
            with phase("forward and backward"):
                total = own.pipeline.forward_backward(micro_batches, scale, self.optimizer.add_up)
        else:
            losses = []
            for number, micro_batch in enumerate(micro_batches, 1):
                own.before_backward(last=number == len(micro_batches))
                with phase("forward"):
                    loss = own.stages[0](None, micro_batch) * scale
                with phase("backward"):
                    loss.backward()
                losses.append(loss.detach())
                del loss
            total = torch.stack(losses).sum()
        own.finish_gradients(self.optimizer.named_gradients)
        return total / own.world.tp.size  # every tensor rank has the whole loss of its tokens

    @torch.no_grad()
    def share_tied(self) -> None:
        state, tied = self.optimizer.state(), self.parallel.tied
        for key, tensor in state.items():
            kind, name, moment = parts_of(key)
            source = state.get(key_of(kind, tied[name], moment)) if name in tied else None
            if source is not None:  # both are here: only the original was read
                tensor.copy_(source)

    @torch.no_grad()
    def forward(self, micro_batches: Iterable[MicroBatch], finish: Finish) -> list[Tensor]:
        return self.parallel.forward([self.parallel.localise(each) for each in micro_batches], finish)
