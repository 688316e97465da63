"""Every layout of a cluster, predicted and ranked.

    workload + cluster ──> candidates ──> problems (refused) ──> memory (does not fit) ──> seconds ──> Plan

Layouts are columns of numbers until one is shown, so that tens of thousands take less than a second. Nothing
is excluded by taste: a layout that nobody would run loses by its predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import RECOMPUTE, SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.model.partition import stage_of_rank
from meshtune.plan.accounting import accounting_of
from meshtune.plan.cluster import MARGIN, Cluster
from meshtune.plan.machine import machine_of, rates
from meshtune.plan.memory import timeline as memory
from meshtune.plan.memory.stages import RANKS, Stages
from meshtune.plan.memory.timeline import Memory
from meshtune.plan.problems import Problem, problems
from meshtune.plan.seconds.step import Seconds, step
from meshtune.plan.work import Columns, Number
from meshtune.plan.workload import Workload

ALIKE = 0.005  # step times as near as that to the shortest are equal to it,
SPARED = 0.05  # and what leaves so much more of a GPU's memory free is better, then what recomputes less
MOST_VIRTUAL_STAGES = 8
CHUNK = 8192  # layouts
EVERY_HYBRID = 128  # GPUs, up to which all hybrids of replicas and shards are looked at


class Rejected(NamedTuple):
    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Choice:
    """One layout and what is predicted for it; seconds and bytes as floats."""

    layout: Layout
    cluster: Cluster
    seconds: Seconds
    memory: Memory
    tokens_per_second_per_gpu: float
    mfu: float

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.cluster.memory * (1 - MARGIN)

    def as_dict(self) -> dict[str, Any]:
        """The contract of `plan --json`: bytes and seconds."""
        m = self.memory
        return {
            "layout": str(self.layout),
            "world": self.layout.world,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "step_seconds": self.seconds.total,
            "mfu": self.mfu,
            "memory": {
                **{name: getattr(m, name) for name in memory.CATEGORIES},
                "peak": m.peak,
                "capacity": self.cluster.memory,
                "moment": memory.EVENTS[int(m.event)],
            },
            "time": {part.name: getattr(self.seconds, part.name) for part in fields(Seconds)}
            | {"total": self.seconds.total},
        }


@dataclass(frozen=True)
class Plan:
    """What a search found. columns, seconds, memory: of the layouts that fit, best first. near: those that
    run but do not fit, the smallest first. fixed: as in `search`.
    """

    workload: Workload
    cluster: Cluster
    considered: int
    rejected: tuple[Rejected, ...]
    columns: Columns
    seconds: Seconds
    memory: Memory
    near: Columns
    fixed: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.columns.tp)

    def best(self, most: int = 10) -> list[Choice]:
        """The best layouts that fit, best first."""
        return [self.choice(place) for place in range(min(most, len(self)))]

    def choice(self, place: int) -> Choice:
        seconds = at(self.seconds, place)
        return choice_of(
            self.workload, self.cluster, layout_at(self.columns, place), seconds, at(self.memory, place)
        )

    def nearest(self, most: int = 3) -> list[Choice]:
        """Layouts that need the least more than there is."""
        places = range(min(most, len(self.near.tp)))
        return [explained(self.workload, self.cluster, layout_at(self.near, place)) for place in places]

    def pareto(self) -> list[int]:
        """Places of the layouts that no other beats in both speed and memory, fastest first."""
        order = np.argsort(self.seconds.total, kind="stable")
        held = self.memory.peak[order]
        before = np.minimum.accumulate(np.concatenate([[np.inf], held]))[:-1]
        return [int(place) for place in order[held < before]]


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    fixed: Mapping[str, Any] | None = None,
    where: Callable[[Columns], Number] | None = None,
    margin: float = MARGIN,
) -> Plan:
    """All layouts of the whole cluster, predicted; those that fit ranked by step time.

    fixed: fields of Layout that are given. where: which axes to consider; None: all. Raises UserError where
    no layout makes the global batch.
    """
    fixed = fixed or {}
    outer = candidates(workload, cluster, fixed)
    if where is not None:
        outer = rows(outer, where(outer))
    inner = {ranks: _micro_batches(workload, int(ranks), fixed) for ranks in np.unique(outer.data_ranks)}
    alternatives = np.array([len(inner[ranks]) for ranks in outer.data_ranks])
    # first what no micro-batch changes, counted once for all of them
    rejected, allowed = _refused(workload, outer, alternatives, _shown(outer, inner))
    c = _with_micro_batches(rows(outer, allowed), inner)
    others = () if "schedule" in fixed else (_outdone(c),)
    later, allowed = _refused(workload, c, np.ones(len(c.tp)), c, others)
    rejected, c = rejected + later, rows(c, allowed)
    c = rows(c, np.argsort(c.pp > 1, kind="stable"))
    held = joined([peak(workload, cluster, each) for each in chunks(c)])
    room = cluster.memory * (1 - margin)
    fits = held.peak <= room
    rejected += _too_large(workload, cluster, c, held, fits)
    tight = np.flatnonzero(~fits)
    tight = tight[np.argsort(held.peak[tight], kind="stable")][:8]
    fitting = rows(c, fits)
    seconds = joined([times(workload, cluster, each) for each in chunks(fitting)])
    order = _ranked(seconds.total, held.peak[fits] / cluster.memory, fitting.recompute)
    considered = int(alternatives.sum())
    return Plan(
        workload, cluster, considered, tuple(rejected), rows(fitting, order), rows(seconds, order),
        rows(rows(held, fits), order), rows(c, tight), fixed,
    )  # fmt: skip


def _ranked(seconds: Number, held: Number, recompute: Number) -> Number:
    """Places by step time, but first the best of those that are as quick as the quickest. held: the peak as a
    share of a GPU's memory.
    """
    order = np.lexsort((held, seconds))
    if len(order):
        alike = order[seconds[order] <= seconds[order[0]] * math.exp(ALIKE)]
        best = alike[np.lexsort((held[alike], recompute[alike], np.floor(held[alike] / SPARED)))[0]]
        order = np.concatenate([[best], order[order != best]])
    return order


def explained(workload: Workload, cluster: Cluster, layout: Layout) -> Choice:
    """What is predicted for one layout, whether it fits or not."""
    c = Columns.of([layout])
    seconds, held = times(workload, cluster, c), peak(workload, cluster, c)
    return choice_of(workload, cluster, layout, at(seconds, 0), at(held, 0))


def choice_of(workload: Workload, cluster: Cluster, layout: Layout, seconds: Seconds, held: Memory) -> Choice:
    speed = workload.tokens / seconds.total / layout.world
    rate = rates(cluster, workload.precision)["flops"]
    return Choice(layout, cluster, seconds, held, speed, speed * workload.flops_per_token / rate)


def _outdone(c: Columns) -> Problem:
    """GPipe and looped BFS wait as long as 1F1B and interleaved 1F1B and keep more: they are for where those
    can't run.
    """
    m = c.gradient_accumulation_steps
    equal_rounds = m % np.maximum(1, np.floor(m / c.pp)) == 0
    beaten = (c.runs("gpipe") & (m >= c.pp)) | (c.runs("loopedbfs") & equal_rounds)
    return Problem("another schedule waits as long and keeps less", beaten)


# predictions #


def times(workload: Workload, cluster: Cluster, c: Columns) -> Seconds:
    machine = machine_of(workload, cluster)
    found = step(workload.work, c, machine, workload.seq_len, workload.document_tokens)
    return Seconds(*(np.broadcast_to(getattr(found, f.name), np.shape(c.tp)) for f in fields(found)))


def peak(workload: Workload, cluster: Cluster, c: Columns) -> Memory:
    stages = stages_of(workload, c)
    if np.all(c.pp == 1):
        stages = rows(stages, slice(0, 1))  # one rank is like the other
    return memory.peak(workload.work, c, accounting_of(workload, cluster), workload.seq_len, stages)


def chunks(c: Columns) -> Iterator[Columns]:
    """These layouts, so many at a time that the formulas' columns stay in the processor's cache."""
    for start in range(0, max(1, len(c.tp)), CHUNK):
        yield rows(c, slice(start, start + CHUNK))


def joined(tables: Sequence[Any]) -> Any:
    """The rows of all, one after the other."""
    names = [f.name for f in fields(tables[0])]
    return type(tables[0])(*(np.concatenate([getattr(each, name) for each in tables]) for name in names))


def stages_of(workload: Workload, c: Columns) -> Stages:
    """Who has which blocks, as partition.census_stages cuts them where all blocks cost the same, but the
    first one no gradients of inputs that it does not need.
    """
    w, blocks = workload.work, int(workload.work.blocks)
    lacking = sum(2 * m.rows * m.cols * m.count * (1 - m.input_gradient) for m in w.matrices) * blocks
    block = workload.block_flops() + lacking / blocks
    first, last = -float(lacking / block), float(workload.head_flops / block)
    # as one number, which is quicker to tell apart
    kinds, which = np.unique((c.pp * 64 + c.virtual_stages) * 2 + c.runs(*V_SCHEDULES), return_inverse=True)
    tables = [
        _stages(blocks, first, last, int(kind // 128), bool(kind % 2), int(kind // 2 % 64)) for kind in kinds
    ]
    columns = np.array(tables, dtype=float).reshape(-1, len(fields(Stages)), len(RANKS))
    return Stages(*columns.transpose(1, 2, 0)[..., which])  # [field, rank, layout]


@lru_cache(maxsize=4096)
def _stages(
    blocks: int, first: float, last: float, pp: int, v_shaped: bool, virtual: int
) -> tuple[tuple[float, ...], ...]:
    """The fields of Stages for the first, the fullest middle and the last rank."""
    count = pp * virtual
    if count > blocks:  # refused elsewhere
        return ((1.0,) * 3, (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0,) * 3)
    sizes = even_stages(blocks, count, last, first)
    schedule = V_SCHEDULES[0] if v_shaped else SCHEDULES[0]
    own = [stage_of_rank(schedule, pp, virtual, rank) for rank in range(pp)]
    held = [sum(sizes[stage] for stage in stages) for stages in own]
    middle = max(range(1, pp - 1), key=lambda rank: (held[rank], -rank), default=0)
    ranks = (0, middle, pp - 1)
    return (
        tuple(float(held[rank]) for rank in ranks),
        tuple(float(0 in own[rank]) for rank in ranks),
        tuple(float(count - 1 in own[rank]) for rank in ranks),
        tuple(float(rank) for rank in ranks),
    )


def even_stages(blocks: int, stages: int, last: float, first: float = 0.0) -> list[int]:
    """`partition.stage_blocks` for blocks that cost 1 each: how many each stage has. last: what the last one
    costs beside its blocks; first: the same of the first one, between -1 and 0.
    """
    if stages == 1:
        return [blocks]

    def cut(at_last: int) -> tuple[int, int, int]:
        """Blocks of the first stage, blocks of the others but the last, how many of these have one more."""
        each, more = divmod(blocks - at_last, stages - 1)
        at_first = each + (more > 0 and (first < 0 or stages == 2))
        return at_first, each, more - (at_first > each)

    def cost(at_last: int) -> tuple[float, float]:
        at_first, each, more = cut(at_last)
        inner, at_ends = stages - 2, (at_last + last, at_first + first)
        largest = max(*at_ends, (each + (more > 0)) * (inner > 0))
        return largest, sum([more * (each + 1) ** 2, (inner - more) * each**2, *(x * x for x in at_ends)])

    at_last = min(range(blocks - stages + 1, 0, -1), key=cost)
    at_first, each, more = cut(at_last)
    return [at_first, *[each] * (stages - 2 - more), *[each + 1] * more, at_last]


# candidates #


def candidates(workload: Workload, cluster: Cluster, fixed: Mapping[str, Any]) -> Columns:
    """All ways to use the cluster's ranks that make the global batch, as columns, with one sequence in a
    micro-batch and nothing recomputed. Raises UserError where there is none.

    Hybrids of replicas and shards: of a larger cluster those with shards over all data ranks, over those
    inside a node, or, without a pipeline, over doublings of these.
    """
    size, gpus = workload.global_batch_size, cluster.gpus
    data_ranks = {n for n in divisors(size) if _micro_batches(workload, n, fixed)}
    found = list(_axes(cluster, data_ranks, int(workload.work.blocks), fixed))
    if not found:
        raise UserError(_no_batch(workload, cluster, fixed))
    axes = np.ascontiguousarray(np.array(found, dtype=float).T)
    shared = [np.ones(len(found)), np.full(len(found), float(size * gpus)), np.zeros(len(found))]
    return Columns(*[*axes, *shared])


def _with_micro_batches(c: Columns, inner: Mapping[float, Sequence[tuple[int, int, int]]]) -> Columns:
    """Each of these with each of the micro-batches, accumulations and recomputations of its data ranks."""
    found = [rows(c, slice(0, 0))]
    for ranks, pairs in inner.items():
        own = rows(c, c.data_ranks == ranks)
        micro, accumulation, recompute = np.tile(np.array(pairs, dtype=float).T, len(own.tp))
        repeated = {f.name: np.repeat(getattr(own, f.name), len(pairs)) for f in fields(own)}
        repeated |= {
            "micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "recompute": recompute
        }  # fmt: skip
        found.append(Columns(**repeated))
    return joined(found)


def _micro_batches(workload: Workload, ranks: int, fixed: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(micro-batch size, accumulation steps, index of the recomputation) that make a data rank's sequences.

    Recomputing attention alone saves nothing but 4 bytes a head where scores are never written out.
    """
    each, rest = divmod(workload.global_batch_size, ranks)
    if rest:
        return []
    micro, accumulation = fixed.get("micro_batch_size"), fixed.get("gradient_accumulation_steps")
    modes = [fixed["recompute"]] if "recompute" in fixed else ("none", "selective", "full")
    return [
        (size, each // size, RECOMPUTE.index(mode))
        for size in divisors(each)
        if micro in (None, size) and accumulation in (None, each // size)
        for mode in modes
    ]


def _shown(c: Columns, inner: Mapping[float, Sequence[tuple[int, int, int]]]) -> Columns:
    """Each of these with the first of its micro-batches."""
    first = np.array([inner[ranks][0] for ranks in c.data_ranks], dtype=float).reshape(-1, 3)
    micro, accumulation, recompute = first.T
    return replace(
        c, micro_batch_size=micro, gradient_accumulation_steps=accumulation, recompute=recompute
    )  # fmt: skip


def _refused(
    workload: Workload, c: Columns, weights: Number, shown: Columns, others: Sequence[Problem] = ()
) -> tuple[list[Rejected], Number]:
    """(what each rule refuses, which layouts none does). weights: layouts that each row stands for, of which
    `shown` has one. A layout counts for the first rule that refuses it.
    """
    allowed, found = np.ones(len(c.tp), bool), []
    rules = problems(
        workload.traits, c, attention=workload.attention, packing=workload.packing, compile=workload.compile
    )
    for problem in (*rules, *others):
        where = problem.where & allowed
        if count := int(weights[where].sum()):
            found.append(Rejected(problem.reason, count, str(layout_at(shown, int(where.argmax())))))
            allowed &= ~where
    return found, allowed


def _axes(
    cluster: Cluster, data_ranks: Collection[int], blocks: int, fixed: Mapping[str, Any]
) -> Iterator[tuple[float, ...]]:
    """(dp_replicate, dp_shard, zero, cp, ulysses, tp, sp, pp, schedule, virtual stages)."""

    gpus = cluster.gpus

    def options(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return [fixed[name]] if name in fixed else values

    for tp in options("tp", divisors(gpus)):
        for cp in options("cp", divisors(gpus // tp) if gpus % tp == 0 else ()):
            for pp in options("pp", [n for n in divisors(gpus // (tp * cp)) if n <= blocks]):
                data, rest = divmod(gpus, tp * cp * pp)
                if rest or data not in data_ranks:
                    continue
                local = math.gcd(data, max(1, cluster.node // (tp * cp)))
                given = fixed.get("dp_replicate", data)
                doubled = (local * 2**n for n in range(1, 12 if pp == 1 else 1))
                few = sorted({1, local, data, max(1, data // given), *(n for n in doubled if data % n == 0)})
                shardings = [
                    (data // shards, shards, zero)
                    for shards in options("dp_shard", divisors(data) if gpus <= EVERY_HYBRID else few)
                    if data % shards == 0
                    for zero in options("zero", (1, 2, 3) if shards > 1 else (0,))
                    if (zero == 0) == (shards == 1)
                    and data // shards == fixed.get("dp_replicate", data // shards)
                ]
                methods = options("cp_method", ("allgather", "ulysses")) if cp > 1 else ("allgather",)
                # without sp as much is sent, and more is kept
                sequences = options("sp", (True,)) if tp > 1 else (False,)
                for replicate, shards, zero in shardings:
                    for method in methods:
                        for sequence in sequences:
                            for schedule, virtual in _schedules(pp, blocks, fixed):
                                yield (
                                    replicate, shards, zero, cp, method == "ulysses", tp, sequence, pp,
                                    SCHEDULES.index(schedule), virtual,
                                )  # fmt: skip


def _schedules(pp: int, blocks: int, fixed: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(schedule, stages a rank)."""
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in [fixed["schedule"]] if "schedule" in fixed else SCHEDULES:
        if schedule in V_SCHEDULES:
            yield schedule, 2
            continue
        least = 2 if schedule in ("interleaved1f1b", "loopedbfs") else 1  # else it is 1f1b, or gpipe
        most = min(MOST_VIRTUAL_STAGES, blocks // pp) if schedule in VIRTUAL_SCHEDULES else 1
        own = [2**n for n in range(4) if least <= 2**n <= max(most, least)]
        for virtual in [fixed["virtual_stages"]] if "virtual_stages" in fixed else own:
            if virtual == 1 or schedule in VIRTUAL_SCHEDULES:
                yield schedule, virtual


@lru_cache(maxsize=1024)
def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _no_batch(workload: Workload, cluster: Cluster, fixed: Mapping[str, Any]) -> str:
    """Why there is no candidate, and the nearest global batch that has one."""
    size, gpus, blocks = workload.global_batch_size, cluster.gpus, int(workload.work.blocks)
    usual = {f.name: f.default for f in fields(Layout)}
    given = ", ".join(f"{name} {value}" for name, value in fixed.items() if value != usual[name])
    layouts = f"No layout of {gpus} GPU{'s' * (gpus > 1)}" + f" with {given}" * bool(given)
    known = [fixed.get(name) for name in ("micro_batch_size", "gradient_accumulation_steps")]
    unit = math.prod(each or 1 for each in known)
    grains = [ranks * unit for ranks in divisors(gpus)]
    near = {grain * (1 if all(known) else max(1, round(size / grain))) for grain in grains} - {size}
    for other in sorted(near, key=lambda n: (abs(n - size), n)):
        sized = workload.of_batch(other)
        data_ranks = {n for n in divisors(other) if _micro_batches(sized, n, fixed)}
        if any(True for _ in _axes(cluster, data_ranks, blocks, fixed)):
            return (
                f"{layouts} makes a global batch of {size} sequences; try train.global_batch_size={other}, "
                "or another number of GPUs."
            )
    least = math.prod(fixed.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    return (
        f"{layouts} uses all of them, whatever the global batch: what is fixed takes {least} or a multiple "
        "of that; change the number of GPUs, or leave more of the layout auto."
    )


# columns and rows #


def rows(table: Any, which: Any) -> Any:
    """These rows of a dataclass of columns."""
    return type(table)(**{f.name: getattr(table, f.name)[which] for f in fields(table)})


def at(table: Any, place: int) -> Any:
    """One row, as floats."""
    return type(table)(**{f.name: float(getattr(table, f.name)[place]) for f in fields(table)})


def layout_at(c: Columns, place: int) -> Layout:
    one = at(c, place)
    schedule = SCHEDULES[int(one.schedule)] if one.pp > 1 else "1f1b"
    return Layout(
        dp_replicate=int(one.dp_replicate), dp_shard=int(one.dp_shard), zero=int(one.zero), cp=int(one.cp),
        cp_method="ulysses" if one.ulysses else "allgather", tp=int(one.tp), sp=bool(one.sp), pp=int(one.pp),
        schedule=schedule, virtual_stages=1 if schedule in V_SCHEDULES else int(one.virtual_stages),
        micro_batch_size=int(one.micro_batch_size),
        gradient_accumulation_steps=int(one.gradient_accumulation_steps),
        recompute=RECOMPUTE[int(one.recompute)],
    )  # fmt: skip


def _too_large(
    workload: Workload, cluster: Cluster, c: Columns, held: Memory, fits: Number
) -> Iterator[Rejected]:
    """Layouts that don't fit, by what is largest in them."""
    parts = np.stack([np.broadcast_to(getattr(held, name), fits.shape) for name in memory.CATEGORIES])
    largest = parts.argmax(0) if parts.size else np.zeros(0)
    for index, name in enumerate(memory.CATEGORIES):
        where = ~fits & (largest == index)
        if count := int(where.sum()):
            least = np.flatnonzero(where)[held.peak[where].argmin()]
            reason = f"does not fit in {cluster.memory / 2**30:.1f} GiB, most of it {name}"
            yield Rejected(reason, count, str(layout_at(c, int(least))))
