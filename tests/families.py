"""Tiny random models, one configuration per family: hidden 64, 2 layers, vocabulary 256, no dropout.

    config = FAMILIES["mistral"]()  # or with changes: FAMILIES["llama"](num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config)

Weights are drawn wide enough (standard deviation 0.15) that attention is far from uniform and soft-capping
bites, so that a mask, window or cap that is not honoured shows. Windows are 8 tokens: use longer sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from cases import cases
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

WINDOW = 8  # tokens, of the families that have a sliding window

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HEAD_DIM: dict[str, Any] = {"head_dim": 16}
GPT2: dict[str, Any] = {
    "vocab_size": 256,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.15,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _family(
    config_class: type[PretrainedConfig], base: dict[str, Any], **own: Any
) -> Callable[..., PretrainedConfig]:
    """Function(**changes) -> configuration. `changes` override `own`, and `own` overrides `base`."""
    return lambda **changes: config_class(**{**base, **own, **changes})


FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": _family(LlamaConfig, COMMON),
    "qwen2": _family(Qwen2Config, COMMON, tie_word_embeddings=True),
    "qwen3": _family(Qwen3Config, COMMON | HEAD_DIM),
    "mistral": _family(MistralConfig, COMMON | HEAD_DIM, sliding_window=WINDOW),
    "gemma2": _family(
        Gemma2Config,
        COMMON | HEAD_DIM | WINDOWED,
        tie_word_embeddings=True,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
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
        Starcoder2Config,
        COMMON,
        sliding_window=WINDOW,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        tie_word_embeddings=True,
    ),
    "cohere": _family(CohereConfig, COMMON, tie_word_embeddings=True, use_qk_norm=False, logit_scale=0.5),
    "gpt2": _family(GPT2Config, GPT2),
    "gpt_neox": _family(
        GPTNeoXConfig, {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, hidden_dropout=0.0
    ),
}

UNLIKE = ["llama", "gemma2", "phi3", "gpt2", "starcoder2"]  # those that differ most from each other
FAMILY_CASES = cases(FAMILIES, default=UNLIKE)


@contextmanager
def exact() -> Iterator[None]:
    """Make casts from fp64 to fp32 do nothing inside the context, so that all is rounded at 1e-16.

    Hugging Face's norms would else compute in fp32. It patches Tensor.float and Tensor.to for all code.
    """
    plain_float, plain_to = torch.Tensor.float, torch.Tensor.to

    def to(x, *args, **kwargs):
        single = torch.float32 in (*args, *kwargs.values()) and x.dtype == torch.float64
        return x if single else plain_to(x, *args, **kwargs)

    with (
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else plain_float(x)),
        patch.object(torch.Tensor, "to", to),
    ):
        yield
