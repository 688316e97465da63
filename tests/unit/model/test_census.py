"""FLOPs against torch's own counter on a real forward and backward; parameters against the real model's."""

import subprocess
import sys

import pytest
import torch
from families import FAMILIES, FAMILY_CASES
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTJConfig,
    GPTNeoConfig,
    Qwen3MoeConfig,
    RwkvConfig,
)

from meshtune.model import trace as trace_module
from meshtune.model.anatomy import anatomy
from meshtune.model.trace import census, census_of
from meshtune.placement.census import attended_pairs, palm_flops, step_flops

TOKENS = 24


def counted(model) -> int:
    """FLOPs that torch counts in one forward and backward with attention written out, rotary tables aside."""
    ids = torch.arange(TOKENS)[None] % 250
    with FlopCounterMode(display=False, depth=5) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in found.items() if name.endswith("rotary_emb"))
    return sum(found["Global"].values()) - rotary


def expected(c) -> float:
    """The census's FLOPs for the same, where written-out attention multiplies the masked pairs too."""
    forward, backward = c.matmul
    pairs = TOKENS * TOKENS
    attention = sum(n * (a.forward(pairs) + a.backward(pairs)) for a, n in c.attentions.items())
    return TOKENS * (forward + backward + c.head.forward + c.head.backward) + attention


def eager(config, **kwargs):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **kwargs)


class Lora(nn.Linear):
    """A linear with an adapter beside its weight, as any implementation would compute it."""

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.T) @ self.lora_B.T


def adapt(model, *targets: str, rank: int = 3) -> None:
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(targets):
            module.__class__ = Lora
            module.lora_A = nn.Parameter(torch.randn(rank, module.in_features))
            module.lora_B = nn.Parameter(torch.randn(module.out_features, rank))


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_flops_equal_torchs_counter_when_all_is_trained(family):
    model = eager(FAMILIES[family]())
    assert expected(census(model.config)) == counted(model)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2", "gemma2"])
def test_frozen_weights_have_no_weight_gradient_and_what_lies_before_them_no_input_gradient(family):
    model = eager(FAMILIES[family]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".1." in name and "bias" not in name
    assert expected(census_of(model)) == counted(model)


@pytest.mark.ci
@pytest.mark.parametrize("targets", [("q_proj",), ("down_proj",), ("_proj",), ("v_proj", "up_proj")])
def test_flops_equal_torchs_counter_with_lora(targets):
    model = eager(FAMILIES["llama"]())
    adapt(model, *targets)
    assert expected(census_of(model)) == counted(model)


def test_lora_with_parallel_attention_and_mlp_of_one_input():
    model = eager(FAMILIES["gpt_neox"]())
    adapt(model, "query_key_value")
    assert expected(census_of(model)) == counted(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=256),
        BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256),
    ],
    ids=lambda c: c.model_type,
)
def test_families_without_the_attention_interface_are_counted_too(config):
    model = eager(config)
    assert expected(census(model.config)) == counted(model)


@pytest.mark.ci
def test_experts_count_as_often_as_they_are_active():
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, vocab_size=256,
    )  # fmt: skip
    assert expected(census(config)) == counted(eager(config, experts_implementation="eager"))


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_parameters_are_the_models(family):
    model = eager(FAMILIES[family]())
    assert census(model.config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.ci
def test_trainable_and_adapter_parameters_are_the_models():
    model = eager(FAMILIES["qwen3"]())
    adapt(model, "q_proj", "down_proj")
    c = census_of(model)
    assert c.total == sum(p.numel() for p in model.parameters())
    assert (
        c.trainable
        == c.parameters["adapter"].count
        == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )


@pytest.mark.ci
@pytest.mark.parametrize("frozen", [".0.", "lora_A", "lora_B"])
def test_frozen_adapters_are_not_trained(frozen):
    model = eager(FAMILIES["llama"]())
    adapt(model, "q_proj", "v_proj", "down_proj")
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad = False
    c = census_of(model)
    assert expected(c) == counted(model)
    assert c.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        RwkvConfig(num_hidden_layers=2),
        GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]),
    ],
    ids=lambda c: c.model_type,
)
def test_a_family_that_cannot_be_counted_has_no_flops_and_says_why(config):
    c = census(config)
    assert c.unsupported
    assert step_flops(c, [10], 5) is None


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_attended_pairs_are_those_of_a_mask(window):
    lengths = [1, 7, 7, 12]
    pairs = sum(
        1
        for n in lengths
        for i in range(n)
        for j in range(n)
        if j <= i and (window is None or i - j < window)
    )
    assert attended_pairs(lengths, window) == pairs


@pytest.mark.ci
def test_windows_are_known_per_layer():
    c = census(FAMILIES["gemma2"]())
    assert [block.attention[0].window for block in c.blocks] == [8, None]


@pytest.mark.ci
def test_the_head_counts_at_labelled_positions_and_attention_by_document():
    c = census(FAMILIES["llama"]())
    one, many = step_flops(c, [24], 24), step_flops(c, [12, 12], 6)
    assert one.head_forward == 4 * many.head_forward == 24 * 2 * 256 * 64
    assert one.matmul_forward == many.matmul_forward
    assert (
        many.attention_forward == 2 * 2 * (2 * 12 * 13 // 2) * 2 * 4 * 16
    )  # layers, QK and PV, pairs, 2, heads, size


def test_the_common_figure_is_6n_plus_12lhs():
    c = census(FAMILIES["llama"]())
    n = c.total - 256 * 64
    assert palm_flops(c, 10, 32) == 10 * (6 * n + 12 * 2 * 64 * 32)


def test_a_tied_head_stays_in_the_common_figure():
    c = census(FAMILIES["qwen2"]())
    assert c.tied
    assert palm_flops(c, 1, 0) == 6 * c.total


def test_the_value_needs_no_torch():
    code = "import meshtune.placement.census, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.ci
def test_the_parts_of_a_model_are_looked_for_as_often_whatever_its_depth(monkeypatch):
    calls = []
    monkeypatch.setattr(trace_module, "anatomy", lambda model: calls.append(model) or anatomy(model))
    counts = []
    for blocks in (2, 6):
        calls.clear()
        census_of(eager(BloomConfig(hidden_size=32, n_layer=blocks, n_head=4, vocab_size=256)))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0, "a second on every tenth block of a deep model"


def test_one_model_read_from_two_paths_is_traced_once(tmp_path, monkeypatch):
    eager(FAMILIES["llama"]()).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    traced = []
    monkeypatch.setattr(trace_module, "traced_models", {})
    monkeypatch.setattr(trace_module, "_traced_census", lambda model: traced.append(model) or object())
    first, second = (
        census_of(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))
        for path, dtype in (("model", torch.float32), (tmp_path / "model", torch.bfloat16))
    )
    assert first is second and len(traced) == 1
