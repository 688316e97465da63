"""Panel of the passes of pipeline ranks, planned or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.report.draw.kinds import Interval, Timeline

if TYPE_CHECKING:
    from meshtune.plan.over_time import Timed

PASSES = {
    "N": "forward without gradients",
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "data": "data",
    "optimizer": "optimizer",
}


def passes_panel(timed: Sequence[Timed], title: str) -> Timeline:
    """Passes of pipeline ranks, a lane for each rank; gaps are the bubble."""
    lanes = {rank: f"rank {rank}" for rank in sorted({one.rank for one in timed})}
    return Timeline(
        "pipeline",
        title,
        "seconds",
        tuple(lanes.values()),
        tuple(
            Interval(lanes[one.rank], one.start, one.end, PASSES[one.kind], _detail(one))
            for one in timed
            if one.end > one.start
        ),
    )


def _detail(one: Timed) -> str:
    return f"micro-batch {one.micro_batch}, stage {one.stage}" if one.stage >= 0 else ""
