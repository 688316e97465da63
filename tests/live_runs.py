"""Run folders as the trainer writes them, for tests of pages that follow them."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshtune.rundir import RunDir

GIB = 2**30


def start_row(**other: Any) -> dict[str, Any]:
    return {
        "kind": "run", "id": "1", "start": 1, "model": "tiny", "method": "full", "world": 2,
        "total_steps": 500, "device_type": "cuda", "global_batch_size": 8, "seq_len": 1000, "host": "node1",
        "predicted": {"step_seconds": 0.25, "memory": {"weights": 2.0 * GIB, "activations": 1.0 * GIB}},
    } | other  # fmt: skip


def step_row(step: int, **other: Any) -> dict[str, Any]:
    """A train row whose loss follows from its step."""
    return {
        "kind": "train", "step": step, "loss": 4.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3,
        "tokens": 8000, "label_tokens": 4000, "step_seconds": 0.5, "data_seconds": 0.01,
        "tokens_per_second_per_gpu": 8000.0, "tflops_per_second": 0.1, "mfu": 0.4, "mfu_6n": 0.38,
        "peak_memory_bytes": 3 * GIB, "peak_resident_bytes": 4 * GIB, "epoch": step / 100,
    } | other  # fmt: skip


def end_row(step: int, status: str) -> dict[str, Any]:
    return {"kind": "end", "step": step, "status": status, "tokens": 8000 * step, "seconds": 0.5 * step}


def write_run(folder: Path, steps: int, *rows: dict[str, Any], **start: Any) -> RunDir:
    """Write a run of some steps at once. rows: behind them. start: of its first row."""
    run = RunDir(folder).create()
    run.config_file.write_text("model: {name: tiny}\n")
    every = [start_row(**start), *map(step_row, range(1, steps + 1)), *rows]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in every))
    return run


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Hold the run's lock, as the process does that trains there."""
    with open(run.lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
