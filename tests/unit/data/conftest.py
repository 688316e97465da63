"""Fixtures for data tests: small byte-level tokenizers made on the spot, and files of rows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "Hello there, how are you today? I am fine, thank you.\n\nThe answer is 42.\n",
    "You are a kind helper. assistant user system What is two plus two? It is four.\n",
]

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def make_tokenizer(*special: str, **keywords: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with <s>, </s> and the special tokens given; it adds none by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    keywords = {"bos_token": "<s>", "eos_token": "</s>", **keywords}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(special), **keywords
    )


@pytest.fixture(scope="session")
def tokenizer_of() -> MakeTokenizer:
    return make_tokenizer


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[[Sequence[dict]], Path]:
    """Writes rows as jsonl and returns the file."""

    def write(rows: Sequence[dict], name: str = "rows.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write
