"""Pictures of a sweep: the best layout by model and GPUs, scaling, speed against memory, predictions.

A picture that the experiments have no numbers for is left out. Where several experiments share a place on a
line, it shows the fastest.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median, quantiles
from typing import Any

from meshtune.report.draw.kinds import (
    Axis,
    Cell,
    Group,
    Guide,
    HeatMap,
    Label,
    Panel,
    Point,
    Scatter,
    Stacks,
)
from meshtune.report.draw.words import short
from meshtune.report.experiments.ablation import Ablation, text
from meshtune.report.experiments.axes import (
    DOT,
    MOST_LINES,
    ROOM,
    Quantity,
    about,
    axis,
    counts_axis,
    curves,
    joined,
    most_frequent,
    values,
)
from meshtune.report.experiments.batch import batch_panels
from meshtune.report.experiments.rows import MOST_LABELS, Experiment, Sweep, best
from meshtune.units import GIB, counted, number

CELLS_WIDTH, CHARACTER = 860, 6.3  # px of a heat map's cells together on a page, and of a character in one
MOST_DOTS = 1500  # of speed against memory
LABELLED = 3  # fronts at most, so that labels don't overlap
LEAST_RANKED = 3  # layouts of a place whose first by prediction is judged


def panels(sweep: Sweep, ablation: Ablation) -> list[Panel]:
    """Every picture that there are numbers for; *simulated* stands in the title of each where nothing ran."""
    drawn = [
        *ablation.panels(),
        best_layouts(sweep),
        *by_gpus(sweep),
        *scaling(sweep),
        *batch_panels(sweep),
        speed_against_memory(sweep, ablation),
        *beside(sweep),
        regret(sweep),
    ]
    mark = f", simulated ({sweep.simulated})" if sweep.simulated else ""
    return [replace(panel, title=f"{panel.title}{mark}") for panel in drawn if panel is not None]


def best_layouts(sweep: Sweep) -> HeatMap | None:
    """The fastest layout by workload and number of devices, coloured by MFU or, where that is not known, by
    tokens/s/GPU × parameters; grey where no experiment was done.
    """
    tried = [one for one in sweep.experiments if one.gpus]
    fastest = best((one for one in sweep.done if one.gpus), lambda one: (sweep.label(one), one.gpus))
    if not fastest:
        return None
    if any(one.shown.mfu is not None for one in fastest.values()):
        value, unit, form = (lambda one: one.shown.mfu), "MFU", ".1%"
    elif all(one.parameters for one in fastest.values()):
        power, name = power_of([one.tokens_parameters_per_second or 0 for one in fastest.values()])
        value, form = (lambda one: one.tokens_parameters_per_second / power), ",.3~g"
        unit = f"{name} {sweep.speed_unit} × parameters"
    else:
        value, unit, form = (lambda one: one.shown.speed), sweep.speed_unit, ",.0f"
    columns, rows = sorted({one.gpus or 0 for one in tried}), sweep.labels(tried)
    of_place: dict[Any, list[Experiment]] = {}
    for one in tried:
        of_place.setdefault((sweep.label(one), one.gpus), []).append(one)
    width = max(8, int(CELLS_WIDTH / len(columns) / CHARACTER))
    cells = tuple(
        tuple(
            _cell(fastest.get((row, column)), of_place.get((row, column), ()), value, form, width)
            for column in columns
        )
        for row in rows
    )
    return HeatMap(
        "best_layouts",
        f"The fastest layout by model and number of {sweep.device}s",
        unit,
        tuple(f"{column:,}" for column in columns),
        tuple(rows),
        cells,
        form,
        x_title=f"{sweep.device}s",
        y_title="model",
    )


def _cell(
    fastest: Experiment | None,
    tried: Sequence[Experiment],
    value: Callable[[Experiment], Any],
    form: str,
    width: int,
) -> Cell | None:
    """The fastest experiment's figure and layout; grey with the most frequent status if none was done."""
    if fastest is None:
        if not tried:
            return None
        status, _ = Counter(one.status for one in tried).most_common(1)[0]
        reason = next((one.reason for one in tried if one.status == status), "")
        return Cell(None, (status,), reason)
    figure = value(fastest)
    text = f"{figure:.1%}" if form.endswith("%") else number(figure) if figure is not None else "–"
    words = [line for part in short(fastest.layout) for line in textwrap.wrap(part, width)]
    speed = f", {number(fastest.shown.speed or 0)} tokens/s each"
    return Cell(figure, (text, *words), about(fastest) + speed)


def power_of(figures: Sequence[float]) -> tuple[float, str]:
    """(A power of ten that makes the largest figure readable, its name before a unit)."""
    powers = ((1e12, "10¹²"), (1e9, "10⁹"), (1e6, "10⁶"))
    return next((pair for pair in powers if max(figures) >= pair[0]), (1.0, ""))


def by_gpus(sweep: Sweep) -> list[Panel]:
    """Speed, and speed × parameters, of the fastest layout over the number of devices: a line a workload."""
    known = [one for one in sweep.done if one.gpus]
    fastest = [*best(known, lambda one: (sweep.label(one), one.gpus)).values()]
    if len({one.gpus for one in fastest}) < 2:
        return []
    all_names = [name for name in sweep.labels(fastest) for one in fastest if sweep.label(one) == name]
    names, note = most_frequent(all_names, "workloads")
    power, power_name = power_of([one.tokens_parameters_per_second or 0 for one in fastest])
    unit = f"{power_name} {sweep.speed_unit} × parameters".strip()

    def by_size(one: Experiment) -> float | None:
        return one.tokens_parameters_per_second and one.tokens_parameters_per_second / power

    speed = Quantity("speed", "Speed of the fastest layout", sweep.speed_unit, lambda one: one.shown.speed)
    quantities = [speed, Quantity("utilisation", "Speed by model size", unit, by_size)]
    quantities = quantities[: len({one.parameters for one in fastest})]  # of one size both are one curve
    x = (f"{sweep.device}s", lambda one: one.gpus)
    return [*curves(quantities, fastest, (names, sweep.label), x, note)]


def scaling(sweep: Sweep) -> list[Panel]:
    """Strong scaling (the global batch stays) and weak scaling (it grows with the devices), with the ideal.

    y: how many devices of the smallest number's speed the experiment is worth.
    """
    kinds = (
        ("strong", "Strong scaling", "the same global batch", lambda one: one.global_batch),
        ("weak", "Weak scaling", "global batch in proportion", lambda one: one.global_batch / one.gpus),
    )
    known = [one for one in sweep.done if one.gpus and one.global_batch and one.shown.speed]
    drawn: list[Panel] = []
    for key, title, unit, batch_of in kinds:
        fastest = best(known, lambda one, of=batch_of: (sweep.label(one), of(one), one.gpus))
        series: dict[Any, list[Experiment]] = {}
        for (name, batch, _), one in fastest.items():
            series.setdefault((name, batch), []).append(one)
        series = {name: some for name, some in series.items() if len(some) > 1}
        chosen, note = most_frequent((name for name, some in series.items() for _ in some), "series")
        groups = [_speedup(name, series[name], key) for name in chosen]
        if not groups:
            continue
        x = counts_axis(f"{sweep.device}s", values(groups, "x"))
        y_title = f"{sweep.device}s' worth of the smallest number's speed"
        worth = values(groups, "y")
        ends = (min(*worth, x.ends[0] * ROOM) / ROOM, max(*worth, x.ends[1] / ROOM) * ROOM)
        covered = x.ends[0] <= min(worth) and max(worth) <= x.ends[1]
        y = Axis(y_title, ends, log=True, ticks=x.ticks if covered else ())
        ideal = Guide(x.ends, x.ends, "ideal")
        drawn.append(
            Scatter(
                key, title, unit + note, tuple(groups), x, y, guides=(ideal,),
                item="experiment",
            )
        )  # fmt: skip
    return drawn


def _speedup(name: tuple[str, float], some: Sequence[Experiment], kind: str) -> Group:
    smallest = min(some, key=lambda one: one.gpus or 0).shown.speed or 1.0
    label, batch = name
    return joined(
        f"{label}, {batch:,.4g} sequences{' each' if kind == 'weak' else ''}",
        (
            Point(float(one.gpus or 0), (one.shown.speed or 0) * (one.gpus or 0) / smallest, about(one))
            for one in some
        ),
    )


def speed_against_memory(sweep: Sweep, ablation: Ablation) -> Scatter | None:
    """Speed over peak memory of all experiments, with the front of each workload: those that no other one
    beats in both. Of one workload, and where an axis is named for it, the colours are the values of an axis.
    """
    known = [one for one in sweep.done if one.shown.speed and one.shown.peak_bytes]
    if len(known) < 3:
        return None
    by_name: dict[str, list[Experiment]] = {name: [] for name in sweep.labels(known)}
    for one in known:
        by_name[sweep.label(one)].append(one)
    names, left_out = most_frequent((name for name, some in by_name.items() for _ in some), "fronts")
    color = ablation.roles[2] if ablation.color or len(names) == 1 else None
    fronts = [
        Group(f"front of {name}" if color else name, tuple(map(_in_plane, front(by_name[name]))),
              "ink" if color else None, "steps", DOT)
        for name in names
    ]  # fmt: skip
    step = -(-len(known) // MOST_DOTS)
    drawn = sorted(known, key=lambda one: one.shown.speed or 0)[::step]
    shown = "all experiments" if step == 1 else f"{len(drawn):,} of {len(known):,} experiments"
    dots = [(shown, drawn)]
    if color:
        some = ablation.values(color)[:MOST_LINES]
        dots = [
            (f"{color.name} {text(value)}", [one for one in drawn if color.of(one) == value])
            for value in some
        ]
    role = None if color else "soft"
    groups = [Group(name, tuple(map(_in_plane, some)), role, size=22, opacity=0.5) for name, some in dots]
    groups += fronts
    note = f"the front of each workload{left_out}"
    return Scatter(
        "front", "Speed against peak memory", note, tuple(groups),
        axis("peak memory, GiB", values(groups, "x"), form=",.3~f"),
        axis(sweep.speed_unit, values(groups, "y")),
        tuple(
            Label(replace(_in_plane(one), text=" ".join(short(one.layout))), "right" if up else "left", up)
            for some in map(front, map(by_name.__getitem__, names[:LABELLED]))
            for one, up in ((some[0], False), (some[-1], True))[: len(some)]
        ),
    )  # fmt: skip


def _in_plane(one: Experiment) -> Point:
    return Point((one.shown.peak_bytes or 0) / GIB, one.shown.speed or 0, about(one))


def front(some: Sequence[Experiment]) -> list[Experiment]:
    """Those that no other one beats in speed and memory, ascending by memory."""
    chosen: list[Experiment] = []
    for one in sorted(some, key=lambda one: (one.shown.peak_bytes or 0, -(one.shown.speed or 0))):
        if not chosen or (one.shown.speed or 0) > (chosen[-1].shown.speed or 0):
            chosen.append(one)
    return chosen


def beside(sweep: Sweep) -> list[Panel]:
    """Predicted and simulated step time and memory over the measured ones; where nothing ran, predicted over
    simulated ones.
    """
    measured = not sweep.simulated
    truth = "measured" if measured else "simulated"
    others = ("predicted", "simulated") if measured else ("predicted",)
    quantities = (
        ("step_beside", "Step time", "step_seconds", "seconds", 1.0),
        ("memory_beside", "Peak memory", "peak_bytes", "GiB", float(GIB)),
    )
    drawn: list[Panel] = []
    for key, title, field, unit, per in quantities:
        groups, notes = [], []
        for other, role in zip(others, ("main", "other"), strict=False):
            pairs = [
                (true / per, value / per, one)
                for one in sweep.done
                if (true := getattr(getattr(one, truth), field))
                and (value := getattr(getattr(one, other), field))
            ]
            if pairs:
                points = tuple(Point(x, y, about(one)) for x, y, one in pairs)
                groups.append(Group(other, points, role, size=DOT, opacity=0.75))
                notes.append(f"{other}: {errors([y / x - 1 for x, y, _ in pairs])}")
        if not groups:
            continue
        if field == "peak_bytes" and sweep.source.facts.get("run") == "train":
            notes.append("predicted is all that a device needs, measured is only tensors")
        both = axis(f"{truth}, {unit}", [*values(groups, "x"), *values(groups, "y")])
        y = replace(both, title=f"{' or '.join(group.name for group in groups)}, {unit}")
        diagonal = Guide(both.ends, both.ends, "equal")
        drawn.append(
            Scatter(
                key, f"{title}: {' and '.join(group.name for group in groups)} against {truth}",
                "; ".join(notes), tuple(groups), both, y, guides=(diagonal,),
            )
        )  # fmt: skip
    return drawn


def regret(sweep: Sweep) -> Stacks | None:
    """How much slower than the fastest layout the one is that was predicted to be the fastest: a bar for each
    workload and number of devices with LEAST_RANKED measured layouts.
    """
    places: dict[tuple[str, int], list[Experiment]] = {}
    for one in sweep.done:
        if one.gpus and one.measured.speed and one.predicted.speed:
            places.setdefault((sweep.label(one), one.gpus), []).append(one)
    judged = []
    for (name, devices), some in places.items():
        if len(some) >= LEAST_RANKED:
            ranked = max(some, key=lambda one: one.predicted.speed or 0)
            loss = 1 - (ranked.measured.speed or 0) / max(one.measured.speed or 0 for one in some)
            words = f"{loss:.1%}: {' '.join(short(ranked.layout))}, of {counted(len(some), 'layout')}"
            judged.append((loss, f"{name}, {counted(devices, sweep.device)}", words))
    if sweep.simulated or not judged:
        return None
    losses, names, words = zip(*sorted(judged, key=lambda bar: -bar[0])[:MOST_LABELS], strict=True)
    average = mean(loss for loss, *_ in judged)
    return Stacks(
        "regret", f"How much slower the layout ranked first by prediction is: {average:.1%} on average",
        "% of the fastest one's speed", names, {"slower": tuple(100 * loss for loss in losses)}, words,
        item="model and number",
    )  # fmt: skip


def errors(relative: Sequence[float]) -> str:
    """The size of relative errors in words: "median error 4.1% (quartiles 2.0% to 7.3%), n = 57"."""
    sizes = sorted(map(abs, relative))
    if len(sizes) < 4:
        return f"error {', '.join(f'{size:.1%}' for size in sizes)}, n = {len(sizes)}"
    low, _, high = quantiles(sizes, n=4, method="inclusive")
    return f"median error {median(sizes):.1%} (quartiles {low:.1%} to {high:.1%}), n = {len(sizes)}"
