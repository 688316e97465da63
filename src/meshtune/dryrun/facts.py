"""Facts of a traced rank as plain values: an entry of `ranks` in `dryrun --json`."""

from collections.abc import Mapping
from typing import Any

from meshtune.dryrun.kernels import KernelTable
from meshtune.layout import Layout
from meshtune.meter.trace import PHASES, RankTrace, StepTrace
from meshtune.report.dryrun.living import Peak, alike, levels
from meshtune.report.dryrun.remedies import remedy
from meshtune.report.dryrun.tables import made_by

EVENTS = 400  # entries of a timeline at most


def rank_facts(trace: RankTrace, stands_for: str, reserved: int, kernels: KernelTable) -> dict[str, Any]:
    """An entry of `ranks`; the outer figures are the second step's, which is like all later ones.

    stands_for: ranks that are like this one. reserved: bytes that the allocator holds for the second step.
    kernels: of that step.
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
        "collectives": [kind._asdict() for kind in trace.collective_kinds(second)],
        "phases": phases(kernels),
        "host_reads": dict(second.host_reads),
        "substitutes": list(trace.substitutes),
        "micro_batches": {"traced": trace.micro_batches, "of": trace.of, "steady": trace.steady},
        "trace_seconds": trace.seconds,
        "steps": [step_facts(first), step_facts(second)],
    }


def largest(trace: RankTrace, layout: Layout, top: int) -> list[dict[str, Any]]:
    """The `top` largest groups of tensors that are alike at the peak of later steps, with the setting that
    removes or shrinks each; bytes are those of the whole group.
    """
    peak = Peak.of(trace.steps[-1])
    return [
        {
            "bytes": tensors.bytes,
            "count": tensors.count,
            "tensor": tensors.name,
            "made_by": made_by(tensors),
            "shape": list(tensors.shape),
            "dtype": tensors.dtype,
            "category": tensors.category,
            "setting": remedy(tensors, layout, peak.vocabulary),
        }
        for tensors in alike(peak.storages)[:top]
    ]


def phases(kernels: KernelTable) -> dict[str, dict[str, int]]:
    """Kernels, FLOPs and bytes moved by each phase of a step; a collective is a kernel."""
    sums: dict[str, dict[str, int]] = {
        phase: dict.fromkeys(("kernels", "flops", "bytes"), 0) for phase in PHASES
    }
    for row in kernels.rows:
        for name, number in zip(sums[row.phase], (row.launches, row.flops, row.bytes), strict=True):
            sums[row.phase][name] += round(number)
    return {phase: counts for phase, counts in sums.items() if any(counts.values())}


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
