"""A run's rows as panels of curves over steps. A new chart of the report is one row of QUANTITIES."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from meshtune.objectives import OBJECTIVES
from meshtune.report.draw.kinds import Lines, Panel, Role, Series
from meshtune.report.run.summary import objective_of, of_kind, speed_unit, values
from meshtune.rundir import Row
from meshtune.units import GIB, MIB

SMOOTHED_PART = 25  # a mean is taken over one 25th of the run
END = 8  # at an end, a mean takes in at least one 8th of its values
FEW = 10  # steps of a run that are all drawn
SPEED = "tokens/s per device"  # where runs are compared
UNIT = OBJECTIVES["sft"].unit  # of a loss


@dataclass(frozen=True)
class Curve(Series):
    """A curve of one column of rows, to which later rows add `Points`."""

    kind: str = ""  # of the rows
    column: str = ""
    per: float = 1  # divides the values
    last: tuple[
        float, ...
    ] = ()  # values of half a window, over which later points are averaged; (): no smoothing


class Quantity(NamedTuple):
    """A column of rows that becomes a panel."""

    key: str  # of the panel
    title: str
    unit: str  # next to the title; SPEED, UNIT: the run's
    axis: str  # name of the y axis; SPEED, UNIT: the run's
    curve: str  # its name
    column: str
    form: str  # d3 format of a value
    kind: str = "train"  # of the rows
    smoothed: bool = False  # True: long runs are drawn with their running mean
    warm: bool = False  # True: long runs are drawn without their first step
    from_zero: bool = True
    per: float = 1  # divides the values
    second: tuple[str, str, str] | None = None  # name, kind and column of a curve in the second colour

    def curves(self, rows: Sequence[Row]) -> list[Curve]:
        """The values, in faint in front of their running mean where they have one; then the second curve."""
        own = of_kind(rows, self.kind)
        own = own[1:] if self.is_warm(rows) else own
        role: Role = "other" if self.kind == "eval" else "main"
        curves = (
            [*smoothed(self.curve, own, self.column)]
            if self.smoothed
            else [series(self.curve, role, own, self.column, unit=self.per)]
        )
        if self.second:
            name, kind, column = self.second
            mean = series(name, "other", of_kind(rows, kind), column)
            if kind == self.kind:
                mean = replace(smoothed(name, own, column)[-1], role="other")
            curves.append(mean)
        return [curve for curve in curves if curve.x]

    def apart(self) -> Iterator["Quantity"]:
        """Yield a panel without the second curve, for runs that are compared; then one of held-out values, if
        that is the second curve's.
        """
        first, held_out = self._replace(second=None), bool(self.second and self.second[1] == "eval")
        title = self.title[0].lower() + self.title[1:]
        yield first._replace(title=f"Training {title}") if held_out else first
        if held_out:
            yield first._replace(
                key=f"eval_{self.key}", title=f"Held-out {title}", kind="eval", smoothed=False
            )

    def is_warm(self, rows: Sequence[Row]) -> bool:
        """True if the first step isn't drawn: compiling in it would flatten all others."""
        return self.warm and len(of_kind(rows, self.kind)) > FEW

    def panel(self, curves: Sequence[Series], words: Mapping[str, str], note: str, end: float) -> Lines:
        """A panel of curves. words: for SPEED and UNIT. note: behind the unit. end: of the x axis."""
        unit, axis, height = self.unit, self.axis, 280 if self.key == "loss" else 190
        for word, own in words.items():
            unit, axis = unit.replace(word, own), axis.replace(word, own)
        return Lines(
            self.key, self.title, unit + note, tuple(curves), self.form, axis, self.from_zero, x_end=end,
            height=height,
        )  # fmt: skip


QUANTITIES = (
    Quantity("loss", "Loss", f"per {UNIT}", f"loss per {UNIT}", "train", "loss", ".4f", smoothed=True,
             from_zero=False, second=("held out", "eval", "loss")),
    Quantity("accuracy", "Accuracy", "pairs whose chosen answer has the higher reward", "share of pairs",
             "train", "rewards/accuracies", ".1%", smoothed=True,
             second=("held out", "eval", "rewards/accuracies")),
    Quantity("margin", "Margin of rewards", "chosen less rejected", "reward", "train", "rewards/margins",
             ".3f", smoothed=True, second=("held out", "eval", "rewards/margins")),
    Quantity("rewards", "Rewards", "in training", "reward", "chosen", "rewards/chosen", ".3f", smoothed=True,
             second=("rejected", "train", "rewards/rejected")),
    Quantity("kl", "Divergence from the reference", "of mismatched answers", "kl", "train", "kl", ".3f",
             smoothed=True, second=("held out", "eval", "kl")),
    Quantity("exact_match", "Exact match", "held-out prompts", "share of prompts", "held out", "exact_match",
             ".1%", kind="eval"),
    Quantity("speed", "Speed", SPEED, SPEED, "speed", "tokens_per_second_per_gpu", ",.0f", smoothed=True,
             warm=True),
    Quantity("mfu", "Model FLOPs utilisation", "of the device's peak", "share of peak", "MFU", "mfu", ".1%",
             smoothed=True, warm=True, second=("6N + 12·L·h·s", "train", "mfu_6n")),
    Quantity("grad_norm", "Gradient norm", "before clipping", "L2 norm", "norm", "grad_norm", ".3f",
             smoothed=True),
    Quantity("noise_scale", "Gradient noise scale", "average", "sequences", "noise scale",
             "gradient_noise_scale", ",.1f"),
    Quantity("experts", "Load of the fullest expert", "times the mean of its layer", "times the mean",
             "fullest layer", "expert_load", ".2f", smoothed=True,
             second=("mean of layers", "train", "expert_load_mean")),
    Quantity("aux_loss", "Load-balancing loss of experts", "without its weight", "loss", "train", "aux_loss",
             ".4f", smoothed=True, from_zero=False),
    Quantity("learning_rate", "Learning rate", "", "learning rate", "learning rate", "learning_rate", ".2e"),
    Quantity("time", "Step time", "seconds", "seconds", "step", "step_seconds", ".3f", smoothed=True,
             warm=True, second=("waiting for data", "train", "data_seconds")),
    Quantity("memory", "Peak memory", "GiB", "GiB", "peak memory", "peak_memory_bytes", ".2f", per=GIB),
)  # fmt: skip


def panels(rows: Sequence[Row]) -> list[Lines]:
    """Every panel that the rows have values for, the most important first; [] without any.

    rows: of metrics.jsonl, all kinds.
    """
    steps = [row["step"] for kind in ("train", "eval") for row in of_kind(rows, kind) if row.get("step")]
    words, drawn = {SPEED: speed_unit(rows), UNIT: OBJECTIVES[objective_of(rows)].unit}, []
    for quantity in QUANTITIES:
        if quantity.per == GIB and max(values(of_kind(rows, "train"), quantity.column), default=0) < GIB / 4:
            quantity = quantity._replace(unit="MiB", axis="MiB", form=".1f", per=MIB)
        if curves := quantity.curves(rows):
            note = ", without the first step" * quantity.is_warm(rows)
            drawn.append(quantity.panel(curves, words, note, max(steps, default=1)))
    return drawn


def series(name: str, role: Role, rows: Sequence[Row], column: str, *, unit: float = 1) -> Curve:
    """One column of rows over their steps; rows without a value are left out. unit: divides the values."""
    known = [row for row in rows if row.get(column) is not None]
    x, y = tuple([row["step"] for row in known]), tuple([row[column] / unit for row in known])
    return Curve(name, role, x, y, kind=rows[0]["kind"] if rows else "", column=column, per=unit)


def smoothed(name: str, rows: Sequence[Row], column: str) -> tuple[Curve, ...]:
    """(The column,) if it has fewer than 2 · SMOOTHED_PART values; else (it in faint, its running mean)."""
    raw = series(name, "main", rows, column)
    window = len(raw.y) // SMOOTHED_PART | 1  # odd, so that the mean has a middle
    if window < 3:
        return (raw,)
    means, last = running_mean(raw.y, window), raw.y[-(window // 2) - 1 :]
    mean = replace(raw, name=f"{name}, mean of {window}", y=means, last=last)
    return replace(raw, role="raw"), mean


def running_mean(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Mean of the `window` (odd) values around each value.

    Near an end its two sides are as long as the way to the end, but on the inner side at least window // END,
    or 1: a one-sided mean of all `window` values would change the trend at the ends, and fewer values would
    show noise as a trend.
    """
    import numpy as np  # only where something is drawn

    sums = np.cumsum([0.0, *values])
    middle = np.arange(len(values))
    to_end = np.minimum(middle, len(values) - 1 - middle)
    reach = np.minimum(window // 2, np.maximum(window // END or 1, to_end))
    start, end = np.maximum(0, middle - reach), np.minimum(len(values), middle + reach + 1)
    return tuple(((sums[end] - sums[start]) / (end - start)).tolist())


# Points that rows add to curves that are drawn, so that a page which stays open continues #

Point = dict[str, float]  # "x": step, "y0": value of a panel's first curve …


class Points:
    """The curves of a page, as they continue."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        drawn = [panel for panel in panels if isinstance(panel, Lines)]
        self._curves = [
            (panel.key, f"y{place}", curve, deque(curve.last, len(curve.last) or 1))
            for panel in drawn
            for place, curve in enumerate(panel.series)
            if isinstance(curve, Curve)
        ]
        self.end = max((panel.x_end or 0 for panel in drawn), default=0)  # last step

    def of(self, rows: Sequence[Row]) -> dict[str, list[Point]]:
        """Points that rows add, by panel; `end` moves to their last step. Each row is given once, in order;
        steps that a curve was drawn with add nothing to it.
        """
        added: dict[str, dict[int, Point]] = {}
        for row in rows:
            for key, field, curve, last in self._curves:
                value = row.get(curve.column) if row.get("kind") == curve.kind else None
                if value is None or row["step"] <= (curve.x[-1] if curve.x else -1):
                    continue
                value /= curve.per
                if curve.last:
                    last.append(value)
                    value = fmean(last)
                point = added.setdefault(key, {}).setdefault(row["step"], {"x": row["step"]})
                point[field] = float(f"{value:.6g}")
                self.end = max(self.end, row["step"])
        return {key: [*points.values()] for key, points in added.items()}
