"""Fixtures of the parity tests: a tiny model on the disk, and the runs of the grid with it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from grid import ONE, Grid, Traced, dry_runs, shared
from layouts import Trained, make_folder
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def grid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the grid's data and runs, one for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "grid"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def folder(grid_folder: Path) -> Path:
    """A Llama of 8 blocks, 4 heads and 2 key-value heads, with its data."""
    data = grid_folder / "data"
    with FileLock(f"{data}.lock"):
        if not data.exists():
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=301, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                eos_token_id=2, pad_token_id=0,
            )  # fmt: skip
            aside = data.with_name("data.new")
            aside.mkdir()
            make_folder(aside, LlamaForCausalLM(config)).rename(data)
    return data


@pytest.fixture(scope="session")
def grid(folder: Path) -> Grid:
    """Function(layout, precision) -> a run of the grid, made once for all tests."""
    return shared(folder.parent)


@pytest.fixture(scope="session")
def dry_run(grid: Grid) -> Traced:
    """Function(layout) -> rank -> the dry run of the grid's run, made once for all tests."""
    return dry_runs(grid)


@pytest.fixture(scope="session")
def reference(grid: Grid) -> Callable[[str], Trained]:
    """Function(precision) -> one rank's run."""
    return lambda precision: grid(ONE, precision)
