"""Descriptions: figures counted by hand, samples that are the text itself, and what the terminal shows."""

import io
import json
import re

import numpy as np
import pytest
from data_rows import Bytes, numbered, prepare, write_rows
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from meshtune.data.inspect import describe, runs
from meshtune.data.pack import Document
from meshtune.report.data import document


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as data_rows.Bytes encodes; the end (0) is <end>."""
    vocabulary = {"<end>" if i == 0 else f"<0x{i:02X}>": i for i in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def described(tmp_path, tokenizer, rows, rows_at_most=None, **settings):
    source = write_rows(tmp_path / "rows.jsonl", rows)
    arguments = {"seq_len": 64, "seed": 0, "cache_dir": tmp_path / "cache"} | settings
    return describe(prepare([source], Bytes(), **arguments), tokenizer, samples=2, max_samples=rows_at_most)


def test_the_figures_are_those_counted_by_hand(tmp_path, tokenizer) -> None:
    #       tokens 3 + 2 = 5 (2 labelled), 2 + 7 = 9 (7 labelled)
    found = described(tmp_path, tokenizer, [("abc", "d"), ("ab", "cdefgh")])

    train = found["train"]
    assert (train["documents"], train["tokens"], train["label_tokens"]) == (2, 14, 9)
    assert (train["label_share"], train["mean_length"], train["longest"]) == (9 / 14, 7.0, 9)
    assert [(b["from"], b["documents"]) for b in train["histogram"] if b["documents"]] == [(5, 1), (9, 1)]
    assert json.loads(json.dumps(found)) == found


def test_every_document_is_in_one_bar(tmp_path, tokenizer) -> None:
    found = described(tmp_path, tokenizer, numbered(500), seq_len=4096)["train"]

    assert sum(bar["documents"] for bar in found["histogram"]) == 500
    assert found["histogram"][-1]["to"] >= found["longest"]
    assert len(found["histogram"]) <= 13


def test_samples_are_the_text_cut_where_it_is_learnt(tmp_path, tokenizer) -> None:
    found = described(tmp_path, tokenizer, [("What is é? ", "É!")])

    (sample,) = found["samples"]
    assert sample["runs"] == [["What is é? ", False], ["É!<end>", True]]
    assert sample["place"].endswith("rows.jsonl:1")


def test_runs_join_to_the_whole_even_where_a_character_is_cut_in_half(tokenizer) -> None:
    ids = np.frombuffer("aéb".encode(), dtype=np.uint8)

    pieces = runs(Document(ids, np.array([0, 0, 1, 1])).stored, tokenizer)

    assert [on for _, on in pieces] == [False, True]
    assert "".join(text for text, _ in pieces) == "aéb"


def test_the_terminal_shows_figures_bars_losses_and_samples(tmp_path, tokenizer) -> None:
    rows = [*numbered(40), ("long", "[red]" + "y" * 200)]
    found = described(tmp_path, tokenizer, rows, eval_split=4)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    console.print(document(found))

    text = console.file.getvalue()
    for part in ("train", "eval", "labelled", "█", "cut to 64 tokens", "Samples", "\x1b[1;32m"):
        assert part in text


@pytest.mark.parametrize("width", [80, 120])
def test_figures_that_look_alike_are_told_apart_in_whole_words(tmp_path, tokenizer, width) -> None:
    found = described(tmp_path, tokenizer, [("abc", "d"), ("ab", "cdefgh")], eval_split=1)
    found = json.loads(json.dumps(found).replace(f"{tmp_path}/", ""))  # a long path can't be one word
    texts = []
    for columns in (width, 1000):
        console = Console(file=io.StringIO(), width=columns)
        console.print(document(found))
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]
    narrow, wide = texts
    for name, explained in (
        ("labelled tokens", "the loss is over its labelled tokens only"),
        ("sequences", "documents packed into at most 64 tokens. train.global_batch_size counts sequences"),
        ("tokens per document", "is the mean over documents"),
        ("data.mean_document_tokens", "is the mean over tokens, in which long documents count more"),
    ):
        assert name in narrow and explained in wide
    assert max(map(len, narrow.splitlines())) <= width
    assert set(re.findall(r"[\w.`]+", narrow)) == set(re.findall(r"[\w.`]+", wide))


@pytest.mark.parametrize("no_color", [False, True])
def test_without_colours_labelled_text_is_in_brackets(tmp_path, tokenizer, no_color) -> None:
    found = described(tmp_path, tokenizer, [("What is é? ", "É!")])
    console = Console(file=io.StringIO(), force_terminal=no_color, no_color=no_color, width=80)
    console.print(document(found))
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "labelled text is in [[brackets]]." in text
    assert "What is é? [[É!<end>]]" in text


def test_rows_behind_max_samples_are_not_counted_as_read(tmp_path, tokenizer) -> None:
    found = described(tmp_path, tokenizer, numbered(2), rows_at_most=2)
    assert document(found).parts[0].title == "Data: 2 rows read (at most the first 2 of each source)"


def test_escapes_of_rows_are_shown_not_obeyed(tmp_path, tokenizer) -> None:
    sample = {"place": "rows\x1b[2J.jsonl:1", "tokens": 2, "label_tokens": 1, "boundaries": []}
    runs = [["a\x1b]0;title\x07", False], ["b\x9b31m", True]]
    found = described(tmp_path, tokenizer, [("abc", "d")]) | {"samples": [sample | {"runs": runs}]}
    console = Console(file=io.StringIO(), width=100)
    console.print(document(found))
    assert not set("\x1b\x07\x9b") & set(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_stream_is_described_by_its_first_window(tmp_path, tokenizer) -> None:
    found = described(tmp_path, tokenizer, numbered(40), streaming=True)

    assert found["train"]["documents"] == 40
    assert found["rows"] >= 40
    assert "stream" in found["of"]
    Console(file=io.StringIO()).print(document(found))
