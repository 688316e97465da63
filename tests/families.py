"""Tiny random models, one configuration per family: hidden 64, 2 layers, vocabulary 256, no dropout.

    config = FAMILIES["mistral"]()  # or with changes: FAMILIES["llama"](num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config)

Weights are drawn wide enough (standard deviation 0.15) that attention is far from uniform and soft-capping
bites, so that a mask, window or cap that is not honoured shows. Windows are 8 tokens: use longer sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from inspect import getsource
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import cases
from transformers import (
    AutoConfig,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Starcoder2Config,
    Zamba2Config,
)

WINDOW = 8  # tokens, of the families that have a sliding window

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.15, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HEAD_DIM: dict[str, Any] = {"head_dim": 16}
GPT2: dict[str, Any] = {
    "vocab_size": 256, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def skip_without_routers(family: str) -> None:
    """Skip a test of routers where transformers names none of a family (transformers 5.17: DeepSeek's)."""
    package = family.removesuffix("_text")
    file = import_module(f"transformers.models.{package}.modeling_{package}")
    if '"router_logits": ' not in getsource(file):
        pytest.skip(f"the installed transformers names no routers of {family}")


def _family(
    config_class: type[PretrainedConfig], base: dict[str, Any], **own: Any
) -> Callable[..., PretrainedConfig]:
    """Function(**changes) -> configuration. `changes` override `own`, and `own` overrides `base`."""
    return lambda **changes: config_class(**deepcopy({**base, **own, **changes}))


FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": _family(LlamaConfig, COMMON),
    "qwen2": _family(Qwen2Config, COMMON, tie_word_embeddings=True),
    "qwen3": _family(Qwen3Config, COMMON | HEAD_DIM),
    "mistral": _family(MistralConfig, COMMON | HEAD_DIM, sliding_window=WINDOW),
    "gemma2": _family(
        Gemma2Config, COMMON | HEAD_DIM | WINDOWED, tie_word_embeddings=True, query_pre_attn_scalar=16,
        attn_logit_softcapping=1.0, final_logit_softcapping=2.0,
    ),
    "gemma3": _family(
        Gemma3TextConfig,
        COMMON | HEAD_DIM | WINDOWED,
        tie_word_embeddings=True,
        query_pre_attn_scalar=16,
        pad_token_id=0,  # so this family's row 0 has no gradient (nn.Embedding's padding_idx)
    ),
    "phi3": _family(
        Phi3Config, COMMON, resid_pdrop=0.0, embd_pdrop=0.0, original_max_position_embeddings=256
    ),
    "olmo2": _family(Olmo2Config, COMMON),
    "starcoder2": _family(
        Starcoder2Config, COMMON, sliding_window=WINDOW, residual_dropout=0.0, embedding_dropout=0.0,
        tie_word_embeddings=True,
    ),
    "cohere": _family(CohereConfig, COMMON, tie_word_embeddings=True, use_qk_norm=False, logit_scale=0.5),
    "gpt2": _family(GPT2Config, GPT2),
    "gpt_neox": _family(
        GPTNeoXConfig, {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, hidden_dropout=0.0
    ),
}  # fmt: skip

LINEAR_LAYERS: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2_LAYERS: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
}  # fmt: skip
ALTERNATING: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}

# Families whose blocks, or some of them, are recurrent or convolutional.
RECURRENT: dict[str, Callable[..., PretrainedConfig]] = {
    "mamba2": _family(
        Mamba2Config, COMMON, num_heads=8, head_dim=16, n_groups=1, state_size=16, chunk_size=16
    ),
    "rwkv": _family(RwkvConfig, COMMON, attention_hidden_size=64, context_length=256),
    "lfm2": _family(Lfm2Config, COMMON, layer_types=["conv", "full_attention"]),
    "falcon_h1": _family(FalconH1Config, COMMON | MAMBA2_LAYERS, mamba_d_ssm=128),
    "qwen3_next": _family(Qwen3NextConfig, COMMON | HEAD_DIM | LINEAR_LAYERS | EXPERTS | ALTERNATING),
    "granitemoehybrid": _family(
        GraniteMoeHybridConfig, COMMON | MAMBA2_LAYERS | EXPERTS | ALTERNATING, position_embedding_type="rope"
    ),
    "zamba2": _family(
        Zamba2Config,
        COMMON | {"num_hidden_layers": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=8, mamba_d_state=16, adapter_rank=8, chunk_size=16,
    ),
    "recurrent_gemma": _family(
        RecurrentGemmaConfig, COMMON, lru_width=64, attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
}  # fmt: skip

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
SHARED: dict[str, Any] = {
    **LATENTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "head_dim": 8,
}  # fmt: skip
# Families with latent attention, with mixtures of experts, and with both.
SPARSE: dict[str, Callable[..., PretrainedConfig]] = {
    name: partial(AutoConfig.for_model, name, **COMMON | fields)
    for name, fields in {
        "minicpm3": LATENTS,
        "youtu": LATENTS | {"q_lora_rank": None},  # whose plan has no word for attention
        "deepseek_v2": EXPERTS | SHARED,
        "deepseek_v3": EXPERTS | SHARED,
        "qwen3_moe": EXPERTS | HEAD_DIM,
        "qwen2_moe": EXPERTS,
        "mixtral": EXPERTS,
        "gpt_oss": EXPERTS | HEAD_DIM | {"sliding_window": WINDOW},
        "olmoe": EXPERTS,
    }.items()
}

FAMILY_CASES = cases(FAMILIES, test=["llama", "gemma2"], ci=["phi3", "gpt2", "starcoder2"])


@contextmanager
def exact() -> Iterator[None]:
    """Make casts from fp64 to fp32 do nothing inside the context, so that all is rounded at 1e-16.

    Hugging Face's norms would else compute in fp32. It patches Tensor.float and Tensor.to for all code.
    """
    plain_float, plain_to, plain_matmul = torch.Tensor.float, torch.Tensor.to, torch.Tensor.__matmul__
    plain_type = torch.Tensor.type

    def to(x, *args, **kwargs):
        single = torch.float32 in (*args, *kwargs.values()) and x.dtype == torch.float64
        return x if single else plain_to(x, *args, **kwargs)

    def matmul(x, other):  # frequencies that stayed fp64 with positions, in transformers 5.17
        wide = torch.promote_types(x.dtype, other.dtype)
        return plain_matmul(plain_to(x, wide), plain_to(other, wide))

    with (
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else plain_float(x)),
        patch.object(torch.Tensor, "to", to),
        patch.object(
            torch.Tensor,
            "type",
            lambda x, *args: x if args and x.dtype == torch.float64 else plain_type(x, *args),
        ),
        patch.object(torch.Tensor, "__matmul__", matmul),
    ):
        yield
