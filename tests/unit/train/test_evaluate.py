"""Prompts of evaluations as people read them."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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
