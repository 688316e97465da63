"""Tiny random models that also see or hear, one configuration per family: a language model of two blocks, a
tower of two, and what lies between them.

    config = MULTIMODAL["gemma3"]()  # or with changes of the text part: MULTIMODAL["gemma3"](vocab_size=301)
    model = AutoModelForMultimodalLM.from_config(config)

Windows are 8 tokens, as in families.py.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from families import ALTERNATING, COMMON, HEAD_DIM, LINEAR_LAYERS, WINDOW, WINDOWED
from transformers import AutoConfig, PretrainedConfig

IMAGE, IMAGE_SIDE = 250, 16  # the token that stands for a piece of an image, where there is one; pixels
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": IMAGE_SIDE, "patch_size": 4, "initializer_range": 0.15,
}  # fmt: skip
LLAMA: dict[str, Any] = COMMON | {"model_type": "llama"}
QWEN2: dict[str, Any] = COMMON | {"model_type": "qwen2"}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "initializer_range": 0.15,
}  # fmt: skip
QWEN3_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "initializer_range": 0.15,
}  # fmt: skip
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253
}  # fmt: skip
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}


def _family(kind: str, text: dict[str, Any], **whole: Any) -> Callable[..., PretrainedConfig]:
    """Function(**changes) -> configuration. `changes` override those of the text part.

    Values are copied: some classes change the dictionaries that they are given.
    """
    return lambda **changes: AutoConfig.for_model(
        kind, text_config=deepcopy({**text, **changes}), **deepcopy(whole)
    )


MULTIMODAL: dict[str, Callable[..., PretrainedConfig]] = {
    "gemma3": _family(
        "gemma3", COMMON | HEAD_DIM | WINDOWED | {"query_pre_attn_scalar": 16, "pad_token_id": 0},
        vision_config=TOWER | {"model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=252, eoi_token_index=253,
    ),
    "mistral3": _family(
        "mistral3", COMMON | HEAD_DIM | {"model_type": "mistral", "sliding_window": WINDOW},
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16}, image_token_index=IMAGE,
        spatial_merge_size=2,
    ),
    "qwen2_vl": _family("qwen2_vl", COMMON | MROPE, vision_config=QWEN_TOWER, **QWEN_TOKENS),
    "qwen2_5_vl": _family(
        "qwen2_5_vl", COMMON | MROPE,
        vision_config=QWEN3_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}, **QWEN_TOKENS,
    ),
    "qwen3_vl": _family(
        "qwen3_vl", COMMON | HEAD_DIM | MROPE,
        vision_config=QWEN3_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    ),
    "llava": _family(
        "llava", LLAMA, vision_config=TOWER | {"model_type": "clip_vision_model"}, image_token_index=IMAGE,
        vision_feature_layer=-2,
    ),
    "llava_next": _family(
        "llava_next", LLAMA, vision_config=TOWER | {"model_type": "clip_vision_model"},
        image_token_index=IMAGE, image_grid_pinpoints=[[16, 16]],
    ),
    "internvl": _family(
        "internvl", QWEN2,
        vision_config=TOWER | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
    ),
    "paligemma": _family(
        "paligemma", COMMON | HEAD_DIM | {"model_type": "gemma"},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "projection_dim": 64}, projection_dim=64,
        image_token_index=IMAGE,
    ),
    "llama4": _family(
        "llama4",
        COMMON | HEAD_DIM | {"intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": [1],
          "attention_chunk_size": 64, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
        vision_config=TOWER | {"pixel_shuffle_ratio": 0.5, "projector_input_dim": 32,
          "projector_output_dim": 32, "vision_output_dim": 32, "intermediate_size": 128},
        image_token_index=IMAGE,
    ),
    "glm4v": _family(
        "glm4v", COMMON | HEAD_DIM | MROPE,
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
          "patch_size": 4, "image_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
          "out_hidden_size": 64, "initializer_range": 0.15}, image_token_id=IMAGE, video_token_id=251,
        image_start_token_id=252, image_end_token_id=253,
    ),
    "idefics3": _family("idefics3", LLAMA, vision_config=TOWER, image_token_id=IMAGE, scale_factor=2),
    "kimi_k25": _family(
        "kimi_k25",
        COMMON | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 16,
          "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
          "first_k_dense_replace": 2},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        image_token_id=IMAGE,
    ),
    "cohere2_vision": _family(
        "cohere2_vision", COMMON | HEAD_DIM | WINDOWED | {"model_type": "cohere2", "logit_scale": 0.5},
        vision_config=TOWER | {"model_type": "siglip_vision_model"}, image_token_id=IMAGE,
    ),
    "qwen3_vl_moe": _family(
        "qwen3_vl_moe",
        COMMON | HEAD_DIM | MROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        vision_config=QWEN3_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    ),
    "qwen3_5": _family(
        "qwen3_5", COMMON | HEAD_DIM | MROPE | LINEAR_LAYERS | ALTERNATING,
        vision_config=QWEN3_TOWER | {"num_position_embeddings": 16}, **QWEN_TOKENS,
    ),
    "gemma4": _family(
        "gemma4",
        COMMON | HEAD_DIM | WINDOWED | {"pad_token_id": 0, "hidden_size_per_layer_input": 8,
          "vocab_size_per_layer_input": 301, "use_bidirectional_attention": "vision", "global_head_dim": 16,
          "num_kv_shared_layers": 0},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        audio_config=None, image_token_id=IMAGE,
    ),
    "qwen2_audio": _family(
        "qwen2_audio", QWEN2,
        audio_config={"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2,
          "num_mel_bins": 8, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_source_positions": 16},
        audio_token_index=IMAGE,
    ),
    "voxtral": _family(
        "voxtral", LLAMA,
        audio_config={"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 16, "head_dim": 16,
          "num_key_value_heads": 2}, audio_token_id=IMAGE,
    ),
}  # fmt: skip


def _seen(pieces: int, pixels: tuple[int, ...], **others: Any) -> Callable[[], dict[str, torch.Tensor]]:
    """Function() -> inputs of a forward: a text in which `pieces` tokens stand for an image of that shape."""

    def inputs() -> dict[str, torch.Tensor]:
        ids = torch.tensor([[3, 4, 252, *[IMAGE] * pieces, 253, 5, 6, 7]])
        noise = torch.randn(pixels, generator=torch.Generator().manual_seed(0))
        tensors = {name: torch.tensor(value) for name, value in others.items()}
        return {"input_ids": ids, "pixel_values": noise, **tensors}

    return inputs


SIDES = (1, 3, IMAGE_SIDE, IMAGE_SIDE)
IMAGES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {  # inputs with an image
    "gemma3": _seen(4, SIDES),
    "llava": _seen(16, SIDES),
    "internvl": _seen(4, SIDES),
    "qwen2_vl": _seen(
        4, (16, 96), image_grid_thw=[[1, 4, 4]], mm_token_type_ids=[[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    ),
}
