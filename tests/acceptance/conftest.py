"""The command line as a user has it: `meshtune(...)` in this process, `process(...)` in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tokenizer


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout; fails where anything else is there."""
        return json.loads(self.out)


Command = Callable[..., Ended]


@pytest.fixture
def meshtune(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process, through the function that the console script calls."""

    def run(*words: object) -> Ended:
        from meshtune import cli

        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


def start(*words: object) -> "subprocess.Popen[str]":
    """Start a command in a process of its own, one thread, so that sums are made in one order."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshtune", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]", *, timeout: float = 240) -> Ended:
    """Wait for a command's end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, out, err)


@pytest.fixture
def begin() -> Any:
    """`process = begin(words)` starts a command; it is killed if the test leaves it running."""
    running = []

    def run(*words: object) -> "subprocess.Popen[str]":
        running.append(start(*words))
        return running[-1]

    yield run
    for each in running:
        if each.poll() is None:
            each.kill()
            each.communicate()


@pytest.fixture
def process(begin: Any) -> Command:
    """Run a command in a process of its own to its end."""
    return lambda *words: end(begin(*words))


@pytest.fixture(scope="session")
def gsm8k_model(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder made by save_pretrained: a tiny random Llama, and a tokenizer of 4,096 tokens trained on GSM8K."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("gsm8k") / "base"
    rows = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer([f"{row['question']}\n{row['answer']}" for row in rows], 4096)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
