"""Memory of a pipeline's micro-batches that were not traced, put into the trace of a step.

Each adds as many bytes as the one before it (`world.growth` measures how many). They lie in one storage a
category from the step's beginning: the peak is right; when during the passes it is filled is not known.
"""

from bisect import bisect_left
from collections.abc import Mapping

from meshtune.meter.trace import Change, StepTrace, Storage

Growth = Mapping[str, int]  # bytes of one more micro-batch by category
PASSES, UPDATE = "forward and backward", "optimizer"  # the phases of a pipeline's step


def add_left_out(step: StepTrace, growth: Mapping[str, Growth], left_out: int) -> None:
    """Add the memory of `left_out` micro-batches to a trace, in place. growth: by phase."""
    for phase, (size, parts) in step.peaks.items():
        more = {category: each * left_out for category, each in growth[phase].items()}
        step.peaks[phase] = (
            size + sum(more.values()),
            {category: parts.get(category, 0) + more.get(category, 0) for category in {**parts, **more}},
        )
    end = next((at for at, name in step.phases if name == UPDATE), len(step.operations))
    until = bisect_left(step.changes, end, key=lambda change: change.at)
    in_update = growth.get(UPDATE, {})
    for category, each in growth.get(PASSES, {}).items():
        stays = min(each, in_update.get(category, 0)) * left_out
        for size, leaves in ((stays, False), (each * left_out - stays, True)):
            if size <= 0:
                continue
            number = len(step.storages)
            step.storages.append(
                Storage(size, category, "", "", "", name=f"{left_out:,} micro-batches that were not traced")
            )
            if leaves:
                step.changes.insert(until, Change(end - 1, number, allocated=False))
            step.changes.insert(0, Change(-1, number, allocated=True))
            until += 1
