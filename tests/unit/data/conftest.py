"""Fixtures for data tests: small byte-level tokenizers made on the spot, and files of rows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


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
