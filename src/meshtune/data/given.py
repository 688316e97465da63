"""Rows that a Python program holds, written to a file: the rest of meshtune reads files alone.

    [{"prompt": …}, …]      ─> CACHE/rows/train_data-<digest>.jsonl
    datasets.Dataset        ─> CACHE/rows/train_data-<digest>.parquet

The name holds the digest of the rows: the same rows are the same file in every process, other rows have
another name, which a run that goes on compares with the one in its config.yaml.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.data.example import ROWS_FOLDER
from meshtune.errors import UserError, expanded
from meshtune.rundir import write_atomically

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
        raise UserError(f"{place} holds what is no JSON value: {error}.") from None
    return f"{line}\n"
