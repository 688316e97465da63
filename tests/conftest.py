"""Shared by every test: one thread a process, no network; a tiny model folder and rows to train it on."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import said_all
from hypothesis import settings
from tiny import make_folder, short_run

from meshtune.compat import splits_backward
from meshtune.layout import ZERO_BUBBLE

sys.path.append(str(Path(__file__).parents[1] / "validation"))  # shapes
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup runs would ignore it too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of packages and devices that aren't there: they could only be skipped."""
    lacking = [item for item in items if not all(map(_installed, _needed(item)))]
    if not splits_backward():  # of torch 2.11
        lacking += [item for item in items if any(name in item.nodeid for name in ZERO_BUBBLE)]
    if not torch.cuda.is_available():
        lacking += [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=lacking)
    items[:] = [item for item in items if item not in lacking]


def _needed(item: pytest.Item) -> list[str]:
    return [mark.args[0] for mark in item.iter_markers("needs")]


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Compare the number of texts of a test that passes with the golden file's."""
    yield
    said_all(item.nodeid)


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
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tiny: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Function(*overrides) -> section.key=value of a short fp32 run on the tiny model, `overrides` last:
    `settings("train.max_steps=5", …)`.
    """

    def of(*overrides: str) -> list[str]:
        return [*short_run(tiny, tmp_path / "cache", tmp_path / "run"), *overrides]

    return of


@pytest.fixture
def train(settings: Callable[..., list[str]]) -> Callable[..., Any]:
    """Function(*overrides) that trains the tiny model in this process and returns its `loop.Run`."""

    def run(*overrides: str) -> Any:
        from meshtune import config
        from meshtune.api import build
        from meshtune.train import loop

        made = build.build(config.load(None, settings(*overrides)))
        loop.train(made)
        return made

    return run
