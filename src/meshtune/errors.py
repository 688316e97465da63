"""Errors that end a command, and their exit codes.

    UserError     2   bad config, data or usage: every problem at once, as sentences with the remedy
      NothingFits 3   no layout fits the memory; the sentences name what would fit
    NonFinite     4   training went non-finite
    Interrupted  75   stopped by a signal; a checkpoint was saved
    RankFailed    1   another rank ended by a bug, was killed, or hung

Anything else that escapes is a bug of ours and exits with 1.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Row = TypeVar("Row")


class UserError(ValueError):
    """A mistake in config, data or usage; `problems` has one sentence for each that was found."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        """problems: one sentence each, with numbers and a remedy; addresses lose their secrets."""
        from meshtune.addresses import public  # a level of imports that only an error needs

        self.problems = public((problems,) if isinstance(problems, str) else tuple(problems))
        super().__init__("\n".join(self.problems))


@contextmanager
def explained(subject: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever a reader raises in the block into a UserError: the one place for readers of others' text.

    YAML, JSON and transformers raise nearly anything for a broken file. subject: begins the sentence, and
    names the setting, file or row. remedy: a sentence of its own. The error is the cause of the UserError. A
    UserError, a full disk and what ends a process pass unchanged.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(f"{subject}: {reason_of(error)} {remedy}".rstrip()) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how a library in Rust fails
            raise
        raise UserError(f"{subject}: {reason_of(error)} {remedy}".rstrip()) from error


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turn an allocation that failed in the block into NothingFits. A UserError passes unchanged."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = "Use fewer or smaller rows, a smaller model, or a machine with more memory."
        raise NothingFits(f"Out of memory: {reason_of(error)} {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's error, a GPU's, and the one of torch's allocator for CPUs."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def reason_of(error: BaseException) -> str:
    """One line that says why: the error's text, at most 300 characters, with a full stop."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else f"{text[:297]}…").rstrip(".") + "."


MOST_SHOWN = 200  # characters of a value in an error
TYPES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def written(value: Any) -> str:
    """A value of a setting or a row as its user would write it, at most MOST_SHOWN characters of it."""
    if isinstance(value, str) and value.strip() == value != "":
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    text = text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def quoted(text: str) -> str:
    """Text in double quotes on one line, with line breaks as \\n."""
    return json.dumps(text, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value that JSON lacks, such as YAML's sets, bytes and dates, as one that it has."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return sorted(map(str, value)) if isinstance(value, set) else str(value)


def type_name(value: Any) -> str:
    """Name the JSON type of a value, with its article."""
    return "null" if value is None else TYPES.get(type(value), f"a {type(value).__name__}")


def expanded(path: str | Path) -> Path:
    """A path that a user wrote, ~ and ~user replaced. Raises UserError for a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{str(path)[:200]}: there is no such user; write the whole path.") from None


def check_file(path: Path) -> None:
    """Raise UserError for a folder, a pipe or a device, which may have no end. A missing file passes."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file: it is a folder, a pipe or a device.")


class Table(dict[str, Row]):
    """Rows by the value of a setting; `table[value]` raises UserError, with the nearest, if it has no row.

    `get` and `in` do not raise. setting: its dotted name, for the error.
    """

    def __init__(self, setting: str, rows: Mapping[str, Row]) -> None:
        super().__init__(rows)
        self.setting = setting

    def __missing__(self, name: str) -> NoReturn:
        from meshtune.nearest import did_you_mean, nearest  # a level of imports that only an error needs

        hint = did_you_mean(nearest(str(name), self))
        raise UserError(f"{self.setting} = {written(name)}: it must be one of {', '.join(self)}{hint}")


class NothingFits(UserError):
    """No layout fits the GPU memory; the sentences name what would fit."""

    exit_code = 3


class NonFinite(RuntimeError):
    """Loss or gradients were not finite for too many steps in a row."""

    exit_code = 4


class Interrupted(RuntimeError):
    """A signal stopped the run; its checkpoint is saved and it can be resumed."""

    exit_code = 75


class RankFailed(RuntimeError):
    """A rank ended by a bug, was killed, or hung; the text names the rank and holds its traceback."""

    exit_code = 1
