"""The census of published models, from nothing but their config: parameters as their authors give them.

The counts are those of the models' safetensors files (their metadata, as model pages show it).
"""

from typing import Any

import pytest
from cases import cases
from transformers import AutoConfig

from meshtune.model.trace import census

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
GEMMA2 = {"model_type": "gemma2", "vocab_size": 256000}


def shape(
    base: dict[str, Any], hidden: int, ffn: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    return base | others | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (shape(LLAMA, 4096, 14336, 32, 32), 8_030_261_248),
    "Llama 3.1 70B": (shape(LLAMA, 8192, 28672, 80, 64), 70_553_706_496),
    "Llama 3.1 405B": (shape(LLAMA, 16384, 53248, 126, 128), 405_853_388_800),
    "Llama 3.2 1B": (shape(LLAMA, 2048, 8192, 16, 32, tie_word_embeddings=True, head_dim=64), 1_235_814_400),
    "Qwen3 0.6B": (shape(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True), 596_049_920),
    "Qwen3 1.7B": (shape(QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True), 1_720_574_976),
    "Qwen3 4B": (shape(QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True), 4_022_468_096),
    "Qwen3 8B": (shape(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False), 8_190_735_360),
    "Qwen3 14B": (shape(QWEN3, 5120, 17408, 40, 40, tie_word_embeddings=False), 14_768_307_200),
    "Qwen3 32B": (shape(QWEN3, 5120, 25600, 64, 64, tie_word_embeddings=False), 32_762_123_264),
    "Qwen2.5 7B": (
        shape({"model_type": "qwen2", "vocab_size": 152064, "num_key_value_heads": 4}, 3584, 18944, 28, 28,
              tie_word_embeddings=False), 7_615_616_512),
    "Mistral 7B": (
        shape({"model_type": "mistral", "vocab_size": 32000, "num_key_value_heads": 8}, 4096, 14336, 32, 32),
        7_241_732_096),
    "Gemma 2 2B": (shape(GEMMA2, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256), 2_614_341_888),
    "Gemma 2 9B": (shape(GEMMA2, 3584, 14336, 42, 16, num_key_value_heads=8, head_dim=256), 9_241_705_984),
    "Gemma 2 27B": (shape(GEMMA2, 4608, 36864, 46, 32, num_key_value_heads=16, head_dim=128), 27_227_128_320),
    "Gemma 3 1B": (
        shape({"model_type": "gemma3_text", "vocab_size": 262144, "num_key_value_heads": 1, "head_dim": 256},
              1152, 6912, 26, 4), 999_885_952),
    "Phi-3 mini": (
        shape({"model_type": "phi3", "vocab_size": 32064, "num_key_value_heads": 32}, 3072, 8192, 32, 32,
              tie_word_embeddings=False), 3_821_079_552),
    "GPT-2": ({"model_type": "gpt2"}, 124_439_808),
    "GPT-2 XL": ({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(PUBLISHED, ci=["Llama 3.2 1B"]))
def test_a_config_alone_gives_the_published_number_of_parameters(name: str) -> None:
    settings, published = PUBLISHED[name]
    found = census(AutoConfig.for_model(**settings))
    assert found.total == published
    assert found.unsupported is None
    assert found.trainable == published
    assert sum(kind.count for kind in found.parameters.values()) == published
