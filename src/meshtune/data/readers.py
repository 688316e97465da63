"""Files and hub data sets to raw rows.

    file, folder or hub id ──> raw_rows() ──> rows.examples() ──> Example
                                  │
                                  └─ not UTF-8, broken JSON, broken CSV: BadRow, with file and line

jsonl is parsed here, line by line, because a data library's parser can't say which line is broken. Local
files are read lazily, one block at a time (a .json file is one value, so it is read whole).
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from meshtune.data.example import (
    LINE_BYTES,
    NOT_UTF8,
    TOO_LONG,
    BadRow,
    Example,
    OnBadRow,
    Origin,
    Source,
    Tally,
)
from meshtune.data.files import DataFile, data_like, files, is_hub, is_saved
from meshtune.data.formats import ArrowRow
from meshtune.data.rows import RawRow, examples
from meshtune.errors import UserError, reason_of, type_name

DELIMITERS = (",", ";", "\t")  # between the fields of a line
PLACED = 256  # rows after which a reader says how far it is


def read(
    source: Source,
    *,
    on_bad_row: OnBadRow,
    data_files: Sequence[DataFile] | None = None,
    streaming: bool = False,
    start: int = 0,
    needs_answer: bool = True,
    tally: Tally | None = None,
) -> Iterator[Example]:
    """Yield the examples of a source's rows, of its first `max_samples` rows if it has a number, in order.

    start: index of the first row wanted (`Origin.row`). Parquet, json and map-style hub data sets seek there;
    in jsonl and csv files the rows before it are read but not checked. data_files, streaming: see `raw_rows`.
    The other arguments are those of `rows.examples`, which also says what is raised.
    """
    rows = raw_rows(source, files(source) if data_files is None else data_files, streaming, start)
    if source.max_samples is not None:
        rows = islice(rows, max(0, source.max_samples - start))
    return examples(rows, source, on_bad_row=on_bad_row, needs_answer=needs_answer, tally=tally)


def raw_rows(source: Source, data_files: Sequence[DataFile], streaming: bool, start: int) -> Iterator[RawRow]:
    """Yield the raw rows of a source from row `start` (from 0) on; the value of a broken row is a BadRow.

    data_files: those of the source; their `share` grows while they are read. streaming: True to read a hub
    data set without storing it on disk; without effect on files. Raises UserError if a file can't be read.
    """
    if is_hub(source.path):
        yield from hub_rows(source, data_files[0], streaming, start)
        return
    if is_saved(Path(data_files[0].path)):
        yield from saved_rows(source, data_files[0], start)
        return
    first = 0
    for file in data_files:
        try:
            first += yield from _reader(file)(file, first, start)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} can't be read: {error}") from error
        except Exception as error:
            if file.filesystem is None or isinstance(error, UserError):
                raise
            # Each filesystem has errors of its own: the network, the server.
            raise UserError(f"{file} can't be read: {reason_of(error)}") from error
        file.share = 1.0


# --- files --------------------------------------------------------------------------------------------------
# A reader takes (file, first, start): `first` is the index, in the whole source, of the file's first row. It
# yields the rows from index `start`, also in the whole source, on and returns how many rows the file has.

Reader = Callable[[DataFile, int, int], Generator[RawRow, None, int]]


def _reader(file: DataFile) -> Reader:
    name = file.name.removesuffix(".gz")
    return next(reader for suffix, reader in READERS.items() if name.endswith(suffix))


@contextmanager
def _opened(file: DataFile) -> Iterator[tuple[Any, Callable[[], None]]]:
    """(The content, a function that writes to `file.share` how far it has been read)."""
    with file.open() as stored:
        content = gzip.GzipFile(fileobj=stored) if file.name.endswith(".gz") else stored

        def place() -> None:
            file.share = min(1.0, stored.tell() / max(1, file.size))

        yield content, place


def _json_lines(file: DataFile, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read one JSON value a line; see `_lines`."""
    return (yield from _lines(file, first, start, _json_value))


def _text_lines(file: DataFile, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read one text a line, as `datasets` reads .txt files; see `_lines`."""
    return (yield from _lines(file, first, start, lambda line: {"text": line}))


def _lines(
    file: DataFile, first: int, start: int, parse: Callable[[str], Any]
) -> Generator[RawRow, None, int]:
    """Read one value a line, `parse` of its text without the line break. first, start, result: see `Reader`.

    Empty lines are skipped but counted as rows: lines before `start` stay unparsed.
    """
    number = -1
    with _opened(file) as (lines, place):
        for number, line in enumerate(_bounded(lines)):
            if number % PLACED == 0:
                place()
            if first + number < start:
                continue
            origin = Origin(file.path, number + 1, first + number)
            if line is None:
                yield (
                    origin,
                    BadRow(TOO_LONG, f"it has more than {LINE_BYTES:,} bytes; split the row"),
                )
                continue
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as Windows editors write
            try:
                text = line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError as error:
                detail = (
                    f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
                )
                yield origin, BadRow(NOT_UTF8, detail)
                continue
            if not text.strip():
                continue
            yield origin, parse(text)
    return number + 1


def _bounded(stream: Any) -> Iterator[bytes | None]:
    """Yield the lines of a binary file object, None for each of more than LINE_BYTES."""
    lines = io.BufferedReader(stream)
    while line := lines.readline(LINE_BYTES + 1):
        part = line
        while part and not part.endswith(b"\n"):
            part = lines.readline(LINE_BYTES)
        yield line if len(line) <= LINE_BYTES else None


def _json_value(text: str) -> Any:
    """The value of a line of JSON, or a BadRow."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", f"broken JSON: {json_fault(error)}")
    if "\\ud" in text.lower() and _has_lone_surrogate(value):
        return BadRow(
            NOT_UTF8, "not UTF-8: half of a surrogate pair (\\ud800 to \\udfff) without the other half"
        )
    return value


def json_fault(error: Exception) -> str:
    """Clause on why json.loads raised `error`, a ValueError or RecursionError."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a whole number of more than 4,300 digits"  # Python's limit (sys.set_int_max_str_digits)


def _has_lone_surrogate(value: Any) -> bool:
    """True if a string has half a surrogate pair: JSON can escape one, UTF-8 and tokenizers can't hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _json_list(file: DataFile, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read a list of objects, or an object with one list; JSON lines in a file named .json as lines.

    first, start, result: see `Reader`. Raises UserError if the file is not UTF-8, no JSON or lacks the list.
    """
    with _opened(file) as (stream, _):
        content = stream.read()
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return (yield from _json_lines(file, first, start))
        where = (
            f", line {error.lineno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else f": {json_fault(error)}"
        )
        raise UserError(
            f"{file}{where}. A .json file holds one list of objects; one object a line is .jsonl."
        ) from None
    if isinstance(value, dict) and is_row(value):
        value = [value]
    if isinstance(value, dict):
        lists = [key for key, inner in value.items() if isinstance(inner, list)]
        if len(lists) != 1:
            raise UserError(
                f"{file} is one JSON object with {len(lists)} lists{' ' * bool(lists)}{', '.join(lists)}; "
                "expected a list of objects, or an object with exactly one list."
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise UserError(f"{file} holds {type_name(value)}; expected a list of objects.")
    escaped = b"\\ud" in content.lower()
    for number in range(max(0, start - first), len(value)):
        file.share = number / len(value)
        bad = escaped and _has_lone_surrogate(value[number])
        yield Origin(file.path, number + 1, first + number), BadRow(NOT_UTF8) if bad else value[number]
    return len(value)


def is_row(value: dict[str, Any]) -> bool:
    """True for a single row, without a list or with one of messages or tokens; False around rows."""
    firsts = [inner[0] if inner else {} for inner in value.values() if isinstance(inner, list)]
    in_rows = (not isinstance(first, dict) or bool(first.keys() & {"role", "from"}) for first in firsts)
    return not firsts or any(in_rows)


def _parquet(file: DataFile, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read the row groups that reach beyond `start`, without null values; the others are not read.

    first, start, result: see `Reader`. Raises UserError if the file isn't parquet.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.open() if file.filesystem else file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable parquet file: {error}") from None
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if first + number + rows <= start:
            number += rows
            continue
        for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
            file.share = number / max(1, table.metadata.num_rows)
            for value in batch.to_pylist():
                if first + number >= start:
                    yield Origin(file.path, number + 1, first + number), ArrowRow(value)
                number += 1
    return number


def _csv(file: DataFile, first: int, start: int, delimiter: str = ",") -> Generator[RawRow, None, int]:
    """Read a file whose first line names the columns; empty lines are not counted as rows.

    delimiter: the suffix's; spreadsheets of many countries write semicolons into .csv files. first, start,
    result: see `Reader`. Raises UserError if the file is empty or names a column twice.
    """
    csv.field_size_limit(LINE_BYTES)  # the default of 128 KiB is shorter than some documents
    with _opened(file) as (content, place):
        stream = io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
        head = stream.readline()
        # An open quote would swallow rows.
        reader = csv.reader(
            chain([head] if head else [], stream), delimiter=delimiter_of(head, delimiter), strict=True
        )
        header = next(reader, None)
        if header is None:
            raise UserError(f"{file} is empty; the first line of a .csv file names its columns.")
        if any(map(_is_broken, header)):
            raise UserError(f"{file} is not UTF-8 text in its first line, which names the columns.")
        if twice := [name for name, times in Counter(header).items() if times > 1]:
            raise UserError(f"{file} names {', '.join(twice)} more than once in its first line; rename one.")
        number = -1
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return number + 1
            except csv.Error as error:
                if "field limit" in str(error):  # what follows may be inside the field, and no row
                    raise UserError(
                        f"{file}, line {reader.line_num}: a field has more than {LINE_BYTES:,} characters; "
                        "close its quote, or split the row."
                    ) from None
                values = BadRow("broken CSV", f"broken CSV: {error}")
            if values == []:
                continue
            number += 1
            if number % PLACED == 0:
                place()
            if first + number < start:
                continue
            origin = Origin(file.path, reader.line_num, first + number)
            if isinstance(values, BadRow):
                yield origin, values
            elif any(map(_is_broken, values)):
                yield origin, BadRow("not UTF-8")
            elif len(values) != len(header):
                detail = f"{len(values)} fields, but the header names {len(header)} columns"
                yield origin, BadRow("wrong number of fields", detail)
            else:
                yield origin, dict(zip(header, values, strict=True))


def delimiter_of(head: str, usual: str) -> str:
    """The character between the columns of the first line: the usual one unless only another is there."""
    if usual in head:
        return usual
    return max(DELIMITERS, key=head.count) if any(map(head.count, DELIMITERS)) else usual


def _is_broken(value: str) -> bool:
    """True if a field was read from bytes that are not UTF-8."""
    return not value.isascii() and re.search("[\udc80-\udcff]", value) is not None


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".txt": _text_lines,
}


# Data sets that the library datasets reads #


def hub_rows(source: Source, file: DataFile, streaming: bool, start: int) -> Iterator[RawRow]:
    """Read a data set of the hub from row `start` on; no code from it is run (`datasets` reads data files).

    file: of the data set, whose size and share are kept. streaming: see `readers.raw_rows`. Raises UserError
    if it, or `source.split`, can't be read.
    """
    dataset = _load_hub(source, streaming)
    if streaming:
        rows = dataset.skip(start) if start else dataset
    else:
        rows = dataset.select(range(min(start, len(dataset)), len(dataset)))
        file.size = dataset.data.nbytes
    for number, value in enumerate(rows, start):
        if not streaming:
            file.share = number / len(dataset)
        yield Origin(source.path, number + 1, number), ArrowRow(value)


def _load_hub(source: Source, streaming: bool) -> Any:
    import datasets  # takes a second to import, and local files don't need it

    name, _, configuration = source.path.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=source.split, streaming=streaming)
    except Exception as error:
        raise UserError(
            f"{source.path} is not a file or folder here{data_like(source.path) or '.'} The hub data set of "
            f"that name can't be read (split {source.split}): {reason_of(error)}"
        ) from error


def saved_rows(source: Source, file: DataFile, start: int) -> Iterator[RawRow]:
    """Read a folder written by `Dataset.save_to_disk`, or the split `source.split` of one written by
    `DatasetDict.save_to_disk`, from row `start` on. Raises UserError if that split is missing.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(file.path)
    except Exception as error:
        raise UserError(f"datasets can't load the folder {file}: {reason_of(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise UserError(f"{file} has no split {source.split}; it has {', '.join(map(str, saved))}.")
        saved = saved[source.split]
    elif source.split != "train":
        raise UserError(
            f"{file} has no splits, so split={source.split} would read all its rows; leave it out."
        )
    for number in range(start, len(saved)):
        file.share = number / len(saved)
        yield Origin(file.path, number + 1, number), ArrowRow(saved[number])


def hub_revision(source: Source) -> str:
    """The data set's commit on the hub; where the hub can't be reached, the fingerprint of the local copy."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path.partition(":")[0]).sha)
    except Exception:
        return str(_load_hub(source, streaming=False)._fingerprint)
