"""Traces made by hand: steps of matmuls and collectives, with the passes of any schedule."""

from __future__ import annotations

from typing import Any

from shapes import of_shape
from transformers import PretrainedConfig

from meshtune.dryrun.world import Job
from meshtune.layout import Layout
from meshtune.meter.trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    UPDATE,
    WEIGHTS,
    Collective,
    Operation,
    RankTrace,
    StepTrace,
    Storage,
)
from meshtune.placement.schedules import orders
from meshtune.placement.share import stage_of_rank
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import catalogue
from meshtune.plan.workload import Workload
from meshtune.train.model import ModelSpec, OptimizerSpec

SIZE = 4096  # rows, columns and inner size of each matmul


def cluster(gpus: int, kind: str = "h100-sxm") -> Cluster:
    """The usual machines of a kind."""
    gpu = catalogue()[kind]
    return Cluster(gpu, gpus, gpu.node, gpu.memory, gpu.link, gpu.network)


def workload() -> Workload:
    """A small model; what it computes is in the traces."""
    shape = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "vocabulary": 128}
    return Workload("small", of_shape(**shape), None, seq_len=128, global_batch_size=8)  # type: ignore[arg-type]


def job_of(
    source: PretrainedConfig, layout: str, documents: tuple[int, ...] = (64,), seq_len: int = 0, **spec: Any
) -> Job:
    """Steps of a model with AdamW. seq_len: 0 for sequences without padding. spec: fields of ModelSpec."""
    return Job(
        spec=ModelSpec(source=source, init="random", **spec),
        optimizer=OptimizerSpec(),
        layout=Layout.parse(layout),
        seq_len=seq_len or sum(documents),
        documents=documents,
    )


def matmul(
    phase: str = FORWARD, *, stage: int = 0, micro_batch: int = 0, reads=(0, 1), writes=(2,), module: str = ""
) -> Operation:
    """A square matmul in bf16; storage 1 is a weight."""
    square = (SIZE, SIZE)
    return Operation(
        "aten.mm.default", phase, module, micro_batch, stage, (square, square), "bfloat16",
        flops=2 * SIZE**3, read=4 * SIZE**2, written=2 * SIZE**2, reads=reads, writes=writes,
    )  # fmt: skip


def collective(op: str, axis: str, size: int, ranks: int, *, waits: bool = True, **fields) -> Operation:
    """A collective of a forward; fields: of the Operation."""
    sent = Collective(op, axis, ranks, size, waits=waits)
    given = {"phase": FORWARD, "module": "", "micro_batch": 0, "stage": 0} | fields
    return Operation(f"c10d.{op}", shapes=(), dtype="bfloat16", kernels=0, collective=sent, **given)


def storages() -> list[Storage]:
    """Return an activation, a weight, a result."""
    return [Storage(1, category, "", "", "") for category in (ACTIVATIONS, WEIGHTS, ACTIVATIONS)]


def step_of(operations: list[Operation]) -> StepTrace:
    """A step of these operations on `storages`."""
    return StepTrace(2, operations, storages())


def trace_of(
    step: StepTrace, *, micro_batches: int = 1, pp: int = 0, stages=(0,), rank: int = 0
) -> RankTrace:
    """A rank whose two steps are alike."""
    coordinates = {"pp": pp, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}
    return RankTrace(rank, coordinates, tuple(stages), [step, step], micro_batches, micro_batches)


def pipeline(layout: Layout, *, forward: int = 1, ranks: list[int] | None = None) -> list[RankTrace]:
    """Traces of a pipeline's ranks with equal stages: a forward of some matmuls, a backward of twice as many.

    forward: matmuls of a stage's forward; a half of the backward has as many. ranks: of the pipeline that
    are traced; None: all.
    """
    traces = []
    for pp, passes in enumerate(orders(layout)):
        if ranks is not None and pp not in ranks:
            continue
        operations = []
        for each in passes:
            place = {"stage": each.stage, "micro_batch": each.micro_batch}
            if each.kind == "F":
                operations += [matmul(**place) for _ in range(forward)]
            if each.kind in "BI":
                operations += [matmul(BACKWARD, **place) for _ in range(forward)]
            if each.kind in "BW":
                operations += [matmul(BACKWARD, reads=(0, 2), **place) for _ in range(forward)]
        operations.append(matmul(UPDATE, stage=-1, micro_batch=-1))
        stages = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, pp)
        step = step_of(operations)
        traces.append(
            trace_of(step, micro_batches=layout.gradient_accumulation_steps, pp=pp, stages=stages, rank=pp)
        )
    return traces
