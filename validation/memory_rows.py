"""A layout's memory as it was measured or simulated, beside the planner's: each phase of a step, by category.

    Job ──> what its ranks held: real ones (memory_grid.py) or fakes (memory_dryrun.py) ──┐
     └────> the planner's events ─────────────────────────────────────────────────────────┴──> Row, Held

What a rank held, as plain values: {"rank", "steps": [{"step", "phase", "bytes", "parts"}], "states":
{"weights", "gathered", "gradients", "optimizer", "host"}}. A phase's peak is compared with the fullest
of the planner's events in it:

    forward               the loss
    backward              backward of the head, backward of a block, end of backward
    forward and backward  (pipelines) all four
    optimizer             the update
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshtune.dryrun.world import Job
from meshtune.layout import Layout
from meshtune.meter.trace import CATEGORIES, GATHERED, OPTIMIZER, WEIGHTS
from meshtune.model.capabilities import traits
from meshtune.model.trace import census_of
from meshtune.placement.columns import Columns
from meshtune.placement.ranks import coordinates
from meshtune.plan.accounting import accounting_of, stack_accounting
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory import timeline
from meshtune.plan.memory.stages import RANKS
from meshtune.plan.memory.states import Step
from meshtune.plan.search import stages_of
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.precision import DTYPE_BYTES
from meshtune.sections import ClusterConfig
from meshtune.train.model import trainable_skeleton

EVENTS_OF_PHASE = {  # events of the planner that a phase's peak is compared with
    "forward": timeline.EVENTS[:1],
    "backward": timeline.EVENTS[1:4],
    "forward and backward": timeline.EVENTS[:4],
    "optimizer": timeline.EVENTS[4:],
}
STATES = (WEIGHTS, "gradients", OPTIMIZER)


class Row(NamedTuple):
    """Peak of one phase on one kind of rank, in bytes by category."""

    name: str  # of the case
    rank: str  # of RANKS; "": there is no pipeline
    phase: str
    event: str  # of the planner, its fullest in the phase
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    states: float  # predicted bytes of model states, which `rest` leaves out

    @property
    def bytes(self) -> float:
        return sum(self.measured.values())

    @property
    def predicted_bytes(self) -> float:
        return sum(self.predicted.values())

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.bytes - 1

    @property
    def rest(self) -> tuple[float, float]:
        """Bytes (measured, predicted) without the planner's states."""
        return self.bytes - self.states, self.predicted_bytes - self.states

    @property
    def rest_error(self) -> float:
        measured, predicted = self.rest
        return predicted / measured - 1

    @property
    def terms(self) -> dict[str, float]:
        """Error of each category as a share of all measured bytes, the largest first."""
        errors = {name: (self.predicted[name] - self.measured[name]) / self.bytes for name in CATEGORIES}
        return dict(sorted(errors.items(), key=lambda pair: -abs(pair[1])))


class Held(NamedTuple):
    """Bytes of the model states of one kind of rank, by part.

    "gathered" is among the parts only under ZeRO-1 or -2 with several micro-batches and without a pipeline.
    """

    name: str
    rank: str
    measured: Mapping[str, int]
    predicted: Mapping[str, int]

    @property
    def surplus(self) -> str:
        """Bytes measured beyond the prediction, by part; empty if all are equal."""
        more = {part: size - self.predicted[part] for part, size in self.measured.items()}
        return ", ".join(f"{part} {size:+,}" for part, size in more.items() if size)


class Planned(NamedTuple):
    """The planner's bytes of the first, a middle and the last pipeline rank, or of the only one."""

    ranks: tuple[tuple[str, int], ...]  # (of RANKS or "", place in the pipeline)
    events: tuple[Mapping[str, Mapping[str, float]], ...]  # of each: event -> category -> bytes
    host: tuple[float, ...]  # of each: bytes of host memory


def workload_of(job: Job) -> Workload:
    """Return a job as the planner sees it."""
    model = trainable_skeleton(job.spec)[0]
    work = Work.of(census_of(model))
    if job.spec.quantise:
        work = work.quantised(DTYPE_BYTES[job.spec.quantise])
    workload = Workload(
        model="", work=work, traits=traits(model), seq_len=job.seq_len,
        global_batch_size=job.layout.global_batch_size, precision=job.spec.precision,
        reduce_dtype=job.spec.reduce_dtype, optimizer=job.optimizer.name,
        step_in_backward=job.optimizer.in_backward,
        offload="optimizer" if job.optimizer.offload else "none",
    )  # fmt: skip
    return workload.compiled() if job.spec.compile else workload


def planned(job: Job, *, first_step: bool = False) -> Planned:
    """Predict a job's memory on each kind of pipeline rank. first_step: see `Step`."""
    layout, workload = job.layout, workload_of(job)
    layouts = Columns.of([layout])
    accounting = accounting_of(workload, cluster_of(ClusterConfig(gpu="cpu"), gpus=layout.world))
    if job.spec.kernels == "cuda":  # on a processor, without a GPU's overhead
        of_gpu = stack_accounting(workload.stack, workload.precision)
        of_loss = {"logit": of_gpu.logit, "logit_split": of_gpu.logit_split}
        accounting = replace(accounting, wide_masks=of_gpu.wide_masks, **of_loss)
    stages = stages_of(workload, layouts)
    step = Step(workload.work, layouts, accounting, job.seq_len, stages, first_step=first_step)
    liveness = timeline.Liveness(step)
    found, of_host = liveness.timeline(), liveness.host
    shape = len(RANKS), 1
    kinds = {1: (0,), 2: (0, 2)}.get(layout.pp, (0, 1, 2))
    names = tuple((RANKS[kind] if layout.pp > 1 else "", int(stages.rank[kind, 0])) for kind in kinds)
    events = tuple(
        {
            event: {part: float(np.broadcast_to(size, shape)[kind, 0]) for part, size in parts.items()}
            for event, parts in found.items()
        }
        for kind in kinds
    )
    return Planned(names, events, tuple(float(np.broadcast_to(of_host, shape)[kind, 0]) for kind in kinds))


def compare(name: str, job: Job, ranks: Sequence[Mapping[str, Any]], step: int = 2) -> list[Row]:
    """Peaks of a step beside the planner's, a Row per kind of rank and phase; of equal ranks the fullest.

    ranks: what each held, see the module's docstring. step: from 1.
    """
    rows, found = [], planned(job, first_step=step == 1)
    for (label, place), at in zip(found.ranks, found.events, strict=True):
        own = [each for each in ranks if coordinates(job.layout, each["rank"])["pp"] == place]
        for phase, events in EVENTS_OF_PHASE.items():
            peaks = [
                each
                for rank in own
                for each in rank["steps"]
                if (each["step"], each["phase"]) == (step, phase)
            ]
            if peaks:
                event = max(events, key=lambda event: sum(at[event].values()))
                parts = max(peaks, key=lambda peak: peak["bytes"])["parts"]
                measured = {category: parts.get(category, 0) for category in CATEGORIES}
                states = sum(at[event][part] for part in states_of(job.layout))
                rows.append(Row(name, label, phase, event, measured, at[event], states))
    return rows


def held(name: str, job: Job, ranks: Sequence[Mapping[str, Any]]) -> list[Held]:
    """Model states beside the planner's, one Held per kind of rank. ranks: as in `compare`."""
    found, states = planned(job), []
    for (label, place), at, host in zip(*found, strict=True):
        rank = next(each for each in ranks if coordinates(job.layout, each["rank"])["pp"] == place)
        expected = {part: round(at["update"][part]) for part in STATES} | {"host": round(host)}
        if GATHERED in states_of(job.layout) and job.layout.pp == 1 < job.layout.gradient_accumulation_steps:
            expected["gathered"] = round(at["loss"][GATHERED])
        states.append(Held(name, label, {part: rank["states"][part] for part in expected}, expected))
    return states


def states_of(layout: Layout) -> tuple[str, ...]:
    """Categories of model states; whole weights are among them where they stay gathered for a step."""
    return (*STATES, GATHERED) if layout.zero in (1, 2) else STATES


def errors(values: Iterable[float]) -> str:
    """Mean and worst of the errors, in words."""
    sizes = [abs(value) for value in values]
    return f"mean error {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}"
