"""Figures of a probe: repeated timings of an operation, their median, their spread, and which are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Any

from meshtune.study.spread import spread
from meshtune.units import counted, human

MARKED, REFUSED = 0.10, 0.30  # spread above which a figure is marked, and above which it is left out
SPREAD = "distance of the quartiles of all repeats, as a share of their median"


@dataclass(frozen=True)
class Figure:
    """An operation's seconds on each of the ranks that run it at once, from several repeats."""

    kind: str  # matmul, attention, memory, collective or host
    what: Mapping[str, Any]  # its sizes, dtype and form
    ranks: int  # that run it at once, on one machine
    repeats: Sequence[float]  # seconds of one operation, in each round

    @property
    def seconds(self) -> float:
        """Median of the repeats."""
        return median(self.repeats)

    @property
    def spread(self) -> float:
        """Spread of the repeats."""
        return spread(self.repeats)

    @property
    def marked(self) -> bool:
        """True if it is kept, with a spread that a reader should know."""
        return MARKED < self.spread <= REFUSED

    @property
    def refused(self) -> bool:
        """True if its repeats differ too much to say anything."""
        return self.spread > REFUSED

    @property
    def name(self) -> str:
        """Kind, form, sizes and ranks: "collective all_reduce, 1.00 MiB, 4 ranks"."""
        words = [value for value in self.what.values() if isinstance(value, str)]
        sizes = [
            human(value) if key == "bytes" else f"{key} {value}"
            for key, value in self.what.items()
            if not isinstance(value, str)
        ]
        return ", ".join([" ".join([self.kind, *words]), *sizes, counted(self.ranks, "rank")])

    def as_dict(self) -> dict[str, Any]:
        """The figure's entry in the file and in `--json`."""
        marks = {name: True for name in ("marked", "refused") if getattr(self, name)}
        return {
            **self.what, "ranks": self.ranks, "seconds": significant(self.seconds),
            "spread": significant(self.spread), **marks,
        }  # fmt: skip


def significant(value: float, digits: int = 4) -> float:
    """The value rounded to so many digits that count."""
    return float(f"{value:.{digits}g}")


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of no values."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs)) if logs else None


def slowdown(figures: Sequence[Figure], kind: str, ranks: int) -> float | None:
    """Seconds of a kind's operations with `ranks` ranks at work over those of a rank alone: the geometric
    mean over operations that both have; None without any.
    """
    alone = {
        frozenset(one.what.items()): one.seconds for one in figures if one.kind == kind and one.ranks == 1
    }
    pairs = ((one, alone.get(frozenset(one.what.items()))) for one in figures)
    return geometric_mean(
        one.seconds / single for one, single in pairs if single and one.kind == kind and one.ranks == ranks
    )
