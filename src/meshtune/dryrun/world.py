"""One rank's first two steps on fake tensors: the trainer's own model and step, in a world of any size.

    fake process group ─> World          collectives return at once: no other rank exists
    train.model.structure ─> this rank's stages on meta, sharded: outside the fake mode, where meshes compute
    fake mode: place, ready ─> memory that is none; Passes.step twice, under PhaseMemory with a Recorder

Tensors are fakes of the CPU whatever kernels are asked for: backward passes of fake CUDA tensors abort the
process where torch was built without CUDA. Which kernels run is the model's own value (ModelSpec.kernels).

`trace_rank` is for a process of its own: torch keeps fakes in its caches, and has one default process group.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshtune.data.batch import Batch, MicroBatch, micro_batch
from meshtune.data.pack import LABELLED
from meshtune.dryrun.collectives import Groups
from meshtune.dryrun.flops import visible_pairs
from meshtune.dryrun.recorder import Recorder
from meshtune.dryrun.substitutes import installed
from meshtune.layout import Layout
from meshtune.meter.phases import WATCHED_STEPS, PhaseMemory
from meshtune.meter.trace import RankTrace, StepTrace
from meshtune.parallel.apply import place
from meshtune.parallel.context import spans
from meshtune.parallel.mesh import World, join
from meshtune.placement.share import coordinates
from meshtune.train.model import ModelSpec, OptimizerSpec, RankModel, ready, structure
from meshtune.train.step import Counts

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The steps to trace, as plain values."""

    spec: ModelSpec  # its weights are not read
    optimizer: OptimizerSpec
    layout: Layout
    seq_len: int
    documents: tuple[int, ...]  # lengths of those in each sequence; the rest of its seq_len is padding
    max_grad_norm: float = 1.0

    @property
    def traced(self) -> Layout:
        """The layout with the micro-batches that are traced: the first, a steady one and the last.

        A pipeline's ranks hold as many at once as with all of them.
        """
        layout = self.layout
        enough = 2 * layout.pp if layout.pp > 1 else 3
        steps = min(layout.gradient_accumulation_steps, enough)
        return replace(layout, gradient_accumulation_steps=steps)


def trace_rank(job: Job, rank: int) -> RankTrace:
    """Trace the first two steps of one rank; call it in a process of its own.

    Raises UserError for a model that the layout can't split.
    """
    started, layout = time.perf_counter(), job.traced
    if layout.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    world = join(layout, CPU, host_backend="fake")
    made = structure(job.spec, world, tokens_per_sequence=job.seq_len)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        parallel = place(
            made.cut, world, compute_dtype=job.spec.compute_dtype, reduce_dtype=job.spec.sum_dtype
        )
        model = ready(job.spec, made, parallel, job.optimizer)
    batch = batch_of(job, world)
    micro_batches = [faked(each, fakes) for each in model.passes.localise(batch)]
    steps = [StepTrace(number) for number in range(1, WATCHED_STEPS + 1)]
    with installed(job.spec.kernels) as substitutes, fakes:
        record(job, model, micro_batches, steps, label_tokens=batch.label_tokens, read=made_up)
    traced, number = layout.gradient_accumulation_steps, job.layout.gradient_accumulation_steps
    return RankTrace(
        rank=rank,
        coordinates=coordinates(layout, rank),
        stages=tuple(stage.index for stage in parallel.stages),
        steps=steps,
        micro_batches=traced,
        of=number,
        steady=traced // 2 if number > traced else -1,
        seconds=time.perf_counter() - started,
        substitutes=substitutes,
    )


def record(
    job: Job,
    model: RankModel,
    micro_batches: Sequence[MicroBatch],
    steps: Sequence[StepTrace],
    *,
    label_tokens: int,
    read: Any = None,
) -> None:
    """Make one update a trace and fill in the traces. read: as in Recorder; None: tensors are real."""
    world, modules = model.parallel.world, model.parallel.modules
    groups, pairs = Groups(world.layout), Pairs(job, world)
    recorders = [Recorder(world.device, trace, modules, groups, pairs=pairs, read=read) for trace in steps]
    entered = iter(recorders)
    memory = PhaseMemory(modules, model.optimizer, world.device, ledger=lambda _: next(entered))
    for recorder, trace in zip(recorders, steps, strict=True):
        with memory.watching(trace.step):
            model.passes.step(
                micro_batches,
                Counts(label_tokens),
                lambda name, trace=trace: noted(trace, memory, name),
                learning_rate=1e-4,
                max_grad_norm=job.max_grad_norm,
            )
            recorder.describe(model.optimizer.state())
        trace.peaks = {peak.phase: (peak.bytes, dict(peak.parts)) for peak in memory.peaks.values()}


@contextmanager
def noted(trace: StepTrace, memory: PhaseMemory, name: str) -> Iterator[None]:
    """Note in `trace` where a phase of PhaseMemory begins and ends."""
    trace.phases.append((len(trace.operations), name))
    with memory.phase(name):
        yield
    trace.phases.append((len(trace.operations), ""))


def made_up(tensor: Tensor) -> Any:
    """A number that a fake tensor might have, and with which a step makes an update."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def batch_of(job: Job, world: World) -> Batch:
    """A batch of the job's documents, all tokens labelled, as one data rank gets it."""
    layout = world.layout
    draw = random.Random(0)
    vocabulary = 2  # ids that every model has: values do not matter
    row = [
        np.array([draw.randrange(vocabulary) for _ in range(length)], dtype=np.uint32) | np.uint32(LABELLED)
        for length in job.documents
    ]
    for document in row:
        document[0] &= ~np.uint32(LABELLED)  # nothing comes before a document's first token
    each = micro_batch([row] * layout.micro_batch_size, job.seq_len)
    number = layout.gradient_accumulation_steps
    ranks = number * world.data_ranks
    return Batch((each,) * number, each.tokens * ranks, each.label_tokens * ranks, origin="")


def faked(each: MicroBatch, fakes: FakeTensorMode) -> MicroBatch:
    """The micro-batch with fakes of its tensors."""
    tensors = {name: value for name, value in vars(each).items() if isinstance(value, Tensor)}
    return replace(each, **{name: fakes.from_tensor(tensor) for name, tensor in tensors.items()})


class Pairs:
    """(Query, key) pairs that a call of an attention kernel computes on a rank."""

    def __init__(self, job: Job, world: World) -> None:
        self.documents, self.width, self.columns = job.documents, job.seq_len, None
        cp = world.cp
        if cp.size > 1 and world.layout.cp_method == "allgather":
            parts = spans(job.seq_len, cp, "allgather")
            self.columns = [column for part in parts for column in part]
            self.width = len(self.columns)

    def __call__(self, name: str, args: Any) -> float:
        """Pairs over all rows, for one head. name: of the operator; args: its arguments."""
        backward = name.endswith("_backward")
        if name.startswith("torch_attn."):
            window = args[13 if backward else 9][0]
            rows = args[1 if backward else 0].shape[0] / self.width
            reach = None if window < 0 else window + 1
            return rows * visible_pairs(self.documents, reach, self.columns)
        q, k = args[1:3] if backward else args[:2]
        rows, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        return rows * (visible_pairs([queries], None) if queries == keys else queries * keys)
