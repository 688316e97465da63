"""Shared by every test: one thread a process, no network; a tiny model folder and rows to train it on."""

import gc
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tiny import make_rows, make_tokenizer, write_rows

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of packages that aren't installed: they could only be skipped."""
    lacking = [item for item in items if not all(map(_installed, _needed(item)))]
    config.hook.pytest_deselected(items=lacking)
    items[:] = [item for item in items if item not in lacking]


def _needed(item: pytest.Item) -> list[str]:
    return [mark.args[0] for mark in item.iter_markers("needs")]


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def pytest_collection_finish() -> None:
    """Let garbage collections, of which a test may cause many, pass over what all the imports have left."""
    gc.collect()
    gc.freeze()


GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder of the GSM8K data set (train.jsonl, test.jsonl), which is not part of the project."""
    if not (GSM8K / "train.jsonl").exists():
        pytest.skip(f"GSM8K is not at {GSM8K}")
    return GSM8K


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and its tokenizer (`model/`), train.jsonl and test.jsonl."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    train, test = make_rows(120), make_rows(20, seed=1)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", test)
    tokenizer = make_tokenizer([f"{row['prompt']}\n{row['completion']}" for row in train], 300)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def settings(tiny: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Function(*overrides) -> section.key=value of a short fp32 run on the tiny model, `overrides` last:
    `settings("train.max_steps=5", …)`.
    """

    def of(*overrides: str) -> list[str]:
        return [
            f"model.name={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}",
            f"data.eval={tiny / 'test.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=128",
            "train.global_batch_size=4", "train.max_steps=4",
            "train.precision=fp32", "train.learning_rate=1e-3", "log.to=[jsonl]", "checkpoint.every=0",
            f"output={tmp_path / 'run'}", *overrides,
        ]  # fmt: skip

    return of


@pytest.fixture
def train(settings: Callable[..., list[str]]) -> Callable[..., Any]:
    """Function(*overrides) that trains the tiny model in this process and returns its `loop.Run`."""

    def run(*overrides: str) -> Any:
        from meshtune import config
        from meshtune.train import build, loop

        made = build.build(config.load(None, settings(*overrides)))
        loop.train(made)
        return made

    return run
