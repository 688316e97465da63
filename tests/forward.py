"""A model's loss from its body on, as the last stage of a layout computes it."""

from typing import Any

from torch import Tensor, nn

from meshtune.data.batch import MicroBatch
from meshtune.model.body import body_forward
from meshtune.train.loss import head_loss


def summed_loss(model: nn.Module, anatomy: Any, micro_batch: MicroBatch, **options: Any) -> Tensor:
    """Sum of the token losses of a micro-batch, a scalar.

    anatomy: that of `model`. options: keyword arguments of head_loss.
    """
    return head_loss(model, anatomy, body_forward(model, anatomy, micro_batch), micro_batch, **options)
