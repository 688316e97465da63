"""A whole model on one device, as tests want it; `meshtune.train.model` is the product's path."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune.data.tokens import id_bound
from meshtune.model.load import fill_whole, grow_embeddings, mapped, skeleton, tables


def load(
    name: str, *, dtype: torch.dtype, attention: str, device: str = "cpu", seed: int = 0, **source: Any
) -> PreTrainedModel:
    model = skeleton(name, dtype=dtype, attention=attention, **source)
    fill_whole(model, mapped(name, dtype=dtype, seed=seed, **source), torch.device(device))
    return model


def resize_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the tokenizer's new tokens the mean of the old rows, computed in fp64; return their number."""
    rows = tables(model)[0].num_embeddings
    added = grow_embeddings(model, id_bound(tokenizer))
    embed, head = tables(model)
    changed = {id(table): table for table in (embed.weight, head.weight, head.bias) if table is not None}
    with torch.no_grad():
        for table in changed.values() if added else ():
            table[rows:] = table[:rows].mean(dim=0, dtype=torch.float64).to(table.dtype)
    return added
