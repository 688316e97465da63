"""One optimizer step's forward and backward passes.

The loss of a step is the sum of the token losses over the global batch divided by its label tokens. Each
micro-batch adds its share of that one quotient, so neither loss nor gradients depend on how the batch is cut.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from meshtune.data.loader import Batch, MicroBatch
from meshtune.model.anatomy import Anatomy
from meshtune.train.loss import summed_loss

Phase = Callable[[str], AbstractContextManager[object]]
SummedLoss = Callable[[nn.Module, Anatomy, MicroBatch], Tensor]


def plain(
    model: nn.Module, anatomy: Anatomy, device: torch.device, loss_fn: SummedLoss = summed_loss
) -> Callable[[Batch, Phase], Tensor]:
    """The forward and backward passes of a whole model on one device, one micro-batch after the other.

    Returns a function of (batch, phase) that leaves gradients on the parameters and returns the batch's loss,
    a scalar; `phase(name)` is a context around each part, for those who watch.
    """

    def forward_backward(batch: Batch, phase: Phase) -> Tensor:
        total = torch.zeros((), device=device)
        for micro_batch in batch.micro_batches:
            micro_batch = micro_batch.to(device)
            with phase("forward"):
                loss = loss_fn(model, anatomy, micro_batch) / max(1, batch.label_tokens)
            with phase("backward"):
                loss.backward()
            total += loss.detach()
            del loss  # its graph holds the head's gradient, which would otherwise outlive the next forward
        return total

    return forward_backward
