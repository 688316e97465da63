"""Raw rows to `Example`s, with every bad row named.

    raw row ──> where? loss_weight? another kind? ──> FORMATS[name].example ──> Example
                │                                       │
                └─ left out, counted                    └─ missing column, wrong type, empty answer: BadRow

A column that is not used is counted by name; one that says the row is of another kind (a preference, an
image) makes it a bad row.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshtune.data.example import (
    ROWS_FOLDER,
    SHOWN,
    BadRow,
    Example,
    Notes,
    OnBadRow,
    Origin,
    Source,
    Tally,
    bad_rows_error,
    is_absent,
)
from meshtune.data.formats import (
    ANSWERS,
    FORMATS,
    OF_PAIRS,
    OPTIONAL,
    PREFERENCE,
    ArrowRow,
    Columns,
    Format,
    Kind,
    column_names,
    detect,
    has,
    reach,
    unused_columns,
)
from meshtune.data.messages import is_empty
from meshtune.errors import UserError, argument, expanded, type_name
from meshtune.rundir import write_atomically

RawRow = tuple[Origin, Any]  # the value: a dict of columns, a BadRow from the reader, or any other JSON value

LOOK_AHEAD = 10_000  # rows read after the first bad one, so that one error names more of them
MEDIA = ("image", "images", "audio", "audios", "video", "videos")  # columns that are not text


def examples(
    raw_rows: Iterable[RawRow],
    source: Source,
    *,
    on_bad_row: OnBadRow,
    needs_answer: bool = True,
    tally: Tally | None = None,
    kind: Kind = ANSWERS,
) -> Iterator[Example]:
    """Yield the example of each raw row of `source`, in order; rows that it leaves out on purpose are not.

    A row is left out on purpose if `source.where` does not hold for it, or its column loss_weight is 0.

    The format is that of `detect`, by the first row that is an object, and by rows behind it for columns of
    `source.columns` that it lacks; raises UserError as that does.
    `kind` has the formats of the rows that the objective reads. `needs_answer` makes a conversation without
    an assistant turn a bad row (false for train_on=all).
    `tally` counts the rows that `on_bad_row="skip"` leaves out, and notes what is not used of the others.
    With `on_bad_row="error"` nothing more is yielded after the first bad row: up to LOOK_AHEAD more rows are
    checked, and one UserError describes the first SHOWN bad ones (file, line, reason) and counts all of them.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"data.on_bad_row={on_bad_row} is unknown; it is error or skip.")
    tally = tally or Tally()
    columns, raw_rows = _first_columns(raw_rows, source)
    # Without a format yet, the row has no columns, and so it is bad whatever the format is.
    format_name = next(iter(kind.forms)) if columns is None else detect(source, columns, kind)
    reading = Reading(kind, format_name, source, needs_answer, tally.notes)
    unseen = {ours: theirs for ours, theirs in source.columns if ours in OPTIONAL}
    problems: list[str] = []
    total = rows = first_bad = 0
    for origin, row in raw_rows:
        rows += 1
        if unseen and isinstance(row, dict):
            unseen = {ours: theirs for ours, theirs in unseen.items() if not has(row, theirs)}
        try:
            example = _example(origin, row, reading)
        except BadRow as bad:
            if on_bad_row == "skip":
                tally.bad_rows[bad.reason] += 1
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
    if rows:
        tally.notes.unfound.update(f"{ours} to {theirs} of {source.path}" for ours, theirs in unseen.items())


def _first_columns(raw_rows: Iterable[RawRow], source: Source) -> tuple[list[str] | None, Iterator[RawRow]]:
    """(Columns of the first row that is an object, and of up to LOOK_AHEAD rows behind it where it lacks one
    that `source.columns` names and needs, None without such a row; all rows).
    """
    rows, read, mapped = iter(raw_rows), [], dict(source.columns)
    needed = {theirs for ours, theirs in mapped.items() if ours not in OPTIONAL}
    found: dict[str, None] | None = None
    behind = 0
    for each in rows:
        read.append(each)
        if isinstance(each[1], dict):
            found = (found or {}) | dict.fromkeys(column_names(each[1], mapped.values()))
        behind += found is not None
        if found is not None and (needed <= found.keys() or behind > LOOK_AHEAD):
            break
    return None if found is None else [*found], chain(read, rows)


class Reading(NamedTuple):
    """How the rows of a source are read; see `examples`."""

    kind: Kind
    format_name: str  # key of kind.forms
    source: Source
    needs_answer: bool
    notes: Notes


def _example(origin: Origin, row: Any, reading: Reading) -> Example | None:
    """Convert the value of one raw row; None if it is left out on purpose (see `examples`).

    Raises BadRow, or `row` itself if it is one.
    """
    kind, format_name, source, needs_answer, notes = reading
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("wrong type", f"the row is {type_name(row)}, expected an object")
    columns = Columns(row, dict(source.columns), dict(source.roles))
    if (other := _other(row, dict(source.where))) is not None:
        notes.left_out["data.where"] += 1
        if other in notes.compared or len(notes.compared) < SHOWN:
            notes.compared[other] += 1
        return None
    if not _loss_weight(columns, notes):
        return None
    _refuse_media(row, columns.names)
    form = kind.forms[format_name]
    if kind is ANSWERS and not source.on_purpose:
        _refuse_other_kinds(columns, format_name, dict(source.where))
    _note_unused(columns, form, dict(source.where), notes)
    example = form.example(origin, columns)
    notes.add(example.notes)
    _check_answer(example, "chosen: " if example.other else "", needs_answer=needs_answer)
    if example.other:
        _check_answer(example.other, "rejected: ", needs_answer=needs_answer)
    if example.masks and kind is ANSWERS:
        notes.masks.update(str(mask) for mask in example.masks if mask)
    return example


def _other(row: Mapping[str, Any], where: Mapping[str, Any]) -> str | None:
    """The first column of `where` that has another value in the row, as `Notes.compared`; None if all have
    theirs. Raises BadRow if the row lacks the column; what is inside null is null.

    A text in the row, as csv has them, is compared as text: "true", "1.0".
    """
    row = row.stored if isinstance(row, ArrowRow) else row
    for column, wanted in where.items():
        try:
            value = reach(row, column)
        except KeyError:
            if not _below_null(row, column):
                raise BadRow(f"no column {column}", f"column {column} (data.where) is missing") from None
            value = None
        if isinstance(value, str) and not isinstance(wanted, str):
            same = value.lower() == str(wanted).lower()
        else:  # True == 1 in Python, not in JSON
            same = isinstance(value, bool) == isinstance(wanted, bool) and value == wanted
        if not same:
            texts = [json.dumps(each, ensure_ascii=False, default=str)[:60] for each in (wanted, value)]
            return f"{column}: {texts[0]}{_reading(wanted) if isinstance(value, str) else ''}\t{texts[1]}"
    return None


def _below_null(row: Mapping[str, Any], column: str) -> bool:
    """Whether an object that the dotted name of a column leads through is null."""
    names = column.split(".")
    outer = [".".join(names[:count]) for count in range(1, len(names))]
    return any(has(row, name) and reach(row, name) is None for name in outer)


def _reading(wanted: Any) -> str:
    """Clause on what YAML reads where no quotes are; "" for a text."""
    if isinstance(wanted, bool):
        words = ("yes", "on") if wanted else ("no", "off")
        return f' (YAML\'s reading of {" and ".join(words)} too; write "{words[0]}" in quotes for the text)'
    return "" if isinstance(wanted, str) else " (a number; write it in quotes for the text)"


def _loss_weight(columns: Columns, notes: Notes) -> bool:
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


def _refuse_media(row: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raise BadRow for images, audio and video, which would be left out. names: of data.columns."""
    media = [column for column in MEDIA if not is_absent(row.get(column)) and column not in names.values()]
    if media:
        raise BadRow(
            f"column {media[0]}",
            f"the row has {media[0]}, and meshtune trains on text; if the text is complete without it, take "
            "that column out of the rows",
        )


def _refuse_other_kinds(columns: Columns, format_name: str, where: Mapping[str, Any]) -> None:
    """Raise BadRow for preference data and KTO rows, which would be trained on in part.

    columns: of the row, with the names of data.columns, by which the user chose. where: of data.where.
    """
    row = columns.row
    sides = [column for column in PREFERENCE if not is_absent(row.get(column))]
    if sides and not set(columns.names.values()) & set(PREFERENCE):
        ours = FORMATS[format_name].needs[-1]
        both = "" if columns.get(ours) is None else f" next to {ours}"
        remedies = "; ".join(_of_one_side(columns, format_name, sides[0]))
        raise BadRow(
            "preference data",
            f"the row has {' and '.join(sides)}{both}. {OF_PAIRS}. "
            f"{remedies or 'Write rows with one side, as messages'}",
        )
    label = row.get("label")
    boolean = isinstance(label, bool) or str(label).lower() in ("true", "false")
    if boolean and "label" not in where and format_name not in ("text", "tokens"):
        raise BadRow(
            "KTO data",
            "the row has a label, true or false, next to its answer: it is KTO data, of good and bad "
            "answers, which objective=kto trains on. To fine-tune on the good ones, set "
            f"{argument('data.where', {'label': 'true'})}",
        )


def _of_one_side(columns: Columns, format_name: str, side: str) -> Iterator[str]:
    """Yield the settings with which the row is trained on: with the answer of one side, or without both."""
    ours = FORMATS[format_name].needs[-1]
    theirs = columns.names.get(ours, ours)
    for names, form in (
        ({ours: side}, format_name),
        ({"prompt": theirs, "completion": side}, "prompt-completion"),
    ):
        if _has_answer(Columns(columns.row, {**columns.names, **names}, columns.roles), form):
            yield f"To fine-tune on one side, set {argument('data.columns', names)}"
            break
    if _has_answer(columns, format_name):
        yield f"to use only {ours}, data.format={format_name}"


def _has_answer(columns: Columns, format_name: str) -> bool:
    """True if a row can be read in a format, and has a question and an answer."""
    try:
        messages = FORMATS[format_name].example(Origin("", 0), columns).messages
    except BadRow:
        return False
    return messages is None or {"user", "assistant"} <= {message["role"] for message in messages}


def _note_unused(columns: Columns, form: Format, where: Mapping[str, Any], notes: Notes) -> None:
    """Count the columns of a row that have a value and are not read."""
    read = {columns.names.get(name, name) for name in (*form.needs, *form.reads, "loss_weight")} | {*where}
    notes.unused.update(unused_columns(columns.row, read))


def last_answer(messages: Sequence[dict]) -> int | None:
    """Index of the last assistant turn, None where there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)


def no_answer(messages: Sequence[dict]) -> BadRow:
    """Reason for refusing a conversation without an assistant turn."""
    return BadRow("no assistant turn", f"none of the {len(messages)} messages is the assistant's")


def empty_answer(index: int, side: str = "") -> BadRow:
    """Reason for refusing a conversation whose message `index` is trained on and empty. side: of a pair."""
    return BadRow("empty answer", f"empty answer: {side}message {index + 1} (assistant) is empty")


def _check_answer(example: Example, side: str, *, needs_answer: bool) -> None:
    """Raise BadRow for a conversation whose last answer is missing, or empty and trained on by every setting
    of data.train_on; the encoder refuses earlier ones, which some settings leave out. side: of a pair.
    """
    messages = example.messages or ()
    last = last_answer(messages)
    if last is None:
        if needs_answer and messages:
            raise no_answer(messages)
        return
    mask = example.masks[last] if example.masks else None
    if is_empty(messages[last]) and (mask is None or mask.trained):
        raise empty_answer(last, side)


# Rows that a Python program holds #

#     [{"prompt": …}, …]      ─> CACHE/rows/train_data-<digest>.jsonl
#     datasets.Dataset        ─> CACHE/rows/train_data-<digest>.parquet
#
# The name holds the digest of the rows: the same rows are the same file in every process, other rows have
# another name, which a run that continues compares with the one in its config.yaml.


if TYPE_CHECKING:
    from datasets import Dataset

    Rows = Iterable[Mapping[str, Any]] | Dataset
else:  # a program without a Dataset need not import the library
    Rows = Iterable[Mapping[str, Any]]


def store_rows(rows: Rows, name: str, cache: str) -> Path:
    """Write `rows` to a file of the data cache, unless they are there, and return its path.

    rows: mappings of plain values, or a datasets.Dataset. name: of the argument that gave them. cache: the
    folder. Raises UserError if they are neither, if there are none, or if a row can't be written as JSON.
    """
    suffix, content = _content(rows, name)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    file = (expanded(cache, "data.cache") / ROWS_FOLDER / f"{name}-{digest}{suffix}").absolute()
    try:
        if not file.exists():
            write_atomically(file, content)
    except OSError as error:
        raise UserError(
            f"{name} can't be kept in {file.parent} ({error.strerror or error}); name another folder by "
            "data.cache."
        ) from error
    return file


def _content(rows: Any, name: str) -> tuple[str, bytes]:
    """(Suffix, content) of the file that holds the rows. Raises as `store_rows`."""
    if hasattr(rows, "to_parquet") and not isinstance(rows, Mapping):  # datasets.Dataset
        table = io.BytesIO()
        rows.to_parquet(table)
        suffix, content, count = ".parquet", table.getvalue(), len(rows)
    elif isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise UserError(
            f"{name} is of type {type(rows).__name__}; give a list of rows (a dict each) or a "
            "datasets.Dataset (of a DatasetDict one split), or name files in the config."
        )
    else:
        lines = [_line(row, f"{name}, row {number}") for number, row in enumerate(rows)]
        suffix, content, count = ".jsonl", "".join(lines).encode(), len(lines)
    if not count:
        raise UserError(f"{name} has no rows.")
    return suffix, content


def _line(row: Any, place: str) -> str:
    """One row as a line of JSON. place: its name in an error."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place} is of type {type(row).__name__}; a row is a dict, such as {{'text': '…'}}.")
    try:
        line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        line.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{place} holds a value that JSON does not have: {error}.") from None
    return f"{line}\n"
