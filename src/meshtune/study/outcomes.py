"""The figures of an experiment from what its command printed: `bench`, `train` or `dryrun --json`."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from meshtune.meter.noise_scale import late_scale
from meshtune.rundir import Row, RunDir
from meshtune.study.store import CRASHED, DOES_NOT_FIT, DONE, OUT_OF_MEMORY, TIMED_OUT, Outcome
from meshtune.units import spread

# Beginnings of bench's sentences on what failed -> status; anything else crashed.
FAILURES = {
    "Out of memory": OUT_OF_MEMORY,
    "Its process was killed": OUT_OF_MEMORY,
    "It did not end within": TIMED_OUT,
}
SPEED = ("step_seconds", "spread", "tokens_per_second_per_gpu", "mfu", "tokens")


def bench_outcome(document: Any, seconds: float) -> Outcome:
    """Outcome of `bench --json` of one layout. Memory is that of tensors on the fullest rank, as predicted,
    simulated and, in the fullest step, measured.
    """
    (one,) = document["layouts"]
    measured, simulated = one["measured"] or {}, one["simulated"] or {}
    figures = {name: measured.get(name) for name in SPEED}
    figures["peak_memory_bytes"] = measured.get("peak_memory_bytes")
    figures["simulated_step_seconds"] = simulated.get("step_seconds")
    figures["simulated_peak_bytes"] = simulated.get("memory", {}).get("peak")
    planned = one["predicted"] or {}  # for the data, which the sweep's own prediction lacked
    again = {f"predicted_{name}": planned.get(name) for name in SPEED}
    again["predicted_peak_bytes"] = planned.get("memory", {}).get("peak")
    figures |= {name: value for name, value in again.items() if value is not None}
    if not one["failed"]:
        return Outcome(DONE, None, figures, one, seconds)
    reason = str(one["failed"])
    status = next((status for text, status in FAILURES.items() if reason.startswith(text)), CRASHED)
    return Outcome(status, reason, figures, one, seconds)


def dryrun_outcome(document: Any, seconds: float) -> Outcome:
    """Outcome of `dryrun --json` of one layout: the memory of the fullest rank with all that it needs."""
    figures = {
        "simulated_peak_bytes": document["need_bytes"],
        "simulated_step_seconds": (document["time"] or {}).get("seconds"),
    }
    if document["fits"]:
        return Outcome(DONE, None, figures, _without_traces(document), seconds)
    reason = " ".join(document["instead"]) or "The dry run says that it does not fit."
    return Outcome(DOES_NOT_FIT, reason, figures, _without_traces(document), seconds)


def _without_traces(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the events of each step, which are most of it."""
    ranks = [{name: value for name, value in rank.items() if name != "steps"} for rank in document["ranks"]]
    return {**document, "ranks": ranks}


def train_outcome(document: Mapping[str, Any], run: RunDir, seconds: float) -> Outcome:
    """Outcome of `train --json` that ended with exit code 0. run: its folder, for the times of its steps."""
    rows = run.rows("train")
    warm = [row for row in rows[1:] if not row.get("warm_up")] or rows
    steps = numbers(warm, "step_seconds")
    figures = {
        "step_seconds": median(steps) if steps else None,
        "spread": spread(steps) if steps else None,
        "tokens_per_second_per_gpu": document["tokens_per_second_per_gpu"],
        "mfu": document["mfu"],
        "tokens": document["tokens"],
        "peak_memory_bytes": document["peak_memory_bytes"],
        "loss": document["last_loss"],
        "eval_loss": document["last_eval_loss"],
        "gradient_noise_scale": late_scale(rows),
    }
    return Outcome(DONE, None, figures, dict(document), seconds)


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a column, without those that are missing."""
    return [row[name] for row in rows if row.get(name) is not None]
