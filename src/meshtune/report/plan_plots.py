"""A plan as a picture: what fills memory and time, what speed costs, which batches and sizes pay.

    plan, sizes, batches  ->  panels (numbers and names)  ->  .html (plotly)  or  .png, .svg (matplotlib)

Both back ends draw the same panels in the same colours. Everything shown was predicted for a layout that the
search found; what was not searched has no panel.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import RECOMPUTE, SCHEDULES, Layout
from meshtune.placement.columns import layout_at
from meshtune.plan.memory import CATEGORIES, gpt_parameters
from meshtune.plan.search import Choice, Plan
from meshtune.plan.seconds import PARTS
from meshtune.report.page import STYLE, _json, _text
from meshtune.report.planned import COLOURS, held, in_any, number, seconds, spent
from meshtune.report.plots import DARK, LIGHT
from meshtune.rundir import write_text_atomically
from meshtune.units import GIB, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LAYOUTS = 8  # as stacks
MOST_LABELS = 7  # along the front
CELLS = (300, 200)  # of the plane of time and memory: dots in the same one are drawn once
SHADES = ("#eaf3f9", "#9cc8e3", "#3d94c6", "#0072b2", "#004c77")  # few to many tokens/s/GPU

# numbers #


@dataclass(frozen=True)
class Stack:
    """A bar for each layout, cut into parts. mark: (where, what it is called)."""

    key: str
    title: str
    unit: str
    layouts: tuple[str, ...]
    parts: Mapping[str, tuple[float, ...]]
    ends: tuple[str, ...]  # written behind each bar
    mark: tuple[float, str] | None = None


@dataclass(frozen=True)
class Front:
    """Seconds a step and peak GiB of the layouts that fit, and of those that none beats in both."""

    key: str
    title: str
    unit: str
    dots: tuple[tuple[float, float, str], ...]
    front: tuple[tuple[float, float, str], ...]
    labels: tuple[tuple[float, float, str], ...]  # of the front, those with room for a name
    mark: tuple[float, str]

    @property
    def times(self) -> tuple[float, float]:
        """Ends of the logarithmic axis, with room for the labels on the left."""
        found = [time for time, _, _ in (*self.dots, *self.front)]
        low, high = min(found), max(max(found), 1.5 * min(found))
        return low * (low / high) ** 0.5, high * (high / low) ** 0.03


@dataclass(frozen=True)
class Scaling:
    """tokens/s/GPU of the best layout for each number of GPUs."""

    key: str
    title: str
    unit: str
    gpus: tuple[int, ...]
    speeds: tuple[float, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Heat:
    """The best layout of each global batch (rows) and number of GPUs: None where nothing fits."""

    key: str
    title: str
    unit: str
    gpus: tuple[int, ...]
    batches: tuple[int, ...]
    speeds: tuple[tuple[float | None, ...], ...]
    texts: tuple[tuple[tuple[str, ...], ...], ...]  # lines
    layouts: tuple[tuple[str, ...], ...]


Panel = Stack | Front | Scaling | Heat


def panels(
    plan: Plan,
    sizes: Mapping[int, Plan] | None = None,
    batches: Mapping[tuple[int, int], Choice | None] | None = None,
) -> list[Panel]:
    """All that the plan has numbers for; where nothing fits, the layouts that need least."""
    shown = plan.best(MOST_LAYOUTS) or plan.nearest(MOST_LAYOUTS)
    found: list[Panel] = [memory_stack(shown, fit=len(plan) > 0), time_stack(shown)] if shown else []
    if len(plan):
        found.append(front_of(plan))
    if best := {gpus: each.best(1)[0] for gpus, each in sorted((sizes or {}).items()) if len(each)}:
        found.append(scaling(best))
    if batches and any(batches.values()):
        found.append(heat_map(batches))
    return found


def memory_stack(choices: Sequence[Choice], *, fit: bool) -> Stack:
    capacity = choices[0].cluster.memory / GIB
    names = in_any(CATEGORIES, map(held, choices))
    return Stack(
        "memory",
        "Peak memory of a GPU" if fit else "Nothing fits; what needs least memory",
        "GiB",
        tuple(str(c.layout) for c in choices),
        {name: tuple(held(c)[name] / GIB for c in choices) for name in names},
        tuple(f"{c.memory.peak / GIB:.1f}" for c in choices),
        (capacity, f"capacity {capacity:.1f}"),
    )


def time_stack(choices: Sequence[Choice]) -> Stack:
    names = in_any(PARTS, map(spent, choices))
    return Stack(
        "time",
        "Time of a step",
        "seconds",
        tuple(str(c.layout) for c in choices),
        {name: tuple(spent(c)[name] for c in choices) for name in names},
        tuple(f"{seconds(c.seconds.total)} · MFU {c.mfu:.0%}" for c in choices),
    )


def front_of(plan: Plan) -> Front:
    time, memory = np.asarray(plan.seconds.total), np.asarray(plan.memory.peak) / GIB
    capacity = plan.cluster.memory / GIB

    def points(places: Sequence[int], name: Any) -> tuple[tuple[float, float, str], ...]:
        return tuple((float(time[n]), float(memory[n]), name(layout_at(plan.columns, n))) for n in places)

    best = plan.pareto()
    return Front(
        "front",
        "Speed against memory",
        f"time of a step, peak memory · {len(plan):,} layouts",
        points(distinct(time, memory), str),
        points(best, str),
        points(
            spread([float(memory[n]) for n in best], best, capacity / 16),
            lambda layout: " ".join(short(layout)),
        ),
        (capacity, f"capacity {capacity:.1f} GiB"),
    )


def distinct(time: np.ndarray, memory: np.ndarray) -> list[int]:
    """One place for each cell of the drawn plane that has any."""
    across, up = np.log(np.maximum(time, 1e-9)), memory
    cells = [
        np.floor((each - each.min()) / max(np.ptp(each), 1e-9) * cells)
        for each, cells in zip((across, up), CELLS, strict=True)
    ]
    return sorted(int(n) for n in np.unique(cells[0] * (CELLS[1] + 1) + cells[1], return_index=True)[1])


def spread(heights: Sequence[float], places: Sequence[int], apart: float) -> list[int]:
    """Places whose heights, which fall, are so far apart that names beside them don't touch; the first and
    the last are always among them.
    """
    kept = [0] if places else []
    for n in range(1, len(places)):
        if heights[kept[-1]] - heights[n] >= apart:
            kept.append(n)
    last = len(places) - 1
    if places and kept[-1] != last:
        kept = [n for n in kept if heights[n] - heights[last] >= apart or n == 0] + [last]
    if len(kept) > MOST_LABELS:
        kept = [*kept[: MOST_LABELS - 1], last]
    return [places[n] for n in kept]


def scaling(best: Mapping[int, Choice]) -> Scaling:
    return Scaling(
        "scaling",
        "The best layout of each size",
        "tokens/s/GPU",
        tuple(best),
        tuple(c.tokens_per_second_per_gpu for c in best.values()),
        tuple(" ".join(short(c.layout)) for c in best.values()),
    )


def heat_map(batches: Mapping[tuple[int, int], Choice | None]) -> Heat:
    """Keys: (global batch size, GPUs)."""
    rows, columns = (tuple(sorted({key[n] for key in batches})) for n in (0, 1))
    grid = [[batches.get((row, column)) for column in columns] for row in rows]
    asked = [[(row, column) in batches for column in columns] for row in rows]
    return Heat(
        "batches",
        "The best layout of each global batch and number of GPUs",
        "tokens/s/GPU",
        columns,
        rows,
        tuple(tuple(c.tokens_per_second_per_gpu if c else None for c in row) for row in grid),
        tuple(
            tuple(
                (number(c.tokens_per_second_per_gpu), *short(c.layout)) if c else ("no layout",) * was
                for c, was in zip(row, of_row, strict=True)
            )
            for row, of_row in zip(grid, asked, strict=True)
        ),
        tuple(tuple(str(c.layout) if c else "" for c in row) for row in grid),
    )


def short(layout: Layout) -> tuple[str, ...]:
    """(its axes, its micro-batch and recomputation): `short(…) == ("zero3x4 tp2 pp2", "mb2 full")`."""
    words = str(layout).split("-")
    inner = [word for word in words if re.fullmatch(r"mb\d+", word) or word in RECOMPUTE]
    left_out = [word for word in words if re.fullmatch(r"sp|v\d+|ga\d+", word) or word in SCHEDULES]
    axes = [word for word in words if word not in (*inner, *left_out)]
    return (*([" ".join(axes)] if axes else []), " ".join(inner))


def subject(plan: Plan) -> str:
    """What was planned, in a line."""
    w, c = plan.workload, plan.cluster
    return (
        f"{c.gpus:,} × {c.gpu.name} · global batch {w.global_batch_size:,} × {w.seq_len:,} tokens · "
        f"{w.precision} · {plan.considered:,} layouts considered, {len(plan):,} fit"
    )


# files #


def write(
    file: Path,
    plan: Plan,
    *,
    sizes: Mapping[int, Plan] | None = None,
    batches: Mapping[tuple[int, int], Choice | None] | None = None,
) -> Path:
    """The plan as a page or a picture, by the file's suffix. Raises UserError for an unknown one.

    sizes: plans for other numbers of GPUs. batches: the best of each (global batch size, GPUs).
    """
    suffix = check(file)
    found = panels(plan, sizes, batches)
    if not found:
        raise UserError(
            "No layout was found, so there is nothing to draw; `meshtune plan` says what would fit."
        )
    if suffix == ".html":
        write_text_atomically(file, page(plan, found))
    else:
        save(figure(plan, found), file)
    return file


def check(file: Path) -> str:
    """The suffix of a file that `write` can write. Raises UserError for another."""
    return known_suffix(file, (".html", ".png", ".svg"))


def known_suffix(file: Path, known: Sequence[str]) -> str:
    suffix = file.suffix.lower()
    if suffix not in known:
        raise UserError(
            f"'{file}' ends in {repr(suffix) if suffix else 'nothing'}; pictures are written as "
            f"{', '.join(known)}, such as {file.with_suffix(known[0])}."
        )
    return suffix


def save(drawn: Figure, file: Path) -> None:
    """Whole or not at all; the same picture is the same file."""
    import matplotlib

    suffix, found = file.suffix.lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "meshtune", "svg.fonttype": "none"}):
        drawn.savefig(
            found,
            format=suffix[1:],
            dpi=160,
            metadata={"Date": None} if suffix == ".svg" else {"Software": None},
        )
    if suffix == ".svg":
        write_text_atomically(file, found.getvalue().decode())
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(found.getvalue())
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


# matplotlib #


def figure(plan: Plan, found: Sequence[Panel]) -> Figure:
    """Stacks side by side, then the front and what else there is, the map of batches over the whole width."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stacks = [each for each in found if isinstance(each, Stack)]
    pairs = [each for each in found if isinstance(each, Front | Scaling)]
    maps = [each for each in found if isinstance(each, Heat)]
    if len(pairs) == 1:
        pairs, maps = [*pairs, *maps], []
    bands: list[tuple[Sequence[Panel], float]] = [
        (stacks, 1.75 + 0.27 * len(stacks[0].layouts) if stacks else 0),
        (pairs, 4.3),
        (maps, 1.2 + 0.62 * len(maps[0].batches) if maps else 0),
    ]
    bands = [(row, height) for row, height in bands if row]
    drawn = Figure(
        figsize=(13, 0.75 + sum(height for _, height in bands)),
        layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12),
        facecolor=LIGHT["paper"],
    )
    drawn.suptitle(
        f"{plan.workload.model}   {subject(plan)}", x=0.012, ha="left", fontsize=10.5, color=LIGHT["ink"]
    )
    rows = drawn.subfigures(len(bands), 1, squeeze=False, height_ratios=[height for _, height in bands])[:, 0]
    for place, (row, _) in zip(rows, bands, strict=True):
        place.set_facecolor(LIGHT["paper"])
        all_axes = np.ravel(place.subplots(1, len(row)))
        for axes, panel in zip(all_axes, row, strict=True):
            framed(axes, panel)
            match panel:
                case Stack():
                    draw_stack(axes, panel, named=axes is all_axes[0])
                case Front():
                    draw_front(axes, panel)
                case Scaling():
                    draw_scaling(axes, panel)
                case Heat():
                    draw_heat(axes, panel)
    return drawn


def framed(axes: Axes, panel: Panel) -> None:
    """Title, no frame, quiet ticks."""
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=LIGHT["ink"])
    axes.set_title(panel.unit, loc="right", fontsize=8, color=LIGHT["ink"])
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=LIGHT["ink"], length=0, labelsize=8)
    axes.set_axisbelow(True)


def draw_stack(axes: Axes, panel: Stack, *, named: bool) -> None:
    places = range(len(panel.layouts))
    start = np.zeros(len(places))
    for name, sizes in panel.parts.items():
        axes.barh(
            places, sizes, left=start, height=0.68, label=name, color=COLOURS[name], edgecolor=LIGHT["paper"],
            linewidth=0.5,
        )  # fmt: skip
        start = start + np.array(sizes)
    marks = [panel.mark[0]] if panel.mark else []
    end = max([*start, *marks])
    for place, total, text in zip(places, start, panel.ends, strict=True):
        axes.text(
            max([total, *marks]) + 0.012 * end, place, text, va="center", fontsize=7.5, color=LIGHT["ink"]
        )
    if panel.mark:
        where, name = panel.mark
        axes.axvline(where, color=LIGHT["ink"], linewidth=1.2, linestyle=(0, (4, 2)))
        axes.text(where, -0.62, f"{name} ", ha="right", va="bottom", fontsize=7.5, color=LIGHT["ink"])
    axes.set_ylim(len(places) - 0.5, -1.0 if panel.mark else -0.6)
    axes.set_xlim(0, end * (1.1 if panel.mark else 1.32))
    axes.set_yticks(places, panel.layouts if named else [""] * len(places), family="monospace")
    axes.grid(axis="x", color=LIGHT["grid"], linewidth=0.8)
    handles, names = axes.get_legend_handles_labels()
    order = [n for column in range(4) for n in range(column, len(names), 4)]  # it is filled by columns
    axes.legend(
        [handles[n] for n in order], [names[n] for n in order], ncols=4, loc="upper right",
        bbox_to_anchor=(1.02, -0.07), frameon=False, fontsize=8, labelcolor=LIGHT["ink"], handlelength=0.9,
        handleheight=0.9, handletextpad=0.4, columnspacing=1.1, borderaxespad=0.2,
    )  # fmt: skip


def draw_front(axes: Axes, panel: Front) -> None:
    from matplotlib.ticker import NullLocator

    axes.scatter(*columns(panel.dots), s=4, color=LIGHT["main"], alpha=0.22, linewidths=0, rasterized=True)
    time, memory = columns(panel.front)
    axes.plot(
        time, memory, color=LIGHT["other"], linewidth=1.4, drawstyle="steps-post", marker="o", markersize=3.5
    )
    for x, y, text in panel.labels:
        axes.annotate(
            text, (x, y), (-4, -2), textcoords="offset points", ha="right", va="top", fontsize=7.5,
            color=LIGHT["ink"],
        )  # fmt: skip
    where, name = panel.mark
    axes.axhline(where, color=LIGHT["ink"], linewidth=1.2, linestyle=(0, (4, 2)))
    axes.text(0.995, where, name, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7.5,
              color=LIGHT["ink"])  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(*panel.times)
    axes.set_ylim(0, where * 1.07)
    axes.set_xticks(*ticks(panel.times, "s"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.0f} GiB")
    axes.grid(color=LIGHT["grid"], linewidth=0.8)


def draw_scaling(axes: Axes, panel: Scaling) -> None:
    from matplotlib.ticker import NullLocator

    axes.plot(panel.gpus, panel.speeds, color=LIGHT["main"], linewidth=1.8, marker="o", markersize=5)
    for n, (gpus, speed, name) in enumerate(zip(panel.gpus, panel.speeds, panel.names, strict=True)):
        side = {0: "left", len(panel.gpus) - 1: "right"}.get(n, "center")
        axes.annotate(
            f"{number(speed)}\n{name}", (gpus, speed), (0, -9 if n % 2 else 8), textcoords="offset points",
            ha=side, va="top" if n % 2 else "bottom", fontsize=7.5, color=LIGHT["ink"],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(panel.gpus, [f"{gpus:,} GPUs" for gpus in panel.gpus])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, max(panel.speeds) * 1.2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.06)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=0.8)


def draw_heat(axes: Axes, panel: Heat) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("speed", SHADES)
    low, high = limits(panel)
    for row, speeds in enumerate(panel.speeds):
        for column, speed in enumerate(speeds):
            shade = (0.0 if speed is None else (speed - low) / (high - low)) if high > low else 0.5
            colour = LIGHT["grid"] if speed is None else shades(shade)
            axes.barh(row, 0.97, left=column - 0.485, height=0.94, color=colour)
            ink = LIGHT["paper"] if speed is not None and shade > 0.5 else LIGHT["ink"]
            first, *others = panel.texts[row][column] or ("",)
            size = 8 if len(panel.gpus) <= 5 else 6.5
            axes.text(
                column, row + (0.2 if others else 0), first, ha="center", va="center", color=ink,
                fontsize=size, fontweight="bold" if others else "normal",
            )  # fmt: skip
            axes.text(
                column, row + 0.06, "\n".join(others), ha="center", va="top", color=ink, fontsize=size - 1
            )
    axes.set_xticks(range(len(panel.gpus)), [f"{gpus:,} GPUs" for gpus in panel.gpus])
    axes.set_yticks(range(len(panel.batches)), [f"GBS {size:,}" for size in panel.batches])
    axes.set_xlim(-0.5, len(panel.gpus) - 0.5)
    axes.set_ylim(-0.5, len(panel.batches) - 0.5)


def limits(panel: Heat) -> tuple[float, float]:
    known = [speed for row in panel.speeds for speed in row if speed is not None]
    return min(known), max(known)


def ticks(ends: tuple[float, float], unit: str) -> tuple[list[float], list[str]]:
    """A handful of round values between the ends of a logarithmic axis, and their names."""
    low, high = np.log10(ends)
    digits = (1, 2, 3, 5, 7) if high - low < 1 else (1, 2, 5) if high - low < 3 else (1,)
    found = [
        digit * 10.0**power for power in range(int(np.floor(low)), int(np.ceil(high))) for digit in digits
    ]
    inside = [value for value in found if ends[0] <= value <= ends[1]]
    return inside, [f"{value:,g} {unit}" for value in inside]


def columns(points: Sequence[tuple[float, float, str]]) -> tuple[list[float], list[float]]:
    return [x for x, _, _ in points], [y for _, y, _ in points]


# plotly #


def page(plan: Plan, found: Sequence[Panel]) -> str:
    """One page that needs nothing from elsewhere; light or dark as the reader's system is."""
    from plotly.offline import get_plotlyjs

    figures = "".join(
        f"<figure><figcaption>{_text(panel.title)} <small>{_text(panel.unit)}</small></figcaption>"
        f"<div id='plot-{panel.key}'></div></figure>"
        for panel in found
    )
    return PAGE.format(
        title=_text(plan.workload.model),
        style=STYLE,
        subtitle=_text(subject(plan)),
        figures=figures,
        rejected=rejected(plan),
        plotly=get_plotlyjs(),
        data=_json({panel.key: plotly_figure(panel) for panel in found}),
        themes=_json({"light": LIGHT, "dark": DARK}),
        draw=DRAW,
    )


def rejected(plan: Plan) -> str:
    """Why the other layouts are not among them."""
    if not plan.rejected:
        return ""
    rows = "".join(
        f"<tr><td>{each.count:,}</td><td>{_text(each.reason)}</td><td><code>{_text(each.example)}</code></td></tr>"
        for each in sorted(plan.rejected, key=lambda each: -each.count)
    )
    return (
        "<section><h2>Layouts left out</h2><div class='wide'><table class='facts left-out'><thead>"
        "<tr><th>layouts</th><th>why</th><th>one of them</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def plotly_figure(panel: Panel) -> dict[str, Any]:
    """A panel as plotly's JSON. A trace's `meta` is the theme's colour that the page gives it, if any."""
    match panel:
        case Stack():
            return plotly_stack(panel)
        case Front():
            return plotly_front(panel)
        case Scaling():
            return plotly_scaling(panel)
        case Heat():
            return plotly_heat(panel)


def plotly_layout(height: int, **others: Any) -> dict[str, Any]:
    axis = {"gridcolor": LIGHT["grid"], "linecolor": LIGHT["grid"], "zeroline": False, "ticks": ""}
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 28, "b": 32},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": LIGHT["ink"]},
        "hoverlabel": {"bgcolor": LIGHT["paper"], "bordercolor": LIGHT["grid"]},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        "showlegend": False,
        **others,
        "xaxis": axis | {"automargin": True} | others.get("xaxis", {}),
        "yaxis": axis | {"automargin": True} | others.get("yaxis", {}),
    }


def plotly_stack(panel: Stack) -> dict[str, Any]:
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(panel.layouts),
            "x": rounded(sizes),
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"{name}: %{{x:.4~g}} {panel.unit}<extra></extra>",
        }
        for name, sizes in panel.parts.items()
    ]
    totals = [sum(sizes) for sizes in zip(*panel.parts.values(), strict=True)]
    marks = [panel.mark[0]] if panel.mark else []
    notes = [
        {
            "x": max([total, *marks]),
            "y": layout,
            "text": text,
            "showarrow": False,
            "xanchor": "left",
            "xshift": 4,
        }
        for layout, total, text in zip(panel.layouts, totals, panel.ends, strict=True)
    ]
    shapes = []
    if panel.mark:
        where, name = panel.mark
        shapes = [line_at("x", where)]
        notes.append(
            {"x": where, "y": 1, "yref": "paper", "text": name, "showarrow": False, "xanchor": "right",
             "xshift": -4, "yanchor": "bottom", "yshift": -14}
        )  # fmt: skip
    end = max([*totals, *marks])
    return {
        "data": traces,
        "layout": plotly_layout(
            110 + 30 * len(panel.layouts),
            barmode="stack",
            bargap=0.3,
            showlegend=True,
            shapes=shapes,
            annotations=notes,
            xaxis={"range": [0, end * (1.08 if panel.mark else 1.26)]},
            yaxis={
                "autorange": False,
                "range": [len(panel.layouts) - 0.5, -1.1 if panel.mark else -0.5],
                "type": "category",
                "showgrid": False,
                "tickfont": {"family": "ui-monospace, monospace", "size": 11},
            },
        ),
    }


def plotly_front(panel: Front) -> dict[str, Any]:
    traces = []
    for points, role, mode, more in (
        (panel.dots, "main", "markers", {"marker": {"size": 4, "opacity": 0.25}}),
        (panel.front, "other", "lines+markers", {"line": {"shape": "hv", "width": 2}, "marker": {"size": 7}}),
    ):
        time, memory = columns(points)
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "meta": role,
                "x": rounded(time),
                "y": rounded(memory),
                "text": [name for _, _, name in points],
                "hovertemplate": "%{text}<br>%{x:.4~g} s, %{y:.1f} GiB<extra></extra>",
                **more,
            }
        )
    where, name = panel.mark
    axis = dict(zip(("tickvals", "ticktext"), ticks(panel.times, "s"), strict=True))
    notes = [
        {
            "x": float(np.log10(x)),
            "y": y,
            "text": text,
            "showarrow": False,
            "xanchor": "right",
            "xshift": -3,
            "yanchor": "top",
            "yshift": 1,
        }
        for x, y, text in panel.labels
    ]
    notes.append({"x": 1, "xref": "paper", "y": where, "text": name, "showarrow": False, "xanchor": "right",
                  "yanchor": "bottom"})  # fmt: skip
    return {
        "data": traces,
        "layout": plotly_layout(
            440,
            hovermode="closest",
            shapes=[line_at("y", where)],
            annotations=notes,
            xaxis={"type": "log", "range": list(np.log10(panel.times)), **axis},
            yaxis={"range": [0, where * 1.07], "ticksuffix": " GiB"},
        ),
    }


def plotly_scaling(panel: Scaling) -> dict[str, Any]:
    sides = ["top center"] * len(panel.gpus)
    sides[-1], sides[0] = "top left", "top right" if len(sides) > 1 else "top center"
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "meta": "main",
                "x": list(panel.gpus),
                "y": rounded(panel.speeds),
                "text": [
                    f"{number(speed)}<br>{name}"
                    for speed, name in zip(panel.speeds, panel.names, strict=True)
                ],
                "textposition": sides,
                "line": {"width": 2},
                "marker": {"size": 8},
                "hovertemplate": "%{x} GPUs: %{text}<extra></extra>",
                "cliponaxis": False,
            }
        ],
        "layout": plotly_layout(
            320,
            xaxis={
                "type": "log",
                "tickvals": list(panel.gpus),
                "ticktext": [f"{gpus:,} GPUs" for gpus in panel.gpus],
                "showgrid": False,
            },
            yaxis={"range": [0, max(panel.speeds) * 1.25]},
        ),
    }


def plotly_heat(panel: Heat) -> dict[str, Any]:
    low, high = limits(panel)
    across, up = [f"{gpus:,} GPUs" for gpus in panel.gpus], [f"GBS {size:,}" for size in panel.batches]
    scale = [[place / (len(SHADES) - 1), shade] for place, shade in enumerate(SHADES)]
    return {
        "data": [
            {
                "type": "heatmap",
                "x": across,
                "y": up,
                "z": [list(row) for row in panel.speeds],
                "zmin": low if high > low else 0,
                "zmax": high if high > low else 2 * high,
                "text": [
                    ["<br>".join((f"<b>{cell[0]}</b>", *cell[1:])) if cell else "" for cell in row]
                    for row in panel.texts
                ],
                "customdata": [list(row) for row in panel.layouts],
                "texttemplate": "%{text}",
                "hovertemplate": "%{x}, %{y}: %{z:,.0f} tokens/s/GPU<br>%{customdata}<extra></extra>",
                "colorscale": scale,
                "showscale": False,
                "xgap": 3,
                "ygap": 3,
            }
        ],
        "layout": plotly_layout(
            90 + 62 * len(panel.batches),
            xaxis={"type": "category", "showgrid": False},
            yaxis={"type": "category", "showgrid": False},
        ),
    }


def line_at(axis: str, where: float) -> dict[str, Any]:
    """A dashed line across the whole panel."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": where, f"{axis}1": where, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", **ends, "line": {"color": LIGHT["ink"], "width": 1.5, "dash": "dash"}}


def rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · plan · meshtune</title>
<style>{style}
.plots {{ grid-template-columns: minmax(0, 1fr); }}
.left-out th, .left-out td {{ width: auto; }}
.left-out td:first-child {{ text-align: right; white-space: nowrap; }}
</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<section class='plots'>{figures}</section>
{rejected}
<footer>Predicted by meshtune; nothing of it was measured.</footer>
</main>
<script>{plotly}</script>
<script>const FIGURES = {data}, THEMES = {themes};
{draw}</script>
</body>
</html>
"""

DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const draw = () => {
  const theme = THEMES[dark.matches ? "dark" : "light"];
  for (const [key, figure] of Object.entries(FIGURES)) {
    for (const trace of figure.data) if (trace.meta) {
      trace.marker.color = theme[trace.meta];
      if (trace.line) trace.line.color = theme[trace.meta];
    }
    const layout = figure.layout;
    layout.font.color = theme.ink;
    layout.hoverlabel = {bgcolor: theme.paper, bordercolor: theme.grid, font: {color: theme.ink}};
    for (const shape of layout.shapes ?? []) shape.line.color = theme.ink;
    for (const axis of [layout.xaxis, layout.yaxis]) axis.gridcolor = axis.linecolor = theme.grid;
    const options = {displaylogo: false, displayModeBar: false, responsive: true};
    Plotly.react("plot-" + key, figure.data, layout, options);
  }
};
draw();
dark.addEventListener("change", draw);
"""

# where a model's parameters are #

VOCABULARY, SEQ_LEN, FEATURES_A_BLOCK = 50257, 1024, 128  # GPT-2's; GPT-3 of 175 B has h = 128 L
NARROW, WIDE = 64, 16384


def parameter_shares(hidden: np.ndarray) -> dict[str, np.ndarray]:
    """Of the parameters of GPTs with hidden / 128 blocks: the terms of L(12h² + 13h) + (V + s)h + 2h."""
    layers = hidden / FEATURES_A_BLOCK
    terms = {
        "matrices of the blocks, 12Lh²": 12 * layers * hidden**2,
        "embeddings, (V + s)h": (VOCABULARY + SEQ_LEN) * hidden,
        "biases and norms, 13Lh + 2h": 13 * layers * hidden + 2 * hidden,
    }
    total = gpt_parameters(layers, hidden, VOCABULARY, SEQ_LEN)
    return {name: term / total for name, term in terms.items()}


def parameters_picture(file: Path) -> Path:
    """How the matrices of the blocks take over as a GPT gets wider, as .svg or .png."""
    known_suffix(file, (".svg", ".png"))
    save(parameters_figure(), file)
    return file


def parameters_figure() -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter

    hidden = np.geomspace(NARROW, WIDE, 400)
    shares = parameter_shares(hidden)
    drawn = Figure(figsize=(8, 4.4), layout="constrained", facecolor=LIGHT["paper"])
    axes = drawn.add_subplot()
    colours = [LIGHT["main"], DARK["other"], COLOURS["optimizer"]]
    axes.stackplot(hidden, *shares.values(), colors=colours, edgecolor=LIGHT["paper"], linewidth=0.6)
    matrices = next(iter(shares.values()))
    half = float(np.interp(0.5, matrices, hidden))
    axes.plot([NARROW, half, half], [0.5, 0.5, 0], color=LIGHT["paper"], linewidth=1, linestyle=(0, (3, 2)))
    axes.text(half * 1.06, 0.03, f"half at h = {half:.0f}", color=LIGHT["paper"], fontsize=8.5)
    first, second, third = shares
    axes.text(3600, 0.5, first, color=LIGHT["paper"], ha="center", fontweight="bold", fontsize=10)
    axes.text(78, 0.62, second, color=LIGHT["ink"], fontweight="bold", fontsize=10)
    most = shares[third].max()
    axes.set_title(f"{third}: at most {most:.2%}, too few to see", loc="right", fontsize=8.5,
                   color=COLOURS["optimizer"])  # fmt: skip
    axes.set_title(
        "What a GPT's parameters are", loc="left", fontsize=11, fontweight="bold", color=LIGHT["ink"]
    )
    axes.set_xscale("log", base=2)
    widths = [2**n for n in range(6, 15)]
    axes.set_xticks(widths, [f"{h:,}\n{parameters_of(h)}" for h in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlim(NARROW, WIDE)
    axes.set_ylim(0, 1)
    axes.set_xlabel(
        f"hidden size h, and parameters with L = h/{FEATURES_A_BLOCK} blocks, V = {VOCABULARY:,}, "
        f"s = {SEQ_LEN:,}",
        color=LIGHT["ink"], fontsize=8.5,
    )  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=LIGHT["ink"], length=0, labelsize=8)
    return drawn


def parameters_of(hidden: float) -> str:
    return count(float(gpt_parameters(hidden / FEATURES_A_BLOCK, hidden, VOCABULARY, SEQ_LEN)))
