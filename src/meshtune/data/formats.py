"""The formats of rows: columns to an `Example`, and which format a source has.

    raw row ──> Columns ──────> FORMATS[name].example ──> Example(messages | prompt + completion | text | ids)
                our names

A new format is one line in `FORMATS`; messages.py reads one message.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from meshtune.data.columns import Columns
from meshtune.data.example import BadRow, Example, Origin, Source, is_absent, name_of
from meshtune.data.messages import ROLES, is_list_of_objects, message_of, turns_of
from meshtune.data.tokenised import MASKS, ids_of
from meshtune.errors import UserError

SYSTEM_ROLES = ("system", "developer")
PREFERENCE = (  # columns of preference data, as DPO trains on
    "chosen", "rejected", "chosen_messages", "rejected_messages", "chosen_response", "rejected_response",
)  # fmt: skip
SUGGESTIONS: tuple[dict[str, str], ...] = (  # our names: those of well-known data sets
    {"instruction": "instruction", "input": "context", "output": "response"},
    {"instruction": "instruction", "output": "response"},
    {"instruction": "instruction", "output": "answer"},
    {"prompt": "prompt", "completion": "response"},
    {"prompt": "question", "completion": "answer"},
    {"prompt": "query", "completion": "response"},
    {"prompt": "query", "completion": "answer"},
    {"prompt": "input", "completion": "output"},
    {"prompt": "inputs", "completion": "targets"},
    {"prompt": "source", "completion": "target"},
    {"messages": "conversation"},
    {"messages": "chat"},
    {"messages": "dialog"},
    {"prompt": "prompt", "completion": "chosen"},
    {"prompt": "question", "completion": "chosen"},
    {"prompt": "instruction", "completion": "chosen"},
    {"prompt": "prompt", "completion": "chosen_response"},
    {"prompt": "question", "completion": "chosen_response"},
    {"messages": "chosen"},
    {"messages": "chosen_messages"},
    {"text": "content"},
    {"text": "document"},
)


def _text(origin: Origin, columns: Columns) -> Example:
    return Example(origin, text=columns.text("text", empty="empty text"))


def _prompt_completion(origin: Origin, columns: Columns) -> Example:
    if isinstance(columns.get("prompt"), list):  # then both columns hold messages, or the answer is text
        turns = _history(columns) + columns.items("prompt")
        return _conversation(origin, columns, turns + _answer(columns))
    return _answered(origin, columns, columns.text("prompt"), "completion")


def _answer(columns: Columns) -> list:
    """The messages in the column completion; text behind a prompt is the assistant's, unless it is JSON of
    messages.
    """
    if columns.get("prompt") and isinstance(columns.get("completion"), str):
        with suppress(BadRow):
            messages = columns.items("completion")
            are_objects = messages and is_list_of_objects(messages)
            if are_objects and all("role" in each or "from" in each for each in messages):
                return messages
        return [{"role": "assistant", "content": columns.text("completion", empty="empty answer")}]
    completion = columns.get("completion")
    return (
        [completion] if isinstance(completion, dict) else columns.items("completion")
    )  # one message, or more


def _alpaca(origin: Origin, columns: Columns) -> Example:
    return _answered(origin, columns, instruction(columns), "output")


def instruction(columns: Columns) -> str:
    """The prompt of an Alpaca row: its instruction, and its input where it has one. Raises BadRow."""
    extra = columns.text("input") if columns.get("input") is not None else ""
    return "\n\n".join([columns.text("instruction"), *([extra] if extra.strip() else [])])


def _answered(origin: Origin, columns: Columns, prompt: str, answer: str) -> Example:
    """Example of a prompt and the text in the column `answer`.

    With the columns system, history or tools it is a conversation; without them a prompt and a completion,
    which need no chat template.
    """
    completion = columns.text(answer, empty="empty answer")
    turns = _history(columns)
    if not turns and is_absent(columns.get("system")) and is_absent(columns.get("tools")):
        return Example(origin, prompt=prompt, completion=completion)
    return _conversation(origin, columns, turns + turns_of(prompt, completion))


def _history(columns: Columns) -> list[dict]:
    """Turns of the column history, a list of [prompt, answer] pairs. Raises BadRow for anything else."""
    if is_absent(columns.get("history")):
        return []
    turns = []
    for pair in columns.items("history"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("wrong type", "column history is not a list of [prompt, answer] pairs of texts")
        turns += turns_of(*pair)
    return turns


def _messages(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("messages"))


def _sharegpt(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("conversations"))


def _conversation(origin: Origin, columns: Columns, turns: list) -> Example:
    """Example of a list of messages, with the tools of the column `tools`. Raises BadRow as `message_of`.

    The column `system` becomes the first message. turns: the messages as they were read.
    """
    read = [message_of(value, number, columns.roles) for number, value in enumerate(turns, 1)]
    messages, masks = [message for message, _ in read], [mask for _, mask in read]
    system = columns.get("system")
    if not is_absent(system):
        system = columns.text("system")
        own = messages[0].get("content") if messages and messages[0]["role"] in SYSTEM_ROLES else None
        if own is not None and own != system:
            raise BadRow(
                "two system prompts",
                "the column system and the first message are two system prompts, and they differ; keep one",
            )
        if own is None and system.strip():
            messages.insert(0, {"role": "system", "content": system})
            masks.insert(0, None)
    if not messages:
        raise BadRow("no messages", "the conversation is empty")
    tools = None if is_absent(columns.get("tools")) else columns.items("tools")
    return Example(origin, messages=tuple(messages), masks=tuple(masks) if any(masks) else None, tools=tools)


def _tokens(origin: Origin, columns: Columns) -> Example:
    form = FORMATS["tokens"]
    given = {name: columns.items(name) for name in form.needs}
    given |= {name: columns.items(name) for name in form.reads if columns.get(name) is not None}
    return Example(origin, ids=ids_of(given))


class Format(NamedTuple):
    """One format of rows: its columns, and the function that makes a row an Example."""

    needs: tuple[str, ...]  # columns that every row has; they tell the formats apart
    reads: tuple[str, ...]  # columns that are read where they exist
    example: Callable[[Origin, Columns], Example]  # raises BadRow


FORMATS = {
    "text": Format(("text",), (), _text),
    "prompt-completion": Format(("prompt", "completion"), ("tools", "system", "history"), _prompt_completion),
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "tools"), _alpaca),
    "messages": Format(("messages",), ("tools", "system"), _messages),
    "sharegpt": Format(("conversations",), ("tools", "system"), _sharegpt),
    "tokens": Format(("input_ids",), ("labels", *MASKS, "attention_mask", "position_ids"), _tokens),
}
OPTIONAL = {"loss_weight"}.union(*(form.reads for form in FORMATS.values()))  # columns that may be missing


def detect(source: Source, columns: list[str]) -> str:
    """Name of the format of rows whose `column_names` are `columns`, once `source.columns` has renamed them.

    An explicit `source.format` wins. Raises UserError if none or several formats fit, with the columns seen
    and the columns that each format needs, if `source.columns` names unknown or missing columns, or columns
    of another format, and if `source.roles` maps a role to one that is not ours.
    """
    if unknown := sorted(set(dict(source.roles).values()) - set(ROLES)):
        raise UserError(f"data.roles maps to {', '.join(unknown)}, expected one of {', '.join(ROLES)}.")
    name = _detected(source, columns)
    form = FORMATS[name]
    if foreign := sorted(dict(source.columns).keys() - {*form.needs, *form.reads, "loss_weight"}):
        raise UserError(
            f"data.columns maps {', '.join(foreign)}, which the format {name} does not read: it reads "
            f"{', '.join((*form.needs, *form.reads))}. Leave it out, or choose another format with "
            "data.format."
        )
    return name


def _detected(source: Source, columns: list[str]) -> str:
    """Name of the format, whether or not it reads all of `source.columns`; see `detect`."""
    names = dict(source.columns)
    seen = f"{name_of(source.path)} has the columns {', '.join(columns) or '(none)'}"
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
    raise UserError(f"{seen}, which fit no format ({needs}). {_suggestion(columns)}")


def _suggestion(columns: list[str]) -> str:
    """Sentence with the data.columns that make a format of these columns."""
    found = {column.rpartition(".")[2].lower(): column for column in reversed(columns)}
    found |= {column.lower(): column for column in reversed(columns)}
    for names in SUGGESTIONS:
        if found.keys() >= set(names.values()):
            renamed = {ours: found[theirs] for ours, theirs in names.items() if found[theirs] != ours}
            written = ", ".join(f"{ours}: {theirs}" for ours, theirs in renamed.items())
            pairs = (
                "It is preference data. To fine-tune on one side, "
                if {*PREFERENCE} & {*names.values()}
                else ""
            )
            return f"{pairs}{'set' if pairs else 'Set'} data.columns={{{written}}}."
    return "Map their names to ours, for example data.columns={prompt: question, completion: answer}."


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
