"""The batch size study: global batch and micro-batch against speed, memory, time of an epoch, held-out loss
and gradient noise.

Losses are compared at equal tokens and at equal updates: at the most that every run has reached, on the line
between a run's two evaluations around it. Runs with other seeds are one point, their median, with a vertical
line from the lowest to the highest.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from meshtune.report.draw.kinds import Axis, Group, Guide, Panel, Point, Scatter
from meshtune.report.experiments.axes import (
    ROOM,
    Quantity,
    about,
    counts_axis,
    curves,
    joined,
    loss_axis,
    most_frequent,
    values,
)
from meshtune.report.experiments.rows import BATCH, DONE, Experiment, Sweep, best
from meshtune.report.run.summary import of_kind
from meshtune.rundir import RunDir

RUNS = "runs"  # in the sweep's folder, with a run folder for each experiment that trained
HEIGHT = 300  # px


@dataclass(frozen=True)
class Curve:
    """The held-out losses of one run."""

    steps: tuple[float, ...]
    tokens: tuple[float, ...]  # trained on up to each of these steps
    losses: tuple[float, ...]
    epoch_tokens: float | None  # of one pass through the data


def batch_panels(sweep: Sweep) -> list[Panel]:
    """Every picture of the study; [] where the global batch doesn't vary among the experiments done."""
    known = [one for one in sweep.done if one.layout]
    batches = {one.global_batch for one in known if one.global_batch}
    if len(batches) < 2 or not _is_studied(sweep):
        return []
    held_out = curves_of(sweep)
    return [*_of_speed(sweep, known, held_out), *_of_losses(sweep, held_out), *_noise(sweep)]


def _is_studied(sweep: Sweep) -> bool:
    """True if the sweep changes the global batch itself, and not only through the GPUs."""
    keys = (*BATCH, "layout", "layout.gradient_accumulation_steps", "layout.micro_batch_size")
    return any(key in sweep.varied for key in keys)


def following(sweep: Sweep) -> list[str]:
    """Settings that the sweep changes together with the global batch, such as a learning rate for each: they
    have one value for each batch, and name no line of their own.
    """

    def values_of(key: str) -> set[tuple[int | None, str]]:
        return {
            (one.global_batch, str(one.settings.get(key))) for one in sweep.experiments if one.global_batch
        }

    return [key for key in sweep.varied if len(dict(values_of(key))) == len(values_of(key))]


def _of_speed(sweep: Sweep, known: Sequence[Experiment], held_out: Mapping[int, Curve]) -> Iterator[Panel]:
    """Yield speed, memory and an epoch's time over the global batch, a line for each micro-batch size."""
    context = sweep.naming((*BATCH, *following(sweep)))
    chosen, note = _one_size(known, context)

    def name_of(one: Experiment) -> str:
        return ", ".join(filter(None, (context(one), f"micro-batch {one.micro_batch}")))

    fastest = [*best(chosen, lambda one: (name_of(one), one.global_batch)).values()]
    several = [one for one in fastest if sum(name_of(other) == name_of(one) for other in fastest) > 1]
    names, left_out = most_frequent(sorted(map(name_of, several), key=_in_order), "lines")

    def epoch(one: Experiment) -> float | None:
        curve = held_out.get(one.number)
        if curve is None or not curve.epoch_tokens or not one.shown.speed:
            return None
        return curve.epoch_tokens / one.shown.speed / (one.gpus or 1)

    quantities = (
        Quantity("batch_speed", "Speed by global batch", sweep.speed_unit, lambda one: one.shown.speed),
        Quantity("batch_memory", "Peak memory by global batch", "GiB", lambda one: one.shown.peak_gib),
        Quantity("batch_epoch", "Time of an epoch by global batch", "seconds", epoch),
    )
    note = f", the fastest layout{note}{left_out}"
    x = ("global batch, sequences", lambda one: one.global_batch)
    return curves(quantities, several, (names, name_of), x, note, height=HEIGHT)


def _one_size(
    known: Sequence[Experiment], context: Callable[[Experiment], str]
) -> tuple[list[Experiment], str]:
    """(The experiments on one number of devices for each context, that with most of them; a note on it)."""
    sizes: dict[str, Counter[int | None]] = {}
    for one in sorted(known, key=lambda one: one.gpus or 0):
        sizes.setdefault(context(one), Counter())[one.gpus] += 1
    chosen = {name: counts.most_common(1)[0][0] for name, counts in sizes.items()}
    words = ", ".join(f"{name or 'all'} on {size}" for name, size in chosen.items())
    note = f"; on the number of devices with most experiments ({words})"
    several = any(len(counts) > 1 for counts in sizes.values())
    return [one for one in known if one.gpus == chosen[context(one)]], note if several else ""


def _in_order(name: str) -> tuple[Any, ...]:
    """Key that sorts names by their words, numbers by size."""
    return tuple((0, float(word), "") if word.isdigit() else (1, 0.0, word) for word in name.split())


def _of_losses(sweep: Sweep, held_out: Mapping[int, Curve]) -> Iterator[Panel]:
    """Yield the held-out loss over the global batch, at equal tokens and at equal updates."""
    runs = [one for one in sweep.experiments if one.number in held_out and one.global_batch]
    if len({one.global_batch for one in runs}) < 2:
        return
    for key, title, unit in (("tokens", "equal tokens", "tokens"), ("steps", "equal updates", "updates")):
        reach = min(getattr(held_out[one.number], key)[-1] for one in runs)
        losses = {one.number: at(held_out[one.number], key, reach) for one in runs}
        groups, x, ends = _spread_groups(sweep, runs, lambda one, losses=losses: losses[one.number])
        if groups:
            y = loss_axis("held-out loss per label token", ends)
            title, unit = f"Held-out loss by global batch, at {title}", f"after {reach:,.0f} {unit}"
            yield Scatter(f"batch_loss_{key}", title, unit, groups, x, y, height=HEIGHT)


def _noise(sweep: Sweep) -> Iterator[Panel]:
    """Yield the gradient noise scale over the global batch, with the line where both are equal."""
    runs = [one for one in sweep.experiments if one.status == DONE and one.noise_scale and one.global_batch]
    groups, x, ends = _spread_groups(sweep, runs, lambda one: one.noise_scale)
    if groups:
        positive = [end for end in (*ends, *x.ends) if end > 0]
        y = Axis("gradient noise scale, sequences", (min(positive) / ROOM, max(positive) * ROOM), log=True)
        title, note = (
            "Gradient noise scale by global batch",
            "above the line a larger batch still saves updates",
        )
        equal = Guide(x.ends, x.ends, "noise scale = batch")
        yield Scatter("batch_noise", title, note, groups, x, y, guides=(equal,), height=HEIGHT)


def _spread_groups(
    sweep: Sweep, runs: Sequence[Experiment], y_of: Callable[[Experiment], float | None]
) -> tuple[tuple[Group, ...], Axis, list[float]]:
    """(A joined group for each name, with the median and both ends of the seeds at each global batch; the
    axis of batches; all ends).
    """
    where = sweep.naming((*BATCH, *following(sweep)))
    places: dict[str, dict[int, list[tuple[float, Experiment]]]] = {}
    for one in runs:
        if (y := y_of(one)) is not None:
            places.setdefault(where(one), {}).setdefault(one.global_batch or 0, []).append((y, one))
    groups, every = [], list[float]()
    for name in most_frequent(name for name, some in places.items() for _ in some)[0]:
        points = []
        for batch, some in places[name].items():
            found = [y for y, _ in some]
            ends = (min(found), max(found))
            words = about(replace(some[0][1], repeats=len(found)))
            points.append(Point(float(batch), median(found), words, ends if len(found) > 1 else None))
            every += ends
        groups.append(joined(name, points))
    return tuple(groups), counts_axis("global batch, sequences", values(groups, "x") or [1.0]), every


def curves_of(sweep: Sweep) -> dict[int, Curve]:
    """The held-out losses of the experiments that trained, by their number, from their run folders."""
    folder = sweep.source.folder / RUNS
    curves = {}
    for one in sweep.experiments:
        run = RunDir(folder / str(one.number))
        file = run.metrics_file
        if one.status == DONE and file.exists() and sweep.may_read(file) and (curve := curve_of(run)):
            curves[one.number] = curve
    return curves


def curve_of(run: RunDir) -> Curve | None:
    """The held-out losses of a run; None without any. Tokens of steps that were not logged are the mean of
    those that were.
    """
    rows = run.rows()
    train = [row for row in of_kind(rows, "train") if row.get("tokens")]
    evals = {row["step"]: row["loss"] for row in of_kind(rows, "eval") if row.get("loss") is not None}
    if not train or not evals:
        return None
    of_step = sum(row["tokens"] for row in train) / len(train)
    epoch = train[-1].get("epoch")
    steps = tuple(sorted(evals))
    return Curve(
        steps=tuple(map(float, steps)),
        tokens=tuple(step * of_step for step in steps),
        losses=tuple(evals[step] for step in steps),
        epoch_tokens=train[-1]["step"] * of_step / epoch if epoch else None,
    )


def at(curve: Curve, key: str, reach: float) -> float | None:
    """The loss on the line between the evaluations around `reach`; None before the first. key: "steps" or
    "tokens".
    """
    places = getattr(curve, key)
    return None if reach < places[0] else float(np.interp(reach, places, curve.losses))
