"""The values that data/ passes on: a source, an example with its origin, and the reason a row is bad.

Nothing here reads a file, so planning can import it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from meshtune.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")  # of data files
SHOWN = 10  # bad rows that one error describes; the rest are only counted

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class Source:
    """A file, a folder of files or a hub data set."""

    path: str  # of the hub: `org/name` or `org/name:configuration`
    weight: float = 1.0  # passes through it in one epoch; under streaming, its share of the rows
    split: str = "train"  # of a hub data set; of a folder, if file names tell it (train.jsonl, test.jsonl)
    format: str = "auto"  # auto or a key of rows.FORMATS
    columns: tuple[tuple[str, str], ...] = ()  # our name -> theirs: (("prompt", "question"),)


@dataclass(frozen=True)
class Origin:
    """The place of an example in its source."""

    file: str  # or the hub data set
    line: int  # from 1: lines of jsonl and csv (the line on which the row ends), else rows of the file
    row: int = 0  # from 0 over the whole source: `read(source, start=origin.row + 1)` goes on after it

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


class BadRow(Exception):
    """One row that can't be used; str() says what is wrong with it."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        """reason: shared by all rows with this fault, for counting. detail: the text with this row's values;
        None: the reason.
        """
        self.reason = reason
        super().__init__(detail or reason)


@dataclass
class Dropped:
    """Bad rows left out under on_bad_row="skip"."""

    counts: Counter[str] = field(default_factory=Counter)  # rows by reason

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        if not self.total:
            return "no rows dropped"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return f"{self.total:,} bad row{'s' * (self.total != 1)} dropped: {reasons}"


def bad_rows_error(problems: list[str], total: int, rows: int) -> UserError:
    """Return the error that lists the first SHOWN of `problems`, a sentence each.

    total: bad rows so far, listed or not. rows: rows read so far, good or bad.
    """
    count = f"{total:,} bad row{'s' * (total != 1)} in the {rows:,} rows read so far"
    shown = f" (the first {SHOWN} are named above)" if total > SHOWN else ""
    return UserError(
        [*problems[:SHOWN], f"{count}{shown}. Correct them, or set data.on_bad_row=skip to leave them out."]
    )
