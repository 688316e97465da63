"""stdout and stderr of a command: output is never a reason to end it.

    text ──> encoded; signs that the encoding lacks are replaced (`replaced`) ──> file descriptor 1 or 2
                                                     not accepted: kept, for the log of a run (`keep_in`)

A reader that is gone (`| head -1`), a terminal that was closed, a full disk and a descriptor that was closed
before the start (`>&-`) raise nothing, neither here nor in rich. A command runs to its end and has its own
exit code; only a result that could not be written for another reason than a missing reader, a full disk's,
is a failure (`lost_result`).
"""

import codecs
import errno
import io
import os
import re
import select
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

KEPT_BYTES = 64 * 1024  # of output that was not accepted, until there is a file for it: the last ones
TERMINAL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")  # not for a file (ECMA-48)
RETURNS = re.compile(rb"\n?\r+\n?")  # ends of lines, of progress lines too
NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader, the terminal, or the descriptor is gone
ERRORS = "meshtune.replace"  # name of `replaced` among Python's codec error handlers
RAISING = ("strict", "surrogateescape", "backslashreplace")  # handlers that it replaces
ASCII = {"…": "...", "·": "-", "–": "-", "—": "-", "−": "-", "×": "x", "→": "->", "±": "+-", "²": "2"}
ASCII |= {"≥": ">=", "≤": "<=", "≈": "~", "µ": "u", "│": "|", "█": "#", **dict.fromkeys("─━╸╺", "-")}


class Output(io.FileIO):
    """stdout (1) or stderr (2); what its file descriptor does not accept is kept."""

    def __init__(self, number: int, descriptor: int | None = None) -> None:
        """descriptor: None for `number` itself."""
        super().__init__(number if descriptor is None else descriptor, "w", closefd=False)
        self.number = number
        self.lost: OSError | None = None  # the first error of a write
        self.replaces: Any = None  # the stream before, which would close the descriptor when it is freed
        self._file: Path | None = None
        self._kept = b""

    def write(self, data: Any, /) -> int:
        """Write all of `data`, a bytes-like object; returns its bytes. Raises nothing."""
        content = bytes(data)
        rest = memoryview(content)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # a pipe that does not block, and is full
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            if self.lost is None:
                self.lost = error
                self._kept = f"meshtune: {self._cause()}; it continues here.\n".encode()
                if self._file:
                    self._tell()
            self._kept = (self._kept + RETURNS.sub(b"\n", TERMINAL.sub(b"", rest)))[-KEPT_BYTES:]
            self._empty()
        return len(content)

    def keep_in(self, file: Path) -> None:
        """Append to `file` what was not accepted and what will not be."""
        self._file = file
        if self.lost:
            self._tell()
            self._empty()

    @property
    def saved_to_file(self) -> bool:
        """True if the text that the stream did not accept was saved to a file."""
        return self._file is not None and not self._kept

    def _empty(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with open(self._file, "ab") as file:
                    file.write(self._kept)
                self._kept = b""

    def _tell(self) -> None:
        """Print once on stderr why stdout lacks lines, where someone may read it."""
        if self.number == 1 and self.lost and self.lost.errno not in NOBODY_READS:
            print(f"meshtune: {self._cause()}; it continues in {self._file}.", file=sys.stderr, flush=True)

    def _cause(self) -> str:
        name = "stdout" if self.number == 1 else "stderr"
        return f"{name} could not be written ({self.lost.strerror if self.lost else ''})"


def replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Codec error handler: our own signs in ASCII, undecodable bytes of file names as they are, other signs
    as \\xfc, \\u20ac.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign, end = error.object[error.start], error.start + 1
    if 0xDC80 <= ord(sign) <= 0xDCFF:  # PEP 383
        return bytes([ord(sign) - 0xDC00]), end
    return ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode(), end


codecs.register_error(ERRORS, replaced)


def text_stream(output: Output, like: Any = None) -> io.TextIOWrapper:
    """Text output that raises neither OSError nor UnicodeEncodeError.

    like: the stream whose encoding and buffering it has; None: UTF-8, by lines.
    """
    if like is None:
        buffer = io.BufferedWriter(output)
        return io.TextIOWrapper(buffer, encoding="utf-8", errors=ERRORS, line_buffering=True)
    return io.TextIOWrapper(
        output if like.write_through else io.BufferedWriter(output),  # type: ignore[arg-type] - python -u
        encoding=like.encoding,
        errors=ERRORS if like.errors in RAISING else like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def guard() -> None:
    """Make stdout and stderr of this process such streams, where they are Python's own; open the standard
    descriptors that are closed, since the next file to be opened would get their number.
    """
    forget_zero_sizes(os.environ)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free number, which is this one; refuses writes
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process
    sys.stdout, sys.stderr = _guarded(sys.stdout, 1), _guarded(sys.stderr, 2)


def forget_zero_sizes(environ: MutableMapping[str, str]) -> None:
    """Remove a terminal's width or height of 0, as containers set it, under which rich prints nothing."""
    for name in ("COLUMNS", "LINES"):
        if environ.get(name) == "0":
            del environ[name]


def _guarded(stream: Any, number: int) -> Any:
    """The stream, or one in its place if it is None or Python's own for the descriptor."""
    if stream is None:  # the descriptor was closed; by now it may be that of another file
        return text_stream(Output(number, os.open(os.devnull, os.O_RDONLY)))
    raw = getattr(getattr(stream, "buffer", None), "raw", None) or getattr(stream, "buffer", None)
    if type(raw) is not io.FileIO or raw.closed or raw.fileno() != number:
        return stream  # a notebook's, a test's, or guarded already
    output = Output(number)
    output.replaces = stream
    text = text_stream(output, stream)
    with suppress(OSError):
        stream.flush()
    return text


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr of the block, for a program that calls meshtune."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = before


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # a program's own, which may be closed
                stream.flush()


def outputs() -> list[Output]:
    """The guarded ones of stdout and stderr, in this order."""
    buffers = [getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr)]
    raws = [getattr(buffer, "raw", buffer) for buffer in buffers]
    return [raw for raw in raws if isinstance(raw, Output)]


def keep_in(file: Path) -> None:
    """Append to `file` what stdout and stderr did not accept and will not accept."""
    for output in outputs():
        output.keep_in(file)


def lost(number: int) -> bool:
    """True if stdout (1) or stderr (2) has not accepted something."""
    return any(output.lost for output in outputs() if output.number == number)


def lost_result() -> OSError | None:
    """Why stdout is incomplete, and in no file either; None if it is complete or nobody reads it."""
    flush()
    for output in outputs():
        error = output.lost if output.number == 1 and not output.saved_to_file else None
        if error and error.errno not in NOBODY_READS:
            return error
    return None


def encodes(text: str) -> bool:
    """True if stdout's encoding has all signs of the text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
