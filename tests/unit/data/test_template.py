"""The label mask, token by token. The reference is a conversation written out by hand, cut into pieces that
say which are the assistant's; a token is expected to be labelled where its offsets lie in such a piece."""

import copy

import numpy as np
import pytest
from chat_templates import template
from golden import refuses
from tokenizers import AddedToken, Tokenizer, models, processors

from meshtune.data.encode import Encoder
from meshtune.data.example import Example, Origin, Tally
from meshtune.data.recipe import Recipe
from meshtune.data.template import apply_template, built_in_templates
from meshtune.errors import UserError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPECIAL += ("<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")

HERE = Origin("rows.jsonl", 7)
SYSTEM = {"role": "system", "content": "You are a kind helper."}
TURNS = (
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four."},
)
A, B = "I am fine, thank you.", "It is four."

# template -> (with a system message?, pieces); every second piece is the assistant's words and end marker
WRITTEN = {
    "llama3": (
        True,
        "<s><|start_header_id|>system<|end_header_id|>\n\nYou are a kind helper.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow are you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        A + "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is two plus two?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        B + "<|eot_id|>",
        "",
    ),
    "qwen2_5": (
        True,
        "<|im_start|>system\nYou are a kind helper.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n"
        "<|im_start|>assistant\n",
        A + "<|im_end|>",
        "\n<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n",
        B + "<|im_end|>",
        "\n",
    ),
    "mistral": (
        True,
        "<s>[INST] You are a kind helper.\n\nHow are you? [/INST]",
        " " + A + "</s>",
        "[INST] What is two plus two? [/INST]",
        " " + B + "</s>",
        "",
    ),
    "gemma": (
        False,
        "<s><start_of_turn>user\nHow are you?<end_of_turn>\n<start_of_turn>model\n",
        A + "<end_of_turn>",
        "\n<start_of_turn>user\nWhat is two plus two?<end_of_turn>\n<start_of_turn>model\n",
        B + "<end_of_turn>",
        "\n",
    ),
    "phi3": (
        True,
        "<|system|>\nYou are a kind helper.<|end|>\n<|user|>\nHow are you?<|end|>\n<|assistant|>\n",
        A + "<|end|>",
        "\n<|user|>\nWhat is two plus two?<|end|>\n<|assistant|>\n",
        B + "<|end|>",
        "\n</s>",
    ),
    "zephyr": (
        True,
        "<|system|>\nYou are a kind helper.</s>\n<|user|>\nHow are you?</s>\n<|assistant|>\n",
        A + "</s>",
        "\n<|user|>\nWhat is two plus two?</s>\n<|assistant|>\n",
        B + "</s>",
        "\n",
    ),
}
# zephyr's roles are plain text in its tokenizer, so nothing but eos splits the text there
SPECIAL_OF = {"zephyr": (), "mistral": ()}


def expected(tokenizer, pieces, labelled_pieces):
    """ids of the pieces' text, and which lie inside the pieces numbered."""
    encoding = tokenizer("".join(pieces), add_special_tokens=False, return_offsets_mapping=True)
    ends = np.cumsum([len(piece) for piece in pieces])
    inside = [
        any(ends[n] - len(pieces[n]) <= start and stop <= ends[n] for n in labelled_pieces)
        for start, stop in encoding["offset_mapping"]
    ]
    return encoding["input_ids"], inside


def encode(tokenizer, messages, train_on="assistant", chat_template=None, **keywords):
    encoder = Encoder(tokenizer, train_on=train_on, chat_template=chat_template, **keywords)
    return encoder.encode([Example(HERE, messages=tuple(messages))])[0]


def own(tokenizer_of, name):
    tokenizer = tokenizer_of(*SPECIAL_OF.get(name, SPECIAL))
    tokenizer.chat_template = template(name)
    return tokenizer


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("train_on", "pieces"), [("assistant", (1, 3)), ("completion", (3,))])
def test_labels_are_the_assistants_tokens_and_end_markers(tokenizer_of, name, train_on, pieces):
    tokenizer = own(tokenizer_of, name)
    system, *written = WRITTEN[name]
    document = encode(tokenizer, (SYSTEM, *TURNS) if system else TURNS, train_on)
    ids, inside = expected(tokenizer, written, pieces)
    assert document.ids.tolist() == ids
    assert document.labelled.tolist() == inside
    assert document.ids.dtype == np.int32
    assert document.labelled.dtype == bool


@pytest.mark.parametrize("name", WRITTEN)
def test_train_on_all_labels_everything_but_the_first_token(tokenizer_of, name):
    document = encode(own(tokenizer_of, name), TURNS, "all")
    assert document.labelled.tolist() == [False] + [True] * (len(document.ids) - 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_generation_starts_where_the_labels_start_and_stops_at_the_last(tokenizer_of, name):
    tokenizer = own(tokenizer_of, name)
    example = Example(HERE, messages=TURNS)
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    document = encoder.encode([example])[0]
    start = int(np.flatnonzero(document.labelled)[0])
    assert encoder.prompt_ids(example) == document.ids[:start].tolist()
    assert document.ids[document.labelled][-1] == encoder.stop_ids[0]


def test_qwen3_labels_the_empty_thinking_that_the_model_must_write(tokenizer_of):
    tokenizer = own(tokenizer_of, "qwen3")
    document = encode(tokenizer, TURNS[:2])
    assert tokenizer.decode(document.ids[document.labelled]) == f"<think>\n\n</think>\n\n{A}<|im_end|>"


def test_qwen3_labels_given_thinking_in_the_last_turn(tokenizer_of):
    tokenizer = own(tokenizer_of, "qwen3")
    thinking = {"role": "assistant", "content": f"<think>\nTwo and two.\n</think>\n\n{B}"}
    document = encode(tokenizer, (*TURNS[:3], thinking), "completion")
    assert (
        tokenizer.decode(document.ids[document.labelled])
        == f"<think>\nTwo and two.\n</think>\n\n{B}<|im_end|>"
    )


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(tokenizer_of):
    with refuses(UserError):
        encode(own(tokenizer_of, "qwen3"), TURNS)


def test_a_generation_prompt_that_no_answer_starts_with_is_refused(tokenizer_of):
    tokenizer = tokenizer_of(*SPECIAL)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with refuses(UserError):
        encode(tokenizer, TURNS)


def test_a_merge_across_the_boundary_is_refused(tokenizer_of):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with refuses(UserError):  # ": I" is ":" and " I", so the prompt's " " is lost
        encode(tokenizer, TURNS)


def test_rows_that_cannot_be_exact_are_counted_when_skipped(tokenizer_of):
    encoder = Encoder(own(tokenizer_of, "qwen3"), train_on="assistant", chat_template=None, on_bad_row="skip")
    recipe, tally = Recipe((), encoder, seq_len=999), Tally()
    rows = [Example(HERE, messages=TURNS), Example(HERE, messages=TURNS[:2])]
    assert len(recipe.usable(rows, tally)) == 1
    assert tally.bad_rows == {"turn is not a prefix": 1}


def test_ten_rows_are_named_at_once_and_all_are_counted(tokenizer_of):
    encoder = Encoder(own(tokenizer_of, "gemma"), train_on="assistant", chat_template=None)
    rows = [Example(Origin("rows.jsonl", line), messages=(SYSTEM, *TURNS)) for line in range(1, 15)]
    with refuses(UserError) as caught:
        encoder.encode([*rows, Example(HERE, messages=TURNS)])
    assert len(caught.value.problems) == 12


def test_an_assistant_turn_that_the_template_leaves_out_is_refused(tokenizer_of):
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add"}}],
        "content": "",
    }
    with refuses(UserError):
        encode(own(tokenizer_of, "phi3"), (TURNS[0], call))


def test_tool_calls_and_tools_are_written_as_the_template_wants(tokenizer_of):
    tokenizer = own(tokenizer_of, "qwen2_5")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = (TURNS[2], {"role": "assistant", "content": "", "tool_calls": [call]})
    tools = [{"type": "function", "function": {"name": "add"}}]
    encoder = Encoder(tokenizer, train_on="assistant", chat_template=None)
    document = encoder.encode([Example(HERE, messages=messages, tools=tools)])[0]
    labelled = tokenizer.decode(document.ids[document.labelled])
    assert labelled.endswith('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>')
    assert '{"type": "function", "function": {"name": "add"}}' in tokenizer.decode(document.ids)


def test_generation_markers_do_not_change_the_labels(tokenizer_of):
    tokenizer = tokenizer_of(*SPECIAL)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    document = encode(tokenizer, TURNS)
    reference = tokenizer.apply_chat_template(
        list(TURNS), return_dict=True, return_assistant_tokens_mask=True
    )
    assert document.ids.tolist() == reference["input_ids"]
    assert document.labelled.tolist() == [bool(bit) for bit in reference["assistant_masks"]]


def test_what_follows_the_last_answer_is_left_out(tokenizer_of):
    tokenizer = own(tokenizer_of, "llama3")
    assert encode(tokenizer, TURNS[:3]).ids.tolist() == encode(tokenizer, TURNS[:2]).ids.tolist()


@pytest.mark.parametrize("messages", [TURNS[:1], TURNS[1:]])
def test_conversations_without_anything_to_answer_are_refused(tokenizer_of, messages):
    with refuses(UserError):
        encode(own(tokenizer_of, "llama3"), messages)


def test_prompt_and_completion_are_a_conversation_under_a_template(tokenizer_of):
    tokenizer = own(tokenizer_of, "phi3")
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None)
    example = Example(HERE, prompt="How are you?", completion=A)
    document, same = encoder.encode([example, Example(HERE, messages=TURNS[:2])])
    assert document.ids.tolist() == same.ids.tolist()
    assert document.labelled.tolist() == same.labelled.tolist()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_prompt_and_completion_are_tokenised_apart(tokenizer_of, adds_bos):
    tokenizer = tokenizer_of()
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    encoder = Encoder(tokenizer, train_on="completion", chat_template=None, separator="\n")
    example = Example(HERE, prompt="How are you?", completion="\nfine")
    document = encoder.encode([example])[0]
    prompt = [0] * adds_bos + tokenizer("How are you?\n", add_special_tokens=False)["input_ids"]
    answer = [*tokenizer("\nfine", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert document.ids.tolist() == prompt + answer
    assert document.labelled.tolist() == [False] * len(prompt) + [True] * len(answer)
    assert encoder.prompt_ids(example) == prompt
    assert encoder.stop_ids == (tokenizer.eos_token_id,)


def test_text_is_labelled_from_its_second_token_to_its_end(tokenizer_of):
    tokenizer = tokenizer_of()
    document = Encoder(tokenizer, train_on="completion", chat_template=None).encode([Example(HERE, text=A)])[
        0
    ]
    assert tokenizer.decode(document.ids) == A + "</s>"
    assert document.labelled.tolist() == [False] + [True] * (len(document.ids) - 1)


def test_none_keeps_an_existing_template_out(tokenizer_of):
    tokenizer = own(tokenizer_of, "llama3")
    encoder = Encoder(tokenizer, train_on="completion", chat_template="none")
    document = encoder.encode([Example(HERE, prompt="Hello", completion="you")])[0]
    assert tokenizer.decode(document.ids) == "Hello\nyou</s>"
    with refuses(UserError):
        encoder.encode([Example(HERE, messages=TURNS)])


@pytest.mark.parametrize("name", built_in_templates())
def test_built_in_templates_label_the_answers_and_stop_there(tokenizer_of, name):
    tokenizer = tokenizer_of()
    before = len(tokenizer)
    encoder = Encoder(tokenizer, train_on="assistant", chat_template=name)
    document = encoder.encode([Example(HERE, messages=(SYSTEM, *TURNS))])[0]
    end = tokenizer.eos_token
    space = " " if name == "mistral" else ""
    assert tokenizer.decode(document.ids[document.labelled]) == f"{space}{A}{end}{space}{B}{end}"
    assert encoder.stop_ids == (tokenizer.eos_token_id,)
    assert len(tokenizer) - before == len(encoder.added)
    assert "You are a kind helper." in tokenizer.decode(document.ids)
    assert apply_template(tokenizer, name) == []


def test_chatml_adds_its_tokens_and_ends_answers_with_im_end(tokenizer_of):
    tokenizer = tokenizer_of()
    assert apply_template(tokenizer, "chatml") == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer("<|im_end|>")["input_ids"]) == 1
    by_text = tokenizer_of()  # the setting may hold the template itself
    assert apply_template(by_text, tokenizer.chat_template) == ["<|im_start|>", "<|im_end|>"]
    assert by_text.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", built_in_templates())
def test_built_in_templates_refuse_tools_rather_than_lose_them(tokenizer_of, name):
    encoder = Encoder(tokenizer_of(), train_on="assistant", chat_template=name)
    with refuses(UserError):
        encoder.encode([Example(HERE, messages=TURNS, tools=[{"type": "function"}])])


def test_a_file_is_a_template(tokenizer_of, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(template("llama3"))
    tokenizer = tokenizer_of(*SPECIAL)
    document = encode(tokenizer, TURNS, chat_template=str(file))
    assert tokenizer.decode(document.ids[document.labelled]) == f"{A}<|eot_id|>{B}<|eot_id|>"


def test_an_unknown_template_names_the_built_in_ones(tokenizer_of):
    with refuses(UserError):
        Encoder(tokenizer_of(), train_on="assistant", chat_template="chatlm")


def test_a_template_runs_in_a_sandbox(tokenizer_of, tmp_path):
    canary = tmp_path / "canary"
    tokenizer = tokenizer_of(*SPECIAL)
    tokenizer.chat_template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch "
        f"{canary}') }}}}"
    )
    with refuses(UserError):
        encode(tokenizer, TURNS)
    assert not canary.exists()


def test_an_end_marker_that_swallows_the_line_break_is_exact(tokenizer_of):
    """Phi-3's own tokens strip the white space to their right."""
    tokenizer = tokenizer_of()
    tokens = [AddedToken(token, rstrip=True, special=True) for token in SPECIAL if "|" in token]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template("phi3")
    document = encode(tokenizer, TURNS)
    assert tokenizer.decode(document.ids[document.labelled]) == f"{A}<|end|>{B}<|end|>"


def test_a_python_tokenizer_gives_the_same_documents(tokenizer_of, monkeypatch):
    tokenizer = own(tokenizer_of, "qwen2_5")
    example = Example(HERE, messages=(SYSTEM, *TURNS))
    fast = Encoder(tokenizer, train_on="assistant", chat_template=None)
    slow = Encoder(tokenizer, train_on="assistant", chat_template=None)
    slow._tokens.backend = None  # what a tokenizer without a Rust part leaves
    (one,), (other,) = fast.encode([example]), slow.encode([example])
    assert one.ids.tolist() == other.ids.tolist()
    assert one.labelled.tolist() == other.labelled.tolist()


def test_the_fingerprint_changes_with_whatever_changes_a_document(tokenizer_of):
    def of(train_on="completion", chat_template=None, separator="\n", special=()):
        tokenizer = tokenizer_of(*special)
        return Encoder(
            tokenizer, train_on=train_on, chat_template=chat_template, separator=separator
        ).fingerprint

    variants = [of(), of("all"), of(chat_template="chatml"), of(separator=" "), of(special=("<x>",))]
    assert len(set(variants)) == len(variants)
    assert of() == of()


def test_the_fingerprint_has_the_template_that_is_in_force(tokenizer_of):
    one = Encoder(tokenizer_of(), train_on="completion", chat_template="chatml").tokenizer
    other = copy.deepcopy(one)
    other.chat_template += "{# changed #}"

    def of(tokenizer, chat_template):
        return Encoder(tokenizer, train_on="completion", chat_template=chat_template).fingerprint

    assert of(one, None) != of(other, None)
    assert of(one, "none") == of(other, "none")


def test_a_tokenizer_without_eos_is_refused_with_a_way_out():
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with refuses(UserError):
        Encoder(bare, train_on="completion", chat_template=None)


HEADERS = (
    "{# special tokens: <|a|> <|b|>\n   an answer ends with: <|b|> #}",
    "{#- special tokens: <|a|> <|b|>\n   an answer ends with: <|b|> -#}",
    "\n{#- Ours.\n  - Special tokens: <|a|> <|b|>\n  - An answer ends with: <|b|>\n-#}\n",
    "{#+ an answer ends with: <|b|>\nspecial tokens: <|a|> <|b|> +#}",
    "\ufeff{#- Copyright -#}\r\n{#- special tokens: <|a|>, <|b|>\r\nan answer ends with: <|b|>\r\n-#}",
)
BODY = "{%- for m in messages %}<|a|>{{ m.role }}\n{{ m.content }}<|b|>{% endfor %}"


@pytest.mark.parametrize("header", HEADERS)
def test_the_opening_comment_of_a_template_may_trim_white_space(header, tokenizer_of, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(header + BODY)
    tokenizer = tokenizer_of()
    assert apply_template(tokenizer, str(file)) == ["<|a|>", "<|b|>"]
    assert tokenizer.eos_token == "<|b|>" and not str(tokenizer.chat_template).startswith("\ufeff")


def test_an_end_token_that_is_not_in_the_vocabulary_is_refused(tokenizer_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text("{#- an answer ends with: <|stop|> -#}" + BODY)
    with refuses(UserError):
        Encoder(tokenizer_of(), train_on="completion", chat_template="own.jinja")
    for unknown in (None, "<unk>"):
        tokenizer = tokenizer_of(unk_token=unknown)
        tokenizer._special_tokens_map["eos_token"] = "<|stop|>"
        with refuses(UserError):
            Encoder(tokenizer, train_on="completion", chat_template=None)
