"""Bytes that the last norm and the head keep and need, from their passes alone on meta.

hidden ──> norm ──> head ──> logits
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from transformers import PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.model.block_peaks import LivingBytes
from meshtune.model.body import head_only
from meshtune.placement.census import EndBytes


def end_bytes(
    model: PreTrainedModel, parts: Anatomy, dtype: torch.dtype, tokens: int, *, tables: float, before: float
) -> EndBytes:
    """Trace both on `tokens` hidden states. dtype: of the weights, which lie on meta. tables, before: as in
    EndBytes.

    tokens: a number that divides no size of the model, so that gradients of weights are recognised.
    """
    features = model.get_input_embeddings().get_parameter("weight").shape[-1]
    hidden = torch.empty(1, tokens, features, dtype=dtype, device="meta").requires_grad_()
    saved, backward = _of_norm(model.get_submodule(parts.norm), hidden) if parts.norm else (0.0, 0.0)
    per_logit, changes = _per_logit(model, parts, hidden[0])
    return EndBytes(per_logit, saved, backward, tables, changes, before)


def _per_logit(model: PreTrainedModel, parts: Anatomy, hidden: Tensor) -> tuple[float, bool]:
    """(Bytes per logit that the head keeps beside its output: a softcap its tanh, a cast to fp32 2 more than
    an output in bf16; whether the logits are another tensor than its matrix's output).
    """
    outputs: list[Tensor] = []  # of the matrix
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # an address is only unique among living storages

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[:-1].numel() == len(hidden) and tensor.shape[-1] > hidden.shape[-1]:
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    head: Any = model.get_submodule(parts.head)
    hook = head.register_forward_hook(lambda _, __, out: outputs.append(out))
    with head_only(model, parts) as logits_of, saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = logits_of(hidden)
    hook.remove()
    storage = logits.untyped_storage()._cdata
    sizes.pop(storage, None)
    kept = sum(sizes.values()) / logits.numel() + logits.element_size() - hidden.dtype.itemsize
    return kept, all(out.untyped_storage()._cdata != storage for out in outputs)


class _Gradient(torch.autograd.Function):
    """Hand out a gradient that nothing else holds."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:  # type: ignore[override]
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


def _of_norm(norm: nn.Module, hidden: Tensor) -> tuple[float, float]:
    """Bytes per token that a norm keeps and the most in its backward."""
    with LivingBytes(hidden.shape[1]) as living:
        given = hidden.clone()  # which lives as long as something holds it
        out = norm(given)
        del given
        edge = get_gradient_edge(_Gradient.apply(out))
        del out
        saved, *_ = living.most = living.living
        torch.autograd.backward([edge], [torch.empty((), dtype=hidden.dtype, device="meta")])
    for parameter in norm.parameters():
        parameter.grad = None
    return saved, living.most[0]
