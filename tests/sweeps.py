"""Databases of sweeps for tests of what reads them, in the form that docs/sweep.md describes."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

COLUMNS = (
    "key", "number", "settings", "layout", "world", "status", "reason", "started", "ended", "seconds",
    "attempts", "step_seconds", "spread", "tokens_per_second_per_gpu", "mfu", "tokens", "peak_memory_bytes",
    "loss", "eval_loss", "gradient_noise_scale", "predicted_step_seconds", "predicted_peak_bytes",
    "predicted_mfu", "predicted_tokens_per_second_per_gpu", "simulated_step_seconds", "simulated_peak_bytes",
    "parameters", "global_batch_size", "seq_len", "model", "gpus", "document",
)  # fmt: skip
MODELS = {"small": 5_000_000, "large <b>": 28_000_000}  # name -> parameters
Row = dict[str, Any]


def write_sweep(folder: Path, rows: Iterable[Row], **facts: Any) -> Path:
    """Write sweep.db into the folder. rows: of `experiments`, settings and document as plain values."""
    file = folder / "sweep.db"
    known = {"form": 1, "name": folder.name, "run": "bench", "simulated": None, "gpus": 0} | facts
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE sweep (name TEXT PRIMARY KEY, value TEXT)")
        database.execute(f"CREATE TABLE experiments ({', '.join(COLUMNS)})")
        database.executemany(
            "INSERT INTO sweep VALUES (?, ?)", [(name, json.dumps(value)) for name, value in known.items()]
        )
        for number, row in enumerate(rows, 1):
            row = {"key": str(number), "number": number, "status": "done", "settings": {}} | row
            values = [row.get(name) for name in COLUMNS]
            cells = [json.dumps(value) if isinstance(value, Mapping) else value for value in values]
            database.execute(f"INSERT INTO experiments VALUES ({', '.join('?' * len(COLUMNS))})", cells)
    return file


def bench_row(model: str, ranks: int, micro_batch: int, **other: Any) -> Row:
    """A benched experiment whose speed follows from its numbers, so that tests know it."""
    parameters = MODELS[model]
    speed = 1e10 / parameters * (1 - 0.02 * ranks) * (1 + 0.1 * micro_batch)
    batch, memory = 2 * micro_batch * ranks, 16.0 * parameters + 1e8 * micro_batch
    step = batch * 256 / speed / ranks
    parts = {"forward": step * 0.3, "backward": step * 0.6, "optimizer": step * 0.1}
    split = {"weights": memory / 4, "activations": memory * 3 / 4}
    layout = f"{f'dp{ranks}-' if ranks > 1 else ''}mb{micro_batch}-ga2"
    return {
        "settings": {"model.name": model, "layout": layout}, "layout": layout, "world": ranks, "gpus": ranks,
        "model": model, "parameters": parameters, "global_batch_size": batch, "seq_len": 256, "attempts": 1,
        "step_seconds": step, "spread": 0.02, "tokens_per_second_per_gpu": speed, "tokens": batch * 256,
        "peak_memory_bytes": memory, "predicted_step_seconds": step * 1.1,
        "predicted_peak_bytes": memory * 0.98,
        "predicted_tokens_per_second_per_gpu": speed / 1.1, "simulated_step_seconds": step * 0.95,
        "simulated_peak_bytes": memory, "seconds": 12.5,
        "document": {"measured": {"parts": parts, "memory": split | {"peak": memory}}},
    } | other  # fmt: skip


def bench_rows() -> list[Row]:
    """Two models on 1 to 4 ranks with micro-batches of 1 to 4; one experiment failed, one was refused."""
    rows = [bench_row(model, ranks, size) for model in MODELS for ranks in (1, 2, 4) for size in (1, 2, 4)]
    figures = [name for name in COLUMNS if name.endswith(("_seconds", "_bytes", "_gpu"))]
    failed = {name: None for name in figures if not name.startswith("predicted_")}
    crash = bench_row("large <b>", 8, 4, status="out of memory", reason="Out of <memory> on rank 3.")
    return [*rows, crash | failed, {"status": "refused", "reason": "tp3 divides no head.", "model": None,
                                    "settings": {"model.name": "small", "layout": "tp3"}}]  # fmt: skip
