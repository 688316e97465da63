"""Changes to a loaded model before it is trained: rows for added tokens, frozen parameters."""

import fnmatch
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.model.multimodal import aside_names
from meshtune.nearest import nearest
from meshtune.units import counted


def grow_embeddings(model: PreTrainedModel, needed: int) -> int:
    """Make embedding and head (with its bias) at least `needed` rows long; return how many were added.

    New rows have arbitrary values until stored values are copied in (`pieces.StoredTensors`). Never shrinks
    (many families round their rows up). `config.vocab_size` follows.
    """
    rows = tables(model)[0].num_embeddings
    if needed > rows:
        resize_to(model, needed)
    return max(0, needed - rows)


def resize_to(model: PreTrainedModel, rows: int) -> None:
    """Make embedding and head `rows` long; their values, requires_grad and tying stay.

    New rows have arbitrary values. Torch's random state is left as it was.
    """
    trainable = [table.weight.requires_grad for table in tables(model)]
    devices = [table.weight.device for table in tables(model) if table.weight.is_cuda]
    with torch.random.fork_rng(devices):  # what it draws is overwritten; adapters drawn later must not differ
        model.resize_token_embeddings(rows, mean_resizing=False)
    for table, grad in zip(tables(model), trainable, strict=True):
        table.weight.requires_grad_(grad)


def train_tables(model: PreTrainedModel) -> None:
    """Train embedding and head whole, where the embedding of a model with adapters grew: all new rows are the
    same mean, and untrained, the model could not tell the new tokens apart.
    """
    for table in tables(model):
        table.weight.requires_grad_(True)


def untie(model: PreTrainedModel) -> None:
    """Give the head of a model that shares its embedding's weight a copy of its own, in place.

    The configuration no longer ties them.
    """
    embed, head = tables(model)
    head.weight = nn.Parameter(embed.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def tables(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The embedding and the output head. Raises UserError for a model without one."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no plain embedding and output head.")
    return embed, head


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters whose names match a glob (`model.layers.0.*`, `*norm*`); return their names.

    `*` matches dots too; tied parameters match under all their names; parts that were set aside are frozen
    already. Raises UserError for every pattern that
    matches nothing, naming near ones, before any is frozen, and afterwards if nothing is left to train.
    """
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied head is found under both its names
    aside = aside_names(model)
    frozen: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches and not fnmatch.filter(aside, pattern):
            near = (nearest(pattern, names) or [*names])[:3]
            problems.append(
                f"The pattern {pattern} matches no parameter; globs match names such as {', '.join(near)}."
            )
        frozen.update(matches)
    if problems:
        raise UserError(problems)
    for name in frozen:
        names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise UserError(f"With {counted(len(frozen), 'parameter')} frozen, nothing is left to train.")
    return sorted(frozen)
