"""A run's time by part and memory by category as panels, over its steps and next to the prediction.

All of them are of the run's last start. What was not measured, or not predicted, has no panel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from meshtune.meter.parts import PARTS
from meshtune.meter.rows import fullest_memory
from meshtune.plan.facts import tensors
from meshtune.plan.over_time import Timed
from meshtune.plan.step_parts import median_parts
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.draw.kinds import Areas, Band, Lines, Mark, Panel, Series, Stacks, Timeline
from meshtune.report.plan.numbers import nonzero, seconds
from meshtune.report.plan.passes import passes_panel
from meshtune.report.run.summary import last, of_kind, of_last_start, values
from meshtune.rundir import Row
from meshtune.units import GIB, MIB, counted, human

MOST_STRETCHES = 200  # of steps; the mean of each is drawn
Parts = Mapping[str, float]


def part_panels(rows: Sequence[Row]) -> list[Panel]:
    """Every panel that the rows have values for. rows: of metrics.jsonl, all kinds."""
    own = of_last_start(rows)
    predicted = (last(of_kind(own, "run")) or {}).get("predicted") or {}
    drawn = (
        time_over_steps(of_kind(own, "time")),
        time_beside(of_kind(own, "time"), predicted.get("parts") or {}),
        *passes_beside(last(of_kind(own, "passes")), predicted.get("passes") or ()),
        experts_by_layer(last(of_kind(own, "experts"))),
        memory_over_phases(of_kind(own, "memory")),
        memory_beside(
            of_kind(own, "memory"),
            predicted.get("memory") or {},
            max(values(of_kind(rows, "train"), "peak_memory_bytes"), default=0),
        ),
    )
    return [panel for panel in drawn if panel is not None]


def time_over_steps(rows: Sequence[Row]) -> Areas | None:
    """Seconds by part over the steps after those that warm up; of many steps the means of stretches."""
    warm = [row for row in rows if not row.get("warm_up")]
    if len(warm) < 2:
        return None
    length = -(-len(warm) // MOST_STRETCHES)
    stretches = [warm[first : first + length] for first in range(0, len(warm), length)]
    means = [{part: fmean([row["parts"][part] for row in some]) for part in PARTS} for some in stretches]
    means_of = f", means of {length} steps" if length > 1 else ""
    before = [row for row in rows if row["step"] < warm[0]["step"]]
    left_out = f" (without {_steps(before)}: warm-up or watched memory)" if before else ""
    resumed = " since the last start" * (rows[0]["step"] > 1)
    return Areas(
        "time_parts",
        f"Time of a step by part{resumed}{means_of}{left_out}",
        "seconds",
        tuple(float(some[0]["step"]) for some in stretches),
        {part: tuple(one[part] for one in means) for part in nonzero(PARTS, means)},
        tuple(_steps(some) for some in stretches),
        "step",
    )


def _steps(some: Sequence[Row]) -> str:
    first, last = some[0]["step"], some[-1]["step"]
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def time_beside(rows: Sequence[Row], predicted: Parts) -> Stacks | None:
    """The median step by part, measured and predicted; None where one of them is not known."""
    warm = [row for row in rows if not row.get("warm_up")]
    if not warm or not predicted:
        return None
    _, measured = median_parts(warm)
    both = [measured, {part: predicted.get(part, 0.0) for part in PARTS}]
    return Stacks(
        "time_beside",
        f"The median of {counted(len(warm), 'step')}, in parts scaled to it, and the predicted one",
        "seconds",
        ("measured", "predicted"),
        {part: tuple(one[part] for one in both) for part in nonzero(PARTS, both)},
        tuple(seconds(sum(one.values())) for one in both),
        item="step",
    )


def passes_beside(row: Row | None, predicted: Sequence[Sequence[Any]]) -> list[Timeline]:
    """The passes of a pipeline's ranks over a step, measured and predicted, on one axis.

    row: of kind "passes"; None: there is none, and so no panel. predicted: passes as in the row.
    """
    if row is None:
        return []
    both = {
        f"The pipeline in step {row['step']:,}, measured": row["passes"],
        "The pipeline, predicted": predicted,
    }
    timed = {title: [Timed(*one) for one in passes] for title, passes in both.items() if passes}
    end = max((one.end for passes in timed.values() for one in passes), default=0.0)
    return [
        replace(passes_panel(passes, title), key=f"pipeline_{title.split()[-1]}", x_end=end)
        for title, passes in timed.items()
    ]


def experts_by_layer(row: Row | None) -> Lines | None:
    """Loads by layer in the last step that has them; None for a dense model. row: of kind "experts"."""
    points = [*zip(row["layers"], row["fullest"], row["entropy"], strict=False)] if row else []
    if row is None or not points:
        return None
    layers, fullest, entropy = zip(*points, strict=True)
    curves = (
        Series("fullest expert, times the mean", "main", layers, fullest),
        Series("entropy, 1 at equal loads", "other", layers, entropy),
    )
    unused = f"; {counted(int(sum(row['unused'])), 'expert')} without a token" * any(row["unused"])
    title = f"Experts by layer in step {row['step']:,}{unused}"
    return Lines("experts_by_layer", title, "", curves, ".2f", "times the mean", True, x_title="layer")


def memory_over_phases(rows: Sequence[Row]) -> Areas | None:
    """Memory by category at the peak of each phase of the watched steps, on rank 0."""
    watched = [row for row in rows if row.get("rank", 0) == 0 and "step" not in row["phases"]]
    phases = [
        (row["step"], name, _categories(sizes)) for row in watched for name, sizes in row["phases"].items()
    ]
    if not phases:
        return None
    sizes = [parts for *_, parts in phases]
    per, unit = _unit(sizes)
    phases.append(phases[-1])  # so that the last phase has a width
    first = {step: place for place, (step, *_) in reversed([*enumerate(phases)])}
    return Areas(
        "memory_phases",
        "Memory of tensors over the first steps, at the peak of each phase on rank 0",
        unit,
        tuple(map(float, range(len(phases)))),
        {name: tuple(parts[name] / per for *_, parts in phases) for name in nonzero(MEMORY_PARTS, sizes)},
        tuple(f"step {step}, {name}" for step, name, _ in phases),
        "phase",
        joined="steps",
        bands=tuple(Band(place, place + 1.0, name) for place, (_, name, _) in enumerate(phases[:-1])),
        sections=tuple(Mark(float(place), f"step {step}") for step, place in sorted(first.items())),
    )


def memory_beside(rows: Sequence[Row], predicted: Parts, highest: float) -> Stacks | None:
    """Memory of tensors by category at the peak of the fullest rank, measured and predicted. highest: bytes
    of the run's highest peak, which the title has if it was in a step that was not watched.
    """
    measured = fullest_memory(rows)
    if not measured or not predicted:
        return None
    both = [_categories(measured), _categories(tensors(predicted))]
    per, unit = _unit(both)
    step = max(row["step"] for row in rows if measured in row["phases"].values())
    lower = human(measured["peak"]) != human(highest) and measured["peak"] < highest
    return Stacks(
        "memory_beside",
        f"Peak memory of tensors on the fullest rank, measured in step {step:,}, and predicted"
        f"{f'; the highest peak of the run is {human(highest)}' * lower}",
        unit,
        ("measured", "predicted"),
        {name: tuple(one[name] / per for one in both) for name in nonzero(MEMORY_PARTS, both)},
        tuple(human(sum(one.values())) for one in both),
        item="peak",
    )


def _categories(sizes: Parts) -> dict[str, float]:
    """Bytes by MEMORY_PARTS, 0 where there are none."""
    return {name: float(sizes.get(name.replace(" ", "_"), 0)) for name in MEMORY_PARTS}


def _unit(sizes: Sequence[Parts]) -> tuple[float, str]:
    most = max(sum(one.values()) for one in sizes)
    return (float(GIB), "GiB") if most >= GIB / 4 else (float(MIB), "MiB")
