"""The values that data/ passes on: a source, an example with its origin, and the reason a row is bad.

Nothing here reads a file, so planning can import it.
"""

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NamedTuple

from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.units import counted, few

NO_MARKER = "no special token"  # in Notes.unstopped: the template writes none
SHOWN = 10  # bad rows that one error describes; the rest are only counted

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
    """One row in exactly one shape: `messages` (with `tools`), `prompt` and `completion`, `text` or `ids`."""

    origin: Origin
    messages: tuple[dict, ...] | None = None
    masks: tuple[Mask | None, ...] | None = None  # of each message, None where the row does not say
    tools: list | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    ids: Ids | None = None


class BadRow(Exception):
    """One row that can't be used; str() says what is wrong with it."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        """reason: shared by all rows with this fault, for counting. detail: the text with this row's values;
        None: the reason.
        """
        self.reason = reason
        super().__init__(detail or reason)


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
        return f"{counted(self.total, 'bad row')} dropped: {reasons}"


@dataclass
class Notes:
    """Counts of what rows have and training does not use, and of the rules that rows bring with them."""

    masks: Counter[str] = field(default_factory=Counter)  # messages (rows: loss_weight) by "weight: 0"
    left_out: Counter[str] = field(default_factory=Counter)  # rows, by the rule that leaves them out
    compared: Counter[str] = field(
        default_factory=Counter
    )  # rows, by "rule of data.where\tvalue it differs from"
    unused: Counter[str] = field(default_factory=Counter)  # rows by the name of a column that is not read
    unfound: Counter[str] = field(default_factory=Counter)  # sources by "ours to theirs" of data.columns
    unwritten: Counter[str] = field(default_factory=Counter)  # messages, by what the chat template leaves out
    unstopped: Counter[str] = field(default_factory=Counter)  # labelled turns, by an end that stops nothing
    control: Counter[str] = field(default_factory=Counter)  # messages, by a control token in their content
    repeated: Counter[str] = field(default_factory=Counter)  # rows, by a token that they hold at an end
    tokenless: Counter[str] = field(default_factory=Counter)  # rows of tokens, by an id without a token

    def values(self) -> dict[str, dict[str, int]]:
        """The counts as JSON-able values."""
        return {name: dict(counts.most_common()) for name, counts in vars(self).items()}


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
    lines += [f"data.columns maps {names}, which no row has" for names in notes["unfound"]]
    lines += [
        f"the chat template leaves out {what}: {counted(count, 'message')}"
        for what, count in notes["unwritten"].items()
    ]
    lines += [
        f"control token in contents, {how}: {counted(count, 'message')}"
        for how, count in notes["control"].items()
    ]
    lines += [
        f"rows that {what} already, which is not added again: {count:,}"
        for what, count in notes["repeated"].items()
    ]
    if ids := sorted(notes["tokenless"], key=int):
        lines.append(f"rows of tokens have {counted(len(ids), 'id')} without a token: {few(ids)}")
    return lines + [
        _unstopped(end, counted(count, "labelled turn")) for end, count in notes["unstopped"].items()
    ]


def _unstopped(end: str, turns: str) -> str:
    """A line on labelled turns, by their number, at whose end generation does not stop."""
    if end == NO_MARKER:
        return f"the chat template ends {turns} with {end}: generation stops at its length only"
    return (
        f"generation does not stop at {end}, with which the chat template ends {turns}; "
        "data.split_turns=true or data.chat_template=training may give them the end of a last turn"
    )


def bad_rows_error(problems: list[str], total: int, rows: int) -> UserError:
    """Return the error that lists the first SHOWN of `problems`, a sentence each.

    total: bad rows so far, listed or not. rows: rows read so far, good or bad.
    """
    count = f"{counted(total, 'bad row')} in the {counted(rows, 'row')} read so far"
    shown = f" (the first {SHOWN} are named above)" if total > SHOWN else ""
    return UserError(
        [*problems[:SHOWN], f"{count}{shown}. Correct them, or set data.on_bad_row=skip to leave them out."]
    )


# How large a row, and how slow a chat template, may be #


ROW_CHARACTERS = 2**22  # of one row's text: a million tokens, for which a tokenizer needs some 7 s
LINE_BYTES = 4 * ROW_CHARACTERS  # of a line of a file, or of a csv field, which is read whole
RENDER_SECONDS = 3  # of processor time: a conversation takes milliseconds, and a template can be a loop
GROWTH = 100  # characters that normalizers may make of one; NFKD makes up to 18
TOO_LONG, NOT_UTF8 = "too long", "not UTF-8"  # reasons of a BadRow


def bounded_product(one: Any, other: Any) -> Any:
    """Return `one` * `other` in a template. Raises UserError if that is too long a text or list."""
    for value, times in ((one, other), (other, one)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            _refuse_long(len(value) * times)
    return one * other


def bounded_power(base: Any, exponent: Any) -> Any:
    """Return `base` ** `exponent` in a template. Raises UserError for a number of too many digits."""
    if isinstance(base, int) and isinstance(exponent, int):
        _refuse_long(base.bit_length() * exponent)
    return base**exponent


def bounded_format(text: Any, values: Any) -> Any:
    """Return `text` % `values` in a template. Raises UserError for padding to too great a length."""
    if isinstance(text, str):
        stars = [value for value in (values if isinstance(values, tuple) else ()) if type(value) is int]
        widths = [int(digits[:20]) for digits in re.findall(r"\d+", text)]
        _refuse_long(max([0, *widths, *(map(abs, stars) if "*" in text else ())]))
    return text % values


def _refuse_long(size: int) -> None:
    if size > ROW_CHARACTERS:
        raise UserError(
            f"The chat template makes a value of size {size:,}, and at most {ROW_CHARACTERS:,} is sensible; "
            "choose another (data.chat_template)."
        )


# Jinja's own hook for the environment in which transformers renders. It also keeps constants such as
# 'x' * 10**9 from being multiplied when a template is compiled, which no signal interrupts.
ImmutableSandboxedEnvironment.intercepted_binops = frozenset(("*", "**", "%"))
ImmutableSandboxedEnvironment.default_binop_table = {
    **ImmutableSandboxedEnvironment.default_binop_table,
    "*": bounded_product,
    "**": bounded_power,
    "%": bounded_format,
}


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


@contextmanager
def render_limit(conversations: int = 1) -> Iterator[None]:
    """Raise UserError in the block after RENDER_SECONDS of this thread's processor time, and 1/20 s more for
    each of `conversations` that are rendered in it.

    Only in the main thread, the only one that signals interrupt; data are prepared there, and a streaming
    thread uses a template that was tried there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.thread_time() + RENDER_SECONDS + conversations / 20

    def interrupt(number: int, frame: FrameType | None) -> None:
        left = until - time.thread_time()
        if left > 0.01:  # the timer counts all threads of the process
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
            return
        raise UserError(
            f"The chat template ran for more than {RENDER_SECONDS} s, and may never end; choose another "
            "(data.chat_template)."
        )

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def growth(component: Any) -> float:
    """The most characters that a normalizer or decoder makes of one, at least 1.

    component: as tokenizer.json describes it: a mapping with "type", or None.
    """
    if not isinstance(component, dict):
        return 1.0
    most = 1.0
    for parts in (component.get("normalizers"), component.get("decoders")):
        for part in parts or ():
            most *= growth(part)
    if component.get("type") == "Prepend":
        most *= 1 + len(component["prepend"])
    if component.get("type") == "Replace":
        pattern = component["pattern"].get("String") or ""  # a regular expression may match one character
        most *= max(1.0, len(component["content"]) / max(1, len(pattern)))
    return most
