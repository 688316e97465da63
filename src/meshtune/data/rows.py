"""Raw rows to `Example`s, with every bad row named.

    raw row ──> Columns ──────> FORMATS[name].example ──> Example(messages | prompt + completion | text)
                our names         │
                                  └─ missing column, wrong type, empty answer, unknown role: BadRow

A new format is one line in `FORMATS`, a new check of a message one function that `_message` calls.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtune.data.example import SHOWN, BadRow, Dropped, Example, OnBadRow, Origin, Source, bad_rows_error
from meshtune.errors import UserError

RawRow = tuple[Origin, Any]  # the value: a dict of columns, a BadRow from the reader, or any other JSON value

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",  # its value is the JSON of one call or of a list of them
}  # fmt: skip
TYPES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}
LOOK_AHEAD = 10_000  # rows read after the first bad one, so that one error names more of them


def examples(
    raw_rows: Iterable[RawRow],
    source: Source,
    *,
    on_bad_row: OnBadRow,
    needs_answer: bool = True,
    dropped: Dropped | None = None,
) -> Iterator[Example]:
    """Yield the example of each raw row of `source`, in order.

    The format is that of `detect`, by the first row that is an object; raises UserError as that does.
    `needs_answer` makes a conversation without an assistant turn a bad row (false for train_on=all).
    `dropped` counts the rows that `on_bad_row="skip"` leaves out. With `on_bad_row="error"` nothing more is
    yielded after the first bad row: up to LOOK_AHEAD more rows are checked, and one UserError describes the
    first SHOWN bad ones (file, line, reason) and counts all of them.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"data.on_bad_row={on_bad_row} is unknown; it is error or skip.")
    names = dict(source.columns)
    format_name: str | None = None
    problems: list[str] = []
    total = rows = first_bad = 0
    for origin, row in raw_rows:
        rows += 1
        if format_name is None and isinstance(row, dict):  # once per source, on its first row with columns
            format_name = detect(source, [str(column) for column in row])
        try:
            # Without a format yet, the row has no columns, and so it is bad whatever the format is.
            example = _example(origin, row, format_name or "text", names, needs_answer)
        except BadRow as bad:
            if on_bad_row == "skip":
                if dropped is not None:
                    dropped.counts[bad.reason] += 1
                continue
            total += 1
            first_bad = first_bad or rows
            if len(problems) < SHOWN:
                problems.append(f"{origin}: {bad}.")
        else:
            if not total:
                yield example
        if total and rows - first_bad >= LOOK_AHEAD:
            break
    if total:
        raise bad_rows_error(problems, total, rows)


def _example(
    origin: Origin, row: Any, format_name: str, names: Mapping[str, str], needs_answer: bool
) -> Example:
    """Convert the value of one raw row. Raises BadRow, or `row` itself if it is one.

    format_name: key of FORMATS. names: our column names -> theirs. needs_answer: see `examples`.
    """
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("wrong type", f"the row is {_type(row)}, expected an object")
    example = FORMATS[format_name].example(origin, Columns(row, names))
    if needs_answer and example.messages is not None and last_answer(example.messages) is None:
        raise no_answer(example.messages)
    return example


def last_answer(messages: Sequence[dict]) -> int | None:
    """Index of the last assistant turn, None where there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)


def no_answer(messages: Sequence[dict]) -> BadRow:
    """Reason for refusing a conversation without an assistant turn."""
    return BadRow("no assistant turn", f"none of the {len(messages)} messages is the assistant's")


# --- columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns of one row, looked up by our names; the methods raise BadRow for values of a wrong type."""

    row: Mapping[str, Any]
    names: Mapping[str, str]  # our name -> theirs, where `data.columns` maps it

    def get(self, name: str) -> Any:
        """The value as it was read, None where the column is missing."""
        return self.row.get(self.names.get(name, name))

    def text(self, name: str, *, empty: str | None = None) -> str:
        """The text of a column. Raises BadRow if it is missing, null or no text.

        empty: the reason with which blank text is refused; None allows it.
        """
        value, theirs = self.get(name), self.names.get(name, name)
        if value is None:
            if theirs in self.row:
                raise BadRow(f"null in column {theirs}", f"column {theirs} is null")
            raise self._missing(theirs)
        if not isinstance(value, str):
            shown = json.dumps(value, default=str)[:40]
            raise BadRow("wrong type", f"column {theirs} is {_type(value)} ({shown}), expected text")
        if empty and not value.strip():
            raise BadRow(empty, f"column {theirs} is empty")
        return value

    def items(self, name: str) -> list:
        """The list in a column, or the list whose JSON text it holds (csv and some parquet files)."""
        value, theirs = self.get(name), self.names.get(name, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise BadRow(
                    "wrong type", f"column {theirs} is text that is not JSON, expected a list"
                ) from None
        if value is None:
            raise self._missing(theirs)
        if not isinstance(value, list):
            raise BadRow("wrong type", f"column {theirs} is {_type(value)}, expected a list")
        return value

    def _missing(self, theirs: str) -> BadRow:
        columns = ", ".join(map(str, self.row))
        return BadRow(f"no column {theirs}", f"column {theirs} is missing (there are {columns})")


def _type(value: Any) -> str:
    """Name the JSON type of a value, with its article."""
    return "null" if value is None else TYPES.get(type(value), f"a {type(value).__name__}")


# --- messages -----------------------------------------------------------------------------------------------


def _message(value: Any, number: int) -> dict:
    """Return a message as a dict with `role` and the other keys of `value` that are not null.

    ShareGPT's keys are renamed. Beside tool calls `content` may be missing. Raises BadRow for wrong types,
    unknown roles and an empty answer. number: its place in the conversation, from 1, for errors.
    """
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"message {number} is {_type(value)}, expected an object")
    if "from" in value and "role" not in value:
        message = _from_sharegpt(value, number)
    else:
        message = {key: inner for key, inner in value.items() if inner is not None}
        _check_role(message, number)
    _check_tool_calls(message, number)
    _check_content(message, number)
    return message


def _from_sharegpt(value: dict, number: int) -> dict:
    """Rename ShareGPT's from and value to role and content; a function_call's value becomes tool_calls.

    Raises BadRow for an unknown sender or call. number: see `_message`.
    """
    sender = value["from"]
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise BadRow("unknown role", f"message {number} is from {sender!r}, expected one of {known}")
    others = {key: inner for key, inner in value.items() if key not in ("from", "value")}
    message = {"role": SHAREGPT_ROLES[sender], "content": value.get("value"), **others}
    if sender == "function_call":
        message["tool_calls"], message["content"] = _function_calls(value.get("value"), number), ""
    return message


def _function_calls(value: Any, number: int) -> list[dict]:
    """Return tool_calls from the JSON of one call {name, arguments}, or of a list of them.

    Raises BadRow for anything else. number: see `_message`.
    """
    try:
        calls = json.loads(value)
    except (TypeError, json.JSONDecodeError):
        raise BadRow("broken JSON", f"message {number} (function_call) is not JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow("wrong type", f"message {number} (function_call) is not an object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _check_role(message: dict, number: int) -> None:
    if message.get("role") not in ROLES:
        shown = repr(message["role"]) if "role" in message else "missing"
        raise BadRow(
            "unknown role", f"message {number}: the role is {shown}, expected one of {', '.join(ROLES)}"
        )


def _check_tool_calls(message: dict, number: int) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not _is_list_of_objects(calls):
        raise BadRow(
            "wrong type", f"message {number}: tool_calls is {_type(calls)}, expected a list of objects"
        )


def _check_content(message: dict, number: int) -> None:
    """Raise BadRow unless content is text, a list of objects, or nothing beside an assistant's tool calls.

    Without tool calls an assistant's must not be empty. number: see `_message`.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    assistant = message["role"] == "assistant"
    if content is None:
        if not (assistant and calls):
            raise BadRow("message without content", f"message {number} ({message['role']}) has no content")
        return
    if isinstance(content, list):
        if not _is_list_of_objects(content):
            raise BadRow("wrong type", f"message {number}: content is a list, but not of objects")
        empty = not content
    elif isinstance(content, str):
        empty = not content.strip()
    else:
        raise BadRow("wrong type", f"message {number}: content is {_type(content)}, expected text")
    if empty and assistant and not calls:
        raise BadRow("empty answer", f"message {number} (assistant) is empty")


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(inner, dict) for inner in value)


# --- formats ------------------------------------------------------------------------------------------------


def _text(origin: Origin, columns: Columns) -> Example:
    return Example(origin, text=columns.text("text", empty="empty text"))


def _prompt_completion(origin: Origin, columns: Columns) -> Example:
    if isinstance(columns.get("prompt"), list):  # then both columns hold messages
        return _conversation(origin, columns, columns.items("prompt") + columns.items("completion"))
    prompt = columns.text("prompt")
    return Example(origin, prompt=prompt, completion=columns.text("completion", empty="empty answer"))


def _alpaca(origin: Origin, columns: Columns) -> Example:
    prompt = columns.text("instruction")
    extra = columns.text("input") if columns.get("input") is not None else ""
    if extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    return Example(origin, prompt=prompt, completion=columns.text("output", empty="empty answer"))


def _messages(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("messages"))


def _sharegpt(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("conversations"))


def _conversation(origin: Origin, columns: Columns, turns: list) -> Example:
    """Example of a list of messages, with the tools of the column `tools`. Raises BadRow as `_message`.

    The column `system` becomes the first message, unless that is a system message already. turns: the
    messages as they were read.
    """
    messages = [_message(value, number) for number, value in enumerate(turns, 1)]
    system = columns.get("system")
    if isinstance(system, str) and system.strip() and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    if not messages:
        raise BadRow("no messages", "the conversation is empty")
    tools = None if columns.get("tools") in (None, "", []) else columns.items("tools")
    return Example(origin, messages=tuple(messages), tools=tools)


class Format(NamedTuple):
    """One format of rows: its columns, and the function that makes a row an Example."""

    needs: tuple[str, ...]  # columns that every row has; they tell the formats apart
    reads: tuple[str, ...]  # columns that are read where they exist
    example: Callable[[Origin, Columns], Example]  # raises BadRow


FORMATS = {
    "text": Format(("text",), (), _text),
    "prompt-completion": Format(("prompt", "completion"), ("tools", "system"), _prompt_completion),
    "alpaca": Format(("instruction", "output"), ("input",), _alpaca),
    "messages": Format(("messages",), ("tools", "system"), _messages),
    "sharegpt": Format(("conversations",), ("tools", "system"), _sharegpt),
}
OPTIONAL = {name for form in FORMATS.values() for name in form.reads}


def detect(source: Source, columns: list[str]) -> str:
    """Name of the format of rows with these `columns`, after `source.columns` has renamed them.

    An explicit `source.format` wins. Raises UserError if none or several formats fit, with the columns seen
    and the columns that each format needs, and if `source.columns` names unknown or missing columns.
    """
    names = dict(source.columns)
    seen = f"{source.path} has the columns {', '.join(columns) or '(none)'}"
    _check_names(names, columns, seen)
    # A column that was renamed is no longer there under its own name, unless it is ours already.
    present = (set(columns) - set(names.values())) | set(names)
    if source.format.lower() != "auto":
        return _chosen(source, present, seen)
    fitting = [name for name, form in FORMATS.items() if present.issuperset(form.needs)]
    if len(fitting) > 1:  # columns that the user mapped say which one is meant
        fitting = [name for name in fitting if set(names) & set(FORMATS[name].needs)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"{seen}, which fit the formats {' and '.join(fitting)}; choose one with data.format."
        )
    needs = "; ".join(f"{name} needs {' and '.join(form.needs)}" for name, form in FORMATS.items())
    example = "data.columns={prompt: question, completion: answer}"
    raise UserError(f"{seen}, which fit no format ({needs}). Map their names to ours, for example {example}.")


def _check_names(names: Mapping[str, str], columns: list[str], seen: str) -> None:
    """Raise UserError for entries of data.columns whose name (ours) is unknown or whose column is missing.

    A column that formats read only where it exists may be missing. names: ours -> theirs. columns: theirs.
    seen: clause for the error that lists these.
    """
    known = OPTIONAL.union(*(form.needs for form in FORMATS.values()))
    problems = []
    for ours, theirs in names.items():
        if ours not in known:
            problems.append(f"data.columns names {ours}, which is not one of {', '.join(sorted(known))}.")
        elif theirs not in columns and ours not in OPTIONAL:
            problems.append(f"data.columns maps {ours} to {theirs}, but {seen}.")
    if problems:
        raise UserError(problems)


def _chosen(source: Source, present: set[str], seen: str) -> str:
    """Name of the format that `source.format` chooses. Raises UserError if it is unknown or lacks columns.

    present: the columns that rows have, by our names. seen: clause for the error that lists theirs.
    """
    name = re.sub(r"[_/ ]", "-", source.format.lower())
    if name not in FORMATS:
        raise UserError(f"data.format={source.format} is unknown; it is auto or one of {', '.join(FORMATS)}.")
    needs = FORMATS[name].needs
    missing = [column for column in needs if column not in present]
    if missing:
        raise UserError(
            f"Format {name} needs the columns {' and '.join(needs)}, but {seen}. Map them with "
            f"data.columns={{{missing[0]}: THEIR NAME}}."
        )
    return name
