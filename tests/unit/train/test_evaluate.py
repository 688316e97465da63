"""Prompts of evaluations as people read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from meshtune.train.console import eval_parts
from meshtune.train.evaluate import without_control_tokens


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a chat's control tokens."""
    backend = Tokenizer(
        models.BPE(vocab={f"<0x{i:02X}>": i for i in range(256)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    made.add_tokens([AddedToken(word, special=True) for word in ("<head>", "<body>", "<end>")])
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("<s><head>user<body>\n\nWhat is é?<end><head>assistant<body>\n\n", "user\nWhat is é?\nassistant"),
        ("Say red 7", "Say red 7"),
        ("<head>a<end> <think> so", "a\n<think> so"),
        ("<s><end>", ""),
    ],
)
def test_control_tokens_become_line_ends_of_what_people_read(tokenizer, prompt, question) -> None:
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == prompt
    assert without_control_tokens(ids, tokenizer) == question


@pytest.mark.ci
def test_a_cut_to_seq_len_leaves_the_expected_answer_whole(tiny: Path, train: Callable[..., Any]) -> None:
    cut = ("data.seq_len=16", "data.overlong=cut", "model.overrides={max_position_embeddings: 12}")
    run = train(*cut, "eval.samples=9", "eval.exact_match=9", "eval.max_new_tokens=4")
    rows = [json.loads(line) for line in (tiny / "test.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: row["completion"] for row in rows}
    samples, row = run.folder.samples(), run.folder.rows("eval")[-1]
    assert [sample["expected"] for sample in samples] == [answers[sample["question"]] for sample in samples]
    assert any(len(sample["expected"].split()) > 16 for sample in samples)
    assert (row["prompts"], row["answers_cut"], row["prompts_without_room"]) == (9, 0, 3)
    assert eval_parts(row)[-1] == "3 of 9 prompts fill the model's context and have no answer"
