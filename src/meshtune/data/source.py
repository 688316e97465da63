"""Rows: from files and the hub to `Example`s of three shapes, with every bad row named.

    file, folder or hub id ──> raw rows ──> our columns ──> Example(messages | prompt + completion | text)
                                  │              │               │
                                  └─ not UTF-8, ─┴─ missing, ────┴─ wrong types, empty answers, unknown roles:
                                      broken JSON                    bad rows, named by file and line

jsonl is parsed here, line by line, because a data library's parser can't say which line is broken. Local
files are read lazily, one block at a time (a .json file is one value, so it is read whole).
"""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from meshtune.errors import UserError

FORMATS: dict[str, tuple[str, ...]] = {  # format -> the columns that it needs
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}
OPTIONAL = ("input", "tools", "system")  # columns that a format reads where they exist
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",  # its value is the JSON of one call or of a list of them
}  # fmt: skip
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
SPLITS = {
    "train": "train", "training": "train", "test": "test", "eval": "validation", "dev": "validation",
    "valid": "validation", "val": "validation", "validation": "validation",
}  # fmt: skip
SHOWN = 10  # problems that one error spells out
LOOK_AHEAD = 10_000  # rows read on after the first bad one, to name more of them at once

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class Origin:
    """Where an example comes from. `line` counts from 1 (lines of jsonl and csv, else rows of the file);
    `row` counts from 0 over the whole source, so `read(source, start=origin.row + 1)` goes on after this
    example.
    """

    file: str
    line: int
    row: int = 0

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class Example:
    """One row, in exactly one shape: `messages` (with `tools`), or `prompt` and `completion`, or `text`."""

    origin: Origin
    messages: tuple[dict, ...] | None = None
    tools: list | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Source:
    """A file, a folder of files or a hub data set (`org/name`, or `org/name:configuration`).

    `columns` maps our name to theirs: `(("prompt", "question"), ("completion", "answer"))`. `split` chooses
    the hub data set's split, and among a folder's files where their names tell it (train.jsonl beside
    test.jsonl).
    """

    path: str
    weight: float = 1.0
    split: str = "train"
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()


@dataclass
class Dropped:
    """How many bad rows were left out, by reason."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        if not self.total:
            return "no rows dropped"
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.counts.most_common())
        return f"{self.total:,} bad row{'s' * (self.total != 1)} dropped: {reasons}"


class BadRow(Exception):
    """One row that can't be used. `reason` groups equal ones for counting, the message says what is wrong
    here.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        self.reason = reason
        super().__init__(detail or reason)


def problems_of_rows(problems: list[str], total: int, rows: int) -> UserError:
    """The error for bad rows: the first ten sentences, how many there are so far, and the way out."""
    more = f"{total:,} bad row{'s' * (total != 1)} in the {rows:,} rows read so far"
    shown = f" (the first {SHOWN} are named above)" if total > SHOWN else ""
    return UserError(
        [*problems[:SHOWN], f"{more}{shown}. Mend them, or set data.on_bad_row=skip to leave them out."]
    )


# --- raw rows -----------------------------------------------------------------------------------------------
# A raw row is (origin, value): value is a dict of columns, or a BadRow that says why there is none.

Raw = tuple[Origin, Any]
Rows = Generator[Raw, None, int]  # yields raw rows from `start` on; returns how many rows the file counts as


def _open(file: Path):
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _json_lines(file: Path, row: int, start: int) -> Rows:
    """One JSON object a line; empty lines are passed over, but count as rows so that `row` is known
    unread.
    """
    number = -1
    with _open(file) as lines:
        for number, line in enumerate(lines):
            if row + number < start:
                continue
            origin = Origin(str(file), number + 1, row + number)
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as Windows editors write
            try:
                text = line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError as error:
                detail = (
                    f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
                )
                yield origin, BadRow("not UTF-8", detail)
                continue
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                value = BadRow("broken JSON", f"broken JSON: {error.msg} at column {error.colno}")
            except RecursionError:
                value = BadRow("broken JSON", "broken JSON: nested too deeply")
            else:
                if "\\ud" in text.lower() and _unpaired(value):
                    value = BadRow(
                        "not UTF-8", "not UTF-8: half of a surrogate pair (\\ud800 to \\udfff) by itself"
                    )
            yield origin, value
    return number + 1


def _unpaired(value: Any) -> bool:
    """JSON may escape half a surrogate pair, which no UTF-8 text (and no tokenizer) can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _json_list(file: Path, row: int, start: int) -> Rows:
    """A list of objects, or an object with one list. Lines of JSON under the name .json are read as such."""
    with _open(file) as stream:
        content = stream.read()
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return (yield from _json_lines(file, row, start))
        where = (
            f", line {error.lineno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else ": nested too deeply"
        )
        raise UserError(
            f"{file}{where}. A .json file holds one list of objects; one object a line is .jsonl."
        ) from None
    if isinstance(value, dict):
        lists = [key for key, inner in value.items() if isinstance(inner, list)]
        if len(lists) != 1:
            raise UserError(
                f"{file} is one JSON object with {len(lists)} lists {lists}; expected a list of objects, or "
                "an object with exactly one list."
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise UserError(f"{file} holds a {type(value).__name__}; expected a list of objects.")
    escaped = b"\\ud" in content.lower()
    for number in range(max(0, start - row), len(value)):
        bad = escaped and _unpaired(value[number])
        yield Origin(str(file), number + 1, row + number), BadRow("not UTF-8") if bad else value[number]
    return len(value)


def _parquet(file: Path, row: int, start: int) -> Rows:
    """Row groups before `start` are not read."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable parquet file: {error}") from None
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + number + rows <= start:
            number += rows
            continue
        for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
            for value in batch.to_pylist():
                if row + number >= start:
                    yield Origin(str(file), number + 1, row + number), _without_nulls(value)
                number += 1
    return number


def _without_nulls(value: Any) -> Any:
    """Arrow fills keys that a struct lacks with null (every message then has `tool_calls: null`): take them
    out.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _csv(file: Path, row: int, start: int) -> Rows:
    """The first line names the columns; `line` is the line on which the row ends."""
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than some documents
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream)
        header = next(reader, None)
        if header is None:
            raise UserError(f"{file} is empty; the first line of a .csv file names its columns.")
        number = -1
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return number + 1
            except csv.Error as error:
                values = BadRow("broken CSV", f"broken CSV: {error}")
            if values == []:
                continue
            number += 1
            if row + number < start:
                continue
            origin = Origin(str(file), reader.line_num, row + number)
            if isinstance(values, BadRow):
                yield origin, values
            elif any(not value.isascii() and re.search("[\udc80-\udcff]", value) for value in values):
                yield origin, BadRow("not UTF-8")
            elif len(values) != len(header):
                detail = f"{len(values)} fields, but the header names {len(header)} columns"
                yield origin, BadRow("wrong number of fields", detail)
            else:
                yield origin, dict(zip(header, values, strict=True))


def _hub(source: Source, streaming: bool, start: int) -> Iterator[Raw]:
    """A data set of the hub; no code from it is run (`datasets` reads data files only)."""
    dataset = _load_hub(source, streaming)
    if streaming:
        rows = dataset.skip(start) if start else dataset
    else:
        rows = dataset.select(range(min(start, len(dataset)), len(dataset)))
    for number, value in enumerate(rows, start):
        yield Origin(source.path, number + 1, number), _without_nulls(value)


def _load_hub(source: Source, streaming: bool) -> Any:
    import datasets  # takes a second to import, and local files don't need it

    name, _, configuration = source.path.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=source.split, streaming=streaming)
    except Exception as error:
        raise UserError(
            f"{source.path} is no file or folder here, and the hub data set of that name can't be read "
            f"(split {source.split}): {type(error).__name__}: {error}"
        ) from error


def _saved(folder: Path, source: Source, start: int) -> Iterator[Raw]:
    """A folder written by `Dataset.save_to_disk`."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise UserError(f"{folder} has no split {source.split}; it has {', '.join(map(str, saved))}.")
        saved = saved[source.split]
    for number in range(start, len(saved)):
        yield Origin(str(folder), number + 1, number), _without_nulls(saved[number])


def is_hub(path: str) -> bool:
    """Whether `path` is read as a hub data set id: no such file or folder, and of the form
    org/name[:configuration].
    """
    named = re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?", path) is not None
    return named and not path.endswith(SUFFIXES) and not Path(path).exists()


def files(source: Source) -> list[Path]:
    """The local files of a source, in the order in which they are read.

    Raises UserError if there is nothing at the path, or nothing that can be read.
    """
    path = Path(source.path).expanduser()
    known = f"Readable are {', '.join(SUFFIXES)}, a folder of these, or a hub data set org/name."
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(f"{path} is of no known kind. {known}")
        return [path]
    if not path.is_dir():
        raise UserError(f"There is no file or folder {path} (from {Path.cwd()}). {known}")
    if (path / "dataset_info.json").exists():
        return [path]  # save_to_disk
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name.lower().endswith(SUFFIXES)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise UserError(f"The folder {path} holds no data files. {known}")
    # A folder with train.jsonl and test.jsonl must not train on the test: names that tell the split choose.
    wanted = SPLITS.get(source.split, source.split)
    of_split = [file for file in found if _split_of(file.relative_to(path)) == wanted]
    return of_split or found


def _split_of(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _reader(file: Path) -> Callable[[Path, int, int], Rows]:
    name = file.name.lower().removesuffix(".gz")
    if name.endswith(".jsonl"):
        return _json_lines
    if name.endswith(".json"):
        return _json_list
    return _parquet if name.endswith(".parquet") else _csv


def _raw(source: Source, streaming: bool, start: int) -> Iterator[Raw]:
    if is_hub(source.path):
        yield from _hub(source, streaming, start)
        return
    row = 0
    found = files(source)
    if found[0].is_dir():
        yield from _saved(found[0], source, start)
        return
    for file in found:
        try:
            row += yield from _reader(file)(file, row, start)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} can't be read: {error}") from error


# --- columns and formats ------------------------------------------------------------------------------------


def _needs() -> str:
    return "; ".join(f"{name} needs {' and '.join(columns)}" for name, columns in FORMATS.items())


def detect(source: Source, columns: list[str]) -> str:
    """The format of rows with these `columns`, after `source.columns`' renaming; an explicit `source.format`
    wins.

    Raises UserError if none or several formats fit, naming the columns seen and what each format needs.
    """
    problems = []
    known = {*OPTIONAL, *(column for needed in FORMATS.values() for column in needed)}
    seen = f"{source.path} has the columns {', '.join(columns) or '(none)'}"
    for ours, theirs in source.columns:
        if ours not in known:
            problems.append(f"data.columns names {ours}, which is not one of {', '.join(sorted(known))}.")
        elif theirs not in columns and ours not in OPTIONAL:
            problems.append(f"data.columns maps {ours} to {theirs}, but {seen}.")
    if problems:
        raise UserError(problems)

    mapped = dict(source.columns)
    # A column that was renamed is no longer there under its own name, unless it is ours already.
    present = (set(columns) - set(mapped.values())) | set(mapped)
    name = re.sub(r"[_/ ]", "-", source.format.lower())
    if name != "auto":
        if name not in FORMATS:
            raise UserError(
                f"data.format={source.format} is unknown; it is auto or one of {', '.join(FORMATS)}."
            )
        missing = [column for column in FORMATS[name] if column not in present]
        if missing:
            raise UserError(
                f"Format {name} needs the columns {' and '.join(FORMATS[name])}, but {seen}. Map them with "
                f"data.columns={{{missing[0]}: THEIR NAME}}."
            )
        return name
    fit = [name for name, needed in FORMATS.items() if present.issuperset(needed)]
    if len(fit) > 1:  # columns that the user mapped say which one is meant
        fit = [name for name in fit if set(mapped) & set(FORMATS[name])] or fit
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise UserError(f"{seen}, which fit the formats {' and '.join(fit)}; choose one with data.format.")
    example = "data.columns={prompt: question, completion: answer}"
    raise UserError(
        f"{seen}, which fit no format ({_needs()}). Map their names to ours, for example {example}."
    )


def _string(row: Mapping, ours: str, mapped: Mapping[str, str], answer: bool = False) -> str:
    theirs = mapped.get(ours, ours)
    value = row.get(theirs)
    if value is None:
        if theirs in row:
            raise BadRow(f"null in column {theirs}", f"column {theirs} is null")
        raise BadRow(
            f"no column {theirs}", f"column {theirs} is missing (there are {', '.join(map(str, row))})"
        )
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)[:40]
        raise BadRow("wrong type", f"column {theirs} is {_kind(value)} ({shown}), expected text")
    if answer and not value.strip():
        raise BadRow("empty answer" if ours != "text" else "empty text", f"column {theirs} is empty")
    return value


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def _list(row: Mapping, ours: str, mapped: Mapping[str, str]) -> list:
    """A column that holds a list, or the JSON text of one (csv and some parquet files)."""
    theirs = mapped.get(ours, ours)
    value = row.get(theirs)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise BadRow("wrong type", f"column {theirs} is text that is not JSON, expected a list") from None
    if value is None:
        raise BadRow(
            f"no column {theirs}", f"column {theirs} is missing (there are {', '.join(map(str, row))})"
        )
    if not isinstance(value, list):
        raise BadRow("wrong type", f"column {theirs} is {_kind(value)}, expected a list")
    return value


def _content(message: dict, number: int) -> None:
    """Checks a message's content: text, a list of parts, or nothing beside tool calls."""
    content = message.get("content")
    calls = message.get("tool_calls")
    assistant = message["role"] == "assistant"
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadRow(
            "wrong type", f"message {number}: tool_calls is {_kind(calls)}, expected a list of objects"
        )
    if content is None:
        if not (assistant and calls):
            raise BadRow("message without content", f"message {number} ({message['role']}) has no content")
    elif isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise BadRow("wrong type", f"message {number}: content is a list, but not of objects")
        if assistant and not content and not calls:
            raise BadRow("empty answer", f"message {number} (assistant) is empty")
    elif not isinstance(content, str):
        raise BadRow("wrong type", f"message {number}: content is {_kind(content)}, expected text")
    elif assistant and not content.strip() and not calls:
        raise BadRow("empty answer", f"message {number} (assistant) is empty")


def _message(value: Any, number: int) -> dict:
    """One message: checked; ShareGPT's from/value becomes role/content. Other keys stay as they are."""
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"message {number} is {_kind(value)}, expected an object")
    if "from" in value and "role" not in value:
        message = {key: inner for key, inner in value.items() if key not in ("from", "value")}
        name = value["from"]
        if not isinstance(name, str) or name not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise BadRow("unknown role", f"message {number} is from {name!r}, which is none of {known}")
        message = {"role": SHAREGPT_ROLES[name], "content": value.get("value"), **message}
        if name == "function_call":
            message["tool_calls"], message["content"] = _calls(value.get("value"), number), ""
    else:
        message = {key: inner for key, inner in value.items() if inner is not None}
        if message.get("role") not in ROLES:
            shown = repr(message["role"]) if "role" in message else "missing"
            raise BadRow(
                "unknown role", f"message {number}: the role is {shown}, expected one of {', '.join(ROLES)}"
            )
    _content(message, number)
    return message


def _calls(value: Any, number: int) -> list[dict]:
    try:
        calls = json.loads(value)
    except (TypeError, json.JSONDecodeError):
        raise BadRow("broken JSON", f"message {number} (function_call) is not JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow("wrong type", f"message {number} (function_call) is no object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _conversation(
    origin: Origin, turns: list, row: Mapping, mapped: Mapping[str, str], needs_answer: bool
) -> Example:
    messages = [_message(value, number) for number, value in enumerate(turns, 1)]
    system = row.get(mapped.get("system", "system"))
    if isinstance(system, str) and system.strip() and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    if not messages:
        raise BadRow("no messages", "the conversation is empty")
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn", f"none of the {len(messages)} messages is the assistant's")
    has_tools = row.get(mapped.get("tools", "tools")) not in (None, "", [])
    tools = _list(row, "tools", mapped) if has_tools else None
    return Example(origin, messages=tuple(messages), tools=tools)


def _example(origin: Origin, row: Any, name: str, mapped: Mapping[str, str], needs_answer: bool) -> Example:
    """One raw row as an Example; raises BadRow."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("wrong type", f"the row is {_kind(row)}, expected an object")
    if name == "text":
        return Example(origin, text=_string(row, "text", mapped, answer=True))
    if name == "prompt-completion":
        if isinstance(row.get(mapped.get("prompt", "prompt")), list):  # both columns hold messages
            turns = _list(row, "prompt", mapped) + _list(row, "completion", mapped)
            return _conversation(origin, turns, row, mapped, needs_answer)
        prompt = _string(row, "prompt", mapped)
        return Example(origin, prompt=prompt, completion=_string(row, "completion", mapped, answer=True))
    if name == "alpaca":
        instruction = _string(row, "instruction", mapped)
        theirs = mapped.get("input", "input")
        extra = _string(row, "input", mapped) if row.get(theirs) is not None else ""
        prompt = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        return Example(origin, prompt=prompt, completion=_string(row, "output", mapped, answer=True))
    ours = FORMATS[name][0]
    return _conversation(origin, _list(row, ours, mapped), row, mapped, needs_answer)


# --- reading ------------------------------------------------------------------------------------------------


def read(
    source: Source,
    *,
    on_bad_row: OnBadRow,
    streaming: bool = False,
    start: int = 0,
    needs_answer: bool = True,
    dropped: Dropped | None = None,
) -> Iterator[Example]:
    """The examples of a source, in order.

    `start` is the index of the first row wanted (`Origin.row`); parquet, json and map-style hub data sets
    seek there, lines are passed over unparsed. `needs_answer` makes a conversation without an assistant turn
    a bad row (false for train_on=all). `dropped` counts what `on_bad_row="skip"` leaves out.

    With `on_bad_row="error"` nothing more is yielded after the first bad row: up to ten thousand more rows
    are looked through, and one UserError names the first ten bad ones (file, line, what is wrong) and counts
    all of them.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"data.on_bad_row={on_bad_row} is unknown; it is error or skip.")
    mapped = dict(source.columns)
    name: str | None = None
    problems: list[str] = []
    total = rows = first_bad = 0
    for origin, row in _raw(source, streaming, start):
        rows += 1
        if name is None and isinstance(row, dict):  # once per source, on its first row that has columns
            name = detect(source, [str(column) for column in row])
        try:
            # Without a format yet, the row has no columns, and so it is bad whatever the format is.
            example = _example(origin, row, name or "text", mapped, needs_answer)
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
        raise problems_of_rows(problems, total, rows)


def columns_of(source: Source, streaming: bool = False) -> list[str]:
    """The columns of the first row that has any; empty if no row has."""
    for _, row in islice(_raw(source, streaming, 0), 1000):
        if isinstance(row, dict):
            return list(row)
    return []


def fingerprint(source: Source) -> str:
    """A digest that changes when the rows may have: each file's path, size and time of change, or the hub
    data set's revision; with the split, format and columns under which they are read.
    """
    parts: list[Any] = [source.split, source.format, source.columns]
    if is_hub(source.path):
        parts += [source.path, _hub_revision(source)]
    else:
        for file in files(source):
            inner = sorted(file.rglob("*")) if file.is_dir() else [file]
            for one in inner:
                status = one.stat()
                parts.append((str(one.resolve()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _hub_revision(source: Source) -> str:
    """The commit on the hub; where the hub can't be reached, the fingerprint of the copy in datasets'
    cache.
    """
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path.partition(":")[0]).sha)
    except Exception:
        return str(_load_hub(source, streaming=False)._fingerprint)
