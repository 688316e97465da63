"""Decoders whose parts lie elsewhere than Llama's: found and right, or refused with what they lack."""

import pytest
import torch
from forward import summed_loss
from golden import refuses
from loading import load
from tiny import documents
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma3nTextConfig,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshtune.attention.register import register
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy, attention_heads
from meshtune.model.capabilities import traits
from meshtune.model.trace import census
from meshtune.placement.families import KINDS, see

BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config"),
    [(BertLMHeadModel, BertConfig), (RobertaForCausalLM, RobertaConfig)],
    ids=["positions from 0", "positions from the padding index"],
)
def test_an_embedding_deeper_in_the_body_trains_packed(kind, config, tmp_path):
    torch.manual_seed(0)
    reference = kind(config(**BERT, is_decoder=True, pad_token_id=1, attn_implementation="eager")).eval()
    reference.save_pretrained(tmp_path)
    register()
    model = load(str(tmp_path), dtype=torch.float32, attention="meshtune").eval()
    micro = documents(seed=0, vocabulary=64)

    with torch.no_grad():
        ours, theirs = summed_loss(model, anatomy(model), micro), torch.zeros(())
        for row, lengths in enumerate(micro.documents):
            end = 0
            for length in lengths:
                start, end = end, end + length
                logits = reference(micro.input_ids[row : row + 1, start:end]).logits[0]
                theirs += torch.nn.functional.cross_entropy(
                    logits, micro.labels[row, start:end], ignore_index=-100, reduction="sum"
                )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", ["bert", "rembert", "roformer", "cpmant"])
def test_what_attends_to_later_tokens_is_refused(model_type):
    """No module of rembert and roformer has an `is_causal`."""
    with refuses(UserError):
        anatomy(on_meta(AutoConfig.for_model(model_type, num_hidden_layers=2)))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        (
            "hrm_text",
            r"one list of blocks \(it has model.L_module.layers \(\d+\), model.H_module.layers",
        ),
        ("longcat_flash", r"4 layers aren't one list of blocks \(it has model.layers \(2\)\)"),
        ("blt", "one list of blocks .*local_encoder.layers"),
    ],
)
def test_blocks_that_are_not_one_list_are_refused_with_the_lists(model_type, why):
    changes = {"num_layers": 2} if model_type == "longcat_flash" else {}
    with pytest.raises(UserError, match=why):
        anatomy(on_meta(AutoConfig.for_model(model_type, **changes)))


@pytest.mark.ci
def test_lists_beside_the_blocks_are_no_blocks_of_the_census():
    """Gemma 3n has three projections on its way in and out, each a matrix in a list."""
    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        head_dim=16, intermediate_size=[48] * 4, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, num_kv_shared_layers=0, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    assert len(census(config).blocks) == 4


@pytest.mark.skipif("dots3_note_text" not in CONFIG_MAPPING, reason="transformers 5.17 has no such family")
def test_heads_that_differ_by_layer_are_counted_by_what_divides_each():
    config = AutoConfig.for_model(
        "dots3_note_text", num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=12,
        swa_num_attention_heads=8, swa_num_key_value_heads=8,
    )  # fmt: skip
    assert attention_heads(on_meta(config)) == (4, 4)


def test_every_refusal_of_a_family_names_a_section_of_the_page():
    refused = traits(on_meta(AutoConfig.for_model("bloom", n_layer=2)))
    assert see("tensor") in str(refused.tensor) and see("stages") in str(refused.pipeline)
    experts = str(traits(on_meta(AutoConfig.for_model("granitemoe", num_hidden_layers=2))).tensor)
    assert see("experts") in experts or "no plan for this family" in experts  # of transformers 5.17
    assert len(KINDS) <= 10


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
