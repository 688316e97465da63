"""Fixtures of the parity tests: a tiny model on the disk, and the runs of the grid with it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from grid import ONE, Grid, Traced, dry_runs, shared
from layouts import Trained, make_folder
from tiny import make_llama


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
            model = make_llama(
                vocab_size=301, intermediate_size=96, num_hidden_layers=8, max_position_embeddings=256
            )
            aside = data.with_name("data.new")
            aside.mkdir()
            make_folder(aside, model).rename(data)
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
