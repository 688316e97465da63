"""`meshtune chat` as a user has it: of a trained run through a pipe, and in a terminal with Ctrl-C."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command


@pytest.mark.all
def test_a_run_remembers_what_was_said_before(
    tiny: Path, tmp_path: Path, settings: Callable[..., list[str]], meshtune: Command
) -> None:
    """Train on two conversations that differ in their first message alone, so that only a model that is
    given it can answer the second; then ask.
    """
    words = ("apple", "stone")
    rows = [
        {"messages": [
            {"role": "user", "content": f"My word is {word}"}, {"role": "assistant", "content": "red"},
            {"role": "user", "content": "Say it"}, {"role": "assistant", "content": word},
        ]}
        for word in words
    ]  # fmt: skip
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = settings(
        f"data.train={file}", "data.eval=[]", "data.chat_template=chatml", "data.train_on=assistant",
        "train.global_batch_size=2", "train.max_steps=150", "train.learning_rate=3e-3", "data.packing=false",
    )  # fmt: skip
    meshtune("train", *trained)
    run = next(word.partition("=")[2] for word in trained if word.startswith("output="))
    typed = "".join(f"My word is {word}\nSay it\n/reset\n" for word in words)
    chat = subprocess.run(
        [sys.executable, "-m", "meshtune", "chat", run],
        input=typed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.splitlines() == ["red", "apple", "red", "stone"]
    asked = [*rows[1]["messages"][:-1]]
    assert meshtune("generate", run, "--messages", json.dumps(asked), "--json").json[0]["answer"] == "stone"


class Terminal:
    """A command in a terminal of its own, which has no size: 0 columns."""

    def __init__(self, *words: str) -> None:
        self.child, self.handle = pty.fork()
        if self.child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            os.execv(sys.executable, [sys.executable, "-m", "meshtune", *words])
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.handle, text.encode())

    def press(self, key: str, *, until: str) -> str:
        """Press a key, again every 5 seconds, until a regular expression is shown; returns what is shown."""
        self.shown = ""
        for _ in range(24):
            os.write(self.handle, key.encode())
            with contextlib.suppress(AssertionError):
                return self.wait_for(until, seconds=5)
        raise AssertionError(self.shown)

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Read until a regular expression is shown; returns what has been shown since the last typing."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.shown):
            assert time.monotonic() < end, self.shown
            if select.select([self.handle], [], [], 0.2)[0]:
                self.shown += os.read(self.handle, 4096).decode(errors="replace")
        return self.shown


@pytest.mark.all
def test_ctrl_c_in_a_terminal_stops_an_answer_and_ctrl_d_ends(tiny: Path) -> None:
    terminal = Terminal(
        "chat", str(tiny / "model"), "data.chat_template=chatml", "--max-new-tokens", "480",
    )  # fmt: skip
    assert "/exit or Ctrl-D ends" in terminal.wait_for("> ")
    terminal.type("Say red\n")
    terminal.wait_for("Say red\r\n.")  # the answer has begun
    terminal.type("\x03")
    terminal.wait_for("(?s)Stopped.*> $")
    # Python misses a signal between the prompt sign and its wait for a key, until the next key: press again.
    assert "/exit or Ctrl-D ends." in terminal.press("\x03", until="(?s)ends.*> ")
    terminal.type("\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.child, 0)[1]) == 0
