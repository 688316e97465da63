"""Generation prompts that open a thought, rows per turn, and the token that ends an answer."""

import json

import numpy as np
import pytest
from chat_templates import template
from corpus import CONVERSATIONS, assistant, user
from golden import refuses, says
from test_corpus import encoded, encoder_of, labelled_text

from meshtune.api.resolve import stops_of
from meshtune.config import load
from meshtune.data.encode import Document, Encoder
from meshtune.data.example import BadRow, Example, Mask, Notes, Origin, notes_sentences
from meshtune.errors import UserError

HERE = Origin("rows.jsonl", 7)


def encode(encoder, messages, masks=None) -> Document | BadRow:
    return next(encoder.encode_each([Example(HERE, messages=tuple(messages), masks=masks)]))


def split(encoder, document) -> tuple[str, str]:
    """(Text before the first label, labelled text) of a document with one labelled run."""
    start = int(np.flatnonzero(document.labelled)[0])
    decode = encoder.tokenizer.decode
    return decode(document.ids[:start]), decode(document.ids[document.labelled])


@pytest.mark.parametrize(
    ("name", "conversation", "prompt", "labelled"),
    [
        ("deepseek_r1_distill", "one turn", "<think>\n", "\n</think>\n\nYes<｜end▁of▁sentence｜>"),
        ("deepseek_r1_distill", "a thought", "<think>\n", "Let me see\n</think>\n\nYes<｜end▁of▁sentence｜>"),
        (
            "deepseek_r1_distill",
            "a thought in the content",
            "<think>\n",
            "Let me see\n</think>\n\nYes<｜end▁of▁sentence｜>",
        ),
        ("nemotron_3_nano", "one turn", "<think>", "</think>Yes<|im_end|>"),
        ("nemotron_3_nano", "a thought", "<think>\n", "Let me see\n</think>\nYes<|im_end|>"),
        ("qwen3_5_think", "one turn", "<think>\n", "\n</think>\n\nYes<|im_end|>"),
        ("qwen3_5_think", "a thought", "<think>\n", "Let me see\n</think>\n\nYes<|im_end|>"),
    ],
)  # fmt: skip
def test_labels_begin_where_the_opened_thought_goes_on(name, conversation, prompt, labelled):
    encoder = encoder_of(name)
    before, text = split(encoder, encode(encoder, CONVERSATIONS[conversation]))
    assert before.endswith(prompt) and text == labelled


def test_a_line_break_that_merges_with_the_closing_one_is_labelled():
    """Qwen's tokenizers have a token for two line breaks, so the prompt's tokens end before its own."""
    encoder = encoder_of("qwen3_5_think")
    encoder.tokenizer.add_tokens(["\n\n"])
    merging = Encoder(encoder.tokenizer, train_on="completion", chat_template=None)
    before, text = split(merging, encode(merging, CONVERSATIONS["one turn"]))
    assert before.endswith("<think>") and text == "\n\n</think>\n\nYes<|im_end|>"


@pytest.mark.parametrize("name", ["nemotron_3_nano", "qwen3_5_think", "qwen3"])
def test_variables_reach_every_rendering(name):
    encoder = encoder_of(name, template_variables={"enable_thinking": False})
    document = encode(encoder, CONVERSATIONS["one turn"])
    prompt = encoder.tokenizer.apply_chat_template(
        CONVERSATIONS["one turn"][:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert split(encoder, document) == (prompt, "Yes<|im_end|>")
    example = Example(HERE, messages=tuple(CONVERSATIONS["one turn"]))
    assert encoder.tokenizer.decode(encoder.prompt_ids(example)) == prompt
    assert encoder.fingerprint != encoder_of(name).fingerprint


@pytest.mark.parametrize(
    "variables",
    [{"enable_thinkin": False}, {"tools": 1}],
)
def test_variables_that_would_do_nothing_are_refused(variables):
    with refuses(UserError):
        encoder_of("qwen3", template_variables=variables)


def test_variables_without_a_template_are_refused():
    with refuses(UserError):
        encoder_of("qwen3", chat_template="none", template_variables={"enable_thinking": False})


def test_masks_choose_the_turns_that_become_rows():
    encoder = encoder_of("qwen3", split_turns=True)
    example = Example(
        HERE, messages=tuple(CONVERSATIONS["two turns"]), masks=(None, Mask(False, "weight"), None, None)
    )
    parts = encoder.split(example)
    assert [len(part.messages) for part in parts] == [4]
    none = Example(HERE, messages=tuple(CONVERSATIONS["one turn"]), masks=(None, Mask(False, "weight")))
    assert encoder.split(none) == [none]
    foreign = Example(HERE, messages=tuple(CONVERSATIONS["one turn"]), masks=(Mask(True, "weight"), None))
    (row,) = encoder.encode_each(encoder.split(foreign))
    says(row)
    assert isinstance(row, BadRow)


def test_split_turns_and_everything_labelled_contradict_each_other():
    with refuses(UserError):
        load(None, ["model.name=x", "data.split_turns=true", "data.train_on=all"])


def test_a_stop_that_opens_the_next_turn_is_appended_to_the_last():
    encoder = encoder_of("glm4moe")
    assert labelled_text(encoder, encoded(encoder, "one turn")) == "\n<think></think>\nYes<|user|>"
    assert labelled_text(encoder, encoded(encoder, "a call")).endswith("</tool_call><|observation|>")
    both = labelled_text(encoder, encoded(encoder, "two turns"))
    assert both == "\n<think></think>\nYes<|user|>\n<think></think>\nDone<|user|>"
    everything = encode(encoder_of("glm4moe", train_on="all"), CONVERSATIONS["one turn"])
    assert encoder.tokenizer.decode(everything.ids[-1:]) == "<|user|>"
    names = encoder.tokenizer.convert_ids_to_tokens(list(encoder.stop_ids))
    assert names[:2] == ["<|user|>", "<|observation|>"]


def test_the_models_own_stop_is_labelled_behind_another_marker():
    """Command-R7B ends a turn with two tokens, and generation stops at the second."""
    encoder = encoder_of("cohere2")
    assert labelled_text(encoder, encoded(encoder, "two turns")) == (
        "Yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>Done<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    )
    assert encoder.tokenizer.convert_ids_to_tokens(encoder.stop_ids[0]) == "<|END_OF_TURN_TOKEN|>"


def test_an_end_that_stops_nothing_is_labelled_and_counted():
    """gpt-oss ends an earlier turn with <|end|>, and only the last with <|return|>."""
    encoder = encoder_of("gptoss")
    (document,) = encoded(encoder, "two turns")
    text = labelled_text(encoder, [document])
    assert text.count("<|end|>") == 1 and text.endswith("Done<|return|>")
    assert document.notes == (("unstopped", "<|end|>"),)
    notes = Notes()
    notes.add(document.notes)
    (line,) = notes_sentences(notes.values())
    says(line)


def test_a_template_without_an_end_is_counted(tokenizer_of):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    encoder = Encoder(tokenizer, train_on="assistant", chat_template=None)
    document = encode(encoder, [user("Hi?"), assistant("Yes")])
    assert document.notes == (("unstopped", "no special token"),)


def test_the_models_stops_are_read_from_its_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    model = load(None, [f"model.name={tmp_path}"]).model
    assert stops_of(model) == []
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert stops_of(model) == [3, 5]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert stops_of(model) == [3]
    assert stops_of(model.model_copy(update={"init": "random"})) == []


def test_a_training_template_needs_one_to_change(tokenizer_of):
    with refuses(UserError):
        Encoder(tokenizer_of(), train_on="assistant", chat_template="training")
    tokenizer = tokenizer_of()
    tokenizer.chat_template = template("qwen3")
    Encoder(tokenizer, train_on="assistant", chat_template="training")
    changed = tokenizer.chat_template
    Encoder(tokenizer, train_on="assistant", chat_template="training")  # a trained model has it already
    assert tokenizer.chat_template == changed != template("qwen3")
