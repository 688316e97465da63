"""Raw rows to `Example`s, with every bad row named.

    raw row ──> Columns ──────> FORMATS[name].example ──> Example(messages | prompt + completion | text)
                our names         │
                                  └─ missing column, wrong type, empty answer, unknown role: BadRow

A column that is not used is counted by name; one that says the row is of another kind (a preference, an
image) makes it a bad row. A new format is one line in `FORMATS`; messages.py reads one message.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtune.data.example import (
    SHOWN,
    BadRow,
    Dropped,
    Example,
    Notes,
    OnBadRow,
    Origin,
    Source,
    bad_rows_error,
)
from meshtune.data.messages import message_of, type_name
from meshtune.errors import UserError

RawRow = tuple[Origin, Any]  # the value: a dict of columns, a BadRow from the reader, or any other JSON value

LOOK_AHEAD = 10_000  # rows read after the first bad one, so that one error names more of them
MEDIA = (
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
)  # columns that are not text
PREFERENCE = ("chosen", "rejected")  # columns of preference data, as DPO trains on
SYSTEM_ROLES = ("system", "developer")
EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of a column that has nothing in a row


def examples(
    raw_rows: Iterable[RawRow],
    source: Source,
    *,
    on_bad_row: OnBadRow,
    needs_answer: bool = True,
    dropped: Dropped | None = None,
    notes: Notes | None = None,
) -> Iterator[Example]:
    """Yield the example of each raw row of `source`, in order; rows that it leaves out on purpose are not.

    A row is left out on purpose if `source.where` does not hold for it, or its column loss_weight is 0.

    The format is that of `detect`, by the first row that is an object; raises UserError as that does.
    `needs_answer` makes a conversation without an assistant turn a bad row (false for train_on=all).
    `dropped` counts the rows that `on_bad_row="skip"` leaves out, `notes` what is not used of the others.
    With `on_bad_row="error"` nothing more is yielded after the first bad row: up to LOOK_AHEAD more rows are
    checked, and one UserError describes the first SHOWN bad ones (file, line, reason) and counts all of them.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"data.on_bad_row={on_bad_row} is unknown; it is error or skip.")
    notes = notes or Notes()
    format_name: str | None = None
    problems: list[str] = []
    total = rows = first_bad = 0
    for origin, row in raw_rows:
        rows += 1
        if format_name is None and isinstance(row, dict):  # once per source, on its first row with columns
            format_name = detect(source, [str(column) for column in row])
        try:
            # Without a format yet, the row has no columns, and so it is bad whatever the format is.
            example = _example(origin, row, format_name or "text", source, needs_answer, notes)
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
            if not total and example is not None:
                yield example
        if total and rows - first_bad >= LOOK_AHEAD:
            break
    if total:
        raise bad_rows_error(problems, total, rows)


def _example(
    origin: Origin, row: Any, format_name: str, source: Source, needs_answer: bool, notes: Notes
) -> Example | None:
    """Convert the value of one raw row; None if it is left out on purpose (see `examples`).

    Raises BadRow, or `row` itself if it is one. format_name: key of FORMATS. needs_answer, notes: see
    `examples`.
    """
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("wrong type", f"the row is {type_name(row)}, expected an object")
    columns = Columns(row, dict(source.columns))
    if not _where(row, dict(source.where)):
        notes.left_out["data.where"] += 1
        return None
    if not _loss_weight(columns, notes):
        return None
    if not source.on_purpose:
        _refuse_other_kinds(row, format_name, columns.names, dict(source.where))
    _note_unused(columns, format_name, dict(source.where), notes)
    example = FORMATS[format_name].example(origin, columns)
    if needs_answer and example.messages is not None and last_answer(example.messages) is None:
        raise no_answer(example.messages)
    if example.masks:
        notes.masks.update(str(mask) for mask in example.masks if mask)
    return example


def _where(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether each column of `where` has its value in the row. Raises BadRow if the row lacks the column.

    A text in the row, as csv has them, is compared as text: "true", "1.0".
    """
    for column, wanted in where.items():
        if column not in row:
            raise BadRow(f"no column {column}", f"column {column} (data.where) is missing")
        value = row[column]
        if isinstance(value, str) and not isinstance(wanted, str):
            value, wanted = value.lower(), str(wanted).lower()
        elif isinstance(value, bool) != isinstance(wanted, bool):
            return False  # True == 1 in Python, not in JSON
        if value != wanted:
            return False
    return True


def _loss_weight(columns: "Columns", notes: Notes) -> bool:
    """False if the row's column loss_weight is 0. Raises BadRow if it is neither 0 nor 1."""
    weight = columns.get("loss_weight")
    if weight is None or weight == "":
        return True
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = -1.0
    if number not in (0, 1):
        raise BadRow(
            "loss_weight is neither 0 nor 1",
            f"loss_weight is {json.dumps(weight, default=str)[:40]}; a row is trained on (1) or left out (0)",
        )
    notes.masks[f"loss_weight: {number:.0f}"] += 1
    if not number:
        notes.left_out["loss_weight 0"] += 1
    return bool(number)


def _refuse_other_kinds(
    row: Mapping[str, Any], format_name: str, names: Mapping[str, str], where: Mapping[str, Any]
) -> None:
    """Raise BadRow for preference data, KTO rows, images, audio and video that would be trained on in part.

    names: of data.columns, with which the user chose. where: of data.where.
    """
    media = [column for column in MEDIA if row.get(column) not in EMPTY and column not in names.values()]
    if media:
        raise BadRow(
            f"column {media[0]}",
            f"the row has {media[0]}, and meshtune trains on text; if the text is complete without it, set "
            f"data.format={format_name}",
        )
    sides = [column for column in PREFERENCE if row.get(column) not in EMPTY]
    if sides and not set(names.values()) & set(PREFERENCE):
        ours = FORMATS[format_name].needs[-1]
        raise BadRow(
            "preference data",
            f"the row has {' and '.join(sides)} beside {ours}: it is preference data. To fine-tune on one "
            f"side, set data.columns={{{ours}: {sides[0]}}}; to use {ours} alone, data.format={format_name}",
        )
    label = row.get("label")
    boolean = isinstance(label, bool) or str(label).lower() in ("true", "false")
    if boolean and "label" not in where and format_name != "text":
        raise BadRow(
            "KTO data",
            "the row has a label, true or false, beside its answer: it is KTO data, of good and bad answers. "
            "To fine-tune on the good ones, set data.where={label: true}",
        )


def _note_unused(columns: "Columns", format_name: str, where: Mapping[str, Any], notes: Notes) -> None:
    """Count the columns of a row that have a value and are not read."""
    form = FORMATS[format_name]
    read = {columns.names.get(name, name) for name in (*form.needs, *form.reads, "loss_weight")}
    for column, value in columns.row.items():
        if column not in read and column not in where and value not in EMPTY:
            notes.unused[str(column)] += 1


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
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)} ({shown}), expected text")
        if empty and not value.strip():
            raise BadRow(empty, f"column {theirs} is empty")
        return value

    def items(self, name: str) -> list:
        """The list in a column, or the list whose JSON text it holds (csv and some parquet files)."""
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
        if not isinstance(value, list):
            raise BadRow("wrong type", f"column {theirs} is {type_name(value)}, expected a list")
        return value

    def _missing(self, theirs: str) -> BadRow:
        columns = ", ".join(map(str, self.row))
        return BadRow(f"no column {theirs}", f"column {theirs} is missing (there are {columns})")


# --- formats ------------------------------------------------------------------------------------------------


def _text(origin: Origin, columns: Columns) -> Example:
    return Example(origin, text=columns.text("text", empty="empty text"))


def _prompt_completion(origin: Origin, columns: Columns) -> Example:
    if isinstance(columns.get("prompt"), list):  # then both columns hold messages
        return _conversation(origin, columns, columns.items("prompt") + columns.items("completion"))
    return _answered(origin, columns, columns.text("prompt"), "completion")


def _alpaca(origin: Origin, columns: Columns) -> Example:
    prompt = columns.text("instruction")
    extra = columns.text("input") if columns.get("input") is not None else ""
    if extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    return _answered(origin, columns, prompt, "output")


def _answered(origin: Origin, columns: Columns, prompt: str, answer: str) -> Example:
    """Example of a prompt and the text in the column `answer`.

    With the columns system, history or tools it is a conversation; without them a prompt and a completion,
    which need no chat template.
    """
    completion = columns.text(answer, empty="empty answer")
    turns = _history(columns)
    if not turns and columns.get("system") in EMPTY and columns.get("tools") in EMPTY:
        return Example(origin, prompt=prompt, completion=completion)
    turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return _conversation(origin, columns, turns)


def _history(columns: Columns) -> list[dict]:
    """Turns of the column history, a list of [prompt, answer] pairs. Raises BadRow for anything else."""
    if columns.get("history") in EMPTY:
        return []
    turns = []
    for pair in columns.items("history"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("wrong type", "column history is not a list of [prompt, answer] pairs of texts")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _messages(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("messages"))


def _sharegpt(origin: Origin, columns: Columns) -> Example:
    return _conversation(origin, columns, columns.items("conversations"))


def _conversation(origin: Origin, columns: Columns, turns: list) -> Example:
    """Example of a list of messages, with the tools of the column `tools`. Raises BadRow as `message_of`.

    The column `system` becomes the first message. turns: the messages as they were read.
    """
    read = [message_of(value, number) for number, value in enumerate(turns, 1)]
    messages, masks = [message for message, _ in read], [mask for _, mask in read]
    system = columns.get("system")
    if system not in EMPTY:
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
    tools = None if columns.get("tools") in EMPTY else columns.items("tools")
    return Example(origin, messages=tuple(messages), masks=tuple(masks) if any(masks) else None, tools=tools)


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
}
OPTIONAL = {"loss_weight"}.union(*(form.reads for form in FORMATS.values()))  # columns that may be missing


def detect(source: Source, columns: list[str]) -> str:
    """Name of the format of rows with these `columns`, after `source.columns` has renamed them.

    An explicit `source.format` wins. Raises UserError if none or several formats fit, with the columns seen
    and the columns that each format needs, and if `source.columns` names unknown or missing columns, or
    columns of another format.
    """
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
