"""Activations of families that compute attention themselves: a forward on meta, with their attention."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtune.model.fused import STAND_IN
from meshtune.model.lora import Adapters
from meshtune.model.saved_tensors import Saved, cast_parameters, saved_by_block

Builder = Callable[[str | None], PreTrainedModel]  # attention implementation, None: the family's -> model


def built_on_meta(build: Builder, attention: str | None, frozen: Collection[str]) -> PreTrainedModel:
    """Build the model on meta, parameters in bf16, in training mode; only those `frozen` have no gradient."""
    with torch.device("meta"):
        model = build(attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    cast_parameters(model, torch.bfloat16)
    return model.train()


def inputs(rows: int, tokens: int, with_mask: bool) -> dict[str, Tensor]:
    """Inputs of a forward on meta: `rows` of `tokens`, and with a mask if `with_mask`."""
    given = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long, device="meta")}
    if with_mask:  # 4-d: passed on as it is, where a family would read the values of one that it makes itself
        given["attention_mask"] = torch.zeros(rows, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    return given


def saved_by_own_attention(build: Builder, frozen: Collection[str], adapters: Adapters, rows: int) -> Saved:
    """Return what `saved_by_block` does, of a family whose attention can't be replaced; empty if untraced.

    A run has the family's attention and a mask. Some families read the mask's values, which meta tensors do
    not have, or want another one. build, frozen, adapters: as in `trace`.
    """
    for attention, with_mask in product((None, STAND_IN), (False, True)):
        try:
            model = built_on_meta(build, attention, frozen)
        except (KeyError, ValueError):  # it knows no STAND_IN
            continue
        found = saved_by_block(model, frozen, adapters, partial(inputs, with_mask=with_mask), rows)
        if found[0]:
            return found
    return {}, ()
