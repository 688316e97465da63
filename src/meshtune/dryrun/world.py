"""One rank's first two steps on fake tensors: the trainer's own model and step, in a world of any size.

    fake process group ─> World          collectives return at once: no other rank exists
    train.model.structure ─> this rank's stages on meta, sharded: outside the fake mode, where meshes compute
    fake mode: place, ready ─> memory that is none; Passes.step twice, under PhaseMemory with a Recorder,
                               behind the pass of a reference, by this model or by another

Tensors are fakes of the CPU whatever kernels are asked for: backward passes of fake CUDA tensors abort the
process where torch was built without CUDA. Which kernels run is the model's own value (ModelSpec.kernels).

`trace_rank` is for a process of its own: torch keeps fakes in its caches, and has one default process group.
"""

import random
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from meshtune.data.batch import Batch, MicroBatch, micro_batch_of
from meshtune.data.pack import Document, in_memory
from meshtune.dryrun.compiled import compiled_on_fakes
from meshtune.dryrun.recorder import Recorder, visible_pairs
from meshtune.dryrun.routing import BALANCED, Routing
from meshtune.dryrun.substitutes import installed
from meshtune.layout import Layout
from meshtune.meter.phases import PhaseMemory
from meshtune.meter.trace import WITHOUT_GRADIENTS, Change, RankTrace, StepTrace, Storage
from meshtune.objectives import OBJECTIVES
from meshtune.parallel.apply import Parallel, place, width_multiple
from meshtune.parallel.context import spans
from meshtune.parallel.mesh import Axis, World, join
from meshtune.placement.census import Census
from meshtune.placement.ranks import coordinates
from meshtune.train.model import ModelSpec, OptimizerSpec, RankModel, ready, structure
from meshtune.train.preference import Preference, log_probabilities
from meshtune.train.step import Counts

# What is left out #

# Each adds the same number of bytes (`world.growth` measures how many). They lie in one storage a
# category from the step's beginning: the peak is right; when during the passes it is filled is not known.


Growth = Mapping[str, int]  # bytes of one more micro-batch by category
PASSES, UPDATE = "forward and backward", "optimizer"  # the phases of a pipeline's step


def add_left_out(step: StepTrace, growth: Mapping[str, Growth], left_out: int) -> None:
    """Add the memory of `left_out` micro-batches to a trace, in place. growth: by phase."""
    for phase, (size, parts) in step.peaks.items():
        # What is 0 does not grow: a first step makes torch's buffers behind a forward without gradients.
        more = {category: each * left_out for category, each in growth[phase].items() if parts.get(category)}
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


# The world #


CPU = torch.device("cpu")
TRACED_STEPS = 2  # the optimizer has its states from the second on: later ones are alike
REFERENCE = "reference"  # the phase of its pass
UNLIKE = 8  # micro-batches of a real batch, which differ in documents and labels, that are traced at least


@dataclass(frozen=True, kw_only=True)
class Job:
    """The steps to trace, as plain values."""

    spec: ModelSpec  # its weights are not read
    optimizer: OptimizerSpec
    layout: Layout
    seq_len: int
    documents: tuple[int, ...]  # lengths of those in each sequence; the rest of its seq_len is padding
    max_grad_norm: float = 1.0
    batch: Batch | None = None  # that data rank 0 gets; None: one of `documents`, all tokens labelled
    label_share: float | None = None  # labelled tokens, of full sequences, which a plan counts; None: all
    longest: int | None = None  # tokens of the longest sequence of the data, which a plan counts
    tokens: float | None = None  # of a step, without padding, which speeds count; None: of full sequences
    census: Census | None = None  # of the model, where it has been counted
    reference: PretrainedConfig | None = None  # of another model that is the reference
    every_micro_batch: bool = False  # False: of many, a few are traced (`traced`)
    routing: Routing = BALANCED  # of tokens to experts on several ranks

    @property
    def traced(self) -> Layout:
        """The layout with the micro-batches that are traced: the first, a steady one and the last; with a
        pipeline more, since its ranks have several at once.
        """
        layout = self.layout
        if self.every_micro_batch:
            return layout
        steps, pipeline = layout.gradient_accumulation_steps, layout.pp
        if layout.schedule == "dualpipev":  # it is steady later than others
            pipeline *= 2
        enough = 3 if layout.pp == 1 else 2 * pipeline if steps > 3 * pipeline else steps
        steps = min(steps, max(enough, UNLIKE * (self.batch is not None)))
        return replace(layout, gradient_accumulation_steps=steps)


def trace_rank(job: Job, rank: int, tell: Callable[[str], Any] = lambda _: None) -> RankTrace:
    """Trace the first two steps of one rank; call it in a process of its own.

    tell: called with the part of the step that begins. Raises UserError for a model that the layout can't
    split.
    """
    started, layout = time.perf_counter(), job.traced
    if layout.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    world = join(layout, CPU, host_backend="fake")
    made = structure(job.spec, world, tokens_per_sequence=job.seq_len, counted=job.census)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        parallel = place(made.cut, world)
        model = ready(job.spec, made, parallel, job.optimizer)
    referring, reference = untrained_model(job, world, fakes) if job.reference else model, None
    batch = batch_of(job, world)
    micro_batches = [each.map(fakes.from_tensor) for each in model.passes.localise(batch)]
    mismatched = [parallel.localise(each).map(fakes.from_tensor) for each in batch.mismatched]
    steps = [StepTrace(number) for number in range(1, TRACED_STEPS + 1)]
    compiling = compiled_on_fakes(job.spec.kernels) if job.spec.compile else nullcontext()
    localised = patch.object(Parallel, "localise", lambda _, each: each)  # documents of fakes are not known
    with installed(job.spec.kernels, job.routing) as substitutes, localised, compiling, fakes:
        options = {
            "max_grad_norm": job.max_grad_norm, "mismatched": mismatched, "read": made_up, "tell": tell,
        }  # fmt: skip
        if job.spec.preference and job.spec.preference.row.reference:
            tell("the reference's pass")
            reference = record_reference(referring, micro_batches, made_up)
        del referring
        record(model, micro_batches, steps, units=batch.units, **options)
        traced, number = layout.gradient_accumulation_steps, job.layout.gradient_accumulation_steps
        if number > traced and layout.pp > 1:
            more = [*micro_batches, *micro_batches[: layout.pp]]
            options["tell"] = lambda part: tell(f"again with {len(more)} micro-batches, {part}")
            grown = growth(model, steps[-1], micro_batches, more, options)
            before = steps[-1].host_bytes - model.optimizer.host_bytes
            of_host = (model.parallel.host_bytes - before) // (len(more) - traced)
            for step in steps:
                add_left_out(step, grown, number - traced)
                step.host_bytes += of_host * (number - traced)
    return RankTrace(
        rank=rank,
        coordinates=coordinates(layout, rank),
        stages=tuple(stage.index for stage in parallel.stages) if layout.pp > 1 else (),
        steps=steps,
        micro_batches=traced,
        of=number,
        steady=traced // 2 if number > traced else -1,
        seconds=time.perf_counter() - started,
        substitutes=tuple(sorted(substitutes)),
        reference=reference,
    )


def untrained_model(job: Job, world: World, memory: AbstractContextManager[Any]) -> RankModel:
    """The job's other model that is the reference, without values. memory: in which it gets memory."""
    from meshtune.train.reference import named, untrained  # here: chains of imports stay short

    assert job.reference is not None, "the model itself is the reference"
    spec, made = untrained(replace(named(job.spec, job.reference), init="random"), world, job.seq_len)
    with memory:
        return ready(spec, made, place(made.cut, world), OptimizerSpec())


def record_reference(model: RankModel, micro_batches: Sequence[MicroBatch], read: Any = None) -> StepTrace:
    """Trace the pass that computes a reference's log-probabilities before the first step.

    It runs one micro-batch, with a pipeline one for each of its ranks: then all work at once. read: as of
    `record`.
    """
    trace, parallel, own = StepTrace(0), model.parallel, model.passes.objective
    assert isinstance(own, Preference), "its objective compares with a reference"
    world = parallel.world
    few = [replace(each, noise=None) for each in islice(cycle(micro_batches), world.pp.size)]
    pairs = Pairs(few, world)
    recorder = Recorder(world.device, trace, parallel.modules, world.layout, pairs=pairs, read=read)
    memory = model.memory(ledger=lambda _: recorder)
    with memory.watching(trace.step):
        with memory.phase(REFERENCE):
            log_probabilities(parallel, own, iter(few))
        recorder.describe(model.optimizer.state())
    trace.peaks = {peak.phase: (peak.bytes, dict(peak.parts)) for peak in memory.peaks.values()}
    return trace


def growth(
    model: RankModel,
    step: StepTrace,
    few: Sequence[MicroBatch],
    more: Sequence[MicroBatch],
    options: Mapping[str, Any],
) -> dict[str, Growth]:
    """Bytes by category that a further micro-batch adds to each phase's peak, by phase.

    torch's stages keep a buffer for what each micro-batch receives, and GPipe all of its activations.
    step: traced with `few` micro-batches; it is compared with the second of two steps with `more`. options:
    of `record`.
    """
    traces = [StepTrace(1), StepTrace(2)]
    record(model, more, traces, units=1, **options)
    return {
        phase: {
            category: (size - step.peaks[phase][1].get(category, 0)) // (len(more) - len(few))
            for category, size in parts.items()
        }
        for phase, (_, parts) in traces[-1].peaks.items()
    }


def record(
    model: RankModel,
    micro_batches: Sequence[MicroBatch],
    steps: Sequence[StepTrace],
    *,
    units: int,
    max_grad_norm: float,
    mismatched: Sequence[MicroBatch] = (),
    read: Any = None,
    tell: Callable[[str], Any] = lambda _: None,
) -> None:
    """Make one update a trace and fill in the traces.

    units, mismatched: of the batch. read: as in Recorder; None: tensors are real. tell: called with the part
    of the step that begins.
    """
    world, modules = model.parallel.world, model.parallel.modules
    layout, pairs = world.layout, Pairs([*micro_batches, *mismatched], world)
    recorders = [Recorder(world.device, trace, modules, layout, pairs=pairs, read=read) for trace in steps]
    entered = iter(recorders)
    memory = model.memory(ledger=lambda _: next(entered))
    for recorder, trace in zip(recorders, steps, strict=True):
        with memory.watching(trace.step):
            model.passes.step(
                micro_batches,
                Counts(units),
                lambda name, trace=trace: noted(trace, memory, name, tell),
                learning_rate=1e-4,
                max_grad_norm=max_grad_norm,
                mismatched=mismatched,
            )
            recorder.describe(model.optimizer.state())
        trace.host_bytes = model.parallel.host_bytes + model.optimizer.host_bytes
        trace.peaks = {peak.phase: (peak.bytes, dict(peak.parts)) for peak in memory.peaks.values()}
        number_messages(trace, len(micro_batches), len(mismatched))


def number_messages(trace: StepTrace, micro_batches: int, mismatched: int) -> None:
    """Give sends and receives between stages the numbers of micro-batches, in the order of their messages.

    mismatched: micro-batches of the forward without gradients.
    """
    alike = defaultdict(list)
    for operation in trace.operations:
        message = operation.collective
        if message is not None and message.peer is not None:
            before = operation.phase == WITHOUT_GRADIENTS
            alike[message.op, message.peer, message.bytes, before].append(operation)
    for (*_, before), operations in alike.items():
        passes = mismatched if before else micro_batches
        for number, operation in enumerate(operations):
            whole = len(operations) % passes == 0  # others are not of micro-batches
            operation.micro_batch = number * passes // len(operations) if whole else -1


@contextmanager
def noted(trace: StepTrace, memory: PhaseMemory, name: str, tell: Callable[[str], Any]) -> Iterator[None]:
    """Note in `trace` where a phase of PhaseMemory begins and ends; tell its beginning."""
    tell(f"step {trace.step} of {TRACED_STEPS}, {name}")
    trace.phases.append((len(trace.operations), name))
    with memory.phase(name):
        yield
    trace.phases.append((len(trace.operations), ""))


def made_up(tensor: Tensor) -> Any:
    """A plausible number for a fake tensor, with which a step makes an update."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def batch_of(job: Job, world: World) -> Batch:
    """The job's batch, or one of its documents, all tokens labelled, as one data rank gets it."""
    layout = world.layout
    number = layout.gradient_accumulation_steps
    if job.batch:
        left_out = job.layout.gradient_accumulation_steps - number
        few = max(number // 2 + 1, len(job.batch.mismatched) - left_out)  # with the steady one
        mismatched = job.batch.mismatched[:few]
        return replace(job.batch, micro_batches=job.batch.micro_batches[:number], mismatched=mismatched)
    draw = random.Random(0)
    vocabulary = 2  # ids that every model has: values do not matter
    documents = [  # nothing comes before a document's first token
        Document(np.array([draw.randrange(vocabulary) for _ in range(length)]), np.arange(length) > 0)
        for length in job.documents
    ]
    every = np.arange(len(documents)), np.array([0, len(documents)])
    wanted = job.spec.preference and job.spec.preference.row
    judged = wanted if wanted and wanted.rows == "judged" else OBJECTIVES["sft"]  # pairs lack their answers
    row = in_memory(documents, *every, seq_len=job.seq_len, packed=True, objective=judged), 0
    each = micro_batch_of([row] * layout.micro_batch_size, job.seq_len, width_multiple(layout))
    ranks, mismatched = number * world.data_ranks, number if judged.mismatched else 0
    return Batch(
        (each,) * number, each.tokens * ranks, each.label_tokens * ranks, origin="",
        answers=each.units * ranks if each.answers else None, mismatched=(each,) * mismatched,
    )  # fmt: skip


class Pairs:
    """(Query, key) pairs that a call of an attention kernel computes on a rank.

    A call's micro-batch is not known: its rows count as the mean of all rows, so that sums are right.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], world: World) -> None:
        """micro_batches: this rank's columns of them, their documents those of whole rows."""
        self.cp = world.cp if world.layout.cp_method == "allgather" else Axis("cp")
        whole = world.cp.size // self.cp.size  # Ulysses: a kernel gets the columns of all ranks
        self.rows = Counter(
            (documents, shared, whole * each.input_ids.shape[1])
            for each in micro_batches
            for documents, shared in zip_longest(each.documents, each.shared, fillvalue=())
        )
        self.width = sum(width * number for (*_, width), number in self.rows.items()) / self.rows.total()
        self.pairs: dict[int | None, float] = {}  # of a row, by the window

    def of_row(self, window: int | None) -> float:
        """Pairs of the mean row. window: keys that a query sees at most; None: all."""
        if window not in self.pairs:
            sums = (
                number * visible_pairs(documents, window, self.columns(width), shared)
                for (documents, shared, width), number in self.rows.items()
            )
            self.pairs[window] = sum(sums) / self.rows.total()
        return self.pairs[window]

    def columns(self, width: int) -> list[int] | None:
        """The columns of whole rows that are this rank's queries, `width` in number; None: all."""
        if self.cp.size == 1:
            return None
        parts = spans(width * self.cp.size, self.cp, "allgather")
        return [column for part in parts for column in part]

    def __call__(self, name: str, args: Any) -> float:
        """Pairs over all rows, for one head. name: of the operator; args: its arguments."""
        backward = name.endswith("_backward")
        if name.startswith("meshtune.attention"):
            rows = args[1 if backward else 0].shape[0] / self.width
            return rows * self.of_row(args[11 if backward else 8])
        q, k = args[1:3] if backward else args[:2]
        rows, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        return rows * (visible_pairs([queries], None) if queries == keys else queries * keys)
