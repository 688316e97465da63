"""Files and hub data sets to raw rows.

    file, folder or hub id ──> raw_rows() ──> rows.examples() ──> Example
                                  │
                                  └─ not UTF-8, broken JSON, broken CSV: BadRow, with file and line

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
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from meshtune.data.example import SUFFIXES, BadRow, Dropped, Example, Notes, OnBadRow, Origin, Source
from meshtune.data.rows import RawRow, examples
from meshtune.errors import UserError

SPLITS = {  # words in file names -> the split that they name
    "train": "train", "training": "train", "test": "test", "eval": "validation", "dev": "validation",
    "valid": "validation", "val": "validation", "validation": "validation",
}  # fmt: skip
FIRST_ROWS = 1000  # rows in which `columns_of` looks for one that has columns


def read(
    source: Source,
    *,
    on_bad_row: OnBadRow,
    streaming: bool = False,
    start: int = 0,
    needs_answer: bool = True,
    dropped: Dropped | None = None,
    notes: Notes | None = None,
) -> Iterator[Example]:
    """Yield the examples of a source, in order.

    start: index of the first row wanted (`Origin.row`). Parquet, json and map-style hub data sets seek there;
    in jsonl and csv files the rows before it are read but not checked. streaming: see `raw_rows`. The other
    arguments are those of `rows.examples`, which also says what is raised.
    """
    return examples(
        raw_rows(source, streaming, start),
        source,
        on_bad_row=on_bad_row,
        needs_answer=needs_answer,
        dropped=dropped,
        notes=notes,
    )


def raw_rows(source: Source, streaming: bool, start: int) -> Iterator[RawRow]:
    """Yield the raw rows of a source from row `start` (from 0) on; the value of a broken row is a BadRow.

    streaming: True to read a hub data set without storing it on disk; without effect on local files. Raises
    UserError if the source is missing or can't be read.
    """
    if is_hub(source.path):
        yield from _hub(source, streaming, start)
        return
    paths = files(source)
    if paths[0].is_dir():
        yield from _saved(paths[0], source, start)
        return
    first = 0
    for file in paths:
        try:
            first += yield from _reader(file)(file, first, start)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} can't be read: {error}") from error


def columns_of(source: Source, streaming: bool = False) -> list[str]:
    """Column names, as the source has them, of the first row that is an object; [] if none of the first
    FIRST_ROWS rows is. streaming: see `raw_rows`.
    """
    for _, row in islice(raw_rows(source, streaming, 0), FIRST_ROWS):
        if isinstance(row, dict):
            return list(row)
    return []


def fingerprint(source: Source) -> str:
    """Digest that changes when the rows may have changed.

    It covers each file's path, size and modification time, or the hub data set's revision, and the split,
    format and columns with which they are read.
    """
    parts: list[Any] = [source.split, source.format, source.columns]
    if is_hub(source.path):
        parts += [source.path, _hub_revision(source)]
    else:
        for path in files(source):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                status = file.stat()
                parts.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# --- from a source to its files -----------------------------------------------------------------------------


def is_hub(path: str) -> bool:
    """True if `path` is a hub data set id: of the form org/name[:configuration], and no file or folder."""
    is_id = re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?", path) is not None
    return is_id and not path.endswith(SUFFIXES) and not Path(path).exists()


def files(source: Source) -> list[Path]:
    """The local files of a source, in the order in which they are read.

    A folder written by `Dataset.save_to_disk` is returned as it is. Raises UserError if there is nothing at
    the path, or nothing that can be read.
    """
    path = Path(source.path).expanduser()
    readable = f"meshtune reads {', '.join(SUFFIXES)}, a folder of these, or a hub data set org/name."
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(f"{path} has an unknown suffix. {readable}")
        return [path]
    if not path.is_dir():
        raise UserError(f"There is no file or folder {path} (from {Path.cwd()}). {readable}")
    if (path / "dataset_info.json").exists():
        return [path]
    data_files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name.lower().endswith(SUFFIXES)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not data_files:
        raise UserError(f"The folder {path} holds no data files. {readable}")
    # A README.txt beside rows.jsonl is no data.
    data_files = [file for file in data_files if _reader(file) is not _text_lines] or data_files
    # Training must not read the test.jsonl beside train.jsonl: where names tell the split, they choose.
    split = SPLITS.get(source.split, source.split)
    return [file for file in data_files if _split_of(file.relative_to(path)) == split] or data_files


def _split_of(file: Path) -> str | None:
    """The split that a word of the path names, None where none does."""
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


# --- files --------------------------------------------------------------------------------------------------
# A reader takes (file, first, start): `first` is the index, in the whole source, of the file's first row. It
# yields the rows from index `start`, also in the whole source, on and returns how many rows the file has.

Reader = Callable[[Path, int, int], Generator[RawRow, None, int]]


def _reader(file: Path) -> Reader:
    name = file.name.lower().removesuffix(".gz")
    return next(reader for suffix, reader in READERS.items() if name.endswith(suffix))


def _open(file: Path):
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _json_lines(file: Path, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read one JSON value a line; see `_lines`."""
    return (yield from _lines(file, first, start, _json_value))


def _text_lines(file: Path, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read one text a line, as `datasets` reads .txt files; see `_lines`."""
    return (yield from _lines(file, first, start, lambda line: {"text": line}))


def _lines(file: Path, first: int, start: int, parse: Callable[[str], Any]) -> Generator[RawRow, None, int]:
    """Read one value a line, `parse` of its text without the line break. first, start, result: see `Reader`.

    Empty lines are skipped but counted as rows: lines before `start` stay unparsed.
    """
    number = -1
    with _open(file) as lines:
        for number, line in enumerate(lines):
            if first + number < start:
                continue
            origin = Origin(str(file), number + 1, first + number)
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
            yield origin, parse(text)
    return number + 1


def _json_value(text: str) -> Any:
    """The value of a line of JSON, or a BadRow."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", f"broken JSON: {json_fault(error)}")
    if "\\ud" in text.lower() and _has_lone_surrogate(value):
        return BadRow("not UTF-8", "not UTF-8: half of a surrogate pair (\\ud800 to \\udfff) by itself")
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


def _json_list(file: Path, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read a list of objects, or an object with one list; JSON lines in a file named .json as lines.

    first, start, result: see `Reader`. Raises UserError if the file is not UTF-8, no JSON or lacks the list.
    """
    with _open(file) as stream:
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
    for number in range(max(0, start - first), len(value)):
        bad = escaped and _has_lone_surrogate(value[number])
        yield Origin(str(file), number + 1, first + number), BadRow("not UTF-8") if bad else value[number]
    return len(value)


def _parquet(file: Path, first: int, start: int) -> Generator[RawRow, None, int]:
    """Read the row groups that reach beyond `start`, without null values; the others are not read.

    first, start, result: see `Reader`. Raises UserError if the file is no parquet.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable parquet file: {error}") from None
    number = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if first + number + rows <= start:
            number += rows
            continue
        for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
            for value in batch.to_pylist():
                if first + number >= start:
                    yield Origin(str(file), number + 1, first + number), _without_nulls(value)
                number += 1
    return number


def _without_nulls(value: Any) -> Any:
    """Remove null values: Arrow fills keys that a struct lacks with null (`tool_calls` of every message)."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _csv(file: Path, first: int, start: int, delimiter: str = ",") -> Generator[RawRow, None, int]:
    """Read a file whose first line names the columns; empty lines are not counted as rows.

    first, start, result: see `Reader`. Raises UserError if the file is empty or names a
    column twice.
    """
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than some documents
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        header = next(reader, None)
        if header is None:
            raise UserError(f"{file} is empty; the first line of a .csv file names its columns.")
        if twice := [name for name, times in Counter(header).items() if times > 1]:
            raise UserError(f"{file} names {', '.join(twice)} more than once in its first line; rename one.")
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
            if first + number < start:
                continue
            origin = Origin(str(file), reader.line_num, first + number)
            if isinstance(values, BadRow):
                yield origin, values
            elif any(not value.isascii() and re.search("[\udc80-\udcff]", value) for value in values):
                yield origin, BadRow("not UTF-8")
            elif len(values) != len(header):
                detail = f"{len(values)} fields, but the header names {len(header)} columns"
                yield origin, BadRow("wrong number of fields", detail)
            else:
                yield origin, dict(zip(header, values, strict=True))


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".txt": _text_lines,
}


# --- the hub ------------------------------------------------------------------------------------------------


def _hub(source: Source, streaming: bool, start: int) -> Iterator[RawRow]:
    """Read a data set of the hub from row `start` on; no code from it is run (`datasets` reads data files).

    streaming: see `raw_rows`. Raises UserError if it, or `source.split`, can't be read.
    """
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
            f"{source.path} is not a file or folder here, and the hub data set of that name can't be read "
            f"(split {source.split}): {type(error).__name__}: {error}"
        ) from error


def _saved(folder: Path, source: Source, start: int) -> Iterator[RawRow]:
    """Read a folder written by `Dataset.save_to_disk`, or the split `source.split` of one written by
    `DatasetDict.save_to_disk`, from row `start` on. Raises UserError if that split is missing.
    """
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise UserError(f"{folder} has no split {source.split}; it has {', '.join(map(str, saved))}.")
        saved = saved[source.split]
    for number in range(start, len(saved)):
        yield Origin(str(folder), number + 1, number), _without_nulls(saved[number])


def _hub_revision(source: Source) -> str:
    """The data set's commit on the hub; where the hub can't be reached, the fingerprint of the local copy."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path.partition(":")[0]).sha)
    except Exception:
        return str(_load_hub(source, streaming=False)._fingerprint)
