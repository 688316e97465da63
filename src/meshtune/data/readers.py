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
from collections.abc import Callable, Iterator, Sequence
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
from meshtune.data.formats import ANSWERS, ArrowRow, Kind
from meshtune.data.rows import RawRow, examples
from meshtune.errors import UserError, reason_of, type_name

DELIMITERS = (",", ";", "\t")  # between the fields of a line
PLACED = 256  # rows after which a reader writes to `file.share` how far it is


def read(
    source: Source,
    *,
    on_bad_row: OnBadRow,
    data_files: Sequence[DataFile] | None = None,
    streaming: bool = False,
    start: int = 0,
    needs_answer: bool = True,
    tally: Tally | None = None,
    kind: Kind = ANSWERS,
) -> Iterator[Example]:
    """Yield the examples of a source's rows, of its first `max_samples` rows if it has a number, in order.

    start: index of the first row wanted (`Origin.row`). Parquet, json and map-style hub data sets seek there;
    in jsonl and csv files the rows before it are read but not checked. data_files, streaming: see `raw_rows`.
    The other arguments are those of `rows.examples`, which also says what is raised.
    """
    rows = raw_rows(source, files(source) if data_files is None else data_files, streaming, start)
    if source.max_samples is not None:
        rows = islice(rows, max(0, source.max_samples - start))
    return examples(rows, source, on_bad_row=on_bad_row, needs_answer=needs_answer, tally=tally, kind=kind)


def raw_rows(source: Source, data_files: Sequence[DataFile], streaming: bool, start: int) -> Iterator[RawRow]:
    """Yield the raw rows of a source from row `start` (from 0) on; the value of a broken row is a BadRow.

    data_files: those of the source; their `share` grows while they are read. streaming: True to read a hub
    data set without storing it on disk; without effect on files. Raises UserError if a file can't be read.
    """
    first = 0
    for file in data_files:
        whole = is_hub(source.path) or is_saved(Path(file.path))
        rows = _dataset(source, file, streaming, start) if whole else _rows(file, start - first)
        count = 0
        for number, line, value in rows:
            count = number + 1
            if first + number >= start and value is not NOTHING:
                yield Origin(file.path, line, first + number), value
        first += count
        file.share = 1.0


# --- files --------------------------------------------------------------------------------------------------
# A reader takes a file and the number of its rows that are not wanted. It yields (index of the row, its line,
# its value) of each row in the file, or at least of those that are wanted and of the last one.

NOTHING = object()  # the value of an empty line, and of a row that is not wanted
Numbered = tuple[int, int, Any]


def _rows(file: DataFile, unwanted: int) -> Iterator[Numbered]:
    """Yield the rows of a file by its reader. Raises UserError if it can't be read."""
    name = file.name.removesuffix(".gz")
    reader = next(reader for suffix, reader in READERS.items() if name.endswith(suffix))
    try:
        yield from reader(file, unwanted)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} can't be read: {error}") from error
    except Exception as error:
        if file.filesystem is None or isinstance(error, UserError):
            raise
        # Each filesystem has errors of its own: the network, the server.
        raise UserError(f"{file} can't be read: {reason_of(error)}") from error


@contextmanager
def _opened(file: DataFile) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """(The content, a function that writes to `file.share` how far it has been read, once in PLACED rows)."""
    with file.open() as stored:
        content = gzip.GzipFile(fileobj=stored) if file.name.endswith(".gz") else stored

        def place(number: int) -> None:
            if number % PLACED == 0:
                file.share = min(1.0, stored.tell() / max(1, file.size))

        yield content, place


def _lines(file: DataFile, unwanted: int, parse: Callable[[str], Any]) -> Iterator[Numbered]:
    """Read one value a line, `parse` of its text without the line break. Empty lines are counted as rows."""
    with _opened(file) as (lines, place):
        for number, line in enumerate(_bounded(lines)):
            place(number)
            value = NOTHING if number < unwanted else _line(line, parse, first=number == 0)
            yield number, number + 1, value


def _line(line: bytes | None, parse: Callable[[str], Any], *, first: bool) -> Any:
    """The value of a line, or a BadRow; NOTHING if it is empty. line: None for one that is too long."""
    if line is None:
        return BadRow(TOO_LONG, f"it has more than {LINE_BYTES:,} bytes; split the row")
    if first:
        line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as Windows editors write
    try:
        text = line.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        at = error.start
        return BadRow(NOT_UTF8, f"not UTF-8: byte 0x{line[at]:02x} at position {at + 1} of the line")
    return parse(text) if text.strip() else NOTHING


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
    return _if_whole(value) if "\\ud" in text.lower() else value


def _if_whole(value: Any) -> Any:
    """The value, or a BadRow if a string has half a surrogate pair: JSON can escape one, UTF-8 and tokenizers
    can't hold it.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        detail = "not UTF-8: half of a surrogate pair (\\ud800 to \\udfff) without the other half"
        return BadRow(NOT_UTF8, detail)
    return value


def json_fault(error: Exception) -> str:
    """Clause on why json.loads raised `error`, a ValueError or RecursionError."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a whole number of more than 4,300 digits"  # Python's limit (sys.set_int_max_str_digits)


def _json_list(file: DataFile, unwanted: int) -> Iterator[Numbered]:
    """Read a list of objects, or an object with one list; JSON lines in a file named .json as lines.

    Raises UserError if the file is not UTF-8, no JSON or lacks the list.
    """
    with _opened(file) as (stream, _):
        content = stream.read()
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}.") from None
    except (ValueError, RecursionError) as error:
        where = f": {json_fault(error)}"
        if isinstance(error, json.JSONDecodeError):
            if error.msg == "Extra data":
                yield from _lines(file, unwanted, _json_value)
                return
            where = f", line {error.lineno}: {error.msg}"
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
    for number, row in enumerate(value):
        file.share = number / len(value)
        yield number, number + 1, _if_whole(row) if escaped and number >= unwanted else row


def is_row(value: dict[str, Any]) -> bool:
    """True for a single row, without a list or with one of messages or tokens; False around rows."""
    firsts = [inner[0] if inner else {} for inner in value.values() if isinstance(inner, list)]
    in_rows = (not isinstance(first, dict) or bool(first.keys() & {"role", "from"}) for first in firsts)
    return not firsts or any(in_rows)


def _parquet(file: DataFile, unwanted: int) -> Iterator[Numbered]:
    """Read the row groups with rows that are wanted, without null values.

    Raises UserError if the file isn't parquet.
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
        if number + rows <= unwanted:
            number += rows
            yield number - 1, number, NOTHING
            continue
        for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
            file.share = number / max(1, table.metadata.num_rows)
            for value in batch.to_pylist():
                yield number, number + 1, ArrowRow(value)
                number += 1


def _csv(file: DataFile, unwanted: int, delimiter: str = ",") -> Iterator[Numbered]:
    """Read a file whose first line names the columns; empty lines are not counted as rows.

    delimiter: the suffix's; spreadsheets of many countries write semicolons into .csv files. Raises UserError
    if the file is empty or names a column twice.
    """
    csv.field_size_limit(LINE_BYTES)  # the default of 128 KiB is shorter than some documents
    with _opened(file) as (content, place):
        stream = io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
        head = stream.readline()
        lines = chain([head] if head else [], stream)
        reader = csv.reader(lines, delimiter=delimiter_of(head, delimiter), strict=True)  # quotes must close
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
                return
            except csv.Error as error:
                if "field limit" in str(error):  # what follows may be inside the field, and no row
                    raise UserError(
                        f"{file}, line {reader.line_num}: a field has more than {LINE_BYTES:,} characters; "
                        "close its quote, or split the row."
                    ) from None
                values = BadRow("broken CSV", f"broken CSV: {error}")
            if values != []:
                number += 1
                place(number)
                yield number, reader.line_num, _fields(values, header)


def _fields(values: list[str] | BadRow, header: list[str]) -> dict[str, str] | BadRow:
    """The row of a line's fields; a BadRow if they are not UTF-8, or of another number than the columns."""
    if isinstance(values, BadRow):
        return values
    if any(map(_is_broken, values)):
        return BadRow("not UTF-8")
    if len(values) != len(header):
        detail = f"{len(values)} fields, but the header names {len(header)} columns"
        return BadRow("wrong number of fields", detail)
    return dict(zip(header, values, strict=True))


def delimiter_of(head: str, usual: str) -> str:
    """The character between the columns of the first line: the usual one unless only another is there."""
    if usual in head:
        return usual
    return max(DELIMITERS, key=head.count) if any(map(head.count, DELIMITERS)) else usual


def _is_broken(value: str) -> bool:
    """True if a field was read from bytes that are not UTF-8."""
    return not value.isascii() and re.search("[\udc80-\udcff]", value) is not None


READERS: dict[str, Callable[[DataFile, int], Iterator[Numbered]]] = {
    ".jsonl": partial(_lines, parse=_json_value),
    ".ndjson": partial(_lines, parse=_json_value),
    ".json": _json_list,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".txt": partial(_lines, parse=lambda line: {"text": line}),  # a text a line, as `datasets` reads them
}


# Data sets that the library datasets reads #


def _dataset(source: Source, file: DataFile, streaming: bool, start: int) -> Iterator[Numbered]:
    """Read a data set of the hub, or a folder that `save_to_disk` wrote, from row `start` on.

    No code from the hub is run: `datasets` reads data files. file: of the data set, whose size and share are
    kept. streaming: see `raw_rows`. Raises UserError if it, or `source.split`, can't be read.
    """
    dataset = _load_hub(source, streaming) if is_hub(source.path) else _load_saved(source, file)
    size = 0 if streaming and is_hub(source.path) else len(dataset)
    if size:
        file.size = file.size or dataset.data.nbytes
        rows = dataset.select(range(min(start, size), size))
    else:
        rows = dataset.skip(start) if start else dataset
    for number, value in enumerate(rows, start):
        file.share = number / size if size else 0.0
        yield number, number + 1, ArrowRow(value)


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


def _load_saved(source: Source, file: DataFile) -> Any:
    """A folder written by `Dataset.save_to_disk`, or the split of one by `DatasetDict.save_to_disk`."""
    import datasets

    try:
        saved = datasets.load_from_disk(file.path)
    except Exception as error:
        raise UserError(f"datasets can't load the folder {file}: {reason_of(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise UserError(f"{file} has no split {source.split}; it has {', '.join(map(str, saved))}.")
        return saved[source.split]
    if source.split != "train":
        raise UserError(
            f"{file} has no splits, so split={source.split} would read all its rows; leave it out."
        )
    return saved


def hub_revision(source: Source) -> str:
    """The data set's commit on the hub; where the hub can't be reached, the fingerprint of the local copy."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path.partition(":")[0]).sha)
    except Exception:
        return str(_load_hub(source, streaming=False)._fingerprint)
