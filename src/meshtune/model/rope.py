"""Rotary embeddings whose frequencies depend on the length of a document: `longrope` and `dynamic`.

transformers takes the frequencies from the largest position of a whole micro-batch (`dynamic_rope_update`):
one long document would change its neighbours, and a loss would depend on what a document is packed with. Here
each document has those of its own length, as without packing:

    follow_documents(model)                     once
    with documents_of(model, micro_batch):      around a forward
        model(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch

RoPE = tuple[Tensor, Tensor]  # cosines and sines [batch, seq, features]


def follow_documents(model: nn.Module) -> None:
    """Make the rotary embeddings that depend on a length take each document's own, in place.

    Outside of `documents_of` they stay as they are.
    """
    found: list[Any] = []
    for module in model.modules():
        types = vars(module).get("rope_type")
        kinds = types.values() if isinstance(types, dict) else [types]
        if any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds):
            found.append(module)
    for module in found:
        module.document_tokens = None
        module.forward = partial(_by_document, module)
    vars(model)["rotary_by_document"] = found


@contextmanager
def documents_of(model: nn.Module, micro_batch: MicroBatch) -> Iterator[None]:
    """Give the model's rotary embeddings the lengths of the documents of `micro_batch` during the block."""
    modules = vars(model).get("rotary_by_document", ())
    tokens = micro_batch.document_tokens() if modules else None
    for module in modules:
        module.document_tokens = tokens
    try:
        yield
    finally:
        for module in modules:
            module.document_tokens = None


@torch.no_grad()
def _by_document(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> RoPE:
    """Return cosines and sines, from the frequencies of each token's document.

    x: for its dtype and device. position_ids [batch, seq]. layer_type: of a family with one kind of
    embedding for each.
    """
    kind = {} if layer_type is None else {"layer_type": layer_type}
    plain = partial(type(module).forward, module, x, **kind)
    if module.document_tokens is None:
        return plain(position_ids)
    own = module.document_tokens.clone()
    limit = _limit(module, layer_type)
    own[own <= limit] = 0  # the frequencies of a short document do not depend on its length
    if _type(module, layer_type) == "longrope":
        own[own > 0] = limit + 1  # all long ones have the same
    lengths = own.unique().tolist()
    # Padding, of length 0, stands with the short documents: its positions must not decide their frequencies.
    position_ids = position_ids * (module.document_tokens > 0).to(position_ids.device)
    found: RoPE | None = None
    for length in lengths:
        of_length = (own == length).to(position_ids.device)
        # One column more, with the last position of a document of this length: it decides the frequencies.
        last = position_ids.new_full((len(position_ids), 1), max(length, 1) - 1)
        _reset(module, layer_type)
        cos, sin = (part[:, :-1] for part in plain(torch.cat([position_ids * of_length, last], 1)))
        mask = of_length[..., None]
        found = (cos, sin) if found is None else (cos.where(mask, found[0]), sin.where(mask, found[1]))
    assert found is not None
    return found


def _type(module: Any, layer_type: str | None) -> str:
    return module.rope_type if layer_type is None else module.rope_type[layer_type]


def _limit(module: Any, layer_type: str | None) -> int:
    """Tokens of a document beyond which the frequencies change."""
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    if _type(module, layer_type) == "longrope":
        return parameters["original_max_position_embeddings"]
    return module.original_max_seq_len


def _reset(module: Any, layer_type: str | None) -> None:
    """Undo what a longer document before left in a dynamic embedding."""
    if "dynamic" in _type(module, layer_type):
        prefix = "" if layer_type is None else f"{layer_type}_"
        module.register_buffer(
            f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
        )
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
