"""Tiny random models of transformers' families: one small configuration for all, and what some need besides.

    config = tiny_config("mixtral")
    model = tiny_model(config)        # weights N(0, 0.1); norms, biases and other vectors perturbed as much

A field that a family's configuration does not have is left out, and so is one that it sets to None. Windows
are 16 tokens. Kinds of layers that differ are all kept, one layer of each.
"""

import dataclasses
from typing import Any

import torch
from multimodal import MULTIMODAL
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshtune.model.anatomy import auto_class

VOCABULARY = 304  # tokens; the tokenizer has fewer
WINDOW = 16  # tokens
STD = 0.1  # of weights, and of what is added to vectors
LAYERS = 2

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, EXPERTS = 64, 4, 2, 16, 96, 4
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    "encoder_layers": LAYERS,
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads", "swa_num_attention_heads"), HEADS
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_dim", "dim_head"), HEAD_DIM),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
         "dim_ff", "dff", "intermediate_size_mlp"), WIDE
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_n_heads",), 16),
    **dict.fromkeys(("index_topk",), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length",
         "original_max_position_embeddings"), 256
    ),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window"), WINDOW),
    **dict.fromkeys(("hidden_size_per_layer_input",), 16),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("pad_token_id",), 0),
    "is_decoder": True,
}  # fmt: skip

HYBRID = {
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

# model_type -> fields that it needs besides, or of another size.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **HYBRID},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": WIDE, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "sliding_window": WINDOW,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 32,
    },
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [WIDE] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "prophetnet": {
        "num_encoder_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_encoder_attention_heads": HEADS,
        "num_decoder_attention_heads": HEADS,
    },
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": HIDDEN},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": WIDE,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "roc_bert": {
        "shape_vocab_size": 100,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 100,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
        "mamba_d_state": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
EVEN_IF_NONE = {"head_dim", "num_key_value_heads", "num_experts_per_tok"}
LAYER_FIELDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
RANDOM = ("drop", "jitter")  # in names of what makes a forward random


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return the small configuration of a family, with `changes`. Raises as the family's class does."""
    if model_type in MULTIMODAL:
        return MULTIMODAL[model_type](vocab_size=VOCABULARY, **changes)
    return _small(CONFIG_MAPPING[model_type], OWN.get(model_type, {}) | changes)


def _small(config_class: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    default: Any = config_class(
        **{
            name: value
            for name, value in own.items()
            if name in ("hidden_size_per_layer_input", "is_decoder")
        }
    )
    fields: dict[str, Any] = {}
    for name in names:
        value = getattr_or_none(default, name)
        if name in SMALL and (value is not None or name in EVEN_IF_NONE):
            fields[name] = SMALL[name]
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and any(word in name for word in RANDOM)
        ):
            fields[name] = type(value)(0)
        elif name in LAYER_FIELDS and value:
            fields[name] = [*dict.fromkeys(value)]
    if (
        "qk_rope_head_dim" in names
    ):  # latent attention: as many key-value heads; the rotary part alone is named
        latent = {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": HEADS}
        fields |= {name: value for name, value in latent.items() if name in names}
    for name in config_class.sub_configs:
        sub: Any = getattr_or_none(default, name)
        if name not in own and sub is not None:
            fields[name] = _small(type(sub), OWN.get(sub.model_type, {}))
    fields |= own
    layers = max([LAYERS, *(len(fields[name]) for name in LAYER_FIELDS if name in fields)])
    for name in LAYER_FIELDS:
        if name in fields:
            fields[name] = (fields[name] * layers)[:layers]
    return config_class(
        **fields | {name: layers for name in DEPTH_FIELDS if name in fields and name not in own}
    )


def getattr_or_none(config: Any, name: str) -> Any:
    """Return a field of a configuration; None where reading it raises."""
    try:
        return getattr(config, name, None)
    except Exception:  # a value that differs by layer
        return None


def tiny_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a random model in fp32, the same for the same configuration."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * STD
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model
