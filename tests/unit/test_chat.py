"""`meshtune chat`: turns, streaming, what stops an answer, a full context; without a terminal."""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from golden import refuses, says
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune.api.answer import Answerer, open_answerer
from meshtune.api.chat import Conversation
from meshtune.commands.chat import chat, talk, typed_lines
from meshtune.data.example import Example, Origin
from meshtune.data.prompts import prompts_of
from meshtune.errors import UserError
from meshtune.train.generate import Sampling, TextStream

CHATML = "data.chat_template=chatml"


@pytest.fixture(scope="module")
def chatty(tiny: Path) -> Answerer:
    """The tiny model, of a context of 512 tokens, with a chat template."""
    return open_answerer(str(tiny / "model"), [CHATML])


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Answerer:
    return open_answerer(str(tiny / "model"))


@pytest.fixture
def begin(chatty: Answerer) -> Callable[..., Conversation]:
    return lambda **options: Conversation(chatty, **{"max_new_tokens": 8, **options})


def ask(conversation: Conversation, text: str) -> tuple[list[str], list[str]]:
    """(The parts in which the answer was passed on, the sentences about it)."""
    parts: list[str] = []
    remarks = list(conversation.ask(text, parts.append))
    return parts, remarks


def test_each_answer_follows_all_turns(begin, chatty):
    conversation = begin(system="Be brief")
    ask(conversation, "Say red")
    ask(conversation, "Say blue")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    *asked, last = conversation.messages
    whole = chatty.prompt_ids(Example(Origin("", 1), messages=tuple(asked)))
    assert chatty.answers([whole], max_new_tokens=8) == [last["content"]]
    text = chatty.opened.tokenizer.decode(whole)
    assert all(message["content"] in text for message in asked if "\ufffd" not in message["content"])


def test_text_is_passed_on_while_tokens_are_generated(begin):
    conversation = begin(max_new_tokens=20)
    parts, _ = ask(conversation, "Say seven")
    assert len(parts) > 3
    assert "".join(parts) == conversation.messages[-1]["content"]


def test_a_character_is_passed_on_when_its_last_token_is_there(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    parts: list[str] = []
    stream = TextStream(parts.append)
    stream.begin(tokenizer, stop_ids=[2])
    ids = tokenizer("aé", add_special_tokens=False)["input_ids"]
    assert len(ids) > 2  # é has several tokens
    for token in [[9, 9], *ids, 2]:
        stream.put(torch.tensor(token))
    stream.end()
    assert parts == ["a", "é"]


def test_ctrl_c_keeps_what_was_said_and_the_conversation_goes_on(begin):
    conversation = begin(max_new_tokens=30)

    def interrupt(text: str) -> None:
        parts.append(text)
        if len(parts) == 3:
            raise KeyboardInterrupt

    parts: list[str] = []
    assert list(conversation.ask("Say red", interrupt)) == ["Stopped."]
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(parts)}
    ask(conversation, "Say blue")
    assert len(conversation.messages) == 4


def test_ctrl_c_in_a_finalizer_where_python_drops_exceptions_stops_the_answer(begin):
    class Pressed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def write(text: str) -> None:
        parts.append(text)
        if len(parts) == 3:
            Pressed()

    parts: list[str] = []
    assert list(begin(max_new_tokens=30).ask("Say red", write)) == ["Stopped."]
    assert len(parts) == 3


@pytest.mark.ci
def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(begin, chatty):
    conversation = begin()
    for _ in range(5):
        _, remarks = ask(conversation, "please " * 90)
    says(remarks[0])
    assert 3 < len(conversation.messages) < 10
    with refuses(UserError):
        ask(conversation, "please " * 900)
    before = conversation.messages
    assert before[-1]["role"] == "assistant"  # nothing is lost by a message that is too long


@pytest.mark.ci
def test_an_answer_that_was_cut_says_by_what(begin):
    says(ask(begin(), "Say red")[1])
    long = begin(max_new_tokens=600)
    says(ask(long, "please " * 200)[1])


def test_sampling_is_repeatable_and_turns_draw_differently(begin):
    sampling = Sampling(temperature=2.0, top_p=0.9, seed=5)
    first, second = begin(sampling=sampling), begin(sampling=sampling)
    for conversation in (first, second):
        ask(conversation, "Say red")
    assert first.messages == second.messages
    other = begin(sampling=Sampling(temperature=2.0, top_p=0.9, seed=6))
    ask(other, "Say red")
    assert other.messages != first.messages


def test_without_a_template_each_message_is_answered_by_itself(plain):
    conversation = Conversation(plain, max_new_tokens=8)
    ask(conversation, "Say blue")
    parts, _ = ask(conversation, "Say red")
    (alone,) = plain.answers([plain.prompt_ids(prompts_of(["Say red"])[0])], max_new_tokens=8)
    assert "".join(parts) == alone
    with refuses(UserError):
        Conversation(plain, system="Be brief")


def test_answers_are_those_of_transformers(plain, tiny):
    """Compare with transformers' own greedy generation."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny / "model")
    ids = plain.prompt_ids(prompts_of(["Say red"])[0])
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    text = plain.opened.tokenizer.decode(expected, skip_special_tokens=True)
    assert plain.answers([ids], max_new_tokens=12) == [text]


# The command #


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_is_answered_line_by_line(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say red\n\n/reset\nSay blue\n/exit\nSay green\n"))
    chat([str(tiny / "model"), CHATML], max_new_tokens=4, as_json=True)
    out, err = capsys.readouterr()
    assert [m["content"] for m in json.loads(out)["messages"]][:1] == ["Say blue"]
    assert len(json.loads(out)["messages"]) == 2
    assert "The conversation is forgotten." in err
    assert ">" not in out


def test_a_line_that_the_model_can_not_take_is_named_and_the_others_answered(begin, capsys):
    conversation = begin()
    assert not talk(conversation, iter(["please " * 900, "a\udcff", "Say red"]), as_json=False)
    out, err = capsys.readouterr()
    says(err)
    assert out.rstrip("\n") == conversation.messages[-1]["content"].rstrip("\n")


def test_an_unknown_command_is_no_message(begin, capsys):
    conversation = begin()
    assert talk(conversation, iter(["/quit"]), as_json=False)
    says(capsys.readouterr().err)
    assert conversation.messages == []
    talk(conversation, iter([" /quit", "/etc/hosts?"]), as_json=False)
    assert [m["content"] for m in conversation.messages[::2]] == [" /quit", "/etc/hosts?"]


def test_the_prompt_sign_is_for_terminals_and_ctrl_c_does_not_end(monkeypatch, capsys):
    def typed() -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    lines = typed()

    def read(sign: str) -> str:
        assert sign == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert list(typed_lines()) == ["one"]
    assert "/exit or Ctrl-D ends." in capsys.readouterr().err


def test_the_prompt_sign_is_not_in_a_file_of_answers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
    assert list(typed_lines()) == ["one"]
    out, err = capsys.readouterr()
    assert (out, err.count("> ")) == ("", 2)


def test_a_pipe_with_a_line_that_was_not_answered_ends_with_2(tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("please " * 900))
    with pytest.raises(typer.Exit) as ended:
        chat([str(tiny / "model"), CHATML], max_new_tokens=2)
    assert ended.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.5},
        {"seed": 1},
        {"temperature": 1.0, "top_p": 1.5},
        {"temperature": 1.0, "seed": -1},
        {"temperature": 1e-320},
    ],
)
def test_sampling_that_would_not_happen_is_refused(values):
    with refuses(UserError):
        Sampling(**values)
