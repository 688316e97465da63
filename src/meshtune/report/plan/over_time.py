"""Panels of one step of a layout over time: passes of the pipeline, and memory of the fullest rank."""

from __future__ import annotations

from meshtune.plan.over_time import StepOverTime, memory_over_time, step_over_time
from meshtune.plan.search import Choice
from meshtune.plan.workload import Workload
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.draw.kinds import Areas, Mark, Panel, Timeline
from meshtune.report.plan.numbers import named, nonzero
from meshtune.report.plan.passes import passes_panel
from meshtune.units import GIB


def over_time(workload: Workload, choice: Choice) -> list[Panel]:
    """Memory over one step and, with a pipeline, the passes of each rank; [] for more than can be drawn.

    Where predicted times mean nothing, none of them.
    """
    if not choice.cluster.timed or not (drawn := step_over_time(workload, choice)):
        return []
    memory = memory_panel(workload, choice, drawn)
    return [memory, pipeline_panel(drawn)] if choice.layout.pp > 1 else [memory]


def memory_panel(workload: Workload, choice: Choice, drawn: StepOverTime) -> Areas:
    """Bytes of the fullest rank over the step, by category."""
    fullest, held = memory_over_time(workload, choice, drawn)
    capacity = choice.cluster.memory / GIB
    parts = [named(one.parts) for one in held]
    names = nonzero(MEMORY_PARTS, parts)
    rank = f", on the fullest pipeline rank ({fullest})" if choice.layout.pp > 1 else ""
    return Areas(
        "memory_over_time",
        f"Memory over {_span(drawn)}{rank}",
        "GiB",
        tuple(one.seconds for one in held),
        {name: tuple(sizes[name] / GIB for sizes in parts) for name in names},
        tuple(one.event for one in held),
        "seconds",
        Mark(capacity, f"capacity {capacity:.1f} GiB"),
    )


def pipeline_panel(drawn: StepOverTime) -> Timeline:
    """The passes of each pipeline rank; gaps are the bubble."""
    return passes_panel(drawn.timed, f"The pipeline over {_span(drawn)}")


def _span(drawn: StepOverTime) -> str:
    """Name what is drawn: a step, or one of fewer micro-batches."""
    every, some = (one.gradient_accumulation_steps for one in (drawn.whole, drawn.layout))
    return "one step" if some == every else f"a step, {some} of its {every} micro-batches"
