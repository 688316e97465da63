"""Constants before and after a calibration, and the errors on runs that were left out of the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshtune.plan.calibration import CONSTANTS
from meshtune.report.draw.table import Table
from meshtune.units import counted

Document = Mapping[str, Any]  # of api.calibrate.calibrate


def tables(document: Document) -> Iterator[Table]:
    """Yield the tables of a calibration."""
    fitted = tuple(
        (name, f"{one['before']:.4g}", f"{one['after']:.4g}", f"{one['factor']:.2f}", f"{len(one['runs'])}",
         CONSTANTS[name] + (", at its bound" if one["at_bound"] else ""))
        for name, one in document["fitted"].items()
    )  # fmt: skip
    left = tuple(f"{name} stays: {why}." for name, why in document["left"].items())
    heads = ("constant", "before", "after", "factor", "runs", "what it is")
    fitted_to = counted(len(document["runs"]), "run")
    yield Table.of_rows(f"Constants fitted to {fitted_to}", heads, fitted, ("constant", "what it is"), left)
    rows = tuple(
        (name, f"{score['after']['runs']}", *_cells(score["before"]), *_cells(score["after"]))
        for name, score in document["held_out"].items()
    )
    scores = ("mean", "median", "Spearman")
    heads = (
        "runs left out",
        "number",
        *(f"{name} {when}" for when in ("before", "after") for name in scores),
    )
    yield Table.of_rows("Error of the predicted step on runs that were left out of the fit", heads, rows,
                  ("runs left out",))  # fmt: skip


def _cells(score: Document) -> tuple[str, str, str]:
    order = score["spearman"]
    return f"{score['mean']:.1%}", f"{score['median']:.1%}", "" if order is None else f"{order:.2f}"
