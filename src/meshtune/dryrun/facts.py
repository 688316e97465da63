"""Facts of a traced rank as plain values: for `dryrun --json`, and for who reads it (`plan --verify`)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from meshtune.meter.trace import PHASES, Collective, RankTrace, StepTrace
from meshtune.report.dryrun.living import levels

EVENTS = 400  # entries of a timeline at most


def rank_facts(trace: RankTrace, stands_for: str, reserved: int) -> dict[str, Any]:
    """An entry of `ranks`; the outer figures are the second step's, which is like all later ones.

    stands_for: ranks that are like this one. reserved: bytes that the allocator holds for the second step.
    """
    first, second = trace.steps
    return {
        "rank": trace.rank,
        "stands_for": stands_for,
        "coordinates": trace.coordinates,
        "stages": list(trace.stages),
        "peak_bytes": second.peak()[0],
        "reserved_bytes": reserved,
        "flops": sum(trace.times(operation) * operation.flops for operation in second.operations),
        "collectives": collectives(trace, second),
        "phases": phases(trace, second),
        "host_reads": dict(second.host_reads),
        "substitutes": list(trace.substitutes),
        "micro_batches": {"traced": trace.micro_batches, "of": trace.of, "steady": trace.steady},
        "trace_seconds": trace.seconds,
        "steps": [step_facts(first), step_facts(second)],
    }


def collectives(trace: RankTrace, step: StepTrace) -> list[dict[str, Any]]:
    """Number and bytes of a step's collectives by operation and axis, in the order of their first one."""
    counts: Counter[tuple[str, str, int]] = Counter()
    total: Counter[tuple[str, str, int]] = Counter()
    for operation in step.operations:
        if one := operation.collective:
            times = trace.times(operation)
            counts[kind_of(one)] += times
            total[kind_of(one)] += times * one.bytes
    return [
        {"op": op, "axis": axis, "ranks": ranks, "count": count, "bytes": total[op, axis, ranks]}
        for (op, axis, ranks), count in counts.items()
    ]


def kind_of(collective: Collective) -> tuple[str, str, int]:
    """Operation, axis and number of ranks: collectives that are alike in these are counted together."""
    return collective.op, collective.axis, collective.ranks


def phases(trace: RankTrace, step: StepTrace) -> dict[str, dict[str, int]]:
    """Kernels, FLOPs and bytes moved by each phase of a step."""
    sums = {phase: Counter[str]() for phase in PHASES}
    for operation in step.operations:
        times = trace.times(operation)
        sums[operation.phase].update(
            kernels=times * operation.kernels,
            flops=times * operation.flops,
            bytes=times * (operation.read + operation.written),
        )
    return {phase: dict(counts) for phase, counts in sums.items() if counts}


def step_facts(step: StepTrace) -> dict[str, Any]:
    """Peak of one step, its composition, the peak of each phase, and the timeline.

    An entry of the timeline has the operation during which the bytes are held: phase, module and name.
    """
    peak, _ = step.peak()
    return {
        "step": step.step,
        "peak_bytes": peak,
        "by_category": positive(step.composition()),
        "phases": {
            phase: {"peak_bytes": size, "by_category": positive(parts)}
            for phase, (size, parts) in step.peaks.items()
        },
        "timeline": [[event(step, at), positive(sizes)] for at, sizes in levels(step, EVENTS)],
    }


def positive(sizes: Mapping[str, int]) -> dict[str, int]:
    """The categories that have any bytes."""
    return {name: size for name, size in sizes.items() if size}


def event(step: StepTrace, at: int) -> str:
    """Name an operation of the step: "forward model.layers.0.mlp.up_proj aten.mm.default"."""
    operation = step.operations[min(at, len(step.operations) - 1)]
    return " ".join(filter(None, (operation.phase, operation.module, operation.name)))
