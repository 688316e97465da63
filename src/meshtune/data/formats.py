"""The formats of rows: columns to an `Example`, and which format a source has.

    raw row ──> Columns ──────> FORMATS[name].example ──> Example(messages | prompt + completion | text | ids)
                our names

A new format is one line in `FORMATS`; messages.py reads one message.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from meshtune.data.example import BadRow, Example, Ids, Origin, Source, is_absent, name_of
from meshtune.data.messages import ROLES, is_list_of_objects, message_of, turns_of
from meshtune.errors import UserError, argument, type_name

# Rows that are tokenised already #


IGNORED = -100  # a label that is not trained on, as in transformers
MASKS = ("completion_mask", "assistant_masks")  # 1: trained on; TRL's names


def ids_of(columns: Mapping[str, list | None]) -> Ids:
    """The token ids of a row and which are labelled. Raises BadRow if its columns contradict each other.

    columns: input_ids, and the others or None. Labels are aligned with the ids, as transformers has them: the
    id itself where it is trained on, else -100. Without labels and masks everything is labelled. Positions
    that attention_mask leaves out at either end are padding and removed.
    """
    ids = _numbers("input_ids", columns["input_ids"] or [])
    if not ids:
        raise BadRow("no tokens", "input_ids is empty")
    given = {name: value for name, value in columns.items() if name != "input_ids" and value is not None}
    for name, value in given.items():
        if len(value) != len(ids):
            detail = f"{name} has {len(value):,} values, input_ids {len(ids):,}"
            raise BadRow(f"{name} of another length", detail)
    start, stop = 0, len(ids)
    if "attention_mask" in given:
        mask = _numbers("attention_mask", given["attention_mask"], masks=True)
        if 1 not in mask:
            raise BadRow("no tokens", "attention_mask is 0 everywhere")
        start, stop = mask.index(1), len(mask) - mask[::-1].index(1)
        if 0 in mask[start:stop]:
            detail = "attention_mask has a 0 between ones, expected padding only"
            raise BadRow("a gap in attention_mask", detail)
    ids = ids[start:stop]
    if "position_ids" in given and given["position_ids"][start:stop] != list(range(len(ids))):
        raise BadRow(
            "positions that are not 0, 1, 2, …",
            "position_ids does not count from 0 without a gap, as in rows that pack several documents; give "
            "each document a row of its own, data.packing packs them",
        )
    masks = [_numbers(name, given[name], masks=True)[start:stop] for name in MASKS if name in given]
    labelled = [all(marks) for marks in zip(*masks, strict=True)] if masks else [True] * len(ids)
    if "labels" in given:
        labels = _numbers("labels", given["labels"])[start:stop]
        for at, (label, id) in enumerate(zip(labels, ids, strict=True)):
            if label not in (id, IGNORED):
                raise BadRow(
                    "a label that is not its token",
                    f"labels has {label} at position {at}, where input_ids has {id}; a label is the token "
                    f"itself, or {IGNORED} where it is not trained on",
                )
        from_masks, labelled = labelled, [label != IGNORED for label in labels]
        if masks and labelled != from_masks:
            raise BadRow("labels and masks differ", "labels and the mask label other tokens; keep one")
    return Ids(tuple(ids), tuple(labelled))


def _numbers(name: str, values: Sequence[Any], *, masks: bool = False) -> list[int]:
    """The values of a column. Raises BadRow unless they are whole numbers, or with `masks` 0 and 1."""
    for value in values:
        if not isinstance(value, int) or (value not in (0, 1) if masks else isinstance(value, bool)):
            wanted = "0 and 1" if masks else "whole numbers"
            raise BadRow("wrong type", f"{name} has {str(value)[:20]} in it, expected {wanted}")
    return [int(value) for value in values]


# The columns of a row #

#     {"extra_info": {"question": "2 + 2?"}}   extra_info.question ──> "2 + 2?"
#
# A column whose own name has the dot comes first. A number is a place in a list: answers.text.0.


MOST_INNER = 20  # names inside one column that an error lists


class ArrowRow(dict[str, Any]):
    """A row without null values, with which Arrow fills keys that a struct lacks (`tool_calls` of messages).

    stored: the row with them, for filters on a column that may be null.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(_without_nulls(stored))
        self.stored = stored


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def reach(value: Any, name: str) -> Any:
    """The value of a column, or of one inside objects by its dotted name. Raises KeyError without one."""
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        for at, character in enumerate(name):
            if character == "." and name[:at] in value:
                try:
                    return reach(value[name[:at]], name[at + 1 :])
                except KeyError:
                    continue
    elif isinstance(value, list):
        place, _, rest = name.partition(".")
        if place.isdecimal() and int(place) < len(value):
            return reach(value[int(place)], rest) if rest else value[int(place)]
    raise KeyError(name)


def _transposed(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Objects from one object of lists of equal length, as which `datasets` before version 4 stored a list of
    objects ({"role": ["user", …], "content": ["Hi", …]}); None for any other. Nulls are left out.
    """
    columns = [*value.values()]
    if not columns or not all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns):
        return None
    rows = zip(*columns, strict=True)
    return [{key: inner for key, inner in zip(value, row, strict=True) if inner is not None} for row in rows]


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column of this name, or one inside objects."""
    try:
        reach(row, name)
    except KeyError:
        return False
    return True


def inner_names(name: str, value: Any, levels: int = 3) -> Iterator[str]:
    """Yield the dotted names of what an object in the column `name` holds; nothing for other values.

    levels: of objects that are looked into.
    """
    if levels and isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{name}.{key}"
            yield from inner_names(f"{name}.{key}", inner, levels - 1)


def unused_columns(row: Mapping[str, Any], read: Set[str]) -> Iterator[str]:
    """Yield the columns of a row that have a value and are not in `read`; of an object that is read in part,
    what is inside it.
    """
    for column, value in row.items():
        name = str(column)
        if name in read or is_absent(value):
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in read):
            inside = {f"{name}.{key}": inner for key, inner in value.items()}
            yield from unused_columns(inside, read)
        else:
            yield name


def column_names(row: Mapping[str, Any], wanted: Iterable[str] = ()) -> list[str]:
    """Names of a row's columns, of the first MOST_INNER inside each, and of the `wanted` that are there."""
    inside = ((str(name), inner_names(str(name), value)) for name, value in row.items())
    names = [each for name, inner in inside for each in (name, *islice(inner, MOST_INNER))]
    return [*dict.fromkeys([*names, *(name for name in wanted if has(row, name))])]


@dataclass(frozen=True)
class Columns:
    """The columns of one row, looked up by our names; the methods raise BadRow for values of a wrong type."""

    row: Mapping[str, Any]
    names: Mapping[str, str]  # our name -> theirs, where `data.columns` maps it
    roles: Mapping[str, str]  # their role -> ours, where `data.roles` maps it

    def get(self, name: str) -> Any:
        """The value as it was read, None where the column is missing or NaN, as pandas writes it."""
        try:
            value = reach(self.row, self.names.get(name, name))
        except KeyError:
            return None
        return None if isinstance(value, float) and value != value else value

    def text(self, name: str, *, empty: str | None = None) -> str:
        """The text of a column. Raises BadRow if it is missing, null or no text.

        empty: the reason with which blank text is refused; None allows it.
        """
        value, theirs = self.get(name), self.names.get(name, name)
        if value is None:
            raise self._missing(theirs)
        if not isinstance(value, str):
            shown = self._inside(theirs, value) or json.dumps(value, default=str)[:40]
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)} ({shown}), expected text")
        if empty and not value.strip():
            raise BadRow(empty, f"column {theirs} is empty")
        return value

    def items(self, name: str) -> list:
        """The list in a column, or the list whose JSON text it holds (csv and some parquet files). Raises
        BadRow as `text`.
        """
        value, theirs = self.get(name), self.names.get(name, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise BadRow(
                    "wrong type", f"column {theirs} is text that is not JSON, expected a list"
                ) from None
        if value is None:
            raise self._missing(theirs)
        if isinstance(value, Mapping) and (rows := _transposed(value)) is not None:
            return rows
        if not isinstance(value, list):
            shown = f" ({inside})" if (inside := self._inside(theirs, value)) else ""
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)}{shown}, expected a list")
        return value

    def _inside(self, theirs: str, value: Any) -> str:
        """Clause with the columns inside an object; "" for other values."""
        return ", ".join(column_names({theirs: value})[1:])

    def _missing(self, theirs: str) -> BadRow:
        """The reason to refuse a row without a value in a column."""
        if has(self.row, theirs):
            return BadRow(f"null in column {theirs}", f"column {theirs} is null")
        columns = ", ".join(column_names(self.row))
        return BadRow(f"no column {theirs}", f"column {theirs} is missing (there are {columns})")


# Formats #


SYSTEM_ROLES = ("system", "developer")
PREFERENCE = (  # columns of preference data, as DPO trains on
    "chosen", "rejected", "chosen_messages", "rejected_messages", "chosen_response", "rejected_response",
)  # fmt: skip
OF_PAIRS = "It is preference data, which objective=dpo and its kin train on"
SUGGESTIONS = (  # our names, and those of well-known data sets
    ("instruction input output", "instruction context response"),
    ("instruction output", "instruction response", "instruction answer"),
    (
        "prompt completion", "prompt response", "question answer", "query response", "query answer",
        "input output", "inputs targets", "source target",
    ),
    ("messages", "conversation", "chat", "dialog"),
    (
        "prompt completion", "prompt chosen", "question chosen", "instruction chosen",
        "prompt chosen_response", "question chosen_response",
    ),
    ("messages", "chosen", "chosen_messages"),
    ("text", "content", "document"),
)  # fmt: skip


def _prompt_completion(origin: Origin, columns: Columns) -> Example:
    if isinstance(columns.get("prompt"), list):  # then both columns hold messages, or the answer is text
        turns = history(columns) + columns.items("prompt")
        return conversation(origin, columns, turns + _answer(columns))
    return _answered(origin, columns, columns.text("prompt"), "completion")


def _answer(columns: Columns) -> list:
    """The messages in the column completion; text behind a prompt is the assistant's, unless it is JSON of
    messages.
    """
    messages = messages_in(columns, "completion")
    if messages is None and columns.get("prompt"):
        return [{"role": "assistant", "content": columns.text("completion", empty="empty answer")}]
    return columns.items("completion") if messages is None else messages


def messages_in(columns: Columns, name: str) -> list | None:
    """The messages in a column: a list, one message, or their JSON text; None for other text.

    Raises BadRow as `Columns.items`.
    """
    value = columns.get(name)
    if isinstance(value, str):
        with suppress(BadRow):
            messages = columns.items(name)
            are_objects = messages and is_list_of_objects(messages)
            if are_objects and all("role" in each or "from" in each for each in messages):
                return messages
        return None
    if isinstance(value, dict) and not isinstance(value.get("role", value.get("from")), list):
        return [value]
    return columns.items(name)


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
    turns = history(columns)
    if not turns and is_absent(columns.get("system")) and is_absent(columns.get("tools")):
        return Example(origin, prompt=prompt, completion=completion)
    return conversation(origin, columns, turns + turns_of(prompt, completion))


def history(columns: Columns) -> list[dict]:
    """Turns of the column history, a list of [prompt, answer] pairs. Raises BadRow for anything else."""
    if is_absent(columns.get("history")):
        return []
    turns = []
    for pair in columns.items("history"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("wrong type", "column history is not a list of [prompt, answer] pairs of texts")
        turns += turns_of(*pair)
    return turns


def conversation(origin: Origin, columns: Columns, turns: list | str) -> Example:
    """Example of a list of messages, with the tools of the column `tools`. Raises BadRow as `message_of`.

    The column `system` becomes the first message. turns: the messages as they were read, or the name of their
    column.
    """
    turns = columns.items(turns) if isinstance(turns, str) else turns
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
    "text": Format(
        ("text",), (), lambda origin, columns: Example(origin, text=columns.text("text", empty="empty text"))
    ),
    "prompt-completion": Format(("prompt", "completion"), ("tools", "system", "history"), _prompt_completion),
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "system", "history", "tools"),
        lambda origin, columns: _answered(origin, columns, instruction(columns), "output"),
    ),
    "messages": Format(("messages",), ("tools", "system"), partial(conversation, turns="messages")),
    "sharegpt": Format(("conversations",), ("tools", "system"), partial(conversation, turns="conversations")),
    "tokens": Format(("input_ids",), ("labels", *MASKS, "attention_mask", "position_ids"), _tokens),
}
OPTIONAL = {"loss_weight", "margin"}.union(
    *(form.reads for form in FORMATS.values())
)  # columns that may be missing


class Kind(NamedTuple):
    """Formats of one kind of rows (`objectives.Rows`); of several that fit preferences the first is taken."""

    forms: Mapping[str, Format]  # by name; the first word is the value of data.format
    names: tuple[tuple[str, ...], ...]  # our names of columns, and those of well-known data sets
    otherwise: str = ""  # sentence on rows that fit none

    @property
    def named_first(self) -> list[str]:
        """The first format of each value of data.format."""
        return [*{key.split()[0]: key for key in reversed([*self.forms])}.values()][::-1]

    def named(self, name: str) -> list[str]:
        """The formats that a value of data.format may mean."""
        return [key for key in self.forms if key.split()[0] == name]


ANSWERS = Kind(FORMATS, SUGGESTIONS)


def detect(source: Source, columns: list[str], kind: Kind = ANSWERS) -> str:
    """Name of the format of rows whose `column_names` are `columns`, once `source.columns` has renamed them.

    kind: of the rows that the objective reads. An explicit `source.format` wins. Raises UserError if none or
    several formats fit, with the columns seen and the columns that each format needs, if `source.columns`
    names unknown or missing columns, or columns of another format, and if `source.roles` maps a role to one
    that is not ours.
    """
    if unknown := sorted(set(dict(source.roles).values()) - set(ROLES)):
        raise UserError(f"data.roles maps to {', '.join(unknown)}, expected one of {', '.join(ROLES)}.")
    names = dict(source.columns)
    seen = f"{name_of(source.path)} has the columns {', '.join(columns) or '(none)'}"
    _check_names(names, columns, seen, kind)
    # A column that was renamed isn't there under its own name, unless it is ours already.
    present = (set(columns) - set(names.values())) | set(names)
    forms = kind.forms
    fitting = [name for name, form in forms.items() if present.issuperset(form.needs)]
    if source.on_purpose:
        fitting = [_chosen(source, present, seen, kind)]
    elif len(fitting) > 1:  # columns that the user mapped say which one is meant
        fitting = [name for name in fitting if set(names) & set(forms[name].needs)] or fitting
    if len(fitting) > 1 and forms is FORMATS:
        raise UserError(
            f"{seen}, which fit the formats {' and '.join(fitting)}; choose one with data.format."
        )
    if not fitting:
        needs = "; ".join(f"{name} needs {' and '.join(forms[name].needs)}" for name in kind.named_first)
        raise UserError(f"{seen}, which fit no format ({needs}). {_suggestion(columns, kind)}")
    form = forms[fitting[0]]
    if foreign := sorted(names.keys() - {*form.needs, *form.reads, "loss_weight"}):
        raise UserError(
            f"data.columns maps {', '.join(foreign)}, which the format {fitting[0]} does not read: it reads "
            f"{', '.join((*form.needs, *form.reads))}. Leave it out, or choose another format with "
            "data.format."
        )
    return fitting[0]


def _suggestion(columns: list[str], kind: Kind, *, mapped: bool = False) -> str:
    """Sentence with the data.columns that make a format of these columns. mapped: some are given, over which
    these are laid.
    """
    if mapped and any({*form.needs} <= {*columns} for form in kind.forms.values()):
        return "Take the mapping out: data.columns={}, or the columns of the source where it has its own."
    found = {column.rpartition(".")[2].lower(): column for column in reversed(columns)}
    found |= {column.lower(): column for column in reversed(columns)}
    for ours, *known in kind.names:
        for theirs in (names.split() for names in known if found.keys() >= set(names.split())):
            pairs = zip(ours.split(), theirs, strict=True)
            names = {name: found[own] for name, own in pairs if mapped or found[own] != name}
            preference = kind.forms is FORMATS and {*PREFERENCE} & {*theirs}
            start = f"{OF_PAIRS}; to fine-tune on one side, set" if preference else "Set"
            return f"{start} {argument('data.columns', names)}."
    if mapped:
        return "Name a column that is there."
    if kind.otherwise:
        return kind.otherwise
    example = argument("data.columns", {"prompt": "question", "completion": "answer"})
    return f"Map their names to ours, for example {example}."


def _check_names(names: Mapping[str, str], columns: list[str], seen: str, kind: Kind) -> None:
    """Raise UserError for entries of data.columns whose name (ours) is unknown or whose column is missing.

    A column that formats read only where it exists may be missing. names: ours -> theirs. columns: theirs.
    seen: clause for the error that lists these.
    """
    known = OPTIONAL.union(*(form.needs for form in kind.forms.values()))
    problems = []
    for ours, theirs in names.items():
        if ours not in known and theirs in known:
            problems.append(
                f"data.columns is {{ours: theirs}}: {{{theirs}: {ours}}}, not {{{ours}: {theirs}}}."
            )
        elif ours not in known:
            problems.append(f"data.columns names {ours}, which is not one of {', '.join(sorted(known))}.")
        elif theirs not in columns and ours not in OPTIONAL:
            remedy = _suggestion(columns, kind, mapped=True)
            problems.append(f"data.columns maps {ours} to {theirs}, but {seen}. {remedy}")
    if problems:
        raise UserError(problems)


def _chosen(source: Source, present: set[str], seen: str, kind: Kind) -> str:
    """Name of the format that `source.format` chooses. Raises UserError if it is unknown or lacks columns.

    present: the columns that rows have, by our names. seen: clause for the error that lists theirs.
    """
    name = re.sub(r"[_/ ]", "-", source.format.lower())
    if not (named := kind.named(name)):
        known = ", ".join(kind.named_first)
        state = "has no preferences" if name in FORMATS else "is unknown"
        raise UserError(f"data.format={source.format} {state}; it is auto or one of {known}.")
    name = next((each for each in named if present.issuperset(kind.forms[each].needs)), named[0])
    needs = kind.forms[name].needs
    missing = [column for column in needs if column not in present]
    if missing:
        raise UserError(
            f"Format {name} needs the columns {' and '.join(needs)}, but {seen}. Map them with "
            f"{argument('data.columns', {missing[0]: 'THEIR NAME'})}."
        )
    return name
