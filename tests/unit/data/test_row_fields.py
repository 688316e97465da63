"""Read the fields of rows beside their text: content parts, masks, tool calls, columns of other data."""

import json
import re

import pytest
from golden import refuses, says

from meshtune.data.encode import Encoder
from meshtune.data.example import Source, Tally, notes_sentences
from meshtune.data.readers import read
from meshtune.errors import UserError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.fixture
def rows_of(tmp_path):
    def rows_of(*rows, on_bad_row="error", **source):
        """(examples, notes) of a jsonl file with these rows."""
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tally = Tally()
        source = Source(str(file), **source)
        return list(read(source, on_bad_row=on_bad_row, tally=tally)), tally.notes

    return rows_of


# Content parts #


def test_text_parts_are_kept_for_the_template(rows_of):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    (example,), _ = rows_of({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert example.messages[1]["content"] == parts


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "refusal", None])
def test_parts_that_are_no_text_are_refused_by_name(rows_of, kind):
    part = {"type": kind, "image_url": {"url": "x.png"}}
    with refuses(UserError):
        rows_of({"messages": [{"role": "user", "content": [part]}, ANSWER]})


# Masks #


@pytest.mark.parametrize(
    ("key", "value", "trained"),
    [("weight", 0, False), ("weight", 1.0, True), ("train", False, False), ("training", True, True)],
)
def test_a_message_says_whether_it_is_trained_on(rows_of, key, value, trained):
    (example,), notes = rows_of({"messages": [USER, ANSWER | {key: value}, USER, ANSWER]})
    assert [mask and mask.trained for mask in example.masks] == [None, trained, None, None]
    assert key not in example.messages[1]
    assert notes.masks == {f"{key}: {int(trained)}": 1}
    assert f"1 by {key}: {int(trained)}" in "".join(notes_sentences(notes.values()))


def test_masks_of_sharegpt_are_read_too(rows_of):
    turns = [{"from": "human", "value": "Hi", "weight": None}, {"from": "gpt", "value": "Hello", "weight": 0}]
    (example,), _ = rows_of({"conversations": turns})
    assert [mask and mask.trained for mask in example.masks] == [None, False]
    assert all("weight" not in message for message in example.messages)


@pytest.mark.parametrize(
    "extra",
    [
        {"weight": 0.5},
        {"train": "yes"},
        {"weight": 1, "train": False},
        {"train_detail": []},
    ],
)
def test_a_mask_that_can_not_be_honoured_is_refused(rows_of, extra):
    with refuses(UserError):
        rows_of({"messages": [USER, ANSWER | extra]})


def test_rows_of_loss_weight_0_are_left_out_and_counted(rows_of):
    row = {"prompt": "Hi", "completion": "Hello"}
    examples, notes = rows_of(row | {"loss_weight": 0}, row | {"loss_weight": 1.0}, row)
    assert len(examples) == 2
    assert notes.masks == {"loss_weight: 0": 1, "loss_weight: 1": 1}
    says(notes_sentences(notes.values()))
    with refuses(UserError):
        rows_of(row | {"loss_weight": 0.3})


# Tool calls #


def call(arguments):
    return {"type": "function", "function": {"name": "look_up", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
def test_arguments_are_objects_however_they_are_written(rows_of, arguments):
    (example,), _ = rows_of({"messages": [USER, {"role": "assistant", "tool_calls": [call(arguments)]}]})
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


@pytest.mark.parametrize("arguments", ["{city: Paris}", "[1]"])
def test_arguments_that_are_no_object_are_refused_with_their_row(rows_of, arguments):
    good = {"messages": [USER, ANSWER]}
    with refuses(UserError):
        rows_of(good, {"messages": [USER, {"role": "assistant", "tool_calls": [call(arguments)]}]})


# Columns beside the text #


def test_alpacas_system_and_history_become_turns(rows_of):
    row = {"instruction": "And two?", "input": "", "output": "Four.", "system": "Be brief."}
    (example,), _ = rows_of(row | {"history": [["One?", "Two."]]})
    assert [(message["role"], message["content"]) for message in example.messages] == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "Two."),
        ("user", "And two?"),
        ("assistant", "Four."),
    ]
    (plain,), _ = rows_of(row | {"system": "", "history": []})
    assert plain.messages is None and plain.prompt == "And two?"


def test_system_and_tools_beside_prompt_and_completion_make_a_conversation(rows_of):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    (example,), _ = rows_of({"prompt": "Hi", "completion": "Hello", "system": "Be kind.", "tools": tools})
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant"]
    assert example.tools == tools


def test_two_system_prompts_are_refused_unless_they_are_the_same(rows_of):
    messages = [{"role": "system", "content": "Be kind."}, USER, ANSWER]
    (example,), _ = rows_of({"messages": messages, "system": "Be kind."})
    assert len(example.messages) == 3
    with refuses(UserError):
        rows_of({"messages": messages, "system": "Be rude."})


def test_columns_that_are_not_used_are_listed_once(rows_of):
    row = {"messages": [USER, ANSWER], "id": 7, "source": "web", "empty": None}
    _, notes = rows_of(row, row)
    assert notes_sentences(notes.values()) == ["columns that are not used: id, source"]


def test_names_of_another_format_are_refused(rows_of):
    with refuses(UserError):
        rows_of({"messages": [USER, ANSWER], "question": "Hi"}, columns=(("prompt", "question"),))


# Other kinds of data #


@pytest.mark.parametrize("label", [True, False, "true", "False"])
def test_kto_rows_are_refused_and_their_good_ones_can_be_chosen(rows_of, label):
    row = {"prompt": "Hi", "completion": "Hello", "label": label}
    with refuses(UserError):
        rows_of(row)
    examples, notes = rows_of(row, where=(("label", True),))
    good = str(label).lower() == "true"
    assert len(examples) == good and notes.left_out.total() == (not good)


def test_a_label_of_a_class_is_no_kto(rows_of):
    examples, notes = rows_of({"text": "Good film.", "label": 1}, {"text": "Bad film.", "label": 0})
    assert len(examples) == 2 and notes.unused["label"] == 2


def test_preference_columns_beside_messages_are_refused_and_a_side_can_be_chosen(rows_of):
    row = {"messages": [USER], "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "No."}]}
    with refuses(UserError):
        rows_of(row)
    (example,), notes = rows_of(row, columns=(("messages", "chosen"),))
    assert example.messages[1]["content"] == "Hello"
    assert "rejected" in notes.unused
    with_answer = row | {"messages": [USER, ANSWER]}
    (example,), notes = rows_of(with_answer, format="messages")
    assert set(notes.unused) == {"chosen", "rejected"}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"conversations": [USER], "chosen": ANSWER}, {"prompt": "conversations", "completion": "chosen"}),
        ({"prompt": "Hi", "chosen": "Hello"}, {"completion": "chosen"}),
        ({"chosen_messages": [USER, ANSWER]}, {"messages": "chosen_messages"}),
    ],
)
def test_the_columns_that_a_refusal_of_preferences_names_train_on_one_side(row, columns, rows_of):
    other = {name.replace("chosen", "rejected"): value for name, value in row.items() if "chosen" in name}
    written = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    with pytest.raises(UserError, match=re.escape(f"set 'data.columns={{{written}}}'")):
        rows_of(row | other)
    (example,), notes = rows_of(row | other, columns=tuple(columns.items()))
    assert notes.unused.keys() == other.keys()
    assert example.messages is None or [m["role"] for m in example.messages] == ["user", "assistant"]


@pytest.mark.parametrize("column", ["image", "images", "audio", "video"])
def test_rows_with_images_or_sound_are_refused_whatever_the_format(rows_of, column):
    row = {"messages": [USER, ANSWER], column: ["a.png"]}
    with refuses(UserError):
        rows_of(row)
    with pytest.raises(UserError, match=f"the row has {column}"):
        rows_of(row, format="messages")
    assert len(rows_of(row | {column: []})[0]) == 1


def test_a_column_of_where_must_be_there(rows_of):
    with refuses(UserError):
        rows_of({"prompt": "Hi", "completion": "Hello"}, where=(("label", True),))


def test_what_is_inside_null_is_null(rows_of):
    rows = [{"text": "a", "m": None}, {"text": "b", "m": {"lang": "en"}}, {"text": "c", "m": {"of": None}}]
    (example,), notes = rows_of(*rows[:2], where=(("m.lang", "en"),))
    assert (example.text, notes.left_out["data.where"]) == ("b", 1)
    with pytest.raises(UserError):  # another key than the one that is null
        rows_of(*rows, where=(("m.lang", "en"),))


def test_an_answer_that_is_json_of_calls_is_text(rows_of):
    calls = json.dumps([{"name": "get_weather", "arguments": {"city": "Rome"}}])
    of_calls, of_messages = rows_of(
        {"prompt": [USER], "completion": calls}, {"prompt": [USER], "completion": json.dumps([ANSWER])}
    )[0]
    assert of_calls.messages[1] == {"role": "assistant", "content": calls}
    assert of_messages.messages[1]["content"] == ANSWER["content"]


# What a template leaves out, where the text stands in the conversation all the same #


PHI = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"what": "Paris", "a": 1}}}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "I add Paris.", "tool_calls": [CALL]},
        {"content": "It is simple.", "reasoning_content": "simple"},
        {"content": "It is simple.", "reasoning_content": "It is simple."},
    ],
)
def test_a_field_is_not_written_because_its_words_are(rows_of, tokenizer_of, message):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = PHI
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    examples, _ = rows_of({"messages": [USER, {"role": "assistant"} | message]})
    with refuses(UserError):
        encoder.encode(examples)


def test_each_of_several_calls_must_be_written(rows_of, tokenizer_of):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = PHI.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}"
    )
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    one, _ = rows_of({"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [CALL]}]})
    assert encoder.encode(one)
    two, _ = rows_of({"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [CALL, CALL]}]})
    with refuses(UserError):
        encoder.encode(two)


def test_other_keys_that_the_template_leaves_out_are_counted(rows_of, tokenizer_of):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = PHI
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    examples, _ = rows_of({"messages": [USER | {"name": "Ann"}, ANSWER]})
    (document,) = encoder.encode(examples)
    assert document.notes == (("unwritten", "name of messages"),)


def test_reasoning_that_is_no_text_is_refused(rows_of):
    with refuses(UserError):
        rows_of({"messages": [USER, ANSWER | {"reasoning_content": ["so"]}]})


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_of_every_name_reach_the_template_as_text(rows_of, kind):
    part = {"type": kind, "text": "Hi", "annotations": []}
    (example,), _ = rows_of({"messages": [{"role": "user", "content": [part]}, ANSWER]})
    assert example.messages[0]["content"] == [{"type": "text", "text": "Hi"}]


def test_the_older_form_of_a_call_becomes_a_tool_call(rows_of):
    call = {"name": "add", "arguments": '{"a": 1}'}
    (example,), _ = rows_of({"messages": [USER, {"role": "assistant", "content": "", "function_call": call}]})
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_history_beside_a_prompt_of_messages_comes_first(rows_of):
    row = {"prompt": [USER], "completion": [ANSWER], "history": [["a", "b"]]}
    (example,), _ = rows_of(row)
    assert [message["content"] for message in example.messages] == ["a", "b", "Hi", "Hello"]


def test_a_mapped_column_that_no_row_has_is_named(rows_of):
    row = {"prompt": "a", "completion": "b", "sys_prompt": "c"}
    _, notes = rows_of(row, columns=(("system", "sys_promt"),))
    lines = notes_sentences(notes.values())
    says(lines)


# Fields that are there and empty #

NAN = float("nan")  # as pandas writes a missing value


@pytest.mark.parametrize(
    "nothing", [None, "", " \n", "[]", " [ ] ", "{}", "null", "None", [], {}, [None], [{}], NAN]
)
def test_empty_fields_are_absent(rows_of, nothing):
    """Templates would write a section of tools or a system prompt for them."""
    row = {"messages": [USER, ANSWER | {"tool_calls": nothing, "name": nothing}]}
    extra = dict.fromkeys(("tools", "system", "images", "chosen", "other"), nothing)
    (example,), notes = rows_of(row | extra)
    assert example.messages == (USER, ANSWER)
    assert example.tools is None
    assert not notes.unused
    (pair,), notes = rows_of({"prompt": "Hi", "completion": "[]", "history": nothing} | extra)
    assert (pair.prompt, pair.completion, pair.messages) == ("Hi", "[]", None)
    assert not notes.unused


def test_empty_content_parts_are_left_out(rows_of):
    text = {"type": "text", "text": "Hi"}
    empty = [None, {}, {"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": None}}]
    (example,), _ = rows_of({"messages": [{"role": "user", "content": [*empty, text]}, ANSWER]})
    assert example.messages[0]["content"] == [text]
    (example,), _ = rows_of({"messages": [{"role": "user", "content": empty}, ANSWER]})
    assert example.messages[0]["content"] == ""


@pytest.mark.parametrize("answer", ["[]", "{}", "null"])
def test_an_answer_of_empty_json_is_an_answer(rows_of, answer):
    (example,), _ = rows_of({"messages": [USER, ANSWER | {"content": answer}]})
    assert example.messages[1]["content"] == answer


# Filters that leave out everything #


@pytest.mark.parametrize(
    ("wanted", "values"),
    [(False, ["no", "en"]), (True, ["yes", "no"]), (1000, ["1_000", "2"]), ("5", [5, 6]), ("x", range(99))],
)
def test_a_filter_says_what_it_compared(rows_of, wanted, values):
    rows = [{"text": "Hi", "lang": value} for value in values]
    examples, notes = rows_of(*rows, where=(("lang", wanted),))
    assert not examples
    says("\n".join(notes_sentences(notes.values())))
