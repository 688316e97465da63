"""Compare a micro-batch with the unmodified model before code trains that was not tested with meshtune.

    check(model, attention)   at the build, unless `make families` has trained the family with this version

On a small copy of the model (recorded.py) one micro-batch of two documents runs as training runs it, and each
document separately through the unmodified model in eager attention. Logits and all gradients must agree.
"""

import copy
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtune import compat
from meshtune.attention.register import keep_documents_apart, register
from meshtune.data.batch import IGNORE, MicroBatch
from meshtune.errors import UserError
from meshtune.experts.register import use_products
from meshtune.model.anatomy import Anatomy, anatomy, is_scored
from meshtune.model.body import ATTENTION_NAMES, body_forward, head_only
from meshtune.model.recorded import NoCopy, random_ids, set_attention, with_small_copy

LENGTHS = (24, 13)  # tokens of the documents: one is longer than the windows of a small copy, which are 16
# Largest relative differences in fp32; rounding in Jamba's scans gives 1.2e-4 and 4e-4.
LOGITS, GRADIENT = 1e-3, 3e-3

_agreed: set[Hashable] = set()  # in this process


def check(model: PreTrainedModel, attention: str) -> None:
    """Raise UserError if a micro-batch of `model` differs from the unmodified model, or can't be compared.

    Does nothing for a family that was tested with the installed versions, and once in a process for others.
    model: as transformers builds it, on any device. attention: name of its attention function in training.
    """
    if compat.family_tested(model.config.model_type) and not compat.untested(type(model)):
        return
    key = (type(model), model.config.to_json_string(use_diff=False), attention)
    if key in _agreed:
        return
    register()
    parts, name = anatomy(model), f"{type(model).__name__} of {compat.installed_versions()}"
    remedy = (
        f"Tested are {compat.tested_versions()}, every family with transformers "
        f"{' and '.join(compat.families_tested())}: install these, or report what differs."
    )
    try:
        worst = with_small_copy(
            model, parts.body, parts.head, parts.blocks, lambda small: differences(small, parts, attention)
        )
    except NoCopy as error:
        raise UserError(f"{name} can't be compared with the unmodified model: {error}. {remedy}") from error
    if problems := [
        f"{what} differ by {value:.2g} of the largest"
        for what, (value, allowed) in worst.items()
        if not value <= allowed  # NaN too
    ]:
        raise UserError(
            f"{name} would train wrong: {' and '.join(problems)} between documents of one micro-batch and "
            f"each separately, unmodified and in eager attention. {remedy}"
        )
    _agreed.add(key)


def beyond_tested(model: PreTrainedModel) -> str:
    """Return a sentence on a class or versions that are not tested, of a model that `check` let pass."""
    reasons = compat.untested(type(model))
    return reasons and (
        f"{reasons[0].upper()}{reasons[1:]} ({compat.tested_versions()}): a micro-batch of a small copy "
        "equals the unmodified model."
    )


def differences(small: Any, parts: Anatomy, attention: str) -> dict[str, tuple[float, float]]:
    """Return {what: (largest relative difference, the largest allowed)} of logits and gradients.

    small: in eager attention and unmodified; it gets gradients. A logit's difference is relative to the
    largest, a gradient's to the larger of its norm and a hundredth of that of all.
    """
    longer, shorter = (random_ids(small, length, seed) for seed, length in enumerate(LENGTHS))
    # Unpacked also a row without padding: transformers then gives some attentions no mask.
    micro_batches = (
        [[[longer, shorter]]] if attention in ATTENTION_NAMES else [[[longer], [shorter]], [[longer]]]
    )
    trained = copy.deepcopy(small)
    set_attention(trained, attention)
    there = dict(trained.named_modules())  # the copy has fewer blocks
    mixers = tuple(path for path in parts.mixers if path in there)
    keep_documents_apart(trained, replace(parts, mixers=mixers), "cpu")
    use_products(trained)
    ours = torch.cat([_logits(trained, parts, rows) for rows in micro_batches])
    documents = [ids for rows in micro_batches for row in rows for ids in row]
    theirs = torch.cat([_unmodified(small, parts, ids) for ids in documents])
    factors = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    for logits in (ours, theirs):
        (logits * factors).sum().backward()
    largest = theirs.abs().max()
    return {
        "logits": (float((ours - theirs).abs().max() / largest), LOGITS),
        "gradients": (_gradients(trained, small), GRADIENT),
    }


def _logits(model: nn.Module, parts: Anatomy, rows: list[list[Tensor]]) -> Tensor:
    """Return logits [tokens, vocabulary] of a micro-batch, as training runs it. rows: ids of documents."""
    columns = max(sum(map(len, row)) for row in rows)
    ids, positions = (torch.zeros(len(rows), columns, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        tokens = sum(map(len, row))
        ids[number, :tokens] = torch.cat(row)
        positions[number] = torch.cat(
            [*(torch.arange(len(each)) for each in row), torch.arange(columns - tokens)]
        )
    lengths = tuple(tuple(map(len, row)) for row in rows)
    count = sum(map(sum, lengths))
    batch = MicroBatch(ids, torch.full_like(ids, IGNORE), positions, lengths, count, 0)
    hidden = body_forward(model, parts, batch)
    real = torch.cat([hidden[number, : sum(row)] for number, row in enumerate(lengths)])
    with head_only(model, parts) as logits_of:
        return logits_of(real)


def _unmodified(model: Any, parts: Anatomy, ids: Tensor) -> Tensor:
    """Return the logits [tokens, vocabulary] of one document by the model's own forward."""
    if model.config.get_text_config(decoder=True) is model.config and not is_scored(model.config):
        return model(input_ids=ids[None], use_cache=False).logits[0]
    hidden = model.get_submodule(parts.body)(input_ids=ids[None], use_cache=False).last_hidden_state
    # A reward model's forward scores the last token; in a model that also sees, other parts lack weights.
    with head_only(model, parts) as logits_of:
        return logits_of(hidden[0])


def _gradients(one: nn.Module, two: nn.Module) -> float:
    """Return the largest relative difference of the gradients of two models with the same parameters."""
    pairs = [
        (first.grad, second.grad)
        for first, second in zip(one.parameters(), two.parameters(), strict=True)
        if first.grad is not None or second.grad is not None
    ]
    floor = float(sum(b.square().sum() for _, b in pairs if b is not None)) ** 0.5 / 100
    none = torch.zeros(())
    return max(
        float((none if a is None else a).sub(none if b is None else b).norm())
        / max(0.0 if b is None else float(b.norm()), floor)
        for a, b in pairs
    )
