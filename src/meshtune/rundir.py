"""The run folder: names of its files, and how rows are written and read.

    runs/my-run/
      config.yaml        every resolved setting; `meshtune train …/config.yaml output=NEW` repeats the run
      plan.yaml          layout and prediction
      metrics.jsonl      one row a line, {"kind": "run" | "train" | "eval" | "end", "step": …}
      samples.jsonl      answers of the model to held-out prompts: {"step", "prompt", "expected", "answer"}
      checkpoints/       step-<N>/
      model/             the final Hugging Face folder
      logs/              the trackers' files (TensorBoard's event files, meshtune.prom …), and rank-<n>.log:
                         stdout and stderr of every rank but the first, since the last start (of the
                         first what its terminal, pipe or file did not accept), and of each rank the
                         traceback behind the sentence that ended it; those of the start before are in
                         logs/before/
      report.html
      .stops.json        stops in a row that left no new checkpoint, and the newest one

    runs/.my-run.replaced  a run that is being replaced, until the new one has done a step

A row is one line of strict JSON: NaN and infinities become null, because the parsers of browsers and of most
languages refuse them. A line is a row once its newline is written: readers skip the incomplete last line of a
killed run, and the next writer cuts it off. Lines whose columns do not fit their types, which no
run writes, are left out and counted: readers need no checks of their own.
"""

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.addresses import has_secret
from meshtune.errors import UserError, check_file
from meshtune.filesystem import is_locked, replace, set_mode, sync_open
from meshtune.units import counted

# Types of rows #

# Columns that are not listed here are only shown as text.

Row = dict[str, Any]
EXPECTED = "MESHTUNE_EXPECTED"  # environment variable with the `expected` of a run's row, as JSON
BEGUN = "MESHTUNE_BEGUN"  # another, with the start of its job in seconds since 1970
PARTS = (  # of a step in time (meter/parts.py)
    "forward", "backward", "recomputation", "communication", "bubble", "waiting", "optimizer", "loading",
    "rest",
)  # fmt: skip


class Type(NamedTuple):
    """Type of a column."""

    fits: Callable[[Any], bool]
    fault: str  # clause on a value that does not fit, behind "its NAME"
    required: bool = False
    nullable: bool = True  # null is as good as a missing column


def is_number(value: Any) -> bool:
    """True for finite numbers, and for true and false."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_number_or_null(value: Any) -> bool:
    return value is None or is_number(value)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of what fits."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_name(fits: Callable[[Any], bool], *names: str) -> Callable[[Any], bool]:
    """Whether a value is a mapping of what fits, with at least these names."""
    return lambda value: isinstance(value, dict) and all(map(fits, value.values())) and {*names} <= {*value}


def _is_pass(value: Any) -> bool:
    """Whether a value is [rank, kind, start, end, stage, micro-batch] of a pass of a pipeline."""
    kinds = (_is_step, _is_text, is_number, is_number, _is_step, _is_step)
    return (
        isinstance(value, list | tuple)
        and len(value) == 6
        and all(fits(one) for fits, one in zip(kinds, value, strict=True))
    )


def _is_prediction(value: Any) -> bool:
    """Whether a value is the `predicted` of a run's row: bytes, seconds by part, passes."""
    if not isinstance(value, dict):
        return False
    numbers, seconds = _by_name(_is_number_or_null), value.get("step_seconds")
    memory, time, parts = (value.get(name) or {} for name in ("memory", "time", "parts"))
    if isinstance(memory, dict):
        memory = {
            name: size for name, size in memory.items() if name != "event"
        }  # where the peak is, in words
    timed = is_number(seconds) if time else _is_number_or_null(seconds)
    timed = timed and _are(_is_pass)(value.get("passes") or [])
    return timed and numbers(memory) and numbers(time) and numbers(parts)


def _is_expected(value: Any) -> bool:
    """Whether a value is the `expected` of a run's row: seconds, most, gpus, price and currency."""
    numbers = _by_name(_is_number_or_null, "seconds", "most", "gpus", "price")
    return isinstance(value, dict) and numbers({name: value[name] for name in value if name != "currency"})


NUMBER = Type(is_number, "is not a number")
STEP = Type(_is_step, "is not a whole number", required=True, nullable=False)
COUNT = Type(lambda value: _is_step(value) and value > 0, "is not a number of 1 or more", nullable=False)
TEXT = Type(_is_text, "is not text")
NUMBERS = Type(_are(is_number), "is not a list of numbers")
BY_NAME = Type(_by_name(is_number), "has no numbers")
ANSWER = Type(lambda value: isinstance(value, str) or is_number(value), "is neither text nor a number")

SAMPLE = {  # of samples.jsonl
    "step": STEP._replace(required=False, nullable=True),
    "prompt": TEXT._replace(required=True, nullable=False),
    "answer": TEXT._replace(required=True, nullable=False),
    "question": TEXT,
    "expected": ANSWER,
}
COLUMNS: Mapping[str, Mapping[str, Type]] = {
    "run": {
        "world": COUNT, "nodes": COUNT, "total_steps": NUMBER, "global_batch_size": NUMBER, "seq_len": NUMBER,
        "layout": TEXT._replace(nullable=False), "device_type": TEXT._replace(nullable=False), "host": TEXT,
        "resumed_from": NUMBER, "expert_share": NUMBER,
        "predicted": Type(_is_prediction, "has no numbers by part"),
        "expected": Type(_is_expected, "has no numbers of a job"), "begun": TEXT,
    },
    "train": {"step": STEP},  # all other columns are numbers, too
    "eval": {"step": STEP},
    "time": {
        "step": STEP,
        "seconds": NUMBER._replace(required=True, nullable=False),
        "parts": Type(_by_name(is_number, *PARTS), "do not have the parts of a step", True, False),
        "busy": NUMBERS._replace(nullable=False), "loading": NUMBERS._replace(nullable=False),
        "exposed": BY_NAME._replace(nullable=False),
        "traffic": Type(
            _by_name(lambda pair: _are(is_number)(pair) and len(pair) == 2), "has no pairs of numbers",
            nullable=False,
        ),
        **dict.fromkeys(
            ("backlog", "launching", "host_seconds", "recompilations", "head_start", "allocator_retries"),
            NUMBER,
        ),
        "padding": NUMBER._replace(nullable=False),
    },
    "memory": {
        "step": STEP,
        "phases": Type(_by_name(_by_name(is_number, "peak")), "have no sizes", True, False),
    },
    "experts": {
        "step": STEP,
        **dict.fromkeys(
            ("layers", "fullest", "largest", "mean", "entropy", "unused", "fullest_rank"),
            NUMBERS._replace(required=True, nullable=False),
        ),
    },
    "passes": {"step": STEP, "passes": Type(_are(_is_pass), "aren't passes of a pipeline", True, False)},
    "cause": {
        "cause": TEXT._replace(required=True, nullable=False),
        "share": NUMBER._replace(required=True, nullable=False),
        "evidence": TEXT._replace(required=True, nullable=False),
        "remedy": TEXT._replace(required=True, nullable=False),
    },
    "save": {"step": STEP, "seconds": NUMBER._replace(required=True, nullable=False)},
    "device": {
        "gpu": TEXT, **dict.fromkeys(("clock", "full_clock"), NUMBER._replace(required=True, nullable=False)),
        "limits": Type(_are(_is_text), "aren't a list of texts", True, False),
    },
    "end": {
        "step": STEP, "status": TEXT._replace(nullable=False), "tokens": NUMBER, "seconds": NUMBER,
    },
}  # fmt: skip
OTHERS = {"step": STEP._replace(required=False, nullable=True)}  # of a kind that is not known here
ALL_NUMBERS = ("train", "eval")


def fault_of(row: Any) -> str | None:
    """Clause on what no run writes in a row of metrics.jsonl; None for a row that fits."""
    if not isinstance(row, dict):
        return "it is not a JSON object"
    kind = row.get("kind", "")
    if not isinstance(kind, str):
        return "its kind is not text"
    return next(_faults(row, COLUMNS.get(kind, OTHERS)), None) or _other_than_numbers(row, kind)


def fault_of_sample(row: Any) -> str | None:
    """Clause on what no run writes in a row of samples.jsonl; None for a row that fits."""
    return next(_faults(row, SAMPLE), None) if isinstance(row, dict) else "it is not a JSON object"


def _faults(row: Row, columns: Mapping[str, Type]) -> Iterator[str]:
    for name, column in columns.items():
        if name not in row:
            if column.required:
                yield f"it has no {name}"
        elif not (row[name] is None and column.nullable) and not column.fits(row[name]):
            yield f"its {name} {column.fault}"


def _other_than_numbers(row: Row, kind: str) -> str | None:
    if kind not in ALL_NUMBERS:
        return None
    values = [*row.values()]
    values.remove(kind)
    if _are_numbers(values):
        return None
    names = sorted(row.keys() - {"kind"})
    faults = (f"its {name} {NUMBER.fault}" for name in names if not _is_number_or_null(row[name]))
    return next(faults, None)


def _are_numbers(values: Sequence[Any]) -> bool:
    """True only where every value is None or a number (`is_number`), which is seen for a whole row at once;
    False where the sum of them is beyond the largest float, too.
    """
    try:
        return {*map(type, values)} <= _NUMBERS and math.isfinite(math.fsum(filter(None, values)))
    except (OverflowError, ValueError):
        return False


_NUMBERS = {int, float, bool, type(None)}


# The folder #


@dataclass(frozen=True)
class RunDir:
    """One run's folder; nothing is created on disk before `create`, `append` or `append_sample`."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rank_logs(self) -> list[Path]:
        """The logs of the ranks since the last start, as far as there are any."""
        return sorted(self.logs.glob("rank-*.log"))

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def holds_run(self) -> bool:
        """True if the folder holds a run, be it of no step yet."""
        return self.config_file.exists() or self.metrics_file.exists()

    @property
    def lock_file(self) -> Path:
        """File that the process which trains here holds locked, until it ends in whatever way."""
        return self.path / ".lock"

    @property
    def is_training(self) -> bool | None:
        """True while a process trains in the folder, on this machine or on one that shares its locks; None
        where that is not known: a file system without locks, or no right to read the lock's file.
        """
        try:
            return self.lock_file.is_file() and is_locked(self.lock_file)
        except OSError:
            return None

    def stops_without_progress(self) -> int:
        """Note that a signal stops the run now; returns how many times in a row that left no checkpoint newer
        than that of the stop before.
        """
        file, newest = self.path / ".stops.json", sum(saved_steps(self.checkpoints)[-1:])
        before = {"step": 0, "times": 0}
        with suppress(OSError, ValueError):
            before |= json.loads(file.read_text("utf-8"))
        times = before["times"] + 1 if before["step"] == newest else 0
        with suppress(OSError):  # a full disk
            write_text_atomically(file, json.dumps({"step": newest, "times": times}))
        return times

    @property
    def replaced(self) -> Path:
        """Name of a run that was here, while the one that replaces it has done no step."""
        return self.path.with_name(f".{self.path.name}.replaced")

    def create(self) -> "RunDir":
        """Make the folder and its parents. Raises UserError if that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"The run folder {self.path} can't be made: {error.strerror}"
            raise UserError(f"{reason}; choose another `output`.") from error
        return self

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to metrics.jsonl."""
        append_line(self.metrics_file, row)

    def append_sample(self, row: Mapping[str, Any]) -> None:
        """Add one row to samples.jsonl."""
        append_line(self.samples_file, row)

    def rows(self, kind: str | None = None) -> "RowList":
        """Read metrics.jsonl in the order written; [] if it is missing. kind: "train" …; None: all."""
        rows = read_lines(self.metrics_file)
        return rows if kind is None else rows.of_kind(kind)

    def samples(self) -> "RowList":
        """Read samples.jsonl in the order written; [] if it is missing."""
        return read_lines(self.samples_file, fault_of_sample)

    def left_out(self, metrics: Sequence[str], samples: Sequence[str] = ()) -> str:
        """A sentence on the lines of both files that are left out, with the first one; "" without any.

        metrics, samples: as RowList has them.
        """
        files = {self.metrics_file.name: metrics, self.samples_file.name: samples}
        parts = [
            f"{counted(len(some), 'line')} of {name} ({some[0]})" for name, some in files.items() if some
        ]
        return f"Left out, since no run writes them: {', '.join(parts)}." if parts else ""

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written, and set the ranks' logs of the start before aside.

        Only the process that holds the run's lock may call it. A model that was being replaced gets its name
        back.
        """
        for path in [*self.path.glob(".*.tmp"), *self.path.glob(".*.writing-*")]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for old in self.path.glob(".model.old-*"):
            shutil.rmtree(old) if self.model.exists() else replace(old, self.model)
        if logs := self.rank_logs:
            before = self.logs / "before"
            shutil.rmtree(before, ignore_errors=True)
            before.mkdir()
            for log in logs:
                replace(log, before / log.name)

    def drop_after(self, step: int) -> None:
        """Remove the rows and samples of steps after `step`, for a run that resumes from its checkpoint.

        So is the row that says that the run has finished. Rows without a step (kind "run") stay, and so do
        lines that no run writes, which readers leave out. Files are written aside and renamed.
        """
        for file, fault in ((self.metrics_file, fault_of), (self.samples_file, fault_of_sample)):
            if file.exists():
                lines = [line for line in _lines_of(file) if not _is_later(_row(line, fault)[0], step)]
                write_atomically(file, b"".join(_bytes(line) + b"\n" for line in lines))


def _is_later(row: Row | None, step: int) -> bool:
    """True for the row of a step after `step`, and for that of a finished run; False for no row."""
    return row is not None and ((row.get("step") or 0) > step or row.get("status") == "finished")


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in the folder `checkpoints`, oldest first."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def json_line(row: Mapping[str, Any]) -> str:
    """Format a row as a line of strict JSON with its newline; floats keep every bit, NaN becomes null."""
    return json.dumps(_finite(row), allow_nan=False, ensure_ascii=False) + "\n"


def append_line(file: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a jsonl file in one write, after cutting off an incomplete last line.

    Creates the file and its folder if missing; does not sync. Raises OSError (ENOSPC) if the disk takes only
    a part of the line.
    """
    line = json_line(row).encode("utf-8", "backslashreplace")  # a lone surrogate becomes its JSON escape
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+", buffering=0) as stream:
        end = stream.seek(0, os.SEEK_END)
        if end:
            stream.seek(end - 1)
            if stream.read(1) != b"\n":
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
        written = stream.write(line)
        if written != len(line):  # a full disk may take half a line; the next append cuts it off
            full = os.strerror(errno.ENOSPC)
            raise OSError(
                errno.ENOSPC, f"{full}: only {written} of {len(line)} bytes could be written", str(file)
            )


class RowList(list[Row]):
    """Rows of a file, in the order written, without those that no run writes."""

    def __init__(self, rows: Iterable[Row] = (), left_out: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.left_out = [*left_out]  # "line 3: its step isn't a whole number", of each line that was left out

    def of_kind(self, kind: str) -> "RowList":
        return RowList((row for row in self if row.get("kind") == kind), self.left_out)


def read_lines(file: Path, fault: Callable[[Any], str | None] = fault_of) -> RowList:
    """Read a jsonl file without an incomplete last line; no rows if it is missing.

    fault: clause on a line's value that isn't a row, which is left out, as a line is that isn't JSON. Raises
    UserError for what isn't a file.
    """
    return rows_of(_lines_of(file), fault)


def rows_of(lines: Iterable[str] | Iterable[bytes], fault: Callable[[Any], str | None] = fault_of) -> RowList:
    """The rows of whole lines, as `read_lines` reads them."""
    rows = RowList()
    for number, line in enumerate(lines, start=1):
        row, reason = _row(line, fault)
        if row is not None:
            rows.append(row)
        elif reason:
            rows.left_out.append(f"line {number}: {reason}")
    return rows


def _lines_of(file: Path) -> list[str] | list[bytes]:
    """The whole lines of a file; none if it is missing. Raises UserError for what isn't a file."""
    if not file.exists():
        return []
    check_file(file)
    return _lines(file.read_bytes())


def _row(line: str | bytes, fault: Callable[[Any], str | None]) -> tuple[Row | None, str]:
    """(The row, or None; the clause on why it is none). Both are empty for a blank line."""
    if not line.strip():
        return None, ""
    try:
        row = _json(line)
    except (ValueError, RecursionError) as error:
        return None, f"it is not JSON ({error})"
    reason = fault(row)
    return (None, reason) if reason else (row, "")


def _lines(content: bytes) -> list[str] | list[bytes]:
    """Lines up to the last newline, as bytes where one of them isn't UTF-8; behind it may be a torn line."""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        return whole.decode("utf-8", "surrogatepass").split("\n")[:-1]
    except UnicodeDecodeError:
        return whole.split(b"\n")[:-1]


def _bytes(line: str | bytes) -> bytes:
    return line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line


def _json(line: str | bytes) -> Any:
    """The value of a line, as json.loads reads its bytes, in less time for each call."""
    if isinstance(line, str):
        try:
            value, end = _DECODER.raw_decode(line)
        except ValueError:  # or it begins with white space
            end = -1
        if end == len(line):
            return value
    return json.loads(_bytes(line))


_DECODER = json.JSONDecoder()


def write_text_atomically(file: Path, text: str) -> None:
    """Write `text` in UTF-8, as `write_atomically`."""
    write_atomically(file, text.encode())


def write_settings(file: Path, text: str) -> None:
    """Write settings as `write_text_atomically`; with a secret in an address only the owner may read them."""
    write_atomically(file, text.encode(), private=has_secret(text))


def aside_pattern(file: Path) -> str:
    """Pattern of the names under which `write_atomically` writes `file` in any process, for fnmatch."""
    return f".{file.name}.*.tmp"


def write_atomically(file: Path, content: bytes, *, private: bool = False) -> None:
    """Write `content` next to `file`, sync it, rename it: `file` holds the old content or the new, never a
    part. Creates the folder if missing; the rename itself is not synced (see `filesystem.sync`).

    private: only the owner may read it, on file systems that have modes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as stream:
            if private:
                set_mode(aside, 0o600)
            stream.write(content)
            stream.flush()
            sync_open(stream.fileno(), file)
        replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def disk_is_full(error: BaseException) -> bool:
    """True if `error`, safetensors' own included, means a full disk, a used-up quota or a file-size limit."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in full
    return any(f"os error {number}" in str(error) for number in full)


def room(error: BaseException) -> str:
    """Sentence on how to make room for what found none (`disk_is_full`)."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "Raise the limit on the size of a file (ulimit -f)."
    return "Make room."


def _finite(value: Any) -> Any:
    """Replace every NaN and infinity in a tree of lists and mappings by None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case str() | bytes():
            return value
        case Iterable():
            return [_finite(item) for item in value]
        case _:
            return value
