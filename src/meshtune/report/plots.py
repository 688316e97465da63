"""A run's curves, as data first: rows -> panels -> plotly (pages) or matplotlib (files).

A panel says what is drawn, a back end how, so both show the same and a new plot is one entry in `panels`.
Lines have roles, not colours: each back end and each theme (light, dark) has one colour per role, from
Okabe and Ito's palette, which colour-blind readers can tell apart. plotly and matplotlib are imported only
when something is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.report.summary import of_kind, unit_of_speed
from meshtune.rundir import Row
from meshtune.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 2000  # a line on a page; more can't be seen, and a long run's page should open at once

LIGHT = {
    "main": "#0072b2",
    "raw": "#0072b2",
    "other": "#d55e00",
    "ink": "#3b4046",
    "grid": "#e4e6ea",
    "paper": "#ffffff",
}
DARK = {
    "main": "#56b4e9",
    "raw": "#56b4e9",
    "other": "#e69f00",
    "ink": "#b9bfc7",
    "grid": "#2c3138",
    "paper": "#15181c",
}


@dataclass(frozen=True)
class Line:
    """One line of a panel. Role `main`: drawn full; `raw`: faint, behind its smoothed version; `other`:
    with dots.
    """

    name: str
    role: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """One plot over steps; `form` formats its values (d3's language and Python's agree on these)."""

    key: str
    title: str
    unit: str
    form: str
    lines: tuple[Line, ...]
    from_zero: bool = False


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Every panel that the rows can fill, the most telling first."""
    train, evals = of_kind(rows, "train"), of_kind(rows, "eval")

    def one(name: str, column: str, *, unit: float = 1) -> Line:
        return line(name, "main", train, column, unit)

    def held_out(column: str) -> Line:
        return line("held out", "other", evals, column)

    def beside(name: str, column: str) -> Line:
        return replace(
            smoothed(name, warm, column)[-1], name=name, role="other"
        )  # smoothed like its neighbour

    speed, speed_unit = "tokens_per_second_per_gpu", unit_of_speed(rows)
    warm = train[1:] if len(train) > 10 else train  # compiling in the first step would flatten all the others
    of_warm = "" if warm is train else ", without the first step"
    losses = (*smoothed("train", train, "loss"), held_out("loss"))
    mfu = (*smoothed("MFU", warm, "mfu"), beside("6N + 12·L·h·s", "mfu_6n"))
    seconds = (*smoothed("step", warm, "step_seconds"), beside("waiting for data", "data_seconds"))
    peak_memory = one("peak memory", "peak_memory_bytes", unit=GIB)
    made = [
        Panel("loss", "Loss", "per label token", ".4f", losses),
        Panel("exact_match", "Exact match", "of held-out prompts", ".1%", (held_out("exact_match"),), True),
        Panel("speed", "Speed", speed_unit + of_warm, ",.0f", smoothed("speed", warm, speed), True),
        Panel("mfu", "Model FLOPs utilisation", "of the device's peak" + of_warm, ".1%", mfu, True),
        Panel(
            "grad_norm", "Gradient norm", "before clipping", ".3f", smoothed("norm", train, "grad_norm"), True
        ),
        Panel("learning_rate", "Learning rate", "", ".2e", (one("learning rate", "learning_rate"),), True),
        Panel("time", "Step time", "seconds" + of_warm, ".3f", seconds, True),
        Panel("memory", "Peak memory", "GiB", ".2f", (peak_memory,), True),
    ]
    filled = (replace(panel, lines=tuple(one for one in panel.lines if one.steps)) for panel in made)
    return [panel for panel in filled if panel.lines]


def line(name: str, role: str, rows: Sequence[Row], column: str, unit: float = 1) -> Line:
    """One column over steps, without nulls, in multiples of `unit`."""
    points = [(row["step"], row[column] / unit) for row in rows if row.get(column) is not None]
    return Line(name, role, tuple(step for step, _ in points), tuple(value for _, value in points))


def smoothed(name: str, rows: Sequence[Row], column: str) -> tuple[Line, ...]:
    """A column as it is; when long enough to be noisy, faint behind its running mean (of 4 % of the run)."""
    raw = line(name, "main", rows, column)
    window = len(raw.values) // 25 | 1  # odd, so that the mean has a middle
    if window < 3:
        return (raw,)
    mean = Line(f"{name}, mean of {window}", "main", raw.steps, running_mean(raw.values, window))
    return replace(raw, role="raw"), mean


def running_mean(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Centred mean over `window` (odd) values.

    Near the ends it narrows, to an eighth on each side: that neither bends a slope, as a one-sided mean does,
    nor shows the last values' noise as the trend.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for middle in range(len(values)):
        to_end = min(middle, len(values) - 1 - middle)
        reach = min(window // 2, max(window // 8, to_end))
        start, end = max(0, middle - reach), min(len(values), middle + reach + 1)
        means.append((sums[end] - sums[start]) / (end - start))
    return tuple(means)


def thinned(one: Line, most: int = MOST_POINTS) -> Line:
    """The same line in at most about `most` points: of each slice its lowest and highest, so that no spike
    is lost.
    """
    count = len(one.values)
    if count <= most:
        return one
    slices = most // 2
    kept = {0, count - 1}
    for index in range(slices):
        part = range(index * count // slices, (index + 1) * count // slices)
        kept |= {min(part, key=one.values.__getitem__), max(part, key=one.values.__getitem__)}
    order = sorted(kept)
    return Line(one.name, one.role, tuple(one.steps[i] for i in order), tuple(one.values[i] for i in order))


# plotly #


def plotly_figure(
    panel: Panel, *, last_step: int | None = None, colours: dict[str, str] = LIGHT, height: int = 260
) -> dict[str, Any]:
    """A panel as plotly's JSON (`plotly.graph_objects.Figure(spec)` takes it); its title belongs to the
    page around it.

    The x axis ends at `last_step`, which plots side by side should share. Each trace's `meta` is its role, by
    which the page recolours it for the reader's theme.
    """
    traces = []
    for one in map(thinned, panel.lines):
        dots = (one.role == "other" and len(one.steps) <= 60) or len(one.steps) == 1
        traces.append(
            {
                "type": "scatter",
                "name": one.name,
                "meta": one.role,
                "x": list(one.steps),
                "y": [float(f"{value:.6g}") for value in one.values],
                "mode": "lines+markers" if dots else "lines",
                "line": {"color": colours[one.role], "width": 1 if one.role == "raw" else 2},
                "marker": {"color": colours[one.role], "size": 6},
                "opacity": 0.35 if one.role == "raw" else 1,
                "hovertemplate": f"%{{y:{panel.form}}}",
            }
        )
    axis = {
        "gridcolor": colours["grid"],
        "linecolor": colours["grid"],
        "zeroline": False,
        "ticks": "",
        "exponentformat": "e",
    }
    last = max((one.steps[-1] for one in panel.lines), default=1) if last_step is None else last_step
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 48, "r": 8, "t": 28, "b": 24},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": colours["ink"]},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": colours["paper"], "bordercolor": colours["grid"]},
            "showlegend": len(traces) > 1,
            "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
            "xaxis": {
                **axis,
                "range": [-0.015 * last, 1.015 * last],
                "showgrid": False,
                "hoverformat": ",d",
                "tickformat": ",d",
            },
            "yaxis": {
                **axis,
                "tickformat": tick_form(panel.form),
                "rangemode": "tozero" if panel.from_zero else "normal",
            },
        },
    }


def tick_form(form: str) -> str:
    """The d3 format of round tick values: fewer digits than the values; "" is plotly's choice."""
    if form.startswith(","):
        return "~s"
    return ".0%" if form.endswith("%") else ""


# matplotlib #


def matplotlib_figure(rows: Sequence[Row], *, dark: bool = False) -> "Figure":
    """All panels as one figure, two a row, the loss over the whole width."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    drawn, colours = panels(rows), DARK if dark else LIGHT
    lines_of_rest = len(drawn) // 2  # of two plots each, below the first
    last = max((row["step"] for row in rows if row.get("step")), default=1)
    figure = Figure(
        figsize=(9, 3 + 2.1 * lines_of_rest),
        layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12),
        facecolor=colours["paper"],
    )
    grid = figure.add_gridspec(1 + lines_of_rest, 2, height_ratios=[1.35] + [1] * lines_of_rest)
    for index, panel in enumerate(drawn):
        cell = grid[0, :] if index == 0 else grid[1 + (index - 1) // 2, (index - 1) % 2]
        axes = figure.add_subplot(cell, facecolor=colours["paper"])
        for one in map(thinned, panel.lines):
            axes.plot(
                one.steps,
                one.values,
                color=colours[one.role],
                linewidth=0.8 if one.role == "raw" else 1.8,
                alpha=0.35 if one.role == "raw" else 1,
                marker="o" if (one.role == "other" and len(one.steps) <= 60) or len(one.steps) == 1 else None,
                markersize=3.5,
                label=one.name,
            )
        axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=colours["ink"])
        axes.set_title(panel.unit, loc="right", fontsize=8, color=colours["ink"])
        axes.spines[:].set_visible(False)
        axes.spines["bottom"].set(visible=True, color=colours["grid"])
        axes.tick_params(colors=colours["ink"], length=0, labelsize=8)
        axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(-0.015 * last, 1.015 * last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        if panel.from_zero:
            axes.set_ylim(0, 1.08 * max(value for one in panel.lines for value in one.values) or 1)
        if panel.form.endswith("%"):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        elif panel.form.startswith(","):
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if len(panel.lines) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=colours["ink"])
    return figure


def write_figure(rows: Sequence[Row], file: Path, *, dark: bool = False) -> Path:
    """All panels of a run as a PNG, SVG or PDF file, by its suffix."""
    matplotlib_figure(rows, dark=dark).savefig(file, dpi=160)
    return file
