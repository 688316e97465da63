"""Errors that end a command, and their exit codes.

    UserError     2   bad config, data or usage: every problem at once, as sentences with the remedy
      NothingFits 3   no layout fits the memory; the sentences name what would fit
    NonFinite     4   training went non-finite
    Interrupted  75   stopped by a signal; a checkpoint was saved
      NoProgress  5   the same, three times in a row without a new checkpoint: a queue must not repeat it
    RankFailed    1   another rank ended by a bug, was killed, or hung
    INTERRUPTED 130   Ctrl-C before a run has started, or a second one

Anything else that escapes is a bug of ours and exits with 1.
"""

import json
import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Row = TypeVar("Row")
INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells write it


class UserError(ValueError):
    """A mistake in config, data or usage; `problems` has one sentence for each that was found."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        """problems: one sentence each, with numbers and a remedy; addresses lose their secrets."""
        from meshtune.addresses import public  # a level of imports that only an error needs

        self.problems = public((problems,) if isinstance(problems, str) else tuple(problems))
        super().__init__("\n".join(self.problems))


def traceback_of(error: BaseException) -> str:
    """Text of an error, its traceback and its causes, for a log; addresses lose their secrets."""
    from meshtune.addresses import public

    return public("".join(traceback.format_exception(error)))


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
    bytes: "bytes",
}


def written(value: Any) -> str:
    """A value of a setting or a row as its user would write it, at most MOST_SHOWN characters of it."""
    if isinstance(value, str) and value.strip() == value != "":
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    text = text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def argument(setting: str, mapping: Mapping[str, str]) -> str:
    """A setting with its mapping as one argument of a command, in the quotes that a shell needs."""
    return shlex.quote(f"{setting}={{{', '.join(f'{name}: {value}' for name, value in mapping.items())}}}")


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


def with_variables(path: str) -> str:
    """A path that a user wrote, $NAME and ${NAME} replaced from the environment.

    A $ before anything else stays, and so does each in an address (?$limit=5) or in the name of what exists.
    Raises UserError for a variable that is not set, or empty, and for more of a shell's or another tool's
    language: ${NAME:-default}, ${oc.env:NAME}, $(command).
    """
    if "://" in path or ("$" in path and os.path.lexists(os.path.expanduser(path))):
        return path

    def value(match: re.Match) -> str:
        name = match[1] or match[2]
        if not name:
            raise UserError(
                f"{path[:MOST_SHOWN]}: {match[0]} can't be replaced; in a path only $NAME and ${{NAME}} are."
            )
        if text := os.environ.get(name):
            return text
        state = "empty" if name in os.environ else "not set"
        raise UserError(
            f"{path[:MOST_SHOWN]}: the environment variable {name} is {state}; set it, or write the path."
        )

    pattern = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|\{[^}]*\}|\([^)]*\))"
    return re.sub(pattern, value, path, flags=re.ASCII)


def expanded(path: str | os.PathLike[str], setting: str = "") -> Path:
    """A path that a user wrote, with variables, ~ and ~user replaced. setting: that has the path, for errors.

    Raises UserError for a user that does not exist, and as `with_variables`.
    """
    try:
        return Path(with_variables(str(path))).expanduser()
    except RuntimeError:
        known = str(path).startswith("~/") or str(path) == "~"
        reason = "this user has no home (HOME is not set)" if known else "there is no such user"
        value = f"{setting} = {path}" if setting else str(path)[:200]
        raise UserError(f"{value}: {reason}; write the whole path.") from None


def check_file(path: Path) -> None:
    """Raise UserError for a folder, a pipe or a device, which may have no end. A missing file passes."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file: it is a folder, a pipe or a device.")


POINTER = b"version https://git-lfs"  # first bytes of what Git LFS leaves where a file was not fetched
ANNEX = re.compile(rb"\S*/annex/objects/\S+\s*")  # the same of git-annex (DataLad)
WEB_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
BINARY = {  # first bytes of files that have another suffix than theirs: what they are, and the suffix
    b"\x1f\x8b\x08": ("compressed by gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd; unpack it", ".zst"),
    b"BZh91AY&SY": ("compressed by bzip2; unpack it", ".bz2"),
    b"\xfd7zXZ\x00": ("compressed by xz; unpack it", ".xz"),
    b"PK\x03\x04": ("a zip archive, as torch.save and spreadsheets write", ".zip"),
    b"PAR1": ("a parquet file", ".parquet"),
    b"\xff\xfe": ("text in UTF-16; save it as UTF-8", ""),
    b"\xfe\xff": ("text in UTF-16; save it as UTF-8", ""),
}
PAGE_OR_ROW = (".json", ".jsonl", ".ndjson", ".safetensors", ".parquet")  # never begin as a web page does


def check_fetched(files: Iterable[Path]) -> None:
    """Raise UserError if some of the files are not what their names say: pointers of Git LFS, links to
    nothing, web pages of a failed download, or files of another kind. Others, and missing ones, pass.
    """
    files = list(files)
    if pointers := [file for file in files if file.is_file() and _beginning(file).startswith(POINTER)]:
        names = ", ".join(file.name for file in pointers[1:6]) + (" and more" if len(pointers) > 6 else "")
        raise UserError(
            f"{pointers[0]} is a Git LFS pointer, not the file itself"
            f"{f' (so are {names})' if names else ''}: the repository was cloned without its large files. "
            f"Run `git lfs pull` in {pointers[0].parent}, or download the files again (`hf download`)."
        )
    if problems := [f"{file} {problem}" for file in files if (problem := _instead(file))]:
        raise UserError(problems[:10])


def _beginning(file: Path) -> bytes:
    with file.open("rb") as content:
        return content.read(256)


def _instead(file: Path) -> str | None:
    """Predicate on what a file is instead of what its name says; None if nothing is wrong with it."""
    if not file.is_file():
        if file.is_symlink() and not file.exists():
            return f"is a link to {os.readlink(file)}, where nothing is; copy the file itself there (cp -rL)."
        return None
    start, name = _beginning(file), file.name.lower()
    if name.endswith(".safetensors") and start[8:9] == b"{":  # after the length of its header
        return None
    if ANNEX.fullmatch(start):
        return f"is a pointer of git-annex, not the file itself; run `git annex get` in {file.parent}."
    if name.endswith(PAGE_OR_ROW) and WEB_PAGE.match(start):
        return "is a web page, not the file itself: its download failed. Download it again."
    for beginning, (kind, suffix) in BINARY.items():
        if start.startswith(beginning) and not (suffix and name.endswith(suffix)):
            return (
                f"is {kind}{f' (rename it to end with {suffix})' if suffix in ('.gz', '.parquet') else ''}."
            )
    if name.endswith(".safetensors") and 0 < len(start) < 256 and start.isascii():
        return f"holds the text {quoted(start.decode().strip())} instead of weights. Download it again."
    return None


class Table(dict[str, Row]):
    """Rows by the value of a setting; `table[value]` raises UserError, with the nearest, if it has no row.

    `get` and `in` do not raise. setting: its dotted name, for the error.
    """

    def __init__(self, setting: str, rows: Mapping[str, Row]) -> None:
        super().__init__(rows)
        self.setting = setting

    def __missing__(self, name: str) -> NoReturn:
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


class NoProgress(Interrupted):
    """A signal stopped the run, as it did several starts before, without a new checkpoint since."""

    exit_code = 5


class RankFailed(RuntimeError):
    """A rank ended by a bug, was killed, or hung; the text names the rank and holds its traceback."""

    exit_code = 1


# Names and paths that a mistyped one may mean: at most two edits away, and a third of its letters #


MOST_ENTRIES = 5_000  # files and folders that are looked at
DEPTH = 3  # levels below the current folder
MOST_NAMED = 3


def nearest(name: str, choices: Iterable[str], part: Callable[[str], str] = str) -> list[str]:
    """The choices with the fewest edits, in their order; [] if those are too many. Case isn't an edit.

    part: the part of a choice that is compared with `name`; all of it by default.
    """
    most = min(2, len(name) // 3)
    similar = [choice for choice in choices if abs(len(part(choice)) - len(name)) <= most]  # quick
    distances = {choice: edits(name.lower(), part(choice).lower()) for choice in similar}
    least = min([*distances.values(), most])
    return [choice for choice, distance in distances.items() if distance == least]


def did_you_mean(near: Sequence[str], otherwise: str = ".") -> str:
    """Return the end of a sentence, `; did you mean a or b?`; `otherwise` where nothing is near."""
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def edits(first: str, second: str) -> int:
    """Count the letters to insert, remove, replace or swap with the next that make `second` of `first`."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, previous, row = row, before, [i]
        for j, other in enumerate(second, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, previous[j - 2] + 1)
            row.append(cost)
    return row[-1]


def path_meant(path: str, wanted: Callable[[Path], bool]) -> str:
    """Clause `; did you mean a or b?` with the paths that are wanted and end alike; "" where none does.

    Looks below the current folder and next to the path, for the last name and then for it without its suffix.
    """
    beside = Path(path).parent
    roots = [Path("."), *([beside] if beside.is_dir() and beside != Path(".") else [])]
    found: dict[str, str] = {}  # absolute path -> as it is named
    for root in roots:
        for each in islice(entries(root), MOST_ENTRIES):
            if wanted(each):
                found.setdefault(os.path.abspath(each), str(each))
    near = nearest(Path(path).name, found.values(), part=lambda each: Path(each).name)
    near = near or nearest(Path(path).stem, found.values(), part=lambda each: Path(each).stem)
    near.sort(key=lambda each: (edits(each, path), each))
    return did_you_mean(near[:MOST_NAMED], "")


def entries(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield what is in a folder and `depth` - 1 levels below it, folder by folder, without hidden entries."""
    try:
        each = sorted(Path(folder, entry.name) for entry in os.scandir(folder) if entry.name[0] != ".")
    except OSError:  # no right to read it
        return
    yield from each
    for path in each if depth > 1 else ():
        if path.is_dir() and not path.is_symlink():
            yield from entries(path, depth - 1)
