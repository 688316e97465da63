"""Output that can't be written or encoded ends no command."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import cases

from meshtune.streams import Output, forget_zero_sizes, text_stream

PRINTING = """
import sys
from rich.console import Console
from meshtune import cli, streams
@cli.app.command("printing")
def printing() -> None:
    if FOLDER:
        streams.keep_in(__import__("pathlib").Path(FOLDER) / "rank-0.log")
    for number in range(2000):
        print(f"{number} result")
        Console(stderr=True).print(f"{number} of [bold]2000[/] · ü")
    print("end", file=sys.stderr)
sys.argv = ["meshtune", "printing"]
cli.main()
"""


@pytest.mark.parametrize(
    "redirection", cases(["2>&1 | head -1", "| head -1", ">&-", "2>&- >&-", "> /dev/full 2>&1"], test=1, ci=4)
)
def test_a_command_whose_output_is_lost_ends_well_with_its_lines_in_a_log(
    tmp_path: Path, redirection: str
) -> None:
    program = PRINTING.replace("FOLDER", repr(str(tmp_path)), 2)
    (tmp_path / "program.py").write_text(program)
    line = f"set -o pipefail; {sys.executable} {tmp_path}/program.py {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    log = (tmp_path / "rank-0.log").read_text()
    assert "stdout could not be written" in log and "it continues here" in log
    assert "1999 result\n" in log
    assert ("1999 of 2000 · ü" in log) == ("2" in redirection)


def test_a_result_that_a_full_disk_did_not_take_is_a_sentence_and_not_success(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PRINTING.replace("FOLDER", "''"))
    line = f"{sys.executable} {tmp_path}/program.py > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("stdout could not be written: No space left on device. Make room") == 1


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("ascii", b"step 1 - loss 2 -> 1 ... \\xfc \\u20ac \\u4f60 \xff"),
        ("cp1252", b"step 1 \xb7 loss 2 -> 1 \x85 \xfc \x80 \\u4f60 \xff"),
    ],
)
def test_signs_that_the_encoding_lacks_are_replaced(encoding: str, text: bytes) -> None:
    read, write = os.pipe()
    like: Any = open(write, "w", encoding=encoding, errors="strict")  # noqa: SIM115
    with os.fdopen(read, "rb") as reader:
        print("step 1 · loss 2 → 1 … ü € 你 \udcff", file=text_stream(Output(1, write), like), flush=True)
        like.close()
        assert reader.read() == text + b"\n"


def test_what_is_kept_of_a_terminal_is_lines_without_its_codes(tmp_path: Path) -> None:
    with open(os.devnull) as closed:
        stream = Output(2, closed.fileno())  # refuses writes
        stream.keep_in(tmp_path / "log")
        stream.write(b"a 10%\ra 20%\r\x1b[2Kdone\r\n\x1b]0;title\x07end")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["a 10%", "a 20%", "done", "end"]


def test_a_terminal_of_no_width_is_not_believed() -> None:
    environ = {"COLUMNS": "0", "LINES": "40"}
    forget_zero_sizes(environ)
    assert environ == {"LINES": "40"}
