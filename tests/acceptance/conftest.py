"""The command line as a user has it: `meshtune(...)` in this process, `process(...)` in one of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Command, Ended, end, fork, start
from tiny import make_llama, make_tokenizer

Process = subprocess.Popen[str]


@pytest.fixture
def meshtune(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process, through the function that the console script calls.

    It must end with exit code 0, or with the one that the caller names.
    """

    def run(*words: object, code: int | None = 0) -> Ended:
        from meshtune import cli

        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err).checked(code)

    return run


def kept(starter: Callable[..., Process]) -> Iterator[Callable[..., Process]]:
    """`starter`; what it has started is killed if the test leaves it running."""
    running: list[Process] = []

    def run(*words: object) -> Process:
        running.append(starter(*words))
        return running[-1]

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def begin() -> Iterator[Callable[..., Process]]:
    """`process = begin(words)` starts a command as a shell does."""
    yield from kept(start)


@pytest.fixture
def begin_fork() -> Iterator[Callable[..., Process]]:
    """As `begin`, in a fork of this process, without the seconds that imports take."""
    yield from kept(fork)


@pytest.fixture
def process(begin: Any) -> Command:
    """Run a command in a process of its own to its end."""
    return lambda *words, code=0: end(begin(*words), code=code)


@pytest.fixture(scope="session")
def gsm8k_model(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder made by save_pretrained: a tiny random Llama, and a tokenizer trained on GSM8K."""
    folder = tmp_path_factory.mktemp("gsm8k") / "base"
    rows = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer([f"{row['question']}\n{row['answer']}" for row in rows], 4096)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 1024}
    make_llama(vocab_size=4096, tie_word_embeddings=True, **sizes).save_pretrained(folder)
    return folder
