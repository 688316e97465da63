"""Run a command in a fork of this process, with limits, and judge how it ended.

Good: an exit code of the command line (0, 2, 3, 4, 75), with a sentence where it is not 0, without a
traceback, in time, within the memory, and no process left.
"""

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

EXIT_CODES = (0, 2, 3, 4, 75)
SECONDS = 20.0
MEMORY = 3 * 2**30  # bytes beyond those of this process
SPARE = 2**30  # bytes of address space that nothing is written to
FILE_SIZE = 2 * 2**30  # bytes of one file


class Ended(NamedTuple):
    """How a command ended."""

    fault: str | None  # None: good
    code: int  # negative: the number of a signal
    seconds: float
    output: str

    @property
    def outcome(self) -> str:
        return self.fault or f"exit {self.code}"


def run(
    command: Callable[[], object],
    folder: Path,
    *,
    stdin: Path | None = None,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Ended:
    """Run `command` in `folder`, which is also its home and its directory for temporary files.

    stdin: a file; None: empty. seconds, memory (bytes beyond those of this process): limits.
    """
    begin, begun = os.pipe()
    output = folder / ".output"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.write(begun, str(_statm()[1]).encode())  # a fork has less resident: it maps no files yet
        _become(command, folder, output, stdin, memory)
    base = int(os.read(begin, 32))
    os.close(begin)
    os.close(begun)
    late = not _wait(child, seconds)
    if late:
        _kill_session(child)
    _, status, usage = os.wait4(child, 0)
    elapsed = time.monotonic() - started
    left = _left(child)
    _kill_session(child)
    text = output.read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    return Ended(_fault(late, usage.ru_maxrss * 1024 > base + memory, left, code, text), code, elapsed, text)


def _fault(late: bool, hungry: bool, left: list[int], code: int, text: str) -> str | None:
    if late:
        return "hang"
    if hungry:
        return "memory"
    if "Traceback (most recent call last)" in text or "panicked at" in text:
        return "traceback"
    if code not in EXIT_CODES:
        return f"signal {-code}" if code < 0 else f"exit {code}"
    if code and not text.strip():
        return "silent"
    return "left a process" if left else None


def _become(
    command: Callable[[], object], folder: Path, output: Path, stdin: Path | None, memory: int
) -> NoReturn:
    """Run the command in this process and end it."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(stdin or os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o644), 1)
        os.dup2(1, 2)
        os.closerange(3, 1024)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115 - as Python's own
        os.chdir(folder)
        os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
        space = _statm()[0] + memory + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        command()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _statm() -> list[int]:
    """Bytes of this process: of its address space, resident, shared."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:3]]


def _wait(child: int, seconds: float) -> bool:
    """Whether the child ended within `seconds`."""
    handle = os.pidfd_open(child)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _session(child: int) -> list[int]:
    """The processes that live in the child's session, ids of ended ones left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == child and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def _left(child: int) -> list[int]:
    """The processes that the child left and that do not end within two seconds."""
    until = time.monotonic() + 2
    while (left := _session(child)) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _kill_session(child: int) -> None:
    for process in _session(child):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
