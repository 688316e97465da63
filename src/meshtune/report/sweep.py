"""A sweep at its end as tables: experiments by status, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.report.draw.table import Table
from meshtune.units import duration, human

SHOWN = 160  # characters of a reason
UNITS = {  # figure -> how it is written
    "tokens_per_second_per_gpu": ("tokens/s/GPU", "{:,.0f}".format),
    "predicted_tokens_per_second_per_gpu": ("predicted tokens/s/GPU", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "predicted_mfu": ("predicted MFU", "{:.1%}".format),
    "step_seconds": ("step", duration),
    "simulated_step_seconds": ("simulated step", duration),
    "peak_memory_bytes": ("memory", human),
    "predicted_peak_bytes": ("predicted memory", human),
    "simulated_peak_bytes": ("simulated memory", human),
    "loss": ("loss", "{:.4f}".format),
    "eval_loss": ("evaluation loss", "{:.4f}".format),
}


def counts_table(counts: Mapping[str, int], reasons: Mapping[str, str], simulated: str | None) -> Table:
    """Number of experiments by status, with the most frequent reason of each."""
    rows = tuple(
        (status, f"{number:,}", _short(reasons.get(status, ""))) for status, number in counts.items()
    )
    note = (f"All figures are simulated ({simulated}); nothing was measured.",) if simulated else ()
    heads = ("status", "experiments", "most frequent reason")
    return Table.of_rows("Sweep", heads, rows, ("status", "most frequent reason"), note)


def best_table(
    best: Sequence[Mapping[str, Any]], axes: Sequence[str], ranked_by: str, *, on_processor: bool = False
) -> Table:
    """The best experiments by one figure: their number, layout, axes and the figures that they have."""

    def head(name: str) -> str:
        return UNITS[name][0].replace("/GPU", "/rank") if on_processor else UNITS[name][0]

    figures = [ranked_by, *(name for name in UNITS if name != ranked_by)]
    shown = [name for name in figures if any(row.get(name) is not None for row in best)]
    varied = [axis for axis in axes if axis != "layout" and len({str(row.get(axis)) for row in best}) > 1]
    heads = ("number", "layout", *varied, *map(head, shown))
    rows = tuple(
        (
            str(row["number"]),
            str(row["layout"] or ""),
            *(str(row[axis]) for axis in varied),
            *("" if row[name] is None else UNITS[name][1](row[name]) for name in shown),
        )
        for row in best
    )
    return Table.of_rows(f"Best by {head(ranked_by)}", heads, rows, ("layout", *varied))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
