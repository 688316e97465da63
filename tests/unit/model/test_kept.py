"""Compare what blocks keep for their backward with what autograd saves in a real forward."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import OPT_WITHOUT_MASK, cases
from families import FAMILIES
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
    StableLmConfig,
    XGLMConfig,
)

from meshtune.experts.register import use_products
from meshtune.model.anatomy import anatomy
from meshtune.model.load import freeze
from meshtune.model.lora import add_lora
from meshtune.model.trace import census, census_of
from meshtune.placement.census import SavedBytes

TOKENS = 29  # a prime that divides no size of these models
DTYPES = {2: torch.bfloat16, 4: torch.float32}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
MORE = {
    "opt": lambda: OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
    "phi": lambda: PhiConfig(**SMALL, intermediate_size=96),
    "stablelm": lambda: StableLmConfig(**SMALL, intermediate_size=96, num_key_value_heads=2),
}
DENSE = FAMILIES | MORE


def causal(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    if query.stride(1) > query.stride(2):  # as our operator, which writes tokens first
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("test_kept_causal", causal)


def real(config, dtype: torch.dtype, prepare=lambda model: None, attention="test_kept_causal") -> list[float]:
    """Bytes per token that autograd keeps of each block on the CPU, each storage once, in the block that
    saves it first; without parameters, buffers, copies of them, and rotary tables.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.train()
    prepare(model)
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    alive, running, norms, found = [], [-1], [False], Counter()

    def watch(module, stack, value):
        def leave(*_):
            stack.pop()

        module.register_forward_pre_hook(lambda *_: stack.append(value))
        module.register_forward_hook(leave)

    def tables(module, args, output):
        for table in output:
            alive.append(table)
            seen.add(table.untyped_storage().data_ptr())

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(storage)
            # Layer norms' means and deviations, which only the CPU keeps in 16 bits.
            halved = norms[-1] and tensor.shape[-1] == 1 and tensor.itemsize == 2
            bytes = storage.nbytes() * (1 + halved)
            if bytes % TOKENS == 0:
                found[running[-1]] += bytes / TOKENS
        return tensor

    blocks = list(model.get_submodule(anatomy(model).blocks).children())
    for index, block in enumerate(blocks):
        watch(block, running, index)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            watch(module, norms, True)
        if "RotaryEmbedding" in type(module).__name__:
            module.register_forward_hook(tables)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = model(input_ids=torch.arange(TOKENS)[None] + 3, use_cache=False)
    del out
    return [found[index] for index in range(len(blocks))]


@pytest.mark.parametrize("size", cases(DTYPES, test=1, ci=1))
@pytest.mark.parametrize("family", cases(DENSE, test=["llama", "gpt2"], ci=["gemma2", "phi3", "starcoder2"]))
def test_every_block_keeps_what_autograd_saves(family, size):
    config = DENSE[family]()
    traced = [dict(block.saved)[size].total for block in census(config).blocks]
    assert traced == real(config, DTYPES[size])


@pytest.mark.ci
@pytest.mark.parametrize("size", DTYPES)
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all-linear"),
        ("llama", ["v_proj", "down_proj"]),
        ("gemma3", ["q_proj"]),
        ("phi3", "all-linear"),
        ("gpt2", "all-linear"),
    ],
)
def test_with_lora_frozen_weights_keep_no_input_and_adapters_theirs(family, targets, size):
    config, models = FAMILIES[family](), []

    def prepare(model):
        add_lora(model, lora_rank=3, alpha=6, target_modules=targets, dtype=model.dtype)
        models.append(model)

    saved = real(config, DTYPES[size], prepare)
    traced = [dict(block.saved)[size].total for block in census_of(models[0]).blocks]
    assert traced == saved


@pytest.mark.ci
def test_frozen_adapters_keep_nothing_before_the_first_that_is_trained():
    models = []

    def prepare(model):
        add_lora(model, lora_rank=3, alpha=6, dtype=model.dtype)
        freeze(model, ["*.layers.0.*", "*.layers.1.self_attn.q_proj.lora_A"])
        models.append(model)

    saved = real(FAMILIES["llama"](), torch.bfloat16, prepare)
    assert saved[0] == 0
    assert [dict(block.saved)[2].total for block in census_of(models[0]).blocks] == saved


@pytest.mark.ci
@pytest.mark.parametrize("pattern", ["embed_tokens", ".mlp.", "layernorm", "layers.0."])
def test_frozen_parameters_keep_what_their_gradient_would_need_no_more(pattern):
    def prepare(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(pattern not in name)
        models.append(model)

    models = []
    saved = real(FAMILIES["llama"](), torch.bfloat16, prepare)
    assert [dict(block.saved)[2].total for block in census_of(models[0]).blocks] == saved


@pytest.mark.ci
@pytest.mark.parametrize(
    ("h", "heads", "kv_heads", "f"), [(64, 4, 2, 96), (64, 4, 4, 176), (96, 6, 1, 64), (4096, 32, 8, 14336)]
)
def test_a_llama_block_keeps_as_much_as_was_measured(h, heads, kv_heads, f):
    config = LlamaConfig(
        hidden_size=h, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=f,
        num_hidden_layers=2, vocab_size=128,
    )  # fmt: skip
    h_kv = h // heads * kv_heads
    wanted = SavedBytes(
        outside=12 * h + 8,
        entering=4 * h,
        attention=0,
        mlp=8 * f,
        core=4 * h + 4 * h_kv + 4 * heads,
        last="mlp.down_proj.weight",
    )
    blocks = census(config).blocks
    saved = [dict(block.saved)[2] for block in blocks]
    eager = [replace(each, peaks=None, compiled=None, selective=None) for each in saved]
    assert eager == [wanted, wanted]
    compiled = [
        (each.compiled.total, each.selective.total) for each in saved if each.compiled and each.selective
    ]
    without = 12 * h + 4 * h_kv + 6 * f + 4 * heads + 8, 8 * h + 4 * h_kv + 4 * f + 4 * heads
    assert compiled == [without, without]
    assert wanted.total == 20 * h + 4 * h_kv + 8 * f + 4 * heads + 8


def test_parallel_attention_and_mlp_enter_with_one_tensor():
    """Cohere has one norm for both; OLMo 2 has none before them, and their input is the residual stream."""
    for family, width in (("cohere", 2 * 64), ("olmo2", 2 * 2 * 64)):
        assert {dict(block.saved)[2].entering for block in census(FAMILIES[family]()).blocks} == {width}


def test_values_that_are_a_view_keep_the_whole_projection():
    (kept, _) = (dict(block.saved)[2] for block in census(FAMILIES["gpt2"]()).blocks)
    assert kept.core == 2 * (3 * 64 + 64) + 4 * 4


@pytest.mark.ci
def test_dropout_keeps_a_byte_an_element():
    plain, dropped = (dict(census(FAMILIES["gpt2"](resid_pdrop=p)).blocks[0].saved)[2] for p in (0.0, 0.1))
    assert (dropped.attention - plain.attention, dropped.mlp - plain.mlp) == (64, 64)
    assert plain.wide_masks is None and dropped.wide_masks is not None
    assert dropped.wide_masks.total - plain.total == 2 * 2 * 64, "on a processor two bytes, as the inputs"


@OPT_WITHOUT_MASK
def test_a_block_without_mlp_counts_its_matrices_outside():
    kept = dict(census(MORE["opt"]()).blocks[0].saved)[2]
    assert kept.outside >= 2 * 2 * 96
    assert kept.entering == 2 * 64


def test_experts_keep_what_is_routed_to_them():
    config = Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    found = [dict(block.saved)[2].total for block in census(config).blocks]
    assert found == real(config, torch.bfloat16, use_products)


OWN_ATTENTION = {
    "bloom": lambda: BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256),
    "falcon": lambda: FalconConfig(**SMALL),
    "xglm": lambda: XGLMConfig(
        d_model=64, num_layers=2, attention_heads=4, ffn_dim=96, vocab_size=256, dropout=0.0,
        attention_dropout=0.0,
    ),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "size"),
    [(family, size) for family in OWN_ATTENTION for size in DTYPES],
)
def test_a_family_s_own_attention_keeps_its_scores(family, size):
    config = OWN_ATTENTION[family]()
    traced = [dict(block.saved_of_one_row)[size] for block in census(config).blocks]
    assert all(kept.scores > 0 for kept in traced)
    for kept in traced:
        assert kept.peaks.forward[1] > 0 < max(time.keys for time in kept.peaks.backward)
    found = [kept.total + kept.scores * TOKENS for kept in traced]
    assert found == real(config, DTYPES[size], attention=None)


def test_tracing_draws_no_random_numbers():
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    add_lora(model, lora_rank=2, alpha=4)
    state = torch.get_rng_state()
    census_of(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_last_norm_s_bytes(family: str) -> None:
    """Gemma multiplies the normalised states with its weight in fp32; frozen, neither family keeps them."""
    size, shape = 64, {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    config = {"llama": LlamaConfig, "gemma2": Gemma2Config}[family](**shape)
    norm = 4 * size + 4  # its input in fp32, and a number for each token
    normed = {2: 4 if family == "gemma2" else 2, 4: 4}
    trained, frozen = (dict(census(config, frozen=names).ends) for names in ((), ("model.norm.weight",)))
    for element, wide in normed.items():
        assert trained[element].norm == norm + wide * size
        assert frozen[element].norm == norm
        assert trained[element].norm_backward == frozen[element].norm_backward == 6 * 4 * size
        assert trained[element].tables == 2 * 16 * element
