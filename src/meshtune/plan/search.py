"""Every layout of a cluster, predicted and ranked.

    workload + cluster ──> candidates ──> rules (refused) ──> memory (does not fit) ──> seconds ──> Plan

Layouts are columns of numbers until one is shown, so that tens of thousands take less than a second. Nothing
is excluded by taste: a layout that nobody would run loses by its predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshtune.layout import SCHEDULES, V_SCHEDULES, Layout
from meshtune.placement.columns import Columns, Number, at, joined, layout_at, rows
from meshtune.placement.rules import rules
from meshtune.placement.share import stage_blocks, stage_of_rank
from meshtune.plan.accounting import accounting_of
from meshtune.plan.candidates import candidates, columns_of, micro_batches, with_micro_batches
from meshtune.plan.cluster import MARGIN, Cluster
from meshtune.plan.machine import machine_of, rates
from meshtune.plan.memory import timeline as memory
from meshtune.plan.memory.stages import RANKS, Stages
from meshtune.plan.memory.timeline import Memory
from meshtune.plan.seconds.step import Seconds, step
from meshtune.plan.workload import Workload

ALIKE = 0.005  # step times as near as that to the shortest are equal to it,
SPARED = 0.05  # and what leaves so much more of a GPU's memory free is better, then what recomputes less
CHUNK = 8192  # layouts
OUTDONE = "another schedule waits as long and keeps less"


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
    ranks = outer.data_ranks
    inner = {int(n): micro_batches(workload, int(n), fixed) for n in np.unique(ranks)}
    alternatives = np.array([len(inner[n]) for n in ranks])
    # first what no micro-batch changes, counted once for all of them
    examples = outer.replace(**columns_of([inner[n][0] for n in ranks]))
    rejected, allowed = _refused(workload, outer, weights=alternatives, examples=examples, others={})
    c = with_micro_batches(rows(outer, allowed), inner)
    others = {} if "schedule" in fixed else {OUTDONE: _outdone(c)}
    later, allowed = _refused(workload, c, weights=np.ones(len(c.tp)), examples=c, others=others)
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


def _outdone(c: Columns) -> Number:
    """GPipe and looped BFS wait as long as 1F1B and interleaved 1F1B and keep more: they are for where those
    can't run.
    """
    m = c.gradient_accumulation_steps
    equal_rounds = m % np.maximum(1, np.floor(m / c.pp)) == 0
    return (c.runs("gpipe") & (m >= c.pp)) | (c.runs("loopedbfs") & equal_rounds)


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


def stages_of(workload: Workload, c: Columns) -> Stages:
    """Who has which blocks, as share.census_stages cuts them where all blocks cost the same, but the
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

    def column(name: str) -> Number:  # [rank, layout]
        values = np.array([getattr(table, name) for table in tables], dtype=float)
        return np.ascontiguousarray(values.reshape(-1, len(RANKS)).T)[:, which]

    return Stages(**{field.name: column(field.name) for field in fields(Stages)})


@lru_cache(maxsize=4096)
def _stages(blocks: int, first: float, last: float, pp: int, v_shaped: bool, virtual: int) -> Stages:
    """The first, the fullest middle and the last rank of one pipeline."""
    count = pp * virtual
    if count > blocks:  # refused elsewhere
        return Stages(blocks=(1, 1, 1), has_embedding=(1, 0, 0), has_head=(0, 0, 1), rank=(0, 0, 0))
    sizes = [len(stage) for stage in stage_blocks([1.0] * blocks, count, first=first, last=last)]
    schedule = V_SCHEDULES[0] if v_shaped else SCHEDULES[0]
    own = [stage_of_rank(schedule, pp, virtual, rank) for rank in range(pp)]
    held = [sum(sizes[stage] for stage in stages) for stages in own]
    middle = max(range(1, pp - 1), key=lambda rank: (held[rank], -rank), default=0)
    ranks = (0, middle, pp - 1)
    return Stages(
        blocks=tuple(held[rank] for rank in ranks),
        has_embedding=tuple(0 in own[rank] for rank in ranks),
        has_head=tuple(count - 1 in own[rank] for rank in ranks),
        rank=ranks,
    )


# what is left out #


def _refused(
    workload: Workload, c: Columns, *, weights: Number, examples: Columns, others: Mapping[str, Number]
) -> tuple[list[Rejected], Number]:
    """What each rule refuses, and the mask of the layouts that none refuses.

    A layout counts for the first rule that refuses it. weights: layouts that each row stands for. examples:
    for each row one of them. others: masks of what else is left out, by reason.
    """
    allowed, rejected = np.ones(len(c.tp), bool), []
    every = rules(
        workload.traits, attention=workload.attention, packing=workload.packing, compile=workload.compile
    )
    masks = ((rule.reason, rule.refuses(c)) for rule in every)
    for reason, mask in (*masks, *others.items()):
        refused = mask & allowed
        if count := int(weights[refused].sum()):
            rejected.append(Rejected(reason, count, str(layout_at(examples, int(refused.argmax())))))
            allowed &= ~refused
    return rejected, allowed


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
