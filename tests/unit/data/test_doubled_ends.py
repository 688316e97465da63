"""Rows that hold begin and end tokens already: one of each, labelled once, and counted."""

import pytest
from golden import refuses
from small_tokenizer import make_tokenizer
from tokenizers import processors

from meshtune.data.encode import Encoder
from meshtune.data.example import Example, Origin, Tally, notes_sentences
from meshtune.data.recipe import Recipe
from meshtune.errors import UserError

HERE = Origin("rows.jsonl", 1)
WRITES_BOS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder_of(*, suffix: str = "", template: str | None = None, **settings) -> Encoder:
    """An encoder whose tokenizer adds <s>, and behind each text `suffix`."""
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{suffix}",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")],
    )
    tokenizer.chat_template = template
    return Encoder(tokenizer, train_on="completion", chat_template=None, **settings)


def encoded(encoder: Encoder, **row):
    """(ids, labelled, sentences) of one row."""
    tally = Tally()
    (made,) = Recipe((), encoder, seq_len=1000).usable([Example(HERE, **row)], tally)
    return made.ids.tolist(), made.labelled.tolist(), "\n".join(notes_sentences(tally.notes.values()))


def messages(question: str, answer: str) -> dict:
    return {"messages": ({"role": "user", "content": question}, {"role": "assistant", "content": answer})}


@pytest.mark.parametrize("suffix", ["", " </s>"])
@pytest.mark.parametrize(
    ("bare", "rendered", "named"),
    [
        ({"text": "Hello"}, {"text": "<s>Hello</s>"}, ("begin with <s>", "end with </s>")),
        ({"text": "Hello"}, {"text": "\n<s><s>Hello</s></s>\n"}, ("begin with <s>", "end with </s>")),
        ({"text": "Hello"}, {"text": "<s>Hello"}, ("begin with <s>",)),
        (
            {"prompt": "Hi", "completion": "Hello"},
            {"prompt": "<s>Hi", "completion": "Hello</s>\n"},
            ("begin with <s>", "end with </s>"),
        ),
        (
            {"prompt": "Hi", "completion": "Hello"},
            {"prompt": "<s>Hi</s>", "completion": "<s>Hello</s>"},
            ("begin with <s>", "end the prompt with </s>", "begin the completion with <s>", "end with </s>"),
        ),
    ],
)
def test_plain_rows_have_each_end_token_once(bare, rendered, named, suffix):
    encoder = encoder_of(suffix=suffix)
    *once, silent = encoded(encoder, **bare)
    *again, said = encoded(encoder, **rendered)
    assert once == again
    assert once[0].count(encoder.tokenizer.eos_token_id) == 1
    assert not silent
    assert all(token in said for token in named)
    assert encoder.prompt_ids(Example(HERE, **rendered)) == encoder.prompt_ids(Example(HERE, **bare))


@pytest.mark.parametrize("mode", ["auto", "keep"])
def test_conversations_have_each_end_token_once(mode):
    encoder = encoder_of(template=WRITES_BOS, control_tokens=mode)
    *once, _ = encoded(encoder, **messages("Hi", "Hello"))
    *again, said = encoded(encoder, **messages("<s>Hi", "Hello<|im_end|>\n"))
    assert once == again
    assert "<s> (begins a conversation" in said
    assert "<|im_end|> (ends an answer" in said
    pair = encoded(encoder, prompt="<s>Hi", completion="Hello<|im_end|>")
    assert list(pair[:2]) == once


def test_tokens_that_are_not_added_there_stay():
    """</s> inside a text, <s> that no tokenizer adds, an end token that the template does not write."""
    encoder = encoder_of()
    ids, _, said = encoded(encoder, text="Hello</s>there")
    assert ids.count(encoder.tokenizer.eos_token_id) == 2
    assert not said
    without = Encoder(make_tokenizer(), train_on="completion", chat_template=None)
    assert without.tokenizer.decode(encoded(without, text="<s>Hello")[0]) == "<s>Hello</s>"
    with pytest.raises(UserError):
        encoded(encoder_of(template=WRITES_BOS), **messages("Hi", "Hello</s>"))


@pytest.mark.parametrize("row", [{"text": "<s></s>"}, {"prompt": "Hi", "completion": " </s>"}])
def test_rows_of_end_tokens_only_are_bad(row):
    with refuses(UserError):
        encoder_of().encode([Example(HERE, **row)])
