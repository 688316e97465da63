"""A model's loss from its body on, as the last stage of a layout computes it; passes of two equal models."""

from typing import Any

import torch
from torch import Tensor, nn

from meshtune.data.batch import MicroBatch
from meshtune.model.body import body_forward
from meshtune.train.loss import head_loss


def summed_loss(model: nn.Module, anatomy: Any, micro_batch: MicroBatch, **options: Any) -> Tensor:
    """Sum of the token losses of a micro-batch, a scalar.

    anatomy: that of `model`. options: keyword arguments of head_loss.
    """
    return head_loss(model, anatomy, body_forward(model, anatomy, micro_batch), micro_batch, **options)


def pass_equally(ours: nn.Module, reference: nn.Module, ids: Tensor) -> None:
    """Run a forward and a backward of both models, and hold our logits to those of the reference."""
    logits = []
    for model in (ours, reference):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        logits.append(out.logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
