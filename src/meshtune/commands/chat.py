"""`meshtune chat`: talk with a target, turn by turn."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from meshtune.commands.options import (
    AsJson,
    MaxNewTokens,
    Seed,
    TargetWords,
    Temperature,
    TopP,
    show_json,
    stdin_lines,
    target_of,
)
from meshtune.errors import UserError
from meshtune.units import LOADING, notice, printable, working

if TYPE_CHECKING:
    from meshtune.api.chat import Conversation

remark = partial(notice, dim=True)  # apart from the answers

SIGN = "> "
COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    target: TargetWords,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a run, a model or an adapter: turns are kept, answers appear as they are generated.

    A line is a message, from the terminal or from a pipe. /reset forgets the conversation, /exit or Ctrl-D
    ends, Ctrl-C stops an answer. Without a chat template each message is answered separately.
    """
    name, overrides = target_of(target, "name one; what you say is typed, or read from stdin.")
    with working(LOADING["generate"]):
        from meshtune.api.answer import open_answerer
        from meshtune.api.chat import Conversation
        from meshtune.train.generate import Sampling

        conversation = Conversation(
            open_answerer(name, overrides), system=system, max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_p, seed),
        )  # fmt: skip
    if not conversation.answerer.templated:
        remark(
            "The model has no chat template: each message is answered separately, without those before it. "
            "If it was trained with one, name it: data.chat_template=NAME."
        )
    interactive = sys.stdin.isatty()
    if interactive:
        remark(COMMANDS)
    good = talk(conversation, typed_lines() if interactive else stdin_lines(), as_json=as_json)
    if as_json:
        show_json({"messages": conversation.messages})
    if not (good or interactive):
        raise typer.Exit(UserError.exit_code)


def talk(conversation: "Conversation", lines: Iterator[str], *, as_json: bool) -> bool:
    """Answer each line until /exit or the last one; False if the model could not take one of them.

    as_json: answers go to stderr, since stdout is for the document.
    """
    good, screen = True, Screen(sys.stderr if as_json else sys.stdout)
    for line in lines:
        word = line.rstrip()
        if word == "/exit":
            break
        if word == "/reset":
            conversation.reset()
            remark("The conversation is forgotten.")
        elif word.startswith("/") and word[1:].isalpha():
            remark(f"There is no command {word}. {COMMANDS} A message may begin with a space and a slash.")
        elif word.strip():
            try:
                for sentence in conversation.ask(line, screen.write):
                    screen.end_answer()
                    remark(sentence)
                screen.end_answer()
            except UserError as error:
                good = False
                for sentence in error.problems:
                    remark(sentence)
    return good


@dataclass
class Screen:
    """Answers as they come, each ended by a line break."""

    out: TextIO
    in_answer: bool = False  # True: the line break is missing

    def write(self, text: str) -> None:
        """Print a part of an answer at once."""
        self.out.write(printable(text) if self.out.isatty() else text)
        self.out.flush()
        self.in_answer = True

    def end_answer(self) -> None:
        """Print the line break behind an answer, if one has begun."""
        if self.in_answer:
            print(file=self.out, flush=True)
        self.in_answer = False


def typed_lines() -> Iterator[str]:
    """Yield the lines typed at the prompt sign, up to Ctrl-D. Ctrl-C empties the line."""
    import readline  # noqa: F401  # input() then knows the arrow keys and the lines before

    while True:
        try:
            yield read_line()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            remark("/exit or Ctrl-D ends.")


def read_line() -> str:
    """A line typed behind the prompt sign, which does not go to stdout where that is a file."""
    if sys.stdout.isatty():
        return input(SIGN)
    print(SIGN, end="", file=sys.stderr, flush=True)
    if line := sys.stdin.readline():
        return line.rstrip("\n")
    raise EOFError
