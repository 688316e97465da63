"""Vocabularies whose ids have gaps: the number of tokens is no bound of the ids."""

import json

import pytest
from data_rows import prepare
from golden import refuses, says
from small_tokenizer import make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from meshtune.data.encode import Encoder
from meshtune.data.example import Example, Ids, Origin, Source
from meshtune.data.prepare import sentences
from meshtune.data.template import built_in_templates
from meshtune.errors import UserError
from meshtune.model.save import write_tokenizer

HERE = Origin("rows.jsonl", 1)
GAP = 10


@pytest.fixture
def tokenizer():
    """A tokenizer whose last 20 ids are GAP higher than their number."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    first = len(tokenizer) - 20
    vocabulary = {text: id + GAP * (id >= first) for text, id in state["model"]["vocab"].items()}
    state["model"]["vocab"] = vocabulary
    tokenizer.backend_tokenizer.model = Tokenizer.from_str(json.dumps(state)).model
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1 + GAP
    return tokenizer


@pytest.mark.parametrize("template", built_in_templates())
def test_added_tokens_get_free_ids_and_are_read_back_with_them(tokenizer, template, tmp_path):
    before = tokenizer.get_vocab()
    encoder = Encoder(tokenizer, train_on="completion", chat_template=template)
    ids = tokenizer.convert_tokens_to_ids(encoder.added)
    assert ids == list(range(max(before.values()) + 1, max(before.values()) + 1 + len(ids)))
    write_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab() == before | dict(zip(encoder.added, ids, strict=True))
    text = "".join(f"{token}Hello " for token in encoder.added)
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_rows_of_ids_may_have_every_id_that_there_is(tokenizer):
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    last = len(tokenizer) - 1 + GAP
    (document,) = encoder.encode([Example(HERE, ids=Ids((0, last), (False, True)))])
    assert document.ids.tolist() == [0, last]
    with refuses(UserError):
        encoder.encode([Example(HERE, ids=Ids((0, last + 1), (False, True)))])


def test_an_added_token_with_the_id_of_another_is_refused(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>"]})
    for template in ("alpaca", "chatml"):
        with pytest.raises(UserError, match=r"<\|a\|> has the id"):
            Encoder(tokenizer, train_on="completion", chat_template=template)


def test_rows_of_ids_may_have_rows_of_the_embedding_without_a_token_which_are_counted(tokenizer, tmp_path):
    last = max(tokenizer.get_vocab().values())
    encoder = Encoder(tokenizer, train_on="all", chat_template=None, embedding_rows=lambda: last + 4)
    rows = [[0, last + 3], [last - 20, last + 3], [0, last]]  # padded; in the gap too; all are tokens
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    prepared = prepare([Source(str(file))], encoder, seq_len=8, cache_dir=tmp_path)
    assert prepared.train.token_count == 6
    assert prepared.stats["notes"]["tokenless"] == {str(last + 3): 2, str(last - 20): 1}
    says("\n".join(sentences(prepared.stats)))
    for outside in (last + 4, -1):
        with refuses(UserError):
            encoder.encode([Example(HERE, ids=Ids((0, outside), (False, True)))])
