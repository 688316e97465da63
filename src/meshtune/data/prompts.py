"""Prompts to answer: texts, conversations, and files of either.

"2 + 2?"                      ─┐
[{"role": …, "content": …}]   ─┼─> Example of a prompt, or of a conversation without the answer asked for
a row {prompt} | {messages}   ─┘
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from meshtune.data.example import SHOWN, BadRow, Example, Origin, Source, checked_text, is_absent
from meshtune.data.files import files
from meshtune.data.formats import FORMATS, Columns, instruction, unused_columns
from meshtune.data.readers import raw_rows
from meshtune.errors import UserError, argument, type_name

Prompt = str | Sequence[dict]  # a text, or messages {role, content}
FORMS = ("messages", "conversations", "prompt", "instruction", "text")  # columns with the prompt: one a row
OTHERS = ("input", "completion", "output", "system", "tools")  # columns that are read next to it


class Given(Origin):
    """The place of a prompt that is in no file: its number."""

    def __str__(self) -> str:
        return f"{self.file} {self.line}"


def prompts_of(prompts: Iterable[Prompt]) -> list[Example]:
    """Examples of texts and conversations. Raises UserError with each that can't be answered."""
    rows = (
        (Given("Prompt", number), {"prompt" if isinstance(prompt, str) else "messages": prompt})
        for number, prompt in enumerate(prompts, 1)
    )
    return _examples(rows, Source(""))


def read_prompts(source: Source) -> tuple[list[Example], list[str]]:
    """(Examples of the first `max_samples` rows of a file, or of all, the columns that are not used).

    A row has `messages` (or `conversations`), a `prompt` or an Alpaca `instruction`, with `system` and
    `tools` where it needs them; a line of a .txt file is a prompt. What is expected (`completion`, `output`,
    a last message of the assistant) stays in the example and is not given to the model. Raises UserError with
    the bad rows, or if there are none.
    """
    unused: dict[str, None] = {}
    rows = islice(raw_rows(source, files(source), False, 0), source.max_samples)
    examples = _examples(rows, source, unused)
    if not examples:
        raise UserError(f"{source.path} has no prompts: it is empty.")
    return examples, [*unused]


def _examples(
    rows: Iterable[tuple[Origin, Any]], source: Source, unused: dict[str, None] | None = None
) -> list[Example]:
    """Examples of all rows. Raises UserError with the bad ones. unused: gets columns that are not read."""
    names, roles = dict(source.columns), dict(source.roles)
    examples, problems = [], []
    for origin, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, dict):
                raise BadRow("wrong type", f"the row is {type_name(row)}, expected an object")
            columns = Columns(row, names, roles)
            examples.append(_example(origin, columns))
            if unused is not None:
                read = {names.get(name, name) for name in (*FORMS, *OTHERS)}
                unused |= dict.fromkeys(unused_columns(row, read))
        except BadRow as bad:
            problems.append(f"{origin}: {bad}.")
    if problems:
        raise UserError(several(problems))
    return examples


def several(problems: Sequence[str]) -> list[str]:
    """The first SHOWN sentences, and one with the number of the others."""
    rest = len(problems) - SHOWN
    return [*problems[:SHOWN], *([f"{rest:,} more prompts can't be answered."] if rest > 0 else [])]


def _example(origin: Origin, columns: Columns) -> Example:
    """The prompt or conversation of a row. Raises BadRow where there is none, or two."""
    forms = [form for form in FORMS if columns.get(form) is not None]
    if len(forms) != 1:
        seen = ", ".join(map(str, columns.row))
        what = (
            f"both {forms[0]} and {forms[1]}" if forms else f"neither prompt nor messages (there are {seen})"
        )
        mapping = argument("data.columns", {"prompt": "question"})
        remedy = "keep one" if forms else f"map their names, such as {mapping}"
        if not forms and {*FORMS} & columns.names.keys() and {*FORMS} & columns.row.keys():
            remedy = "data.columns={} clears the mapping of the run's settings"
        if {"role", "content"} <= columns.row.keys():
            remedy = (
                "a row holds a conversation: write {messages: [all of them]} in a line, or use --messages"
            )
        raise BadRow("no prompt", f"the row has {what}; {remedy}")
    (form,) = forms
    if form == "prompt" and isinstance(columns.get(form), list):  # TRL's conversational prompt
        columns = replace(columns, row={**columns.row, "messages": columns.get(form)})
        form = "messages"
    if form in ("messages", "conversations"):
        example = FORMATS["messages" if form == "messages" else "sharegpt"].example(origin, columns)
        if not question(example):
            raise BadRow("no question", "the only message is the assistant's, so there is nothing to answer")
        return replace(example, masks=None)
    text = checked_text(instruction(columns) if form == "instruction" else columns.text(form))
    answer = columns.get("output" if form == "instruction" else "completion")
    answer = answer if isinstance(answer, str) else ""
    if is_absent(columns.get("system")) and is_absent(columns.get("tools")):
        return Example(origin, prompt=text, completion=answer)
    turns = [{"role": "user", "content": text}]
    turns += [{"role": "assistant", "content": answer}] if answer.strip() else []
    return FORMATS["messages"].example(origin, replace(columns, row={**columns.row, "messages": turns}))


def question(example: Example) -> tuple[dict, ...]:
    """The messages of a conversation that the answer follows: without a last one of the assistant."""
    messages = example.messages or ()
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def expected(example: Example) -> str:
    """The answer that a row has already; "" without one."""
    if not example.messages:
        return example.completion or ""
    rest = example.messages[len(question(example)) :]
    content = rest[0].get("content") if rest else ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
