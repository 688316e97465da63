"""A run's state in the list, from its files: summary.status in one word, with the reason next to it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshtune.report.run.summary import UNKNOWN, of_kind, of_last_start
from meshtune.rundir import Row, RowList, RunDir, rows_of
from meshtune.units import printable

ENDS = 48 * 1024  # bytes of metrics.jsonl at its start and at its end that the list reads
LONGEST = 160  # characters of a reason


class State(NamedTuple):
    """A run's state."""

    word: str  # waiting (for its first step), running, finished, stopped, failed or unknown
    why: str  # of stopped, failed and unknown; ""


def state_of(run: RunDir, status: str, rows: Sequence[Row]) -> State:
    """State of a run. status: of its summary. rows: of metrics.jsonl, at least the last ones."""
    began = bool(of_kind(of_last_start(rows), "train"))
    if status == "finished":
        return State("finished", "")
    if status == "running":
        return State("running" if began else "waiting", "" if began else "for its first step")
    if status.startswith("stopped by"):
        return State("stopped", status.removeprefix("stopped "))
    if status not in ("stopped without an end", UNKNOWN):
        return State("failed", status.removeprefix("stopped: "))
    if not rows:
        return State("waiting", "to be started")
    if status == UNKNOWN:
        return State("unknown", status)
    ended = "it wrote no end: it was killed, stopped at once, or its machine is gone"
    resumes = "; the same command resumes it" if any(run.checkpoints.glob("step-*")) else ""
    return State("failed", last_log_line(run) or ended + resumes)


def last_log_line(run: RunDir) -> str:
    """Last line of the ranks' newest log, where a traceback ends, behind the log's name; "" without one."""
    logs = [log for log in run.rank_logs if log.is_file() and log.stat().st_size]
    if not logs:
        return ""
    newest = max(logs, key=lambda log: log.stat().st_mtime)
    lines = [line.strip() for line in _piece(newest, -4096).decode(errors="replace").splitlines()]
    line = printable(next((line for line in reversed(lines) if line), ""))
    return line and f"{newest.name}: {line}"[:LONGEST]


def first_and_last_rows(file: Path) -> RowList:
    """Rows at the start and at the end of metrics.jsonl, all of a short one. A list of many runs is made from
    them at once.
    """
    try:
        size = file.stat().st_size
        pieces = [_piece(file, ENDS)]
        if size > 2 * ENDS:
            pieces.append(_piece(file, -ENDS).partition(b"\n")[2])
        elif size > ENDS:
            pieces = [_piece(file, size)]
    except OSError:  # it has not been written yet
        return RowList()
    return rows_of(line for piece in pieces for line in whole_lines(piece))


def whole_lines(piece: bytes) -> list[bytes]:
    """The lines of a part of a file, without an incomplete last one."""
    return piece.split(b"\n")[:-1]


def _piece(file: Path, length: int) -> bytes:
    """The first bytes of a file, or with a negative length the last ones."""
    with open(file, "rb") as stream:
        if length < 0:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end + length))
        return stream.read(abs(length))
