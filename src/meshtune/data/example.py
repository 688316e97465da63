"""The values that data/ passes on: a source, an example with its origin, and the reason a row is bad.

Nothing here reads a file, so planning can import it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.units import counted, few

if TYPE_CHECKING:
    import numpy as np

    from meshtune.objectives import Rows

NO_MARKER = "no special token"  # in Notes.unstopped: the template writes none
SHOWN = 10  # bad rows that one error describes; the rest are only counted

DOCUMENTS = {"answers": "document", "pairs": "pair", "judged": "answer"}  # their name by `objectives.Rows`
ROWS_FOLDER = "rows"  # of the data cache, for rows that a Python program holds

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class Source:
    """A file, a folder of files or a hub data set."""

    path: str  # of the hub: `org/name` or `org/name:configuration`
    weight: float = 1.0  # passes through it in one epoch; under streaming, its share of the rows
    split: str = "train"  # of a hub data set; of a folder, if file names tell it (train.jsonl, test.jsonl)
    format: str = "auto"  # auto or a key of rows.FORMATS
    columns: tuple[tuple[str, str], ...] = ()  # our name -> theirs: (("prompt", "question"),)
    where: tuple[tuple[str, Any], ...] = ()  # rows to train on, by a column's value: (("label", True),)
    roles: tuple[tuple[str, str], ...] = ()  # their role -> ours: (("bot", "assistant"),)
    max_samples: int | None = None  # only that many rows, the first ones; None: all

    @property
    def on_purpose(self) -> bool:
        """True if the user named the format, and so means only its columns."""
        return self.format.lower() != "auto"


def is_url(path: str) -> bool:
    """True for s3://bucket/rows.jsonl and the like."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def rows_name(path: Any) -> str | None:
    """Name of the file, with the digest of its rows, if given.store_rows wrote `path`; else None."""
    stored = isinstance(path, str) and re.search(rf"/{ROWS_FOLDER}/(\w+_data-[0-9a-f]{{16}}\.\w+)$", path)
    return stored.group(1) if stored else None


def name_of(path: str) -> str:
    """A source's path as errors name it: of rows in memory the argument that gave them, "train_data"."""
    stored = rows_name(path)
    return stored.partition("-")[0] if stored else path


def place_of(path: str, line: int, between: str = ", line ") -> str:
    """The place of a row as errors name it. line: from 1; rows in memory count from 0, as Python does."""
    return f"{name_of(path)}, row {line - 1}" if rows_name(path) else f"{public(path)}{between}{line}"


@dataclass(frozen=True)
class Origin:
    """The place of an example in its source."""

    file: str  # or the hub data set
    line: int  # from 1: lines of jsonl and csv (the line on which the row ends), else rows of the file
    row: int = 0  # from 0 over the whole source: `read(source, start=origin.row + 1)` continues after it

    def __str__(self) -> str:
        return place_of(self.file, self.line)


class Mask(NamedTuple):
    """Whether a message is trained on, as its row says."""

    trained: bool
    key: str  # of the message

    def __str__(self) -> str:
        return f"{self.key}: {int(self.trained)}"


class Ids(NamedTuple):
    """A row that was tokenised already."""

    ids: tuple[int, ...]
    labelled: tuple[bool, ...]  # of each id, whether it is trained on


@dataclass(frozen=True)
class Example:
    """One row in exactly one shape: `messages` (with `tools`), `prompt` and `completion`, `text` or `ids`;
    of a pair, one side.
    """

    origin: Origin
    messages: tuple[dict, ...] | None = None
    masks: tuple[Mask | None, ...] | None = None  # of each message, None where the row does not say
    tools: list | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    ids: Ids | None = None
    answer_at: int = 0  # characters of the prompt that `text` begins with, which are not trained on
    other: "Example | None" = None  # of a pair: the rejected side; this one is the chosen side
    good: bool = True  # of a judged answer
    margin: float = 0.0  # of a pair's chosen side
    notes: tuple["Note", ...] = ()


class BadRow(Exception):
    """One row that can't be used; str() says what is wrong with it."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        """reason: shared by all rows with this fault, for counting. detail: the text with this row's values;
        None: the reason.
        """
        self.reason = reason
        super().__init__(detail or reason)


def caught(step: Callable[..., Any], value: Any, *arguments: Any) -> Any:
    """Return `step(value, *arguments)`, or the BadRow that it raises or that `value` is already."""
    if isinstance(value, BadRow):
        return value
    try:
        return step(value, *arguments)
    except BadRow as bad:
        return bad


def is_absent(value: Any, levels: int = 5) -> bool:
    """Whether an optional field holds nothing: null, NaN, blank, [] or {}, the text of one, or only these.

    levels: of lists and objects that are looked into.
    """
    if isinstance(value, str):
        return "".join(value.split()) in ("", "[]", "{}", "null", "None", "NaN", "nan")
    if isinstance(value, list | tuple | Mapping):
        inside = value.values() if isinstance(value, Mapping) else value
        return levels > 0 and all(is_absent(inner, levels - 1) for inner in inside)
    return value is None or value != value  # NaN, as pandas writes what is missing


# What becomes of rows, counted #


Note = tuple[str, str]  # a name of `Notes`, and what is counted there


@dataclass
class Notes:
    """Counts of what rows have and training does not use, and of the rules that rows bring with them."""

    masks: Counter[str] = field(default_factory=Counter)  # messages (rows: loss_weight) by "weight: 0"
    left_out: Counter[str] = field(default_factory=Counter)  # rows, by the rule that leaves them out
    compared: Counter[str] = field(default_factory=Counter)  # rows, by "rule of data.where\tother value"
    unused: Counter[str] = field(default_factory=Counter)  # rows by the name of a column that is not read
    unfound: Counter[str] = field(default_factory=Counter)  # sources by "ours to theirs" of data.columns
    unwritten: Counter[str] = field(default_factory=Counter)  # messages, by what the chat template leaves out
    unstopped: Counter[str] = field(default_factory=Counter)  # labelled turns, by an end that stops nothing
    control: Counter[str] = field(default_factory=Counter)  # messages, by a control token and its treatment
    repeated: Counter[str] = field(default_factory=Counter)  # rows, by a token that they hold at an end
    tokenless: Counter[str] = field(default_factory=Counter)  # rows of tokens, by an id without a token

    def add(self, notes: Iterable[Note]) -> None:
        for name, what in notes:
            getattr(self, name)[what] += 1

    def values(self) -> dict[str, dict[str, int]]:
        """The counts as JSON-able values."""
        return {name: dict(counts.most_common()) for name, counts in vars(self).items()}


LINES = {  # of the log, one for each entry of `Notes`
    "unfound": "data.columns maps {what}, which no row has",
    "unwritten": "the chat template leaves out {what}: {messages}",
    "control": "control token in contents, {what}: {messages}",
    "repeated": "rows that {what} already, which is not added again: {count:,}",
    "unstopped": "generation does not stop at {what}, with which the chat template ends {turns}; "
    "data.split_turns=true or data.chat_template=training may give them the end of a last turn",
}
UNENDED = "the chat template ends {turns} with {what}: generation stops at its length only"


def notes_sentences(notes: dict[str, dict[str, int]]) -> list[str]:
    """Lines for the log. notes: those of `Notes.values`."""
    lines = []
    if masks := notes["masks"]:
        counts = ", ".join(f"{count:,} by {rule}" for rule, count in masks.items())
        lines.append(f"trained on, or not, as the rows say: {counts}")
    lines += [f"rows left out by {rule}: {count:,}" for rule, count in notes["left_out"].items()]
    values: dict[str, list[str]] = {}
    for key in notes["compared"]:
        values.setdefault(key.partition("\t")[0], []).append(key.partition("\t")[2])
    lines += [f"data.where compared {rule}, with {', '.join(others)}" for rule, others in values.items()]
    if unused := notes["unused"]:
        lines.append(f"columns that are not used: {', '.join(unused)}")
    if ids := sorted(notes["tokenless"], key=int):
        lines.append(f"rows of tokens have {counted(len(ids), 'id')} without a token: {few(ids)}")
    for name, line in LINES.items():
        for what, count in notes[name].items():
            messages, turns = counted(count, "message"), counted(count, "labelled turn")
            text = UNENDED if what == NO_MARKER else line
            lines.append(text.format(what=what, count=count, messages=messages, turns=turns))
    return lines


@dataclass
class Lost:
    """Documents that are dropped or cut, and their tokens that are not trained on."""

    documents: int = 0
    tokens: int = 0
    label_tokens: int = 0

    def add(self, labelled: "np.ndarray") -> None:
        """Count one document's lost tokens; `labelled` bool [tokens lost]."""
        self.documents += 1
        self.tokens += len(labelled)
        self.label_tokens += int(labelled.sum())


@dataclass
class Tally:
    """Counts of examples read, cut and dropped."""

    examples: int = 0  # bad rows are not among them
    bad_rows: Counter[str] = field(default_factory=Counter)  # left out under on_bad_row="skip", by reason
    cut: Lost = field(default_factory=Lost)  # documents cut to seq_len, and the tokens behind the cut
    split: Counter[str] = field(default_factory=Counter)  # "documents" that were split, and their "pieces"
    dropped: dict[str, Lost] = field(default_factory=dict)  # whole documents, by reason
    notes: Notes = field(default_factory=Notes)
    overlong: list[str] = field(default_factory=list)  # the first SHOWN problems under overlong="error"

    def values(self) -> dict[str, Any]:
        """The counts as JSON-able values: rows, bad_rows by reason, cut, dropped by reason, notes."""
        return {
            "rows": self.examples + self.bad_rows.total(),
            "bad_rows": dict(self.bad_rows.most_common()),
            "cut": vars(self.cut),
            "split": dict(self.split),
            "dropped": {reason: vars(lost) for reason, lost in self.dropped.items()},
            "notes": self.notes.values(),
        }

    def refuse_overlong(self, rows: "Rows") -> None:
        """Raise UserError for documents that are too long under overlong="error". rows: that they are of."""
        if self.overlong:
            ways = "cut, split or drop" if rows == "answers" else "cut or drop"
            raise UserError([*self.overlong, f"Raise data.seq_len, or set data.overlong to {ways}."])


def bad_rows_error(problems: list[str], total: int, rows: int) -> UserError:
    """Return the error that lists the first SHOWN of `problems`, a sentence each.

    total: bad rows so far, listed or not. rows: rows read so far, good or bad.
    """
    count = (
        f"{counted(total, 'bad row')} in the {counted(rows, 'row')} read so far, before labels are checked"
    )
    shown = f" (the first {SHOWN} are named above)" if total > SHOWN else ""
    return UserError(
        [*problems[:SHOWN], f"{count}{shown}. Correct them, or set data.on_bad_row=skip to leave them out."]
    )


# How large a row may be #


ROW_CHARACTERS = 2**22  # of one row's text: a million tokens, for which a tokenizer needs some 7 s
LINE_BYTES = 4 * ROW_CHARACTERS  # of a line of a file, or of a csv field, which is read whole
TOO_LONG, NOT_UTF8 = "too long", "not UTF-8"  # reasons of a BadRow


def checked_text(text: str) -> str:
    """Return `text`. Raises BadRow if it is too long to tokenize, or if UTF-8 can't hold it."""
    if len(text) > ROW_CHARACTERS:
        raise BadRow(
            TOO_LONG,
            f"its text has {len(text):,} characters, and at most {ROW_CHARACTERS:,} are read; split it into "
            "several rows",
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow(NOT_UTF8, "its text is not UTF-8: it has half of a surrogate pair") from None
    return text
