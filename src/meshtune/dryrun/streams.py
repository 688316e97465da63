"""A step on the streams of its GPUs: when each kernel and collective runs, and what the rest of the time is.

    compute stream           all kernels, in the order in which the host launches them
    host copies              of what is offloaded, to host memory and back
    a stream per axis and collective   FSDP2's all-gathers, its reduce-scatters, … each in order
    host                     launches kernels one after the other, ahead of them until it reads a result

Rules of the streams
    a blocking collective    begins where the compute stream has come to, which waits for its end
    any other                begins when the storages that it reads are written; who reads its result, waits
    collectives of one axis  run one after the other: NCCL orders those of a communicator as they were issued
    FSDP2's all-gathers      in the forward two, in the backward one besides the one copied out; what
                             fills their buffers runs on their stream
    FSDP2's reduce-scatters  before the next one the compute stream waits for the one before; what is added to
                             their results runs on their stream
    a host copy              begins where the compute stream has come to, which waits for one to the host when
                             the next one begins, and for one back where its result is read
    computation during a collective  takes longer by the machine's `contention`

All ranks of a pipeline run together; ranks of the other axes are alike, so that one of each stage stands for
them. Without torch.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshtune.dryrun.costs import Costs, makes_weight_gradient, matmul_sizes, runs
from meshtune.dryrun.queues import Run, Task
from meshtune.layout import Layout
from meshtune.meter.trace import (
    COMMUNICATION,
    FORWARD,
    OFFLOADS,
    OPTIMIZER,
    TO_HOST,
    UPDATE,
    WEIGHTS,
    WITHOUT_GRADIENTS,
    Collective,
    Operation,
    RankTrace,
    StepTrace,
)
from meshtune.placement.schedules import Pass, orders
from meshtune.placement.share import stage_of_rank
from meshtune.plan.seconds.step import PARTS, Seconds

COMPUTE, COPIES = "compute", "host copies"
FORWARDS = {"N": WITHOUT_GRADIENTS, "F": FORWARD}  # kind of a pass -> its phase
NO_PASS = Pass("", -1, -1)


@dataclass(slots=True)
class Interval(Task):
    """One kernel, collective or message between stages, as a task on a stream of its rank."""

    name: str = ""
    part: str = ""  # field of plan.seconds.step.Seconds
    operation: int = -1  # number in the trace of the rank; -1: none
    of: Operation | None = None  # None: a message between stages
    run: Pass = NO_PASS

    @property
    def stream(self) -> str:
        """COMPUTE, or the axis and the collective."""
        return self.queue[1]

    @property
    def phase(self) -> str:
        """Phase of its operation; "": none."""
        return self.of.phase if self.of else ""

    @property
    def module(self) -> str:
        """Module of its operation; "": none."""
        return self.of.module if self.of else ""


@dataclass(frozen=True)
class RankTime:
    """One rank of the pipeline in a step."""

    pp: int  # its index
    trace: int  # rank in the world whose trace it is
    intervals: list[Interval]  # by their begin
    parts: Seconds  # of the compute stream; they add up to the step's seconds
    # `parts.host` by the phase of the kernel that the compute stream waits for; without the step's first one
    host: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """A simulated step."""

    seconds: float
    ranks: list[RankTime]  # of the pipeline
    parts: Seconds  # of the mean rank

    def of_trace(self, rank: int) -> RankTime | None:
        """The first rank of the pipeline that runs the trace of `rank`; None: there is none."""
        return next((each for each in self.ranks if each.trace == rank), None)

    def host(self, phase: str) -> float:
        """Seconds in which the mean rank waits for its host in a phase, without the start of the step."""
        return sum(rank.host.get(phase, 0.0) for rank in self.ranks) / len(self.ranks)


def simulate(
    traces: Sequence[RankTrace],
    layout: Layout,
    costs: Costs,
    step: int = 2,
    *,
    copies: Mapping[int, int] = {},
) -> StepTime:
    """Run a step of the traced ranks on streams. step, copies: as in `programs`."""
    collects = gc.isenabled()
    gc.disable()  # it takes half the time to look for cycles, which tasks don't have
    try:
        world = _World(layout, costs)
        for pp, program in enumerate(programs(traces, layout, step, copies)):
            world.add(pp, program)
        world.connect()
        seconds = Run(world.tasks, costs.machine.contention).to_end()
        ranks = [world.rank_time(pp, seconds) for pp in range(layout.pp)]
        return StepTime(seconds, ranks, _mean([rank.parts for rank in ranks]))
    finally:
        if collects:
            gc.enable()


def part_of(collective: Collective) -> str:
    """Field of Seconds that a collective's time belongs to."""
    axes = collective.axis.split("+")
    if axes == ["tp"]:
        return "tensor"
    if axes == ["ep"]:
        return "experts"
    if axes == ["cp"] and collective.waits:
        return "context"
    return "pipeline" if axes == ["pp"] else "data"


@dataclass
class _Rank:
    """Streams of one rank while its tasks are made; tasks by number."""

    pp: int  # its index in the pipeline
    program: Program
    feeds: dict[int, str]  # storage -> stream of the all-gather that it is sent by
    reading: set[int]  # operations that the host issues once it has read from the compute stream
    host: float  # seconds of the host before the next task
    last: int = -1  # on the compute stream
    gate: list[int] = field(default_factory=list)  # tasks that the compute stream's next one waits for
    writers: dict[int, int] = field(default_factory=dict)  # storage -> the task that wrote it last
    # stream -> each of its all-gathers, and the task that copies its result out
    copied: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    leaving: list[int] = field(default_factory=list)  # the last copy to the host, until it is waited for
    reduced: dict[str, int] = field(default_factory=dict)  # stream -> its last reduce-scatter
    exchanged: dict[str, int] = field(default_factory=dict)  # axis -> its last collective
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)  # sent and received, by ranks


class _World:
    """Tasks of all ranks of a pipeline."""

    def __init__(self, layout: Layout, costs: Costs) -> None:
        self.layout, self.costs = layout, costs
        self.ranks: list[_Rank] = []
        self.tasks: list[Interval] = []
        self.sent: dict[tuple, int] = {}  # key of a message -> task that sends it
        self.awaited: list[tuple[tuple, int]] = []  # key of a message, task that needs it
        # pipeline rank -> its collectives over the pipeline: task, the tasks that it waits for on its rank
        self.joint: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        self.pp_of_stage = {
            stage: pp
            for pp in range(layout.pp)
            for stage in stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, pp)
        }

    def add(self, pp: int, program: Program) -> None:
        """Make the tasks of one rank of the pipeline."""
        rank = _Rank(pp, program, _feeds(program), _reading(program), self.costs.machine.host_step)
        self.ranks.append(rank)
        late: list[Pass] = []  # their messages leave with those of the next pass
        following = [run for run, _ in program.order[1:]] + [NO_PASS]
        for (run, numbers), after in zip(program.order, following, strict=True):
            rank.host += self.costs.machine.host_micro_batch * (run.kind in FORWARDS)
            first = len(self.tasks)
            for number in numbers:
                self._operation(rank, number, run)
            if received := self._received(pp, run):
                computing = (n for n in range(first, len(self.tasks)) if self.tasks[n].stream == COMPUTE)
                self.awaited += [(received, number) for number in [next(computing, -1)] if number >= 0]
            late.append(run)
            if not self._together(run, after):
                for each in late:
                    self._send(rank, each)
                late = []

    def _together(self, run: Pass, after: Pass) -> bool:
        """True for a forward and the backward paired in DualPipeV, which are one action of torch's."""
        return self.layout.schedule == "dualpipev" and (run.kind, after.kind) == ("F", "B")

    def _received(self, pp: int, run: Pass) -> tuple | None:
        """Key of the message that a pass waits for; None: there is none, or it comes from the same rank."""
        if run.kind in ("", "W"):
            return None
        sender = self.pp_of_stage.get(run.stage + (-1 if run.kind in FORWARDS else 1))
        return None if sender in (None, pp) else _message_of(run, run.stage)

    def _send(self, rank: _Rank, run: Pass) -> None:
        """Make the task of the message that a pass sends to the next stage, if that is on another rank."""
        forward, size = run.kind in FORWARDS, rank.program.message
        to = run.stage + (1 if forward else -1)
        if run.kind in ("", "W") or self.pp_of_stage.get(to, rank.pp) == rank.pp:
            return
        stride = self.layout.world // self.layout.pp
        message = Collective("send", "pp", self.layout.pp, size, stride)
        seconds = self.costs.collective(message) if size else 0.0
        name, after = f"send {'forward' if forward else 'backward'}", [rank.last] if rank.last >= 0 else []
        self.sent[_message_of(run, to)] = len(self.tasks)
        queue = (rank.pp, f"pp {name}")
        self.tasks.append(Interval(queue, seconds, after=after, name=name, part="pipeline", run=run))

    def _operation(self, rank: _Rank, number: int, run: Pass) -> None:
        """Make the task of one operation."""
        each = rank.program.step.operations[number]
        if each.collective is not None:
            message = is_message(each)
            self._message(rank, number) if message else self._collective(rank, number, each.collective, run)
            return
        if each.name in OFFLOADS:
            rank.gate += rank.leaving
            seconds, after = self.costs.compute(each), [rank.last] if rank.last >= 0 else []
            update = each.phase == UPDATE  # whose copies have a stream for each direction
            stream, part = (f"{COPIES}, {each.name}", "optimizer") if update else (COPIES, "host")
            task = Interval(
                (rank.pp, stream), seconds, self.costs.launch(each), after=after, name=each.name, part=part,
                operation=number, of=each, run=run,
            )  # fmt: skip
            placed = self._place(rank, task, each.reads)
            rank.leaving = [placed] if each.name == TO_HOST else []
            return
        stream = self._stream(rank, each)
        part = ("optimizer" if each.phase == UPDATE else "compute") if stream == COMPUTE else "data"
        seconds = self.costs.compute(each, rank.program.step.storages)
        task = Interval(
            (rank.pp, stream), seconds, self.costs.launch(each), computes=stream == COMPUTE,
            name=each.name, part=part, operation=number, of=each, run=run,
        )  # fmt: skip
        self._place(rank, task, [*each.reads, *each.writes])

    def _collective(self, rank: _Rank, number: int, collective: Collective, run: Pass) -> None:
        each = rank.program.step.operations[number]
        stream = f"{collective.axis} {collective.op}"
        task = Interval(
            (rank.pp, stream), self.costs.collective(collective), self.costs.launch(each),
            slows=not collective.waits, name=collective.op, part=part_of(collective), operation=number,
            of=each, run=run,
        )  # fmt: skip
        if collective.waits:
            task.after = [*rank.gate, rank.last] if rank.last >= 0 else [*rank.gate]
        elif collective.op == "all_gather":
            most = 2 if each.phase in FORWARDS.values() else 1
            task.after = [*rank.copied[stream].values()][-most:][:1]
        elif collective.op == "reduce_scatter" and stream in rank.reduced:
            rank.gate.append(rank.reduced[stream])
        if collective.axis in rank.exchanged:
            task.after.append(rank.exchanged[collective.axis])
        if "pp" in collective.axis.split("+"):
            self.joint[rank.pp].append((len(self.tasks), [*task.after]))
        placed = self._place(rank, task, each.reads)
        if collective.waits:
            rank.gate = [placed]
        elif collective.op == "reduce_scatter":
            rank.reduced[stream] = placed
        rank.exchanged[collective.axis] = placed

    def _stream(self, rank: _Rank, each: Operation) -> str:
        """Stream of a kernel: the compute stream, but for what fills or continues a collective's buffer."""
        if each.writes and each.writes[0] in rank.feeds and _only_copies(each, rank.program):
            return rank.feeds[each.writes[0]]
        if each.phase != UPDATE:
            for writer in (self.tasks[rank.writers[n]] for n in each.reads if n in rank.writers):
                if writer.slows and writer.name in ("reduce_scatter", "all_reduce"):
                    return writer.stream
        return COMPUTE

    def _place(self, rank: _Rank, task: Interval, storages: Sequence[int]) -> int:
        """Append a task of a rank, which waits for those that wrote `storages` on other streams."""
        writers = {rank.writers[storage] for storage in storages if storage in rank.writers}
        task.after += [writer for writer in writers if self.tasks[writer].queue != task.queue]
        if task.stream == COMPUTE:
            task.after += rank.gate
            rank.gate = []
        task.host += rank.host
        rank.host = 0.0
        task.reads = rank.last if task.operation in rank.reading else -1
        number = len(self.tasks)
        self.tasks.append(task)
        if task.stream == COMPUTE:
            rank.last = number
            for writer in writers:
                if self.tasks[writer].name == "all_gather" and self.tasks[writer].slows:
                    rank.copied[self.tasks[writer].stream].setdefault(writer, number)
        if task.of is not None:
            rank.writers |= dict.fromkeys(task.of.writes, number)
        return number

    def _message(self, rank: _Rank, number: int) -> None:
        """A message outside of passes, such as the gradients of a tied embedding; matched in their order."""
        each, trace = rank.program.step.operations[number], rank.program.trace
        collective = each.collective
        assert collective is not None and collective.peer is not None
        stride = self.layout.world // self.layout.pp
        other, sends = rank.pp + (collective.peer - trace.rank) // stride, collective.op == "send"
        ends = (rank.pp, other) if sends else (other, rank.pp)
        key = (*ends, rank.messages[ends])
        rank.messages[ends] += 1
        task = Interval(
            (rank.pp, f"pp {collective.op}"), self.costs.collective(collective) if sends else 0.0,
            after=[rank.last] if rank.last >= 0 else [],
            name=collective.op, part="pipeline", operation=number, of=each,
        )  # fmt: skip
        placed = self._place(rank, task, each.reads if sends else ())
        if sends:
            self.sent[key] = placed
        else:
            self.awaited.append((key, placed))
            rank.gate.append(placed)

    def connect(self) -> None:
        """Let tasks wait for those of other ranks: receivers for senders, all for the last in a collective
        over the pipeline.
        """
        for key, number in self.awaited:
            if key in self.sent:
                self.tasks[number].after.append(self.sent[key])
        for pp, collectives in self.joint.items():
            for count, (number, _) in enumerate(collectives):
                for other, theirs in self.joint.items():
                    if other != pp and count < len(theirs):
                        self.tasks[number].after += theirs[count][1]

    # Times #

    def rank_time(self, pp: int, seconds: float) -> RankTime:
        """Intervals and parts of one rank, after the run."""
        mine = [task for task in self.tasks if task.queue[0] == pp]
        parts: defaultdict[str, float] = defaultdict(float)
        host: defaultdict[str, float] = defaultdict(float)
        end = 0.0
        for task in mine:
            if task.stream != COMPUTE:
                continue
            for part, waited in self._gap(task, end):
                parts[part] += waited
                if part == "host" and end:
                    host[task.phase] += waited
            slowed = task.slowed or {}
            for other, lost in slowed.items():
                parts[self.tasks[other].part] += lost
            parts[task.part] += task.end - task.begin - sum(slowed.values())
            end = task.end
        last = max(mine, key=lambda task: task.end, default=None)
        if last and (late := last.end - end) > 0:
            parts[last.part] += late
            end += late
        parts["bubble"] += max(0.0, seconds - end)
        intervals = sorted(mine, key=lambda task: task.begin)
        every = Seconds(**{name: parts.get(name, 0.0) for name in PARTS})
        return RankTime(pp, self.ranks[pp].program.trace.rank, intervals, every, dict(host))

    def _gap(self, task: Interval, end: float) -> Sequence[tuple[str, float]]:
        """(Part, seconds) of the time for which the compute stream has waited before a task.

        end: of the one before.
        """
        if (gap := task.begin - end) <= 0:
            return ()
        cause = self.tasks[task.cause] if task.cause >= 0 else None
        if cause is None or cause.end < task.begin - 1e-12:
            return (("host", gap),)
        own = cause.queue[0] == task.queue[0]
        if cause.name in OFFLOADS and cause.part == "optimizer":
            return ((cause.part, gap),)
        if cause.part in ("compute", "optimizer"):
            return (("data" if own else "bubble", gap),)
        idle = min(gap, max(0.0, cause.begin - end))  # before the collective began
        first = self.tasks[cause.cause] if cause.cause >= 0 else None
        if not own or (first and first.queue[0] != task.queue[0]):
            why = "bubble"
        else:
            why = cause.part if first else "host"
        return (why, idle), (cause.part, gap - idle)


def _message_of(run: Pass, stage: int) -> tuple:
    """Key of the message that a pass of `stage` waits for. run: that pass, or the one that sends it."""
    return run.kind if run.kind in FORWARDS else "B", stage, run.micro_batch


def _feeds(program: Program) -> dict[int, str]:
    """Storages that are sent by all-gathers which the compute stream does not wait for -> their stream."""
    feeds: dict[int, str] = {}
    for each in reversed(program.step.operations):
        collective = each.collective
        if collective is not None and not collective.waits and collective.op == "all_gather":
            feeds.update(dict.fromkeys(each.reads, f"{collective.axis} {collective.op}"))
        elif each.kernels and each.writes and each.writes[0] in feeds and _only_copies(each, program):
            feeds.update(dict.fromkeys(each.reads, feeds[each.writes[0]]))
    return feeds


def _reading(program: Program) -> set[int]:
    """The first operation that runs behind each read of the host."""
    operations, waits = program.step.operations, program.step.host_waits
    following = (range(at + 1, len(operations)) for at in waits)
    return {next((n for n in numbers if runs(operations[n])), -1) for numbers in following}


def _only_copies(each: Operation, program: Program) -> bool:
    """True for a kernel that reads only shards of weights, and writes them into a buffer."""
    storages = program.step.storages
    return all(storages[number].category in (WEIGHTS, COMMUNICATION, OPTIMIZER) for number in each.reads)


def _mean(parts: Sequence[Seconds]) -> Seconds:
    """Mean of the ranks' parts; their bubble is that of the busiest rank, the rest of it `imbalance`."""
    mean = {name: sum(getattr(each, name) for each in parts) / len(parts) for name in vars(parts[0])}
    least = min(each.bubble for each in parts)
    return Seconds(**mean | {"bubble": least, "imbalance": mean["bubble"] - least})


# Passes #

#     trace of a rank ─> cut ─> before, {(kind, stage, micro-batch): operations}, after
#     orders(layout)  ─> program ─> the same passes in the order of another rank, or of more micro-batches
#
# Ranks and micro-batches that were not traced are copies: of a rank in the middle (ranks.pipeline_copies), of
# the steady micro-batch. Without torch.


MESSAGES = ("send", "receive")


@dataclass
class Cut:
    """Operations of a step, by number, that run on a GPU or between GPUs."""

    before: list[int] = field(default_factory=list)
    passes: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)  # kind, stage, micro-batch
    after: list[int] = field(default_factory=list)
    message: int = 0  # bytes that are sent from a stage to the next one; 0: nothing is sent

    def run(self, kind: str, stage: int, micro_batch: int) -> list[int]:
        """Operations of a pass; where this micro-batch has none of its kind, of the one next to it.

        A backward that was traced in two halves is both.
        """
        found = [number for k, s, number in self.passes if (k, s) == (kind, stage)]
        if found:
            nearest = min(found, key=lambda number: abs(number - micro_batch))
            return self.passes[kind, stage, nearest]
        if kind == "B":
            return self.run("I", stage, micro_batch) + self.run("W", stage, micro_batch)
        return []


def is_message(operation: Operation) -> bool:
    """True for a send or a receive."""
    return operation.collective is not None and operation.collective.op in MESSAGES


def cut(step: StepTrace, planned: Sequence[Pass]) -> Cut:
    """Cut a step into passes. planned: those of its rank, by which a backward in two halves is known.

    A forward ends with its last operation outside of autograd: what it runs backward before, is the loss's.
    The second half of a backward begins with the first gradient of a weight, or after another pass. What
    belongs to no micro-batch (hooks on gradients) belongs to the pass before it.
    """
    operations, halves = step.operations, {(p.stage, p.micro_batch) for p in planned if p.kind == "I"}
    last_forward = {  # messages between two ranks are numbered together, whatever their stages
        (each.stage, each.micro_batch): number
        for number, each in enumerate(operations)
        if each.micro_batch >= 0 and each.phase == FORWARD and runs(each) and not is_message(each)
    }
    end = _end_of_passes(step)
    found, now = Cut(), ("", -1, -1)
    for number, each in enumerate(operations):
        if not runs(each):
            continue
        if number < end and is_message(each):
            assert each.collective is not None
            found.message = max(found.message, each.collective.bytes)
            continue
        place = each.stage, each.micro_batch
        if each.phase == WITHOUT_GRADIENTS:
            now = "N", *place
        elif number < end and each.micro_batch >= 0:
            kind = "F" if number <= last_forward.get(place, -1) else "B"
            if kind == "B" and place in halves:
                within = now == ("I", *place) and not _of_weights(each, step)
                kind = "I" if within or ("I", *place) not in found.passes else "W"
            now = kind, *place
        of_pass = found.passes.setdefault(now, []) if now[0] else found.before
        (found.after if number >= end else of_pass).append(number)
    return found


def _of_weights(operation: Operation, step: StepTrace) -> bool:
    return matmul_sizes(operation) is not None and makes_weight_gradient(operation, step.storages)


def _end_of_passes(step: StepTrace) -> int:
    """Number of the first operation behind the last pass."""
    of_passes = [number for number, each in enumerate(step.operations) if each.micro_batch >= 0]
    last = of_passes[-1] + 1 if of_passes else 0
    updates = (n for n, each in enumerate(step.operations[last:], last) if each.phase == UPDATE)
    return next(updates, len(step.operations))


@dataclass
class Program:
    """A step of one rank of the pipeline."""

    trace: RankTrace  # its own, or of the rank that stands for it
    step: StepTrace
    order: list[tuple[Pass, list[int]]]  # passes with their operations; NO_PASS before and after them
    message: int  # as Cut.message


def programs(
    traces: Sequence[RankTrace], layout: Layout, step: int, copies: Mapping[int, int]
) -> list[Program]:
    """The program of every rank of the pipeline, all micro-batches included.

    traces: of several with one index in the pipeline that of the lowest rank counts. step: 1 or 2. copies:
    index in the pipeline -> that of the rank whose trace runs there, where it is another one. Raises
    ValueError for a trace that is missing.
    """
    by_pp = {trace.coordinates.get("pp", 0): trace for trace in sorted(traces, key=lambda one: -one.rank)}
    source = [copies.get(rank, rank) for rank in range(layout.pp)]
    if missing := sorted({*source} - by_pp.keys()):
        raise ValueError(f"There is no trace of pipeline rank {', '.join(map(str, missing))}.")
    cuts = {
        rank: cut(step_of(by_pp[rank], step), _traced_order(layout, by_pp[rank], rank)) for rank in {*source}
    }
    made = []
    for rank, passes in enumerate(orders(layout)):
        like = source[rank]
        trace, found = by_pp[like], cuts[like]
        stages = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
        of_like = trace.stages or stages
        without_gradients = _without_gradients(trace, found, stages)
        order = [
            (each, found.run(each.kind, of_like[stages.index(each.stage)], traced_number(trace, each)))
            for each in [*without_gradients, *passes]
        ]
        order = [(NO_PASS, found.before), *order, (NO_PASS, found.after)]
        if without_gradients:
            order.insert(1 + len(without_gradients), (NO_PASS, found.passes.get(("N", -1, -1), [])))
        made.append(Program(trace, step_of(trace, step), order, found.message))
    return made


def _without_gradients(trace: RankTrace, found: Cut, stages: Sequence[int]) -> list[Pass]:
    """The forwards of `Pipeline.forward_only` before a step's own passes, in their order."""
    traced = len({number for kind, _, number in found.passes if kind == "N" and number >= 0})
    numbers = range(traced and traced + trace.of - trace.micro_batches)
    made = [Pass("N", stage, number) for number in numbers for stage in stages]
    return sorted(made, key=lambda each: (each.stage + each.micro_batch, each.stage))


def step_of(trace: RankTrace, number: int) -> StepTrace:
    return trace.steps[min(number, len(trace.steps)) - 1]


def traced_number(trace: RankTrace, each: Pass) -> int:
    """Number of the traced micro-batch that stands for the micro-batch of a pass."""
    left_out = trace.of - trace.micro_batches
    if left_out <= 0 or trace.steady < 0 or each.micro_batch <= trace.steady:
        return each.micro_batch
    return max(trace.steady, each.micro_batch - left_out)


def _traced_order(layout: Layout, trace: RankTrace, rank: int) -> list[Pass]:
    steps = trace.micro_batches or layout.gradient_accumulation_steps
    return orders(replace(layout, gradient_accumulation_steps=steps))[rank]
