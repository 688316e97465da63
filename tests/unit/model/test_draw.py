"""Random weights, one module at a time, against transformers' own `from_config` after the same seed."""

import logging

import pytest
import torch
from families import COMMON, FAMILIES
from transformers import AutoModelForCausalLM, DiffLlamaConfig, LlamaConfig
from transformers.modeling_utils import PreTrainedModel

from meshtune.meter.ledger import Ledger
from meshtune.model.load import drawn, mapped


def collected(config, dtype, seed=3):
    """(Parameters by name, buffers by name) of `drawn`."""
    values = {}

    def receive(names, whole):
        values.update(dict.fromkeys(names, whole.clone()))

    return values, drawn(config, receive, dtype=dtype, seed=seed)


def of_transformers(config, dtype, seed=3):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


# Tied; other rules; a scale for some matrices; a constructor that draws by calls of torch.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "diffllama"])
def test_values_are_those_of_from_config(family, dtype, caplog):
    if family == "diffllama":
        config = DiffLlamaConfig(**COMMON | {"pad_token_id": 5})
    else:
        config = FAMILIES[family](pad_token_id=5)
    expected = of_transformers(config, dtype)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        values, buffers = collected(config, dtype)

    assert torch.equal(torch.get_rng_state(), before)
    assert not [record for record in caplog.records if "drawn whole" in record.message]
    named = dict(expected.named_parameters(remove_duplicate=False))
    assert values.keys() == named.keys()
    assert all(torch.equal(values[name], named[name]) for name in named)
    stored = {name: tensor for name, tensor in expected.state_dict().items() if name not in named}
    assert buffers.keys() == stored.keys()
    assert all(torch.equal(buffers[name], stored[name]) for name in stored)


def test_memory_is_what_is_kept_and_one_matrix(caplog):
    """Half of each of a Llama's matrices is kept, and all norms; the largest module is the embedding."""
    hidden, ffn, vocabulary, blocks = 128, 256, 4096, 4
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=blocks,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    kept = []

    def receive(names, whole):
        kept.append(whole[: len(whole) // 2].clone())

    ledger = Ledger(torch.device("cpu"))
    with ledger:
        drawn(config, receive, dtype=torch.float32)

    matrices = blocks * (4 * hidden * hidden + 3 * hidden * ffn) + 2 * vocabulary * hidden
    norms = (2 * blocks + 1) * hidden
    own, embedding = 4 * (matrices + norms) // 2, 4 * vocabulary * hidden
    assert sum(tensor.nbytes for tensor in kept) == own
    assert own < ledger.peak <= own + embedding + 65536  # rotary tables, the generator's states
    assert ledger.peak < 4 * (matrices + norms)


def test_a_family_that_keeps_what_a_constructor_made_is_drawn_whole_with_a_warning(monkeypatch, caplog):
    original = PreTrainedModel._init_weights

    def without_norms(self, module):
        if "Norm" not in type(module).__name__:
            original(self, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", without_norms)
    config = FAMILIES["llama"]()
    with caplog.at_level(logging.WARNING):
        values, _ = collected(config, torch.float32)
    assert "drawn whole on every rank" in caplog.text
    expected = mapped(config, init="random", dtype=torch.float32, seed=3)
    assert all(torch.equal(values[name], expected[name]) for name in values)
    assert torch.equal(values["model.norm.weight"], torch.ones(64))
