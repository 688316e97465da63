"""Layouts of a bench: prediction and dry run in the parts that a run measures; the largest micro-batch."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from meshtune.dryrun.kernels import COMMUNICATION, UPDATES
from meshtune.dryrun.simulation import Simulation
from meshtune.meter.causes import causes
from meshtune.meter.trace import BACKWARD, FORWARD, RECOMPUTATION, WITHOUT_GRADIENTS
from meshtune.plan.facts import tensors
from meshtune.plan.machine import machine_of
from meshtune.plan.step_parts import parts_of, predicted_parts
from meshtune.report.dryrun.beside import fullest, peak_event, simulated_memory
from meshtune.report.dryrun.facts import facts_of

PASSES: tuple[str, ...] = (FORWARD, BACKWARD, RECOMPUTATION)  # phases of a trace, and parts of a step


def predicted(simulation: Simulation) -> dict[str, Any] | None:
    """The planner's step of a simulated layout: seconds by part, and bytes by category of tensors on the
    pipeline rank that holds most when simulated; None for a model that it can't count.

    Seconds are None where they mean nothing, as on processors that nobody has measured.
    """
    workload, choice = simulation.workload, simulation.predicted
    memory = simulation.predicted_memory(simulation.fullest, nearest=True)
    if workload is None or choice is None or memory is None:
        return None
    event = memory["event"]
    facts = choice.as_dict()
    if not choice.cluster.timed:
        return {"step_seconds": None, "parts": None, "memory": tensors(memory), "event": event}
    workload = choice.decided(workload)
    machine = machine_of(workload, choice.cluster)
    speed = {name: facts[name] for name in ("step_seconds", "tokens_per_second_per_gpu", "mfu")}
    return speed | {
        "parts": predicted_parts(workload, choice.layout, machine),
        "time": facts["time"],
        "memory": tensors(memory),
        "event": event,
    }


def why_slow(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The causes that make a measured layout slow, as plain values, the costliest first.

    document: of `bench --json`, with its layout, `predicted` and `measured`.
    """
    measured, names = document["measured"], ("layout", "predicted")
    run = {"kind": "run", "device_type": measured["device_type"]} | {name: document[name] for name in names}
    return [asdict(cause) for cause in causes([run, *measured["time_rows"]])]


def simulated(simulation: Simulation) -> dict[str, Any]:
    """The dry run's step of a layout, as `predicted`."""
    document = facts_of(simulation)
    memory = {name: float(size) for name, size in simulated_memory(document).items()}
    rank = fullest(document)
    facts: dict[str, Any] = {
        "step_seconds": None, "parts": None, "memory": tensors(memory), "rank": rank["rank"],
        "event": peak_event(rank),
    }  # fmt: skip
    if simulation.costs is None:
        return facts
    later, kernels = simulation.times[-1], dict[str, float].fromkeys(PASSES, 0.0)
    for table in simulation.kernels_of.values():
        for row in table.rows:
            if row.place not in (COMMUNICATION, UPDATES):
                kernels[FORWARD if row.phase == WITHOUT_GRADIENTS else row.phase] += row.seconds
    scale = float(later.parts.compute) / (sum(kernels.values()) or 1.0)
    split = {phase: scale * value + later.host(phase) for phase, value in kernels.items()}
    split[FORWARD] += later.host(WITHOUT_GRADIENTS)
    return facts | {
        "step_seconds": later.seconds,
        "parts": {name: float(value) for name, value in parts_of(later.parts, split).items()},
    }


# Largest micro-batch #


MOST = 4096  # sequences; nobody needs more


@dataclass(frozen=True)
class Tried:
    """One micro-batch size."""

    size: int  # sequences
    runs: bool
    peak: int | None  # bytes of tensors on the fullest rank; None: it did not run to the end
    reason: str | None = None  # why it does not run


def largest(run: Callable[[int], Tried], first: int = 1) -> tuple[int, list[Tried]]:
    """(The largest size that runs, 0 if none does; all sizes in the order in which they were tried).

    run: tries one size; a size below one that runs is taken to run. first: where to begin.
    """
    tried: list[Tried] = []

    def runs(size: int) -> bool:
        tried.append(run(size))
        return tried[-1].runs

    good, bad = 0, MOST + 1
    size = first
    while good < size < bad:
        good, bad = (size, bad) if runs(size) else (good, size)
        size = min(2 * good, MOST) if bad > MOST else (good + bad) // 2
    return good, tried
