"""Fixtures of the parity tests: a tiny model on the disk, and one rank's run with it."""

from pathlib import Path

import pytest
import torch
from layouts import Trained, make_folder, trained
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 blocks, 4 heads and 2 key-value heads, with its data."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return make_folder(tmp_path_factory.mktemp("parity"), model)


@pytest.fixture(scope="session")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """One rank's run in each precision."""
    runs = tmp_path_factory.mktemp("one-rank")
    return {name: trained(folder, runs / name, "mb4-ga4", name) for name in ("fp32", "fp64")}
