"""A run's rows as panels of curves over steps. A new chart of the report is one entry in `panels`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtune.report.draw.kinds import Lines, Role, Series
from meshtune.report.run.summary import of_kind, speed_unit
from meshtune.rundir import Row
from meshtune.units import GIB

SMOOTHED_PART = 25  # a mean is taken over one 25th of the run
END = 8  # at an end, a mean takes in at least one 8th of its values


@dataclass(frozen=True)
class Curve(Series):
    """A curve of one column of rows, to which later rows add points (points.py)."""

    kind: str = ""  # of the rows
    column: str = ""
    per: float = 1  # divides the values
    last: tuple[float, ...] = ()  # values of which the mean at the end is; (): the curve isn't a mean


def panels(rows: Sequence[Row]) -> list[Lines]:
    """Every panel that the rows have values for, the most important first; [] without any.

    rows: of metrics.jsonl, all kinds.
    """
    train, evals, unit = of_kind(rows, "train"), of_kind(rows, "eval"), speed_unit(rows)
    warm = train[1:] if len(train) > 10 else train  # compiling in the first step would flatten all the others
    of_warm = "" if warm is train else ", without the first step"

    def held_out(column: str) -> Series:
        return series("held out", "other", evals, column)

    def beside(name: str, column: str) -> Series:
        """The running mean alone of a second quantity, in the second colour."""
        return replace(smoothed(name, warm, column)[-1], name=name, role="other")

    losses = (*smoothed("train", train, "loss"), held_out("loss"))
    exact = (held_out("exact_match"),)
    speeds = smoothed("speed", warm, "tokens_per_second_per_gpu")
    mfu = (*smoothed("MFU", warm, "mfu"), beside("6N + 12·L·h·s", "mfu_6n"))
    norms = smoothed("norm", train, "grad_norm")
    noise = (series("noise scale", "main", train, "gradient_noise_scale"),)
    rates = (series("learning rate", "main", train, "learning_rate"),)
    times = (*smoothed("step", warm, "step_seconds"), beside("waiting for data", "data_seconds"))
    memory = (series("peak memory", "main", train, "peak_memory_bytes", unit=GIB),)
    peak = "of the device's peak"
    candidates = [
        Lines("loss", "Loss", "per label token", losses, ".4f", "loss per label token", height=280),
        Lines(
            "exact_match", "Exact match", "held-out prompts", exact, ".1%", "share of prompts", from_zero=True
        ),
        Lines("speed", "Speed", unit + of_warm, speeds, ",.0f", unit, from_zero=True),
        Lines("mfu", "Model FLOPs utilisation", peak + of_warm, mfu, ".1%", "share of peak", from_zero=True),
        Lines("grad_norm", "Gradient norm", "before clipping", norms, ".3f", "L2 norm", from_zero=True),
        Lines("noise_scale", "Gradient noise scale", "average", noise, ",.1f", "sequences", from_zero=True),
        Lines("learning_rate", "Learning rate", "", rates, ".2e", "learning rate", from_zero=True),
        Lines("time", "Step time", "seconds" + of_warm, times, ".3f", "seconds", from_zero=True),
        Lines("memory", "Peak memory", "GiB", memory, ".2f", "GiB", from_zero=True),
    ]
    last = max((row["step"] for row in (*train, *evals) if row.get("step")), default=1)
    filled = (
        replace(panel, series=tuple(one for one in panel.series if one.x), x_end=last) for panel in candidates
    )
    return [panel for panel in filled if panel.series]


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
    means, last = running_mean(raw.y, window), raw.y[-(window // END) - 1 :]
    mean = replace(raw, name=f"{name}, mean of {window}", y=means, last=last)
    return replace(raw, role="raw"), mean


def running_mean(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Mean of the `window` (odd) values around each value; as many means as values.

    Near an end it takes as many values on each side as there are up to the end, but on the inner side at
    least window // END: a one-sided mean of all `window` values would change the trend at the ends, and fewer
    values would show noise as a trend.
    """
    import numpy as np  # only where something is drawn

    sums = np.cumsum([0.0, *values])
    middle = np.arange(len(values))
    to_end = np.minimum(middle, len(values) - 1 - middle)
    reach = np.minimum(window // 2, np.maximum(window // END, to_end))
    start, end = np.maximum(0, middle - reach), np.minimum(len(values), middle + reach + 1)
    return tuple(((sums[end] - sums[start]) / (end - start)).tolist())
