"""Encode parts, masks, tool calls and reasoning with published chat templates, read from TRL's wheel."""

import numpy as np
import pytest
from cases import cases
from chat_templates import names, template
from corpus import TOOL
from transformers.utils import chat_template_utils

from meshtune.data.encode import Document, Encoder
from meshtune.data.example import BadRow, Example, Mask, Origin

HERE = Origin("rows.jsonl", 7)
USER = {"role": "user", "content": "How are you?"}
A, B = ({"role": "assistant", "content": text} for text in ("I am fine, thank you.", "It is four."))

# Published templates, as one reads them: which raise an exception at a message of a tool, which write no
# calls of an answer, which no thought before it.
NO_RESULTS = {"cohere", "cohere2", "gemma", "gemma3"}
NO_CALLS = NO_RESULTS | {"deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5"}
NO_THOUGHTS = {
    *NO_RESULTS, "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "lfm2", "lfm2_v2", "llama3", "llama3_1",
    "llama3_2", "phi3", "phi3_5", "qwen2_5", "qwen3_instruct_2507",
    "qwen3_5_nothink",  # its prompt for an answer ends a thought that is empty
}  # fmt: skip
if not hasattr(chat_template_utils, "_REASONING_FIELDS"):  # transformers 5.17 hands on the keys as they are
    NO_THOUGHTS.add("gptoss")  # it reads `thinking`
EVERY = cases(names(), test=["deepseekv3", "gptoss", "llama3_1", "qwen2_5", "phi3"])


@pytest.fixture
def encode(tokenizer_of):
    def encode(name, messages, train_on="completion", masks=None, tools=None) -> Document | BadRow:
        tokenizer = tokenizer_of()
        tokenizer.chat_template = template(name)
        encoder = Encoder(tokenizer, train_on=train_on, chat_template=None)
        example = Example(HERE, messages=tuple(messages), masks=masks, tools=tools)
        document = next(encoder.encode_each([example]))
        encode.text = "" if isinstance(document, BadRow) else tokenizer.decode(document.ids)
        return document

    return encode


def mask(*trained: bool | None) -> tuple[Mask | None, ...]:
    return tuple(None if one is None else Mask(one, "weight") for one in trained)


@pytest.mark.parametrize("name", EVERY)
def test_masks_choose_among_the_answers(encode, name):
    turns = [USER, A, USER, B]
    both, last = encode(name, turns, "assistant"), encode(name, turns)
    first = encode(name, turns, masks=mask(None, True, None, False))
    if isinstance(both, BadRow):  # the template rewrites what was said before, or opens a thought
        assert isinstance(first, BadRow)
        return
    assert isinstance(last, Document) and isinstance(first, Document)
    assert np.array_equal(first.labelled, both.labelled & ~last.labelled) and first.labelled.any()
    assert np.array_equal(encode(name, turns, masks=mask(None, True, None, True)).labelled, both.labelled)
    none = encode(name, turns, masks=mask(None, False, None, False))
    assert not none.labelled.any()
    rest = encode(name, turns, "all", masks=mask(None, False, None, None))
    everything = encode(name, turns, "all").labelled
    assert np.array_equal(rest.labelled, everything & ~first.labelled)


@pytest.mark.parametrize(("train_on", "trained"), [("assistant", True), ("all", False)])
def test_a_mask_of_a_users_message_is_refused(encode, train_on, trained):
    row = encode("qwen2_5", [USER, A], train_on, masks=mask(trained, None))
    assert isinstance(row, BadRow) and f"message 1 (user) has weight: {int(trained)}" in str(row)


@pytest.mark.parametrize("name", EVERY)
def test_text_parts_are_trained_as_their_text(encode, name):
    parts = [{"type": "text", "text": text} for text in ("I am fine,", "thank you.")]
    document = encode(name, [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}])
    assert "'type'" not in encode.text and '"type"' not in encode.text
    assert isinstance(document, Document)
    assert encode.text.count("I am fine,") == encode.text.count("thank you.") == 2


def tool_conversation(arguments):
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "four"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result, B]


@pytest.mark.parametrize("name", EVERY)
def test_a_tool_calls_arguments_are_encoded_once(encode, name):
    document = encode(name, tool_conversation({"what": "two and two"}), tools=[TOOL])
    assert isinstance(document, BadRow) == (name in NO_RESULTS)
    if isinstance(document, BadRow):
        assert "refuses it" in str(document)
        return
    written = "two and two" in encode.text
    assert written == (("unwritten", "tool_calls") not in document.notes)
    assert '\\"what' not in encode.text and "{'what'" not in encode.text
    assert ("Add two numbers." in encode.text) == (("unwritten", "tools") not in document.notes)


@pytest.mark.parametrize("name", EVERY)
def test_a_call_to_be_learned_is_written_or_refused(encode, name):
    document = encode(name, tool_conversation({"what": "two and two"})[:2], tools=[TOOL])
    assert isinstance(document, BadRow) == (name in NO_CALLS)
    assert ("two and two" in encode.text) == (name not in NO_CALLS)


@pytest.mark.parametrize("name", EVERY)
def test_reasoning_to_be_learned_is_written_or_refused(encode, name):
    said = "two and two make it"
    document = encode(name, [USER, B | {"reasoning_content": said}])
    assert isinstance(document, BadRow) == (name in NO_THOUGHTS)
    assert (said in encode.text) == (name not in NO_THOUGHTS)
    earlier = encode(name, [USER, A | {"reasoning_content": said}, USER, B])
    assert isinstance(earlier, Document)
    assert (said in encode.text) == (("unwritten", "reasoning_content") not in earlier.notes)
