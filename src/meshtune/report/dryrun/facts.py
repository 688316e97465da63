"""The facts of a dry run as plain values: the document of `dryrun --json`; bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshtune.meter.trace import OFFLOADS, PHASES, RankTrace, StepTrace
from meshtune.plan.facts import cluster_facts
from meshtune.report.dryrun.living import levels
from meshtune.report.dryrun.remedies import largest

if TYPE_CHECKING:
    from meshtune.dryrun.kernels import KernelTable
    from meshtune.dryrun.simulation import Simulation

EVENTS = 400  # entries of a timeline at most


def facts_of(simulation: Simulation, top: int = 0) -> dict[str, Any]:
    """The document of one layout. top: groups of each rank's largest tensors."""
    return {
        "model": simulation.model,
        "layout": str(simulation.layout),
        "world": simulation.layout.world,
        "cluster": cluster_facts(simulation.cluster),
        "kernels": simulation.kernels,
        "documents": list(simulation.documents),
        "routing": simulation.routing,
        "fits": simulation.fits,
        "need_bytes": simulation.need,
        "outside_bytes": simulation.outside,
        "capacity": simulation.capacity,
        "fullest_rank": simulation.fullest.rank,
        "time": time_facts(simulation),
        "ranks": [rank_facts(simulation, trace, top) for trace in simulation.traces],
        "predicted": simulation.predicted and simulation.predicted.as_dict(),
        "notes": list(simulation.notes),
        "instead": list(simulation.instead),
    }


def time_facts(simulation: Simulation) -> dict[str, Any] | None:
    """Seconds of a later step; None where operations have no times."""
    if simulation.workload is None or not simulation.times:
        return None
    first, later = simulation.times
    return {
        "seconds": later.seconds,
        "first_step_seconds": first.seconds,
        "tokens_per_second_per_gpu": simulation.workload.tokens / later.seconds / simulation.layout.world,
        "parts": vars(later.parts),
    }


def rank_facts(simulation: Simulation, trace: RankTrace, top: int) -> dict[str, Any]:
    """An entry of `ranks`; the outer figures are the second step's, which is like all later ones."""
    first, second = trace.steps
    return {
        "rank": trace.rank,
        "stands_for": simulation.stands_for[trace.rank],
        "coordinates": trace.coordinates,
        "stages": list(trace.stages),
        "peak_bytes": second.peak()[0],
        "reserved_bytes": simulation.reserved(trace),
        **({"offloaded": offloaded(second)} if second.host_bytes else {}),
        "flops": sum(trace.times(operation) * operation.flops for operation in second.operations),
        "collectives": [kind._asdict() for kind in trace.collective_kinds(second)],
        "phases": phases(simulation.kernels_of[trace.rank]),
        "host_reads": dict(second.host_reads),
        "host_copies": dict(second.host_copies),
        "substitutes": list(trace.substitutes),
        "micro_batches": {"traced": trace.micro_batches, "of": trace.of, "steady": trace.steady},
        "trace_seconds": trace.seconds,
        **({"reference": step_facts(trace.reference)} if trace.reference else {}),
        "steps": [step_facts(first), step_facts(second)],
        "allocator": allocator_facts(simulation, trace),
        "predicted": simulation.predicted_memory(trace, nearest=trace is simulation.fullest),
        "largest": largest(trace, simulation.layout)[:top],
    }


def offloaded(step: StepTrace) -> dict[str, int]:
    """Bytes of pinned host memory that a step needs, and those that it copies there and back."""
    copied = (step.offloaded_bytes(name) for name in OFFLOADS)
    return dict(zip(("host_bytes", "to_host", "to_device"), (step.host_bytes, *copied), strict=True))


def allocator_facts(simulation: Simulation, trace: RankTrace) -> dict[str, Any] | None:
    """Facts of torch's allocator on a rank, its figures those of both steps; None for processors."""
    if simulation.workspaces is None:
        return None
    replays, others = simulation.replays[trace.rank], simulation.other_replays[trace.rank]
    return {
        "expandable_segments": simulation.expandable,
        "active_bytes": [replay.active for replay in replays],
        "reserved_bytes": [replay.reserved for replay in replays],
        "segments": [len(replay.segments) for replay in replays],
        "other_reserved_bytes": [replay.reserved for replay in others],
        "workspaces": [asdict(row) for row in simulation.workspaces.table(trace)],
    }


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
