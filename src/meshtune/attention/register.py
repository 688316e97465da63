"""Causal attention over packed documents, for any Hugging Face model that uses `AttentionInterface`.

    register()                                     # once a process, before a model is built with it
    model.set_attn_implementation("meshtune")
    model(input_ids, position_ids=..., documents=((5, 3), (8,)), use_cache=False)

`documents[b]` holds the lengths of row b's documents from column 0 on; what lies beyond their sum is
padding. A token sees the earlier tokens of its own document (the last `sliding_window` ones, itself
included), nothing else; no document sees padding. No mask of seq × seq is ever built, and keys and values are
never expanded to the number of query heads. The kernels are in core.py.

"meshtune_recompute" is the same function, but what happens inside is recomputed in the backward.

A family that does not pass `documents` down to its attention raises, as does any argument that is not known
here: a silently wrong result is never possible.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from meshtune.attention.core import attend_rows
from meshtune.data.boundaries import checked_lengths, row_boundaries
from meshtune.meter.clock import recomputing
from meshtune.model.anatomy import Anatomy
from meshtune.model.body import ATTENTION_NAMES
from meshtune.model.documents import follow_documents, keep_weights, separate_documents
from meshtune.model.recorded import unsupported


@cache
def register() -> None:
    """Make both names known to transformers. Call it before a model is built; further calls do nothing.

    No function that makes masks is registered: transformers would look for packed sequences in the positions,
    and wait for the device to say whether there are any.
    """
    functions = (document_attention, recomputed_document_attention)
    for name, function in zip(ATTENTION_NAMES, functions, strict=True):
        AttentionInterface.register(name, function)


def use_kernels(model: nn.Module, anatomy: Anatomy, kernels: str) -> None:
    """Make the attention of each block run the kernels of one kind of device, "cpu" or "cuda", in place, and
    the model refuse a padding mask, which meshtune's attention would not see (NotImplementedError).

    Without it a module's attention runs the kernels of the device that its tensors are on.
    """
    for module in model.get_submodule(anatomy.blocks).modules():
        vars(module)["kernels"] = kernels
    model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)


def keep_documents_apart(model: PreTrainedModel, parts: Anatomy, kernels: str) -> None:
    """Make a model, built with any attention, keep the documents of packed rows apart in all that it does,
    and its weights in evaluation, in place. kernels: see `use_kernels`.
    """
    use_kernels(model, parts, kernels)
    follow_documents(model)
    separate_documents(model, parts.mixers)
    keep_weights(model)


def _refuse_mask(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    ours = model.config._attn_implementation in ATTENTION_NAMES  # type: ignore[union-attr]
    if ours and kwargs.get("attention_mask") is not None:
        raise NotImplementedError(
            "meshtune's attention was given an attention_mask: describe padding by `documents`, or use "
            "model.attention=sdpa."
        )


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    recompute: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention inside each document, as Hugging Face's modules call it.

    query [batch, heads, seq, head_dim], key and value [batch, kv_heads, seq, head_dim] -> ([batch, seq,
    heads, head_dim], None for the weights). documents: `MicroBatch.boundaries`, or each row's document
    lengths. scaling: None for 1/sqrt(head_dim). dropout: probability. sliding_window: keys that a query sees
    at most, its own included; None: all earlier ones. softcap: of the scaled scores; None: none. s_aux
    [heads]: attention sinks, of a module's own heads; None: none. recompute: save only query, key and value
    for the backward.

    Raises ValueError without `documents`, or if they do not fit; NotImplementedError for an attention_mask
    and for arguments that would change the result and are not known here.
    """
    _refuse_unknown(module, attention_mask, is_causal, others)
    if documents is None:
        raise ValueError(
            f"{type(module).__name__} called meshtune's attention without `documents`: either the model was "
            "called without them, or this family does not pass keyword arguments down to its attention; then "
            "use model.attention=sdpa, without packing."
        )
    own = vars(module)
    context = own.get("context")  # set where other ranks have the other columns (parallel/context.py)
    attend = partial(context or attend_rows, sinks=s_aux, kernels=own.get("kernels"))
    if isinstance(documents, Sequence):
        seq = query.shape[2]
        documents = row_boundaries(checked_lengths(documents, query.shape[0], seq), seq)
        documents = documents.map(lambda tensor: tensor.to(query.device))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    arguments = (query, key, value, documents, scale, dropout, softcap, sliding_window)
    if recompute and torch.is_grad_enabled():
        out = checkpoint(
            partial(_measured, attend), *arguments, use_reentrant=False, preserve_rng_state=dropout > 0
        )
    else:
        out = attend(*arguments)
    return out, None


def _measured(attend: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call `attend`; its time is recomputation's where a backward pass calls it."""
    with recomputing():
        return attend(*arguments)


def recomputed_document_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Call `document_attention`, saving only query, key and value for the backward, which recomputes it."""
    return document_attention(module, *args, recompute=True, **kwargs)


def _refuse_unknown(
    module: nn.Module, attention_mask: Any, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Raise NotImplementedError, naming all arguments that would change the result and are not supported.

    others: keyword arguments that `document_attention` does not know; None and the HARMLESS ones pass, and
    those in MUST_BE_OFF if they are False.
    """
    problems = unsupported(attention_mask, is_causal, others)
    if problems:
        raise NotImplementedError(
            f"{type(module).__name__} calls its attention with arguments that meshtune's does not support: "
            f"{', '.join(problems)}. Use model.attention=eager with data.packing=false."
        )
