"""Tiny model folders, made as a user would: `save_pretrained`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SPARSE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))  # [batch, seq]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save("llama", dtype=..., **changes of the configuration) -> the folder of a random model."""

    def make(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        folder = tmp_path / f"base-{family}"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config((FAMILIES | SPARSE)[family](**changes), dtype=dtype).save_pretrained(
            folder
        )
        return folder

    return make


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """256 words and two tokens more: ids up to 257."""
    words = {f"w{index}": index for index in range(256)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="w2")
    made.add_tokens(["<|start|>", "<|end|>"], special_tokens=True)
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made
