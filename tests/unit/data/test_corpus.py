"""Every conversation of the corpus under every chat template: trained on exactly, or refused with a reason.

The reference is transformers: the text of apply_chat_template, its ids, and the text of each beginning.
"""

import numpy as np
import pytest
from cases import cases
from chat_templates import STOPS, names, special_tokens, template
from corpus import BROKEN_FILES, CONVERSATIONS, TOOL
from data_rows import prepare
from small_tokenizer import make_tokenizer

from meshtune.data.encode import Document, Encoder
from meshtune.data.example import BadRow, Example, Origin, Source
from meshtune.data.messages import with_thought
from meshtune.errors import UserError

TEMPLATES = cases(
    [*names(), "mistral", "zephyr"],
    test=["gptoss", "qwen3"],
    ci=["deepseek_r1_distill", "glm4moe", "llama3_1", "nemotron_3_nano", "qwen3_5_think"],
)
# What a template that is given such a row may be refused for; each is tested in a test of its own.
REASONS = {
    "prompt is not a prefix", "turn is not a prefix", "turn not written", "starts with the assistant",
    "refused by the chat template", "reasoning_content is not written", "tool_calls is not written",
    "thought in the content is not written", "tokens merge across the boundary",
}  # fmt: skip
# Families whose templates rewrite what was said before, and whose training form does not.
REWRITING = (
    "qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "gptoss", "deepseek_r1_distill", "deepseekv3",
    "nemotron_3_nano", "gemma4_v5", "lfm2_2_5",
)  # fmt: skip
WHITE_SPACE_AND_THOUGHTS = ("two turns", "nine turns", "white space around", "two thoughts", "long")


def encoder_of(name, **settings):
    text = template(name)
    tokenizer = make_tokenizer(*(token for token in special_tokens(text) if token not in ("<s>", "</s>")))
    tokenizer.chat_template = text
    known = tokenizer.convert_tokens_to_ids(list(STOPS.get(name, ())))
    if name == "gptoss":
        tokenizer.eos_token = "<|return|>"
    own = {"train_on": "assistant", "chat_template": None, "stops": known, "control_tokens": "keep"}
    return Encoder(tokenizer, **own | settings)


def example_of(conversation):
    tools = [TOOL] if "call" in conversation else None
    return Example(Origin("rows.jsonl", 7), messages=tuple(CONVERSATIONS[conversation]), tools=tools)


def encoded(encoder, conversation):
    example = example_of(conversation)
    return list(encoder.encode_each(encoder.split(example)))


def labelled_text(encoder, documents):
    return "".join(encoder.tokenizer.decode(document.ids[document.labelled]) for document in documents)


def ends_of(document):
    """Ends of labelled turns at which generation does not stop."""
    return [what for name, what in document.notes if name == "unstopped"]


def reference(encoder, conversation):
    """(ids of the whole text, of the last turn's prompt) by transformers, with an opened thought closed."""
    tokenizer, messages = encoder.tokenizer, encoder._renderer.adapt(CONVERSATIONS[conversation])
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    options = {"tools": [TOOL] if "call" in conversation else None, "tokenize": False}
    prompt = tokenizer.apply_chat_template(messages[:last], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages[: last + 1], **options)
    whole = with_thought(prompt, whole, messages[last], tokenizer.chat_template)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, prompt)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_last_answers_are_exact_or_refused(name):
    encoder = encoder_of(name, train_on="completion")
    taken = 0
    for conversation, messages in CONVERSATIONS.items():
        (document,) = encoded(encoder, conversation)
        if isinstance(document, BadRow):
            assert document.reason in REASONS, (conversation, document)
            continue
        taken += 1
        whole, prompt = reference(encoder, conversation)
        ids, labels = document.ids.tolist(), np.flatnonzero(document.labelled)
        assert ids[: len(whole)] == whole and len(ids) <= len(whole) + 1, conversation
        start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
        assert labels[0] == start and np.all(np.diff(labels) == 1), conversation
        assert ids[labels[-1]] in encoder.stop_ids, conversation
        assert start == len(prompt) or "<think>" in encoder.tokenizer.decode(prompt), conversation
        last = [message for message in messages if message["role"] == "assistant"][-1]
        answer = last["content"].rpartition("</think>")[2].strip()
        assert answer in labelled_text(encoder, [document]), conversation
    assert taken >= 7, "the template refuses nearly every conversation"


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_answers_together_are_the_answers_one_by_one(name):
    """Several turns of one row have the labels that each has in a row of its own."""
    together, apart = encoder_of(name), encoder_of(name, split_turns=True)
    for conversation in CONVERSATIONS:
        (document,), parts = encoded(together, conversation), encoded(apart, conversation)
        if isinstance(document, BadRow):
            assert document.reason in REASONS
            continue
        assert not any(isinstance(part, BadRow) for part in parts), conversation
        if unstopped := ends_of(document):
            assert name == "gptoss" and set(unstopped) == {"<|end|>"}
            continue
        assert labelled_text(together, [document]) == labelled_text(apart, parts), conversation


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_a_row_of_its_own_under_split_turns(name):
    apart, last = encoder_of(name, split_turns=True), encoder_of(name, train_on="completion")
    parts = encoded(apart, "two turns")
    (first,), (second,) = encoded(last, "one turn"), encoded(last, "two turns")
    for part, alone in zip(parts, (first, second), strict=True):
        assert isinstance(part, Document)
        assert np.array_equal(part.ids, alone.ids) and np.array_equal(part.labelled, alone.labelled)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_training_template_is_the_original_for_single_turns(name):
    plain, training = encoder_of(name), encoder_of(name, chat_template="training")
    for conversation, messages in CONVERSATIONS.items():
        if [message["role"] for message in messages].index("assistant") != len(messages) - 1:
            continue
        for part, prompt in ((messages, False), (messages[:-1], True)):
            for tools in (None, [TOOL]):
                rendered = [each._renderer.render(part, prompt, tools) for each in (plain, training)]
                assert str(rendered[0]) == str(rendered[1]), conversation


@pytest.mark.parametrize("name", cases(REWRITING, test=["qwen3", "deepseek_r1_distill"]))
def test_a_training_template_trains_all_turns_as_they_are_generated(name):
    original, training = encoder_of(name), encoder_of(name, chat_template="training")
    apart = encoder_of(name, split_turns=True)
    refused = 0
    for conversation in WHITE_SPACE_AND_THOUGHTS:
        (document,) = encoded(training, conversation)
        assert isinstance(document, Document) and not ends_of(document), conversation
        assert labelled_text(training, [document]) == labelled_text(apart, encoded(apart, conversation))
        before = encoded(original, conversation)[0]
        refused += isinstance(before, BadRow) or bool(ends_of(before))
    assert refused, "the original would have done"


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_refused_with_a_sentence(case, tmp_path):
    name, content, sentence = BROKEN_FILES[case]
    file = tmp_path / name
    file.write_bytes(content)
    encoder = Encoder(make_tokenizer(), train_on="completion", chat_template="chatml")
    with pytest.raises(UserError) as error:
        prepare([Source(str(file))], encoder, seq_len=64, cache_dir=tmp_path / "cache")
    assert sentence in str(error.value)
    assert "No document is left" in str(error.value) or str(file) in str(error.value)
