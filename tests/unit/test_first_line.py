"""Something is visible at once, and no line of a terminal is cut in a word."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from meshtune import __version__
from meshtune.units import at_words, notice

# A command that runs in this process until it would import torch; then it prints what stderr has and ends.
UNTIL_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers", "datasets"):
            sys.exit(9)
sys.meta_path.insert(0, NoTorch())
sys.argv = ["meshtune", *sys.argv[1:]]
from meshtune.cli import main
main()
"""


def until_torch(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command up to the first import that takes seconds."""
    return subprocess.run(
        [sys.executable, "-c", UNTIL_TORCH, *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "reading", "work"),
    [
        (["train", "examples/quickstart.yaml", "output=runs/not-there"], "examples/quickstart.yaml",
         ["loading PyTorch, the model and the data"]),
        (["data", "model.name=quickstart/base", "data.train=org/rows"], "the settings of the command line",
         ["loading the tokenizer and the rows"]),
        (["generate", "quickstart/base", "-p", "hello"], "quickstart/base", ["loading the model"]),
        (["chat", "quickstart/base"], "quickstart/base", ["loading the model"]),
        (["export", "examples", "out"], "examples", ["reading the weights and writing the folder"]),
        (["env"], "this machine", []),
    ],
)  # fmt: skip
def test_a_command_names_what_it_reads_and_does_before_its_slow_imports(words, reading, work):
    ended = until_torch(*words)
    assert ended.returncode == 9, ended.stderr
    first = f"meshtune: version {__version__}, reading {reading} …"
    assert ended.stderr.splitlines() == [first, *(f"meshtune: {what} …" for what in work)]
    assert ended.stdout == ""


@pytest.mark.ci
@pytest.mark.parametrize("command", ["train", "data"])
def test_missing_data_files_are_named_before_the_slow_imports(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "config.json").write_text("{}")
    paths = [f"data.{name}={tmp_path / file}" for name, file in (("train", "trian.jsonl"), ("eval", "x.csv"))]
    ended = until_torch(command, f"model.name={tmp_path}", *paths)
    assert ended.returncode == 2, ended.stderr
    assert f"no file or folder {tmp_path}/trian.jsonl" in ended.stderr
    assert "did you mean" in ended.stderr and f"{tmp_path}/train.jsonl" in ended.stderr
    assert f"{tmp_path}/x.csv" in ended.stderr


@pytest.mark.ci
def test_of_several_ranks_the_first_alone_prints_it():
    assert until_torch("env", RANK="1").stderr == ""
    assert until_torch("env", RANK="0").stderr != ""


def on_terminal(width: int, *words: str, **environment: str) -> tuple[str, float]:
    """(What a command prints on a terminal of `width` columns, seconds until its first character)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    started, first, shown = time.monotonic(), None, b""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshtune", *words],
        env=os.environ | {"TERM": "xterm-256color"} | environment,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # how Linux reports that the other side is closed
            break
        first = first or time.monotonic() - started
    os.close(ours)
    process.wait()
    assert first is not None
    return shown.decode(), first


@pytest.mark.ci
@pytest.mark.parametrize("width", [80, 120])
def test_problems_are_broken_at_words(width):
    shown, _ = on_terminal(width, "plan", "model.name=x", "train.foo=1", "data.bar=2", NO_COLOR="1")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    piped = until_torch("plan", "model.name=x", "train.foo=1", "data.bar=2").stderr
    assert shown.split() == piped.split()
    assert len(piped.splitlines()) == 3 < len(lines)  # a line each, which can be searched


@pytest.mark.all
def test_the_first_line_comes_within_a_second():
    assert min(on_terminal(80, "train", "examples/quickstart.yaml", "model.name=-")[1] for _ in range(3)) < 1


def test_a_word_that_is_too_long_keeps_a_line_of_its_own():
    path = "/a/path/of/many-parts/" * 5
    assert at_words(f"The file {path} is new.", 40).splitlines() == ["The file", path, "is new."]
    assert at_words("a b c", None) == "a b c"


def test_a_notice_shows_control_characters(capsys):
    notice("a\x1b]0;title\x07")
    assert capsys.readouterr().err == "a␛]0;title␇\n"


def test_a_terminal_without_a_size_breaks_no_lines(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((0, 0)))
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)
    notice("word " * 50)
    assert capsys.readouterr().err.count("\n") == 1
