"""A simulated rank as pictures and trace files need it: its passes, its streams, a time for each operation.

Without torch.
"""

from __future__ import annotations

from meshtune.dryrun.streams import COMPUTE, RankTime
from meshtune.meter.trace import StepTrace
from meshtune.plan.over_time import Timed


def passes(rank: RankTime) -> list[Timed]:
    """Passes of a rank, each from its first kernel to its last one, in the order in which they begin."""
    found: list[Timed] = []
    for each in rank.intervals:
        if each.stream != COMPUTE or not each.kind:
            continue
        key = each.kind, each.stage, each.micro_batch
        if found and (found[-1].kind, found[-1].stage, found[-1].micro_batch) == key:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(Timed(rank.pp, each.kind, each.begin, each.end, each.stage, each.micro_batch))
    return found


def busy(rank: RankTime) -> list[tuple[str, float, float, str, str]]:
    """(Stream, begin, end, label, part) of each kernel and collective, for report.dryrun's streams_panel.

    The part of kernels is their phase: all of them are computation.
    """
    return [
        (
            each.stream,
            each.begin,
            each.end,
            " ".join(filter(None, (each.name, each.module))),
            each.phase if each.stream == COMPUTE else each.part,
        )
        for each in rank.intervals
    ]


def starts(rank: RankTime, step: StepTrace, seconds: float) -> list[float]:
    """Seconds at which each operation begins on the compute stream, ascending, then the step's end.

    Operations without a kernel, and those on other streams, begin with the last kernel before them. seconds:
    of the step.
    """
    begins: dict[int, float] = {}
    for each in rank.intervals:
        if each.stream == COMPUTE:
            begins.setdefault(each.operation, each.begin)
    times, now = [], 0.0
    for number in range(len(step.operations)):
        now = max(now, begins.get(number, now))
        times.append(now)
    return [*times, seconds]
