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

    runs/.my-run.replaced  a run that is being replaced, until the new one has done a step

A row is one line of strict JSON: NaN and infinities become null, because the parsers of browsers and of most
languages refuse them. A line is a row once its newline is written: readers skip the incomplete last line of a
killed run, and the next writer cuts it off.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, check_file
from meshtune.filesystem import replace, sync_open

Row = dict[str, Any]


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
    def is_training(self) -> bool:
        """True while a process trains in the folder, on this machine or on one that shares its locks."""
        if not self.lock_file.is_file():
            return False
        try:
            with open(self.lock_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until `lock` is closed
        except BlockingIOError:
            return True
        except OSError:  # no right to read it, or a file system without locks: not known
            return False
        return False

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

    def rows(self, kind: str | None = None) -> list[Row]:
        """Read metrics.jsonl in the order written; [] if it is missing. kind: "train" …; None: all."""
        return [row for row in read_lines(self.metrics_file) if kind is None or row.get("kind") == kind]

    def samples(self) -> list[Row]:
        """Read samples.jsonl in the order written; [] if it is missing."""
        return list(read_lines(self.samples_file))

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written, and set the ranks' logs of the start before aside.

        Only the process that holds the run's lock may call it. A model that was being replaced gets its name
        back.
        """
        for path in [*self.path.glob(".*.tmp"), *self.path.glob(".*.writing-*")]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for old in self.path.glob(".model.old-*"):
            shutil.rmtree(old) if self.model.exists() else old.rename(self.model)
        if logs := self.rank_logs:
            before = self.logs / "before"
            shutil.rmtree(before, ignore_errors=True)
            before.mkdir()
            for log in logs:
                log.rename(before / log.name)

    def drop_after(self, step: int) -> None:
        """Remove the rows and samples of steps after `step`, for a run that resumes from its checkpoint.

        So is the row that says that the run has finished. Rows without a step (kind "run") stay. Files are
        written aside and renamed.
        """
        for file in (self.metrics_file, self.samples_file):
            if file.exists():
                rows = [
                    row
                    for row in read_lines(file)
                    if (row.get("step") is None or row["step"] <= step) and row.get("status") != "finished"
                ]
                write_text_atomically(file, "".join(map(json_line, rows)))


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


def read_lines(file: Path) -> Iterator[Row]:
    """Yield the rows of a jsonl file, without an incomplete last line; nothing if the file is missing.

    Raises UserError for any other line that is no row (`fault_of`), and for what is no file.
    """
    if not file.exists():
        return
    check_file(file)
    for number, line in enumerate(_lines(file.read_bytes()), start=1):
        if not line.strip():
            continue
        try:
            row = _json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{file}, line {number} is not JSON ({error}); mend or remove that line."
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number} is not a JSON object; mend or remove that line.")
        if fault := fault_of(row):
            raise UserError(f"{file}, line {number}: {fault}; mend or remove that line.")
        yield row


def _lines(content: bytes) -> list[str] | list[bytes]:
    """Lines up to the last newline, as bytes where one of them is no UTF-8; behind it may be a torn line."""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        return whole.decode("utf-8", "surrogatepass").split("\n")[:-1]
    except UnicodeDecodeError:
        return whole.split(b"\n")[:-1]


def _json(line: str | bytes) -> Any:
    """The value of a line, as json.loads reads its bytes, in less time for each call."""
    if isinstance(line, str):
        try:
            value, end = _DECODER.raw_decode(line)
        except ValueError:  # or it begins with white space
            end = -1
        if end == len(line):
            return value
        line = line.encode("utf-8", "surrogatepass")
    return json.loads(line)


_DECODER = json.JSONDecoder()
# Values of rows that are numbers; in rows of kind train and eval all but the kind are.
_NUMBERS_OF_OTHERS = ("world", "total_steps", "tokens", "seconds")


def fault_of(row: Row) -> str | None:
    """Clause on what no run writes in a row: a step, or a number of a measurement, that is none."""
    kind, step = row.get("kind", ""), row.get("step")
    if not isinstance(kind, str):
        return "its kind is no text"
    if (step is not None or kind in ("train", "eval", "memory", "end")) and (
        type(step) is not int or not 0 <= step < 2**63
    ):
        return "its step is no whole number"
    if kind in ("train", "eval"):
        values = [*row.values()]
        values.remove(kind)
    else:
        values = [row[name] for name in _NUMBERS_OF_OTHERS if name in row]
    if not _are_numbers(values):
        for name in sorted(row.keys() - {"kind"} if kind in ("train", "eval") else _NUMBERS_OF_OTHERS):
            if row.get(name) is not None and not _is_number(row[name]):
                return f"its {name} is no number"
    if kind == "memory" and not _are_sizes(row.get("phases")):
        return "its phases have no sizes"
    return None


def _are_numbers(values: Sequence[Any]) -> bool:
    """True only where every value is None or a number (`_is_number`), which is seen for a whole row at once;
    False where the sum of them is beyond the largest float, too.
    """
    try:
        return {*map(type, values)} <= _NUMBERS and math.isfinite(math.fsum(filter(None, values)))
    except (OverflowError, ValueError):
        return False


_NUMBERS = {int, float, bool, type(None)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _are_sizes(phases: Any) -> bool:
    """True for {phase: {"peak": bytes, category: bytes, …}, …}."""
    return isinstance(phases, dict) and all(
        isinstance(sizes, dict) and "peak" in sizes and all(map(_is_number, sizes.values()))
        for sizes in phases.values()
    )


def write_text_atomically(file: Path, text: str) -> None:
    """Write `text` in UTF-8, as `write_atomically`."""
    write_atomically(file, text.encode())


def aside_pattern(file: Path) -> str:
    """Pattern of the names under which `write_atomically` writes `file` in any process, for fnmatch."""
    return f".{file.name}.*.tmp"


def write_atomically(file: Path, content: bytes) -> None:
    """Write `content` beside `file`, sync it, rename it: `file` holds the old content or the new, never a
    part. Creates the folder if missing; the rename itself is not synced (see `filesystem.sync`).
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as stream:
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
