"""Templates that write more, or less, than they were asked for: labels are exact, or the row is refused."""

import inspect
import re
from typing import Any

import pytest
from chat_templates import names, special_tokens, template
from corpus import CONVERSATIONS, TOOL, assistant, user
from small_tokenizer import make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from meshtune.data.encode import Document, Encoder
from meshtune.data.example import BadRow, Example, Mask, Origin
from meshtune.errors import UserError

ALWAYS_PROMPT = {
    "always_prompts_header": "<|eot_id|>",
    "always_prompts_system": "<|im_end|>",
    "always_prompts_words": "<|EOT|>",
}
CHATML = template("plain_chatml")
TEMPLATE_OPTIONS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
FIRST_PART = "{{ m.content[0].text }}"  # of several
ALL_PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
TURNS = [user("Hello?"), assistant("Yes"), user("So?"), assistant("Done")]


def encoder_of(text: str, eos: str = "</s>", *, lines: bool = False, **settings: Any) -> Encoder:
    tokens = [token for token in special_tokens(text) if token not in ("<s>", "</s>")]
    tokenizer = make_tokenizer(*tokens, lines=lines, eos_token=eos)
    tokenizer.chat_template = text
    return Encoder(tokenizer, **{"train_on": "assistant", "chat_template": None} | settings)


def example(messages: list[dict[str, Any]], **fields: Any) -> Example:
    return Example(Origin("rows.jsonl", 7), messages=tuple(messages), **fields)


def encoded(encoder: Encoder, messages: list[dict[str, Any]], **fields: Any) -> Document | BadRow:
    return next(encoder.encode_each([example(messages, **fields)]))


def runs(tokenizer: PreTrainedTokenizerBase, document: Document | BadRow) -> list[str]:
    """The text of each labelled run."""
    assert isinstance(document, Document), document
    marks = "".join("1" if labelled else "0" for labelled in document.labelled)
    return [str(tokenizer.decode(document.ids[run.start() : run.end()])) for run in re.finditer("1+", marks)]


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("name", "end"), ALWAYS_PROMPT.items())
def test_a_prompt_that_is_always_written_is_not_a_part_of_the_answer(
    name: str, end: str, known: bool, train_on: str
) -> None:
    encoder = encoder_of(template(name), end if known else "</s>", train_on=train_on)
    labelled = [re.sub(r"\s", "", run) for run in runs(encoder.tokenizer, encoded(encoder, TURNS))]
    assert labelled == [f"Yes{end}", f"Done{end}"][-2 if train_on == "assistant" else -1 :]
    assert encoder.tokenizer.decode(encoder.stop_ids[0]) == end
    prompt = encoder.tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True, return_dict=False)
    assert encoder.turn_ids(TURNS[:1]) == prompt


def test_a_thought_that_the_template_closes_is_closed_once_and_the_turn_ends() -> None:
    encoder = encoder_of(template("closes_thoughts"), train_on="completion")
    assert runs(encoder.tokenizer, encoded(encoder, TURNS)) == ["</think>Done<|user|>"]
    thought = [user("Hello?"), assistant("Yes", reasoning_content="Hm.")]
    inside = [user("Hello?"), assistant("<think>\nHm.\n</think>\n\nYes")]
    for messages in (thought, inside):
        assert runs(encoder.tokenizer, encoded(encoder, messages)) == ["Hm.</think>Yes<|user|>"]


def test_an_empty_thought_of_the_prompt_is_written_before_the_answer() -> None:
    encoder = encoder_of(template("empty_thought"), train_on="completion")
    document = encoded(encoder, TURNS)
    assert runs(encoder.tokenizer, document) == ["Done<turn|>"]
    assert isinstance(document, Document)
    prompt = encoder.turn_ids(TURNS[:3])
    assert document.ids[: len(prompt)].tolist() == prompt
    thought = encoded(encoder, [user("Hello?"), assistant("Yes", reasoning_content="Hm.")])
    assert isinstance(thought, BadRow) and thought.reason == "prompt is not a prefix"


def test_a_header_of_the_assistant_ends_no_answer() -> None:
    """Two answers in a row, in a template that ends an answer with the token of the next turn."""
    encoder = encoder_of(template("glm4moe"))
    document = encoded(encoder, [user("Hello?"), assistant("Yes"), assistant("Done")])
    assert [run.rpartition("\n")[2] for run in runs(encoder.tokenizer, document)] == ["Yes", "Done<|user|>"]


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_a_header_that_the_prompt_lacks_behind_an_answer_is_not_labelled(train_on: str) -> None:
    asked = CHATML.replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role == 'user'"
    )
    encoder = encoder_of(asked, train_on=train_on)
    labelled = runs(
        encoder.tokenizer, encoded(encoder, [user("Hello?"), assistant("Yes"), assistant("Done")])
    )
    assert labelled == ["Yes<|im_end|>", "Done<|im_end|>"][-2 if train_on == "assistant" else -1 :]


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_text_beside_a_call_is_never_lost_without_a_word(train_on: str) -> None:
    encoder = encoder_of(template("drops_text"), train_on=train_on)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Paris"}}}
    beside = assistant("Let me see.") | {"tool_calls": [call]}
    row = encoded(encoder, [user("Hello?"), beside, user("So?"), assistant("Done")], tools=[TOOL])
    if train_on == "assistant":
        assert isinstance(row, BadRow) and row.reason == "text next to tool_calls is not written"
    else:
        assert isinstance(row, Document) and ("unwritten", "text next to tool_calls") in row.notes


def test_the_words_of_a_user_that_the_template_leaves_out_are_named() -> None:
    encoder = encoder_of(template("first_user_only"), train_on="completion")
    row = encoded(encoder, [user("Hello?"), assistant("Yes"), user("Words that are lost"), assistant("Done")])
    assert isinstance(row, Document) and row.notes == (("unwritten", "messages of the role user"),)


@pytest.mark.parametrize(("written", "parts"), [(ALL_PARTS, 2), (FIRST_PART, 1)])
def test_a_template_of_parts_gets_text_as_parts(written: str, parts: int) -> None:
    encoder = encoder_of(CHATML.replace("' + m.content + '", "' }}" + written + "{{ '"))
    assert runs(encoder.tokenizer, encoded(encoder, TURNS)) == ["Yes<|im_end|>", "Done<|im_end|>"]
    two = [{"type": "text", "text": "Yes"}, {"type": "text", "text": "indeed"}]
    (run,) = runs(encoder.tokenizer, encoded(encoder, [user("Hello?"), assistant(two)]))
    assert run == ("Yesindeed<|im_end|>" if parts == 2 else "Yes indeed<|im_end|>")


def test_a_thought_in_the_content_moves_to_the_field_that_the_template_reads() -> None:
    """As Kimi-K2-Thinking writes answers: a thought from its field, else an empty one."""
    thought = "('<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' else '')"
    encoder = encoder_of(CHATML.replace("m.content", f"{thought} + m.content"))
    rows = [user("Hello?"), assistant("<think>\nHm.\n</think>\n\nYes"), user("So?"), assistant("Done")]
    assert runs(encoder.tokenizer, encoded(encoder, rows)) == [
        "<think>Hm.</think>Yes<|im_end|>", "<think></think>Done<|im_end|>",
    ]  # fmt: skip


def test_an_empty_thought_before_one_in_the_content_is_left_out() -> None:
    """As Kimi-K2-Thinking writes its last answer: an empty thought, and none of the field."""
    thought = "('<think></think>' if m.role == 'assistant' else '')"
    encoder = encoder_of(CHATML.replace("m.content", f"{thought} + m.content"), train_on="completion")
    rows = [user("Hello?"), assistant("<think>\nHm.\n</think>\n\nYes")]
    assert runs(encoder.tokenizer, encoded(encoder, rows)) == ["<think>\nHm.\n</think>\n\nYes<|im_end|>"]
    assert runs(encoder.tokenizer, encoded(encoder, TURNS)) == ["<think></think>Done<|im_end|>"]


@pytest.mark.parametrize("end", ["<|end|>", "</s>"])
def test_a_part_of_the_prompt_that_is_always_written_is_not_a_part_of_the_answer(end: str) -> None:
    """As Command A, which writes <|assistant|> always, and <|answer|> behind it if it is asked for."""
    answer = "{{ '<|answer|>' if m.role == 'assistant' else '' }}"
    turns = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{answer}{{{{ m.content }}}}<|end|>{{% endfor %}}"
    prompt = "<|assistant|>{% if add_generation_prompt %}<|answer|>{% endif %}{# <|user|> #}"
    encoder = encoder_of(turns + prompt, end)
    document = encoded(encoder, TURNS)
    assert runs(encoder.tokenizer, document) == ["Yes<|end|>", "Done<|end|>"]
    assert isinstance(document, Document) and document.labelled[-1]


def test_an_empty_answer_is_a_fault_only_where_it_is_trained_on() -> None:
    rows = [user("Hello?"), assistant(""), user("So?"), assistant("Done")]
    refused = encoded(encoder_of(CHATML), rows)
    assert isinstance(refused, BadRow) and refused.reason == "empty answer"
    encoder = encoder_of(CHATML, train_on="completion")
    assert runs(encoder.tokenizer, encoded(encoder, rows)) == ["Done<|im_end|>"]
    masked = encoded(encoder_of(CHATML), rows, masks=(None, Mask(False, "weight"), None, None))
    assert runs(encoder.tokenizer, masked) == ["Done<|im_end|>"]


# Control tokens in contents #


def injected(token: str) -> list[dict[str, Any]]:
    return [user(f"Hi{token}\n{token} x {token}y"), assistant("Yes"), user(f"{token}Go")]


@pytest.mark.skipif(
    "sanitize_control_tokens" not in TEMPLATE_OPTIONS,
    reason="this transformers does not know sanitize_control_tokens and would pass it to the template",
)
@pytest.mark.parametrize("name", names())
def test_control_tokens_in_contents_have_transformers_ids_of_their_characters(name: str) -> None:
    text = template(name)
    encoder = encoder_of(text, train_on="completion")
    tokens = [token for token in special_tokens(text) if "think" not in token and "channel" not in token]
    for token in tokens[:5]:
        options = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
        ids = encoder.tokenizer.apply_chat_template(injected(token), **options)
        assert encoder.turn_ids(injected(token)) == ids


@pytest.mark.parametrize(
    ("mode", "of_user", "of_assistant"),
    [
        ("auto", "its characters", None), ("text", "its characters", "its characters"),
        ("keep", "kept as the token", "kept as the token"), ("error", None, None),
    ],
)  # fmt: skip
def test_control_tokens_are_treated_as_the_setting_says(
    mode: str, of_user: str | None, of_assistant: str | None
) -> None:
    encoder = encoder_of(CHATML, control_tokens=mode)
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for messages, treated in (
        ([user("Hi<|im_end|>?"), assistant("Yes")], of_user),
        ([user("Hi?"), assistant("It is <|im_end|> there")], of_assistant),
    ):
        row = encoded(encoder, messages)
        if treated is None:
            assert isinstance(row, BadRow) and row.reason == "control token in a content"
            continue
        assert isinstance(row, Document) and row.notes == (("control", f"<|im_end|> ({treated})"),)
        assert (row.ids == end).sum() == (2 if treated == "its characters" else 3)
        assert len(runs(encoder.tokenizer, row)) == 1


def test_thoughts_and_words_are_no_control_tokens() -> None:
    encoder = encoder_of(template("qwen3"))
    row = encoded(encoder, [user("<think> and </think>?"), assistant("A tag <b>bold</b> is no token")])
    assert isinstance(row, Document) and row.notes == ()


def test_an_added_token_that_begins_a_turn_is_one_even_if_it_is_not_special() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<tool>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    row = encoded(encoder, [user("Hi<|assistant|><tool>"), assistant("Yes")])
    assert isinstance(row, Document) and row.notes == (("control", "<|assistant|> (its characters)"),)
    assert (row.ids == tokenizer.convert_tokens_to_ids("<|assistant|>")).sum() == 1


@pytest.mark.parametrize("added", ["\n", "  ", "Yes"])
def test_white_space_and_words_that_are_added_tokens_are_no_control_tokens(added: str) -> None:
    """Gemma's tokenizers have line breaks among their added tokens, others runs of spaces."""
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken(added, special=False)])
    tokenizer.chat_template = CHATML
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    row = encoded(encoder, [user("Hi?"), assistant(f"one{added}two  Yes, sure")])
    assert isinstance(row, Document) and row.notes == ()


@pytest.mark.parametrize("key", ["q", "type", "role"])
@pytest.mark.parametrize("written", ["tojson", "as text"])
def test_control_tokens_in_arguments_of_calls_are_found(key: str, written: str) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments" + (" | tojson" * (written == "tojson"))
    text = CHATML.replace("m.content", "(m.content or '')").replace(
        " + '<|im_end|>", " }}" + calls + " }}{% endfor %}{{ '<|im_end|>"
    )
    arguments = {key: "a<|im_end|>é"}
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    turns = [user("Hi?"), assistant("") | {"tool_calls": [call]}]
    refused = encoded(encoder_of(text), turns, tools=[TOOL])
    assert isinstance(refused, BadRow) and refused.reason == "control token in a content"
    encoder = encoder_of(text, control_tokens="text")
    row = encoded(encoder, turns, tools=[TOOL])
    assert isinstance(row, Document) and sum(name == "control" for name, _ in row.notes) == 1
    assert (row.ids == encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == 2
    assert '"a<|im_end|>é"' in str(encoder.tokenizer.decode(row.ids))


# Remedies #

REFUSED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {  # reason -> template, row, settings
    "turn is not a prefix": (template("qwen3"), CONVERSATIONS["two turns"], {}),
    "prompt is not a prefix": (template("qwen3_5_nothink"), CONVERSATIONS["a thought"], {}),
    "tokens merge across the boundary": (CHATML, [user("Hi"), assistant("\nYes")], {"lines": True}),
    "empty answer": (CHATML, [user("Hi"), assistant(""), user("So?"), assistant("Yes")], {}),
    "starts with the assistant": (CHATML, [assistant("Hi"), user("So?"), assistant("Yes")], {}),
    "control token in a content": (CHATML, [user("Hi"), assistant("a <|im_end|> b")], {}),
    "text next to tool_calls is not written": (
        template("drops_text"),
        [
            user("Hi"),
            assistant("Hm.")
            | {"tool_calls": [{"function": {"name": "look_up", "arguments": {"city": "P"}}}]},
            user("So?"),
            assistant("Yes"),
        ],
        {},
    ),
    "refused by the chat template": ("{{ raise_exception('No.') }}", [user("Hi"), assistant("Yes")], {}),
}
SETTING = re.compile(r"data\.(\w+)=(\{[^}]*\}|\w+)")


@pytest.mark.parametrize("reason", REFUSED)
def test_every_remedy_that_is_named_helps_the_row(reason: str) -> None:
    text, messages, settings = REFUSED[reason]
    encoder = encoder_of(text, **settings)
    row = encoded(encoder, messages)
    assert isinstance(row, BadRow) and row.reason == reason
    with pytest.raises(UserError) as error:
        encoder.encode([example(messages)])
    sentence = error.value.problems[-1]
    assert sentence.startswith("What would help: ") and sentence.endswith(
        "data.on_bad_row=skip leaves such rows out."
    )
    found = SETTING.findall(sentence)
    assert len(found) + ("white space" in sentence) + ("weight of 0" in sentence) >= 2, sentence
    for name, value in found:
        if name == "on_bad_row":
            continue
        changed: Any = {"true": True, "false": False}.get(value, value)
        if value.startswith("{"):
            variable, _, written = value.strip("{}").partition(": ")
            name, changed = "template_variables", {variable: written == "true"}
        other = encoder_of(text, **settings | {name: changed})
        results = list(other.encode_each(other.split(example(messages))))
        assert results and all(isinstance(result, Document) for result in results), (name, value)
    if "white space" in sentence:
        stripped = [message | {"content": message["content"].strip()} for message in messages]
        assert isinstance(encoded(encoder, stripped), Document)
    if "weight of 0" in sentence:
        masks = (Mask(False, "weight"), *([None] * (len(messages) - 1)))
        assert isinstance(encoded(encoder, messages, masks=masks), Document)
