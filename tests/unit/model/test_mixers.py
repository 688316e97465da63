"""Recurrent families: packed and unpacked as the unmodified model computes each document alone."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import cases
from families import RECURRENT, exact
from forward import summed_loss
from golden import refuses, says
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    PreTrainedModel,
    ZayaConfig,
)

from meshtune.attention.register import register
from meshtune.data.batch import micro_batch
from meshtune.data.pack import LABELLED
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.model.capabilities import traits
from meshtune.model.documents import _rows, keep_weights, separate_documents
from meshtune.model.load import on_meta, skeleton
from meshtune.model.lora import add_lora, merge_lora
from meshtune.model.pieces import materialise
from meshtune.parallel.recompute import recompute_blocks
from meshtune.placement.rules import refusals
from meshtune.train.generate import cached_answers

Gradients = dict[str, Tensor]
PACKED = [[5, 70, 12], [1, 33, 3, 40]]  # tokens of each row's documents
CASES = cases(RECURRENT, test=["mamba2", "lfm2", "qwen3_next"])


def documents() -> list[list[np.ndarray]]:
    """Rows of documents in stored tokens, the second half of each labelled."""
    random = np.random.default_rng(0)
    rows = [[random.integers(3, 250, length).astype(np.uint32) for length in row] for row in PACKED]
    for document in (document for row in rows for document in row):
        document[-(len(document) // 2) :] |= LABELLED if len(document) > 1 else 0
    return rows


def build(family: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        RECURRENT[family](), attn_implementation=attention, experts_implementation="eager"
    ).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that matter
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return model.train()


def gradients_of(model: PreTrainedModel) -> Gradients:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def expected(family: str) -> tuple[Tensor, Gradients]:
    """Summed loss and gradients of the unmodified model, a document at a time."""
    model: Any = build(family, "eager")
    total = torch.zeros((), dtype=torch.float64)
    for document in (document for row in documents() for document in row):
        ids = torch.from_numpy((document & ~LABELLED).astype(np.int64))
        targets = ids.where(torch.from_numpy((document & LABELLED) != 0), -100)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        if len(targets):
            total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    total.backward()
    return total.detach(), gradients_of(model)


def ours(family: str) -> PreTrainedModel:
    register()
    model = build(family, "meshtune")
    separate_documents(model, anatomy(model).mixers)
    return model


def check(model: PreTrainedModel, loss: Tensor, want: tuple[Tensor, Gradients]) -> None:
    torch.testing.assert_close(loss.detach(), want[0], rtol=1e-7, atol=0)
    for name, gradient in gradients_of(model).items():
        error = (gradient - want[1][name]).norm() / (want[1][name].norm() + 1e-6)
        assert error < 1e-5, (name, float(error))


@pytest.mark.ci
@pytest.mark.parametrize("family", CASES)
def test_packed_and_unpacked_equal_each_document_alone(family: str) -> None:
    with exact():
        want = expected(family)
        model = ours(family)
        rows = documents()
        for batch in (micro_batch(rows), micro_batch([[each] for row in rows for each in row])):
            model.zero_grad()
            loss = summed_loss(model, anatomy(model), batch)
            loss.backward()
            check(model, loss, want)


@pytest.mark.parametrize("mode", ["full", "linear", "selective"])
def test_what_is_recomputed_belongs_to_the_documents_of_its_own_micro_batch(mode: str) -> None:
    """A pipeline runs other forwards between a micro-batch's forward and its backward."""
    with exact():
        want = expected("lfm2")
        model = ours("lfm2")
        parts = anatomy(model)
        recompute_blocks(model, parts, mode)
        losses = [summed_loss(model, parts, micro_batch([row])) for row in documents()]
        for loss in losses:
            loss.backward()
        check(model, losses[0] + losses[1], want)


def test_without_it_documents_of_a_row_would_mix() -> None:
    register()
    model = build("mamba2", "meshtune")
    with exact(), torch.no_grad():
        mixed = summed_loss(model, anatomy(model), micro_batch(documents()))
        separate_documents(model, anatomy(model).mixers)
        apart = summed_loss(model, anatomy(model), micro_batch(documents()))
    assert abs(mixed / apart - 1) > 1e-4


def test_generation_keeps_its_state() -> None:
    """Outside of a training forward a mixer runs as it is."""
    model: Any = build("mamba2", "eager").eval()
    changed = copy.deepcopy(model)
    separate_documents(changed, anatomy(changed).mixers)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(
        model.generate(ids, max_new_tokens=8, do_sample=False),
        changed.generate(ids, max_new_tokens=8, do_sample=False),
    )


def test_an_evaluation_leaves_the_weights_as_they_are() -> None:
    """RWKV halves weights of its later layers in evaluation, until the next forward in training."""
    model = skeleton(RECURRENT["rwkv"](num_hidden_layers=8), init="random", dtype=torch.float32)
    keep_weights(model)
    materialise(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    before = copy.deepcopy(model.state_dict())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        trained, evaluated = model.train()(ids).logits, model.eval()(ids).logits
    torch.testing.assert_close(evaluated, trained)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_prompts_of_unlike_lengths_are_answered_as_alone() -> None:
    """Padding before a prompt would be in a recurrent state: RWKV knows no mask."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RECURRENT["rwkv"]()).eval()
    prompts = [[3, 4, 5, 6, 7], [9, 8], [11, 12, 13]]
    tokenizer: Any = SimpleNamespace(pad_token_id=0)
    answer = partial(cached_answers, model, tokenizer, stop_ids=[])
    assert answer(prompts, [6] * 3) == [answer([prompt], [6])[0] for prompt in prompts]


def test_short_documents_are_not_as_wide_as_longer_ones() -> None:
    lengths = ((10,) * 20 + (127,),)
    places = sum(group.numel() for group in _rows(lengths, 327, torch.device("cpu")).groups)
    assert places == 20 * 10 + 127


def test_adapters_of_a_shared_matrix_are_not_merged_and_dt_proj_has_none() -> None:
    shared = AutoModelForCausalLM.from_config(RECURRENT["zamba2"]())
    add_lora(shared, lora_rank=2, alpha=2.0)
    with refuses(UserError):
        merge_lora(shared)
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    assert not [name for name in add_lora(mamba, lora_rank=2, alpha=2.0) if name.endswith("dt_proj")]
    with refuses(UserError):
        add_lora(mamba, lora_rank=2, alpha=2.0, target_modules=["dt_proj"])


def test_what_recurrent_layers_do_not_take_is_refused() -> None:
    own = traits(on_meta(RECURRENT["qwen3_next"]()))
    assert refusals(own, Layout(pp=2, schedule="gpipe")) == []
    says(refusals(own, Layout(cp=2))[0])
    assert "recurrent" in refusals(own, Layout(tp=2))[0]
    shared = traits(on_meta(RECURRENT["zamba2"]()))
    assert "share" in refusals(shared, Layout(pp=2, schedule="gpipe"))[0]


def test_attention_that_carries_a_state_is_not_packed() -> None:
    config = ZayaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=1, intermediate_size=32, moe_intermediate_size=32,
    )  # fmt: skip
    own = traits(on_meta(config))
    says(refusals(own, Layout(), packing=True))
    assert refusals(own, Layout(), attention="eager", packing=False) == []


def test_a_family_named_after_its_norm_has_attention_and_no_mixer() -> None:
    config = AutoConfig.for_model("roberta-prelayernorm", num_hidden_layers=2, is_decoder=True)
    own = traits(on_meta(config))
    assert own.context is None and own.attention is None
