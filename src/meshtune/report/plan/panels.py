"""A plan as panels: what fills memory and a step's time, one step over time, time against memory, cluster
sizes, global batches.

Everything shown was predicted for a layout that the search listed; what was not searched has no panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import numpy as np

from meshtune.layout import Layout
from meshtune.placement.columns import layout_at
from meshtune.plan.over_time import StepOverTime, memory_over_time, step_over_time
from meshtune.plan.search import Choice, Plan
from meshtune.plan.seconds.step import PARTS
from meshtune.plan.workload import Workload
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.draw.kinds import (
    Areas,
    Axis,
    Cell,
    Group,
    Guide,
    HeatMap,
    Label,
    Mark,
    Panel,
    Point,
    Scatter,
    Stacks,
)
from meshtune.report.draw.words import short
from meshtune.report.plan.numbers import (
    by_memory_part,
    common_error,
    memory_parts,
    nonzero,
    number,
    seconds,
    speed_unit,
    time_parts,
)
from meshtune.report.plan.passes import passes_panel
from meshtune.units import GIB, counted, human

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer

MOST_LABELS = 7  # along the front
MOST_DOTS = 1200  # of time against memory, so that a page stays small
CHARACTER = 0.0145  # of the width of the chart, for a label's character
SLOWEST = 5  # times the shortest step, of the layouts that are drawn
CELLS = (300, 200)  # of that plane, across and up: dots in the same cell are drawn once
EVENT = 1 / 300  # of a step's width, for an event that lasts no time
NO_LAYOUT = "no layout"

SizeAndGpus = tuple[int, int]  # (global batch size, GPUs)


def panels(
    answer: Answer,
    choices: Sequence[Choice],
    sizes: Mapping[int, Plan] | None = None,
    batches: Mapping[SizeAndGpus, Choice | None] | None = None,
) -> list[Panel]:
    """Every panel that there are numbers for.

    choices: layouts of the answer whose memory and time are shown, the chosen one first. sizes: number of
    GPUs -> plan; those where nothing fits are left out. batches: (global batch size, GPUs) -> best layout, or
    None where nothing fits. Without sizes or batches there is no panel of them.
    """
    panels = memory_and_time(choices, chosen=0)
    panels += [*over_time(answer.workload, answer.choice), time_against_memory(answer.plan, answer.choice)]
    best = {gpus: of_size.best(1)[0] for gpus, of_size in sorted((sizes or {}).items()) if len(of_size)}
    if len(best) > 1:
        panels.append(scaling(best))
    if batches and any(batches.values()):
        panels.append(batch_map(batches))
    return predicted(panels)


def predicted(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with *predicted* in the title of each."""
    return [replace(panel, title=f"{panel.title}, predicted") for panel in panels]


def memory_and_time(choices: Sequence[Choice], *, chosen: int | None = None) -> list[Panel]:
    """Memory of each layout and the time of its step.

    chosen: place of the layout whose name is bold; None: none is.
    """
    return [memory_stacks(choices, chosen=chosen), time_stacks(choices, chosen=chosen)]


def memory_stacks(choices: Sequence[Choice], *, chosen: int | None = None) -> Stacks:
    """Peak memory in GiB of each layout by category, in the order given; the title says if none of them fits.

    choices: at least one, all of the same GPU kind. chosen: place of the bold one; None: none is.
    """
    return memory_bars(
        [str(choice.layout) for choice in choices],
        [memory_parts(choice) for choice in choices],
        choices[0].cluster.memory,
        f"Peak memory of a GPU {common_error(choices, 'memory')}"
        + ("" if any(choice.fits for choice in choices) else ": nothing fits"),
        chosen=chosen,
    )


def memory_bars(
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    capacity: float | None,
    title: str,
    *,
    chosen: int | None = None,
) -> Stacks:
    """Peak memory in GiB, a bar for each name. parts: of each, bytes by MEMORY_PARTS. capacity: a GPU's."""
    limit = Mark(capacity / GIB, f"capacity {capacity / GIB:.1f}") if capacity else None
    return Stacks(
        "memory",
        title,
        "GiB",
        tuple(names),
        {name: tuple(one[name] / GIB for one in parts) for name in nonzero(MEMORY_PARTS, parts)},
        tuple(f"{sum(one.values()) / GIB:.1f}" for one in parts),
        limit,
        chosen=chosen,
    )


def time_stacks(choices: Sequence[Choice], *, chosen: int | None = None) -> Stacks:
    """Step time in seconds of each layout by part, in the order given. chosen: place of the bold one."""
    return time_bars(
        [str(choice.layout) for choice in choices],
        [time_parts(choice) for choice in choices],
        [f"{seconds(choice.seconds.total)} · MFU {choice.mfu:.0%}" for choice in choices],
        f"Time of a step {common_error(choices, 'time')}".rstrip(),
        chosen=chosen,
    )


def time_bars(
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    ends: Sequence[str],
    title: str,
    *,
    chosen: int | None = None,
) -> Stacks:
    """Time of a step, a bar for each name. parts: of each, seconds by PARTS. ends: a text behind each bar."""
    shown = {name: tuple(one[name] for one in parts) for name in nonzero(PARTS, parts)}
    return Stacks("time", title, "seconds", tuple(names), shown, tuple(ends), chosen=chosen)


def time_against_memory(plan: Plan, chosen: Choice) -> Scatter:
    """Seconds per step and peak GiB of the layouts that fit (at most MOST_DOTS are drawn), with the front.

    The front are the layouts that no other one beats in both; at most MOST_LABELS of them are labelled.
    Layouts that take more than SLOWEST times the shortest step are left out. At least one layout must fit.
    """
    time, memory = np.asarray(plan.seconds.total), np.asarray(plan.memory.peak) / GIB
    capacity = plan.cluster.memory / GIB
    low = float(time.min())
    near = np.flatnonzero(time <= SLOWEST * low)

    def points(places: Sequence[int], name: Callable[[Layout], str] = str) -> tuple[Point, ...]:
        return tuple(
            Point(float(time[n]), float(memory[n]), name(layout_at(plan.columns, n))) for n in places
        )

    front = [place for place in plan.pareto() if time[place] <= SLOWEST * low]
    dots = [int(near[n]) for n in distinct(time[near], memory[near])]
    named = spread([float(memory[n]) for n in front], front, capacity / 10)
    high = max(float(time[near].max()), 1.5 * low)
    labels = points(named, lambda layout: "\n".join(short(layout)))
    longest = max(len(line) for label in labels for line in label.text.splitlines())
    room = min(0.4, CHARACTER * longest)  # for the labels on the left
    ends = (low * (low / high) ** (room / (1 - room)), high * (high / low) ** 0.03)
    slower = f"; {len(time) - len(near):,} take more than {SLOWEST} times the shortest step"
    best = Point(chosen.seconds.total, chosen.memory.peak / GIB, str(chosen.layout))
    return Scatter(
        "front",
        "Speed against memory",
        f"{len(dots):,} of {counted(len(plan), 'layout')} drawn{slower * (len(near) < len(time))}",
        (
            Group("layouts that fit", points(dots), "soft", opacity=0.45),
            Group("none is faster with less memory", points(front), "ink", joined="steps", size=36),
            Group(f"recommended: {best.text}", (best,), "chosen", size=130),
        ),
        Axis("seconds a step", ends, log=True, suffix=" s"),
        Axis("peak GiB", (0, capacity * 1.07), suffix=" GiB", form=".1f"),
        tuple(Label(point, "right", above=point.y < capacity / 16) for point in labels),
        (Guide(ends, (capacity, capacity), f"capacity {capacity:.1f} GiB"),),
    )


def distinct(time: np.ndarray, memory: np.ndarray, *, most: int = MOST_DOTS) -> list[int]:
    """Indices, ascending, of the first layout in each cell of the plane log(time) × memory that has any.

    time, memory: one value per layout, in any units. most: cells are made larger until no more are left.
    """
    cells = CELLS
    while True:
        columns, rows = (
            np.floor((values - values.min()) / max(np.ptp(values), 1e-9) * count)
            for values, count in zip((np.log(np.maximum(time, 1e-9)), memory), cells, strict=True)
        )
        first = np.unique(columns * (cells[1] + 1) + rows, return_index=True)[1]
        if len(first) <= most:
            return sorted(int(index) for index in first)
        cells = (cells[0] * 4 // 5, cells[1] * 4 // 5)


def spread(heights: Sequence[float], places: Sequence[int], apart: float) -> list[int]:
    """The entries of `places` to label so that labels don't overlap: at most MOST_LABELS, in their order.

    heights: of each entry of `places`, in the same order, descending. Neighbours among the labelled differ in
    height by `apart` or more, except that the first and the last are always kept.
    """
    chosen = [0] if places else []
    for n in range(1, len(places)):
        if heights[chosen[-1]] - heights[n] >= apart:
            chosen.append(n)
    last = len(places) - 1
    if places and chosen[-1] != last:
        chosen = [n for n in chosen if heights[n] - heights[last] >= apart or n == 0] + [last]
    if len(chosen) > MOST_LABELS:
        chosen = [*chosen[: MOST_LABELS - 1], last]
    return [places[n] for n in chosen]


def scaling(best: Mapping[int, Choice]) -> Scatter:
    """tokens/s/GPU over the number of GPUs. best: number of GPUs -> best layout, ascending; at least two."""
    sizes = [float(gpus) for gpus in best]
    speeds = [choice.tokens_per_second_per_gpu for choice in best.values()]
    unit = speed_unit(best.values())
    names = [" ".join(short(choice.layout)) for choice in best.values()]
    points = tuple(map(Point, sizes, speeds, names))
    labels = []
    for place, (point, speed) in enumerate(zip(points, speeds, strict=True)):
        last = place == len(points) - 1
        neighbour = speeds[place - 1 if last else place + 1]
        text = Point(point.x, point.y, f"{number(speed)}\n{point.text}")
        labels.append(Label(text, "right" if last else "left", above=speed >= neighbour))  # next to the line
    reach = (sizes[-1] / sizes[0]) ** 0.04
    return Scatter(
        "scaling",
        "The best layout of each cluster size",
        unit,
        (Group("", points, "ink", joined="line", size=70),),
        Axis(
            "GPUs",
            (sizes[0] / reach, sizes[-1] * reach),
            log=True,
            ticks=tuple(sizes),
            suffix=" GPUs",
            form=",",
        ),
        Axis(unit, (0, max(speeds) * 1.25), form=",.0f"),
        tuple(labels),
    )


def batch_map(batches: Mapping[SizeAndGpus, Choice | None]) -> HeatMap:
    """tokens/s/GPU of the best layout by global batch and number of GPUs.

    A pair that is None (nothing fits) is a grey cell, one that is missing (not searched) no cell.
    """
    sizes, gpus = (sorted({key[n] for key in batches}) for n in (0, 1))
    return HeatMap(
        "batches",
        "The best layout of each global batch and number of GPUs",
        speed_unit(batches.values()),
        tuple(counted(number, "GPU") for number in gpus),
        tuple(f"GBS {size:,}" for size in reversed(sizes)),
        tuple(
            tuple(cell_of(batches[size, count]) if (size, count) in batches else None for count in gpus)
            for size in reversed(sizes)
        ),
    )


def cell_of(choice: Choice | None) -> Cell:
    """Cell with the layout's speed and short name; a grey one for None."""
    if choice is None:
        return Cell(None, (NO_LAYOUT,))
    speed = choice.tokens_per_second_per_gpu
    return Cell(speed, (number(speed), *short(choice.layout)), str(choice.layout))


def over_time(workload: Workload, choice: Choice) -> list[Panel]:
    """Memory over one step and, with a pipeline, the passes of each rank; [] for more than can be drawn."""
    if not (drawn := step_over_time(workload, choice)):
        return []
    passes = [passes_panel(drawn.timed, f"The pipeline over {_span(drawn)}")] if choice.layout.pp > 1 else []
    return [memory_panel(workload, choice, drawn), *passes]


def memory_panel(workload: Workload, choice: Choice, drawn: StepOverTime) -> Areas:
    """Bytes of the fullest rank over the step, by category."""
    fullest, held = memory_over_time(workload, choice, drawn)
    capacity = choice.cluster.memory / GIB
    parts = [by_memory_part(one.parts) for one in held]
    names = nonzero(MEMORY_PARTS, parts)
    rank = f", on the fullest pipeline rank ({fullest})" if choice.layout.pp > 1 else ""
    x, sizes = _apart([one.seconds for one in held]), [sum(one.parts.values()) for one in held]
    top = sizes.index(max(sizes))
    peak = Point(x[top], sizes[top] / GIB, f"peak {human(sizes[top])}: {held[top].event}")
    return Areas(
        "memory_over_time",
        f"Memory over {_span(drawn)}{rank}",
        "GiB",
        x,
        {name: tuple(sizes[name] / GIB for sizes in parts) for name in names},
        tuple(one.event for one in held),
        "seconds",
        Mark(capacity, f"capacity {capacity:.1f} GiB"),
        peaks=(peak,),
    )


def _apart(seconds: Sequence[float]) -> tuple[float, ...]:
    """The times, ascending, with a stretch for each event that lasts no time, so that its size is drawn."""
    shown = [at + n * seconds[-1] * EVENT for at, same in groupby(seconds) for n, _ in enumerate(same)]
    return tuple(min(at, seconds[-1]) for at in accumulate(shown, max))


def _span(drawn: StepOverTime) -> str:
    """Name what is drawn: a step, or one of fewer micro-batches."""
    every, some = (one.gradient_accumulation_steps for one in (drawn.whole, drawn.layout))
    return "one step" if some == every else f"a step, {some} of its {every} micro-batches"
