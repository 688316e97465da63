"""Every layout of a cluster, predicted and ranked.

    workload + cluster ──> candidates ──> rules (refused) ──> memory (does not fit) ──> seconds ──> Plan

Layouts are columns of numbers until one is shown, so that tens of thousands take less than a second. Nothing
is excluded by taste: a layout that nobody would run loses by its predicted time. Only uneven degrees of tp
and cp (`uneven_degrees`) rank after all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import SCHEDULES, V_SCHEDULES, Layout
from meshtune.notebook import Notebook
from meshtune.placement.columns import Columns, Number, at, joined, layout_at, rows
from meshtune.placement.rules import UNCOMPILED, uncompiled
from meshtune.placement.share import stage_blocks, stage_of_rank
from meshtune.plan.accounting import Accounting, accounting_of
from meshtune.plan.accuracy import Accuracy, accuracy, band_of
from meshtune.plan.candidates import (
    candidates,
    columns_of,
    micro_batches,
    uneven_degrees,
    with_fewest_blocks,
    with_micro_batches,
    with_regathering,
)
from meshtune.plan.cluster import Cluster
from meshtune.plan.machine import machine_of, peak_flops
from meshtune.plan.memory import timeline
from meshtune.plan.memory.stages import RANKS, Stages, interleaved_share
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.timeline import Liveness, Memory, in_host_memory
from meshtune.plan.programs import MESHTUNE, Tool
from meshtune.plan.seconds.step import PARTS, TIE, Seconds, StepTime
from meshtune.plan.workload import Workload
from meshtune.units import human

PEAK_TIE = 0.01  # share of a GPU's memory by which peaks may differ and count as equal
Prediction = TypeVar("Prediction", Seconds, Memory)
CHUNK = 8192  # layouts that are predicted at a time
OUTDONE_BY = {"gpipe": "1f1b", "loopedbfs": "interleaved1f1b"}
OUTDONE = "GPipe or looped BFS, where (interleaved) 1F1B has the same bubble and stores fewer activations"


class Rejected(NamedTuple):
    """Layouts that one reason rules out."""

    reason: str  # one clause, a final full stop or none
    count: int  # of layouts, each under its first reason
    example: str  # a layout string


@dataclass(frozen=True, repr=False)
class Choice(Notebook):
    """One layout and what is predicted for it; seconds and bytes as floats."""

    layout: Layout
    cluster: Cluster
    seconds: Seconds
    memory: Memory
    tokens_per_second_per_gpu: float
    mfu: float  # model FLOPs, without recomputation, as a share of the precision's dense peak
    stack: str = "meshtune"  # of stacks.toml, that predicted it
    tool: Tool = MESHTUNE  # that runs it
    uncompiled: str = ""  # a sentence on why the blocks are not compiled, though train.compile leaves it open
    attention: str = ""  # a sentence on the version of FlashAttention that is predicted
    offload: bool = False  # the optimizer's states are in host memory
    objective: str = "sft"  # as in Workload
    reference: float = 0.0  # seconds in which a reference model reads a global batch; 0: there is none

    @property
    def summary_line(self) -> str:
        cluster = self.cluster
        speed = f"{self.tokens_per_second_per_gpu:,.0f} {cluster.speed_unit}, " if cluster.timed else ""
        peak = f"{human(self.memory.peak)} of {human(cluster.memory)}"
        return f"{self.layout} on {cluster.title}: {speed}{peak}"

    def decided(self, workload: Workload) -> Workload:
        """The workload with train.compile as it is for this layout."""
        return workload.under(self.cluster.gpu, self.layout)

    @property
    def accuracy(self) -> Accuracy:
        """Error bars of time and memory."""
        return accuracy_of(self.stack, self.cluster, band_of(self.layout, self.cluster.node, self.mfu))

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.cluster.usable_memory

    @property
    def in_host_memory(self) -> str:
        """A sentence on the host memory that it needs for what it offloads; "" for none."""
        return in_host_memory(self.memory.host, self.layout, self.cluster, states=self.offload)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what can't be seen in the layout; each may be empty."""
        return self.in_host_memory, self.uncompiled, self.attention

    @property
    def safe(self) -> bool:
        """Whether the peak with its error bar is in the GPU's memory."""
        return self.memory.peak <= safe_peak(self.stack, self.cluster)

    def as_dict(self) -> dict[str, Any]:
        """The contract of `plan --json`: bytes and seconds; times are None unless the cluster is `timed`."""
        timed = self.cluster.timed
        time = {part: getattr(self.seconds, part) for part in PARTS} | {"total": self.seconds.total}
        return {
            "layout": str(self.layout),
            "objective": self.objective,
            "tool": self.tool.name,
            "stack": self.stack,
            "world": self.layout.world,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu if timed else None,
            "step_seconds": self.seconds.total if timed else None,
            "mfu": self.mfu if timed else None,
            "memory": self.memory.as_dict() | {"capacity": self.cluster.memory, "safe": self.safe},
            "time": time if timed else None,
            "error": self.accuracy.as_dict(),
        }


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of a search; its length is the number of layouts that fit, possibly 0."""

    workload: Workload
    cluster: Cluster
    considered: int  # number of layouts, with those rejected
    rejected: tuple[Rejected, ...]
    columns: Columns  # layouts that fit, best first
    seconds: Seconds  # columns, one row for each row of `columns`
    memory: Memory  # columns, one row for each row of `columns`
    near: Columns  # up to 8 layouts that run but do not fit, the smallest first
    fixed: Mapping[str, Any]  # as in `search`

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
        """Layouts that run but do not fit, least memory first; at most 8."""
        places = range(min(most, len(self.near.tp)))
        return [explained(self.workload, self.cluster, layout_at(self.near, place)) for place in places]

    @property
    def fixed_of_batches(self) -> Mapping[str, Any]:
        """`fixed` for other global batches: without the accumulation, which follows from the batch."""
        return {field: value for field, value in self.fixed.items() if field != "gradient_accumulation_steps"}

    @cached_property
    def safe(self) -> Number:
        """Mask of the layouts whose peak with its error bar is in the GPU's memory."""
        return self.memory.peak <= safe_peaks(self.workload, self.cluster, self.columns)

    @cached_property
    def reference(self) -> Number:
        """Seconds in which a reference model reads a global batch under each layout; zeros without one."""
        if not self.workload.reads_reference:
            return 0.0 * self.seconds.total
        forward = partial(times, self.workload, self.cluster, gradients=False)
        return joined([forward(chunk) for chunk in chunks(self.columns)]).total

    @cached_property
    def uneven(self) -> Number:
        """Mask of the layouts that rank last for their degrees of tp or cp: see `uneven_degrees`."""
        return uneven_degrees(self.workload, self.cluster, self.columns, self.fixed)

    def by_memory(self) -> list[int]:
        """Places by peak memory, those with uneven degrees last; but first the fastest of those whose peak is
        at most PEAK_TIE above the lowest.
        """
        peaks, seconds = self.memory.peak, self.seconds.total
        order = np.lexsort((seconds, peaks, self.uneven))
        alike = order[self.uneven[order] == self.uneven[order[:1]]]
        ties = alike[peaks[alike] <= peaks[alike[:1]] + PEAK_TIE * self.cluster.memory]
        best = ties[seconds[ties].argsort(kind="stable")][:1]
        return [*best.tolist(), *order[~np.isin(order, best)].tolist()]

    def pareto(self) -> list[int]:
        """Places of the layouts that no other beats in both speed and memory, fastest first.

        Without those of uneven degrees, unless there are no others.
        """
        places = np.flatnonzero(self.uneven == self.uneven[:1])
        order = places[np.argsort(self.seconds.total[places], kind="stable")]
        peaks = self.memory.peak[order]
        before = np.minimum.accumulate(np.concatenate([[np.inf], peaks]))[:-1]
        return [int(place) for place in order[peaks < before]]


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    fixed: Mapping[str, Any] | None = None,
    where: Callable[[Columns], Number] | None = None,
) -> Plan:
    """All layouts of the whole cluster, predicted; those that fit ranked by step time (`ranking.ranked`).

    fixed: fields of Layout that are given; None: none. where: returns a mask of the layouts to consider, from
    all columns but micro-batch size, accumulation and recomputation; None: all. Raises UserError where no
    layout makes the global batch; if none fits, the Plan is empty.
    """
    fixed, room = fixed or {}, cluster.usable_memory
    layouts, memory, rejected, considered = peaks(workload, cluster, fixed, where)
    fits = memory.peak <= room
    rejected += _too_large(room, layouts, memory, fits)
    tight = np.flatnonzero(~fits)
    tight = tight[np.argsort(memory.peak[tight], kind="stable")][:8]
    fitting, held = rows(layouts, fits), rows(memory, fits)
    seconds = joined([times(workload, cluster, chunk) for chunk in chunks(fitting)])
    if "recompute_blocks" not in fixed:
        fewer = with_fewest_blocks(
            fitting, seconds.total, held.peak, workload.work.blocks, room,
            total=lambda layouts: times(workload, cluster, layouts).total,
            peak=lambda layouts: peak(workload, cluster, layouts).peak, gain=TIE,
        )  # fmt: skip
        fewer = rows(fewer, _allowed(workload, fewer))
        fitting, considered = joined([fitting, fewer]), considered + len(fewer.tp)
        seconds = joined([seconds, times(workload, cluster, fewer)])
        held = joined([held, peak(workload, cluster, fewer)])
    uneven = uneven_degrees(workload, cluster, fitting, fixed)
    unsafe = held.peak > safe_peaks(workload, cluster, fitting)
    order = ranked(seconds.total, held.peak / cluster.memory, fitting.recompute, uneven, unsafe, tie=TIE)
    return Plan(
        workload, cluster, considered, tuple(rejected), rows(fitting, order), rows(seconds, order),
        rows(held, order), rows(layouts, tight), fixed,
    )  # fmt: skip


def best_fitting(
    workload: Workload, cluster: Cluster, fixed: Mapping[str, Any] | None = None
) -> Choice | None:
    """The best layout that fits; None if none does, no layout makes the global batch or nodes are not full.

    fixed: as in `search`.
    """
    try:
        plan = search(workload, cluster.of_size(cluster.gpus), fixed=fixed)
    except UserError:
        return None
    return plan.choice(0) if len(plan) else None


def _by_memory(workload: Workload, cluster: Cluster, layouts: Columns) -> tuple[Columns, Memory]:
    """(the layouts, those without a pipeline first, which are quicker to predict; their peaks)."""
    layouts = rows(layouts, np.argsort(layouts.pp > 1, kind="stable"))
    return layouts, joined([peak(workload, cluster, chunk) for chunk in chunks(layouts)])


def _regathering(workload: Workload, too_large: Columns, fixed: Mapping[str, Any]) -> Columns:
    """Layouts that do not fit, with sp_regather where that changes them and a run can have it.

    It saves memory and costs time, so a layout that fits does not need it. None where it is fixed.
    """
    added = with_regathering(too_large)
    return rows(added, _allowed(workload, added) & ("sp_regather" not in fixed))


def explained(workload: Workload, cluster: Cluster, layout: Layout) -> Choice:
    """The prediction for one layout, whether it fits, and the model can be trained under it, or not."""
    layouts = Columns.of([layout])
    seconds, memory = times(workload, cluster, layouts), peak(workload, cluster, layouts)
    return choice_of(workload, cluster, layout, at(seconds, 0), at(memory, 0))


def choice_of(
    workload: Workload, cluster: Cluster, layout: Layout, seconds: Seconds, memory: Memory
) -> Choice:
    """The layout with its speed and MFU; seconds and memory are its prediction, as floats."""
    of_device = {"processor": cluster.gpu.processor, "tiled": workload.mlp_tile is not None}
    why = uncompiled(workload.compile, workload.traits, layout, **of_device)
    workload = workload.under(cluster.gpu, layout)
    speed = workload.tokens / seconds.total / layout.world
    forward = workload.reads_reference and times(workload, cluster, Columns.of([layout]), gradients=False)
    rate = peak_flops(cluster.gpu, workload.precision)
    mfu = speed * workload.flops_per_token / rate
    return Choice(
        layout,
        cluster,
        seconds,
        memory,
        speed,
        mfu,
        workload.stack,
        workload.tool,
        why and UNCOMPILED.format(why),
        workload.attention_note(cluster.gpu),
        workload.offload != "none",
        workload.objective,
        float(forward.total[0]) if forward else 0.0,
    )


def peaks(
    workload: Workload,
    cluster: Cluster,
    fixed: Mapping[str, Any],
    where: Callable[[Columns], Number] | None = None,
) -> tuple[Columns, Memory, list[Rejected], int]:
    """(layouts that can run, their peaks, those refused, number of both). Arguments, errors: as `search`."""
    outer = candidates(workload, cluster, fixed)
    if where is not None:
        outer = rows(outer, where(outer))
    ranks = outer.data_ranks
    inner = {int(n): micro_batches(workload, int(n), fixed) for n in np.unique(ranks)}
    alternatives = np.array([len(inner[n]) for n in ranks])
    # first what no micro-batch changes, counted once for all of them
    examples = outer.replace(**columns_of([inner[n][0] for n in ranks]))
    rejected, allowed = _refused(workload, outer, weights=alternatives, examples=examples, others={})
    layouts = with_micro_batches(rows(outer, allowed), inner)
    others = {} if "schedule" in fixed else {OUTDONE: outdone(layouts)}
    later, allowed = _refused(
        workload, layouts, weights=np.ones(len(layouts.tp)), examples=layouts, others=others
    )
    layouts, memory = _by_memory(workload, cluster, rows(layouts, allowed))
    regathering = _regathering(workload, rows(layouts, memory.peak > cluster.usable_memory), fixed)
    considered = int(alternatives.sum()) + len(regathering.tp)
    if len(regathering.tp):
        regathering, less = _by_memory(workload, cluster, regathering)
        layouts, memory = joined([layouts, regathering]), joined([memory, less])
    return layouts, memory, rejected + later, considered


def outdone(layouts: Columns) -> Number:
    """True where 1F1B has GPipe's bubble, or interleaved 1F1B looped BFS's, and both save fewer activations.

    GPipe and looped BFS are left to layouts that those can't run.
    """
    steps = layouts.gradient_accumulation_steps
    equal_rounds = steps % np.maximum(1, np.floor(steps / layouts.pp)) == 0
    return (layouts.runs("gpipe") & (steps >= layouts.pp)) | (layouts.runs("loopedbfs") & equal_rounds)


# predictions #


def times(workload: Workload, cluster: Cluster, layouts: Columns, *, gradients: bool = True) -> Seconds:
    """Predicted seconds of a step, every part as an array with one element per layout.

    gradients: False: of one forward over its documents that saves nothing.
    """
    if workload.compile == "auto":
        return _decided(partial(times, gradients=gradients), workload, cluster, layouts)
    machine = machine_of(workload, cluster)
    time = StepTime(workload.work, layouts, machine, workload.seq_len, workload.document_tokens)
    found = time.seconds if gradients else time.without_gradients
    return Seconds(*(np.broadcast_to(getattr(found, f.name), np.shape(layouts.tp)) for f in fields(found)))


def peak(workload: Workload, cluster: Cluster, layouts: Columns) -> Memory:
    """Predicted memory of the fullest rank of each layout, with the accounting of the workload's stack."""
    if workload.compile == "auto":
        return _decided(peak, workload, cluster, layouts)
    accounting = accounting_of(workload, cluster)
    stages = ranks_of(workload, accounting, layouts)
    return timeline.peak(workload.work, layouts, accounting, workload.seq_len, stages)


def _decided(
    predict: Callable[[Workload, Cluster, Columns], Prediction],
    workload: Workload,
    cluster: Cluster,
    layouts: Columns,
) -> Prediction:
    """Predict the layouts whose blocks are compiled, and the others, each with their stack."""
    compiled = workload.compiles(cluster.gpu, layouts)
    both = (workload.compiled(), compiled), (workload.uncompiled(), ~compiled)
    parts = [(predict(one, cluster, rows(layouts, mask)), mask) for one, mask in both if np.any(mask)]
    if not parts:
        return predict(workload.uncompiled(), cluster, layouts)
    order = np.concatenate([np.flatnonzero(mask) for _, mask in parts])
    return rows(joined([found for found, _ in parts]), np.argsort(order))


def peaks_of_ranks(workload: Workload, cluster: Cluster, layout: Layout) -> dict[int, Liveness]:
    """Memory of each pipeline rank that `peak` compares, by its index in the pipeline."""
    workload = workload.under(cluster.gpu, layout)
    layouts, accounting = Columns.of([layout]), accounting_of(workload, cluster)
    stages = ranks_of(workload, accounting, layouts)
    alone = [rows(stages, slice(place, place + 1)) for place in range(len(stages.rank))]
    steps = [Step(workload.work, layouts, accounting, workload.seq_len, rank) for rank in alone]
    return {int(step.stages.rank[0, 0]): Liveness(step) for step in steps}


def ranks_of(workload: Workload, accounting: Accounting, layouts: Columns) -> Stages:
    """Blocks of the pipeline ranks whose memory is compared, as the workload's tool cuts them.

    One entry where no layout has a pipeline: there one rank is like the other.
    """
    if workload.tool is MESHTUNE:
        stages = stages_of(workload, layouts)
    else:
        stages = Stages.cut(workload.work, layouts, accounting.stage_cut)
    return rows(stages, slice(0, 1)) if np.all(layouts.pp == 1) else stages


def chunks(layouts: Columns) -> Iterator[Columns]:
    """The layouts in parts small enough that the formulas' columns stay in the processor's cache."""
    for start in range(0, max(1, len(layouts.tp)), CHUNK):
        yield rows(layouts, slice(start, start + CHUNK))


def stages_of(workload: Workload, layouts: Columns) -> Stages:
    """Blocks of the first, the fullest middle and the last pipeline rank of each layout.

    Cut as share.census_stages does where all blocks cost the same, except that the first one lacks gradients
    of inputs that it does not need. Arrays are [RANKS, layouts].
    """
    blocks, (first, last) = int(workload.work.blocks), end_costs(workload)
    # as one number, which is quicker to tell apart
    kinds, which = np.unique(
        (layouts.pp * 64 + layouts.virtual_stages) * 2 + layouts.runs(*V_SCHEDULES), return_inverse=True
    )
    tables = [
        _stages(blocks, first, last, int(kind // 128), bool(kind % 2), int(kind // 2 % 64)) for kind in kinds
    ]

    def column(name: str) -> Number:  # [rank, layout]
        values = np.array([getattr(table, name) for table in tables], dtype=float)
        return np.ascontiguousarray(values.reshape(-1, len(RANKS)).T)[:, which]

    return Stages(**{field.name: column(field.name) for field in fields(Stages)})


def end_costs(workload: Workload) -> tuple[float, float]:
    """Costs of the first and the last stage besides their blocks, in blocks; the first one's is 0 or less."""
    work, blocks = workload.work, int(workload.work.blocks)
    lacking = sum(2 * m.rows * m.cols * m.count * (1 - m.input_gradient) for m in work.matrices) * blocks
    block = workload.block_flops() + lacking / blocks
    return -float(lacking / block), float(workload.head_flops / block)


@lru_cache(maxsize=4096)
def _stages(blocks: int, first: float, last: float, pp: int, v_shaped: bool, virtual: int) -> Stages:
    """The first, the fullest middle and the last rank of one pipeline: tuples in the order of RANKS.

    first, last: what the first and the last stage cost besides their blocks, in blocks. virtual: stages per
    rank; v_shaped: as V schedules place them. A placeholder if there are more stages than blocks.
    """
    count = pp * virtual
    if count > blocks:  # refused elsewhere
        return Stages((1, 1, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0), (1, 1, 1), (1, 1, 1))
    sizes = [len(stage) for stage in stage_blocks([1.0] * blocks, count, first=first, last=last)]
    schedule = V_SCHEDULES[0] if v_shaped else SCHEDULES[0]
    stages_of_rank = [stage_of_rank(schedule, pp, virtual, rank) for rank in range(pp)]
    blocks_of_rank = [sum(sizes[stage] for stage in stages) for stages in stages_of_rank]
    middle = max(range(1, pp - 1), key=lambda rank: (blocks_of_rank[rank], -rank), default=0)
    ranks = (0, middle, pp - 1)
    own = [([sizes[stage] for stage in stages_of_rank[rank]], pp, rank) for rank in ranks]
    return Stages(
        blocks=tuple(blocks_of_rank[rank] for rank in ranks),
        has_embedding=tuple(0 in stages_of_rank[rank] for rank in ranks),
        has_head=tuple(count - 1 in stages_of_rank[rank] for rank in ranks),
        rank=ranks,
        interleaved=tuple(interleaved_share(*each, of_last=False) for each in own),
        interleaved_at_loss=tuple(interleaved_share(*each, of_last=True) for each in own),
    )


# what is left out #


def _refused(
    workload: Workload, layouts: Columns, *, weights: Number, examples: Columns, others: Mapping[str, Number]
) -> tuple[list[Rejected], Number]:
    """Return (layouts that each rule refuses, mask of the rows that none refuses).

    A layout counts for the first rule that refuses it; a rule that refuses none has no entry.

    weights: number of layouts that each row stands for. examples: one of them for each row. others: masks of
    what else is left out, by reason; they come after the rules.
    """
    allowed, rejected = np.ones(len(layouts.tp), bool), []
    masks = ((rule.reason, rule.refuses(layouts)) for rule in workload.rules())
    for reason, mask in (*masks, *others.items()):
        refused = mask & allowed
        if count := int(weights[refused].sum()):
            rejected.append(Rejected(reason, count, str(layout_at(examples, int(refused.argmax())))))
            allowed &= ~refused
    return rejected, allowed


def _allowed(workload: Workload, layouts: Columns) -> Number:
    """Mask of the layouts that no rule refuses."""
    return _refused(workload, layouts, weights=np.ones(len(layouts.tp)), examples=layouts, others={})[1]


def _too_large(room: float, layouts: Columns, memory: Memory, fits: Number) -> Iterator[Rejected]:
    """Layouts that don't fit in `room` bytes, by their memory's largest category; the example needs least.

    fits: mask of the layouts that fit.
    """
    parts = np.stack([np.broadcast_to(getattr(memory, name), fits.shape) for name in timeline.CATEGORIES])
    largest = parts.argmax(0) if parts.size else np.zeros(0)
    for index, name in enumerate(timeline.CATEGORIES):
        where = ~fits & (largest == index)
        if count := int(where.sum()):
            least = np.flatnonzero(where)[memory.peak[where].argmin()]
            reason = f"needs more than {human(room)}, its largest part {timeline.CATEGORY_NAMES[name]}"
            yield Rejected(reason, count, str(layout_at(layouts, int(least))))


# The order of layouts that fit #


SAFE_COST = 0.02  # longer that a step may take in a layout that fits safely, and it is still chosen
TIE_MEMORY_STEP = 0.05  # ties are broken by free memory in steps of 5 % of a GPU, then by less recomputation


def ranked(
    seconds: Number, occupied: Number, recompute: Number, uneven: Number, unsafe: Number, *, tie: float
) -> Number:
    """Indices by step time, except that the best of all ties with the quickest comes first.

    Where the quickest is not safe, one that is and takes SAFE_COST longer at most is in its place; only safe
    ones tie with it. Among ties, the one with most free memory in steps of TIE_MEMORY_STEP, then with least
    recomputation. occupied: peak as a share of a GPU's memory. recompute: index of the mode in RECOMPUTE.
    uneven: mask of the layouts that come after all others. unsafe: mask of those that fit barely. tie:
    difference of logarithms of step times up to which layouts tie.
    """
    order = np.lexsort((occupied, seconds, uneven))
    if len(order):
        first = order[0]
        alike = order[uneven[order] == uneven[first]]
        safe = alike[~unsafe[alike] & (seconds[alike] <= seconds[first] * (1 + SAFE_COST))]
        if len(safe):
            alike, first = alike[~unsafe[alike]], safe[0]
        ties = alike[seconds[alike] <= seconds[first] * math.exp(tie)]
        steps = np.floor(occupied[ties] / TIE_MEMORY_STEP)
        best = ties[np.lexsort((occupied[ties], recompute[ties], steps))[0]]
        order = np.concatenate([[best], order[order != best]])
    return order


def safe_peak(stack: str, cluster: Cluster) -> float:
    """Bytes of a predicted peak up to which a layout fits safely: with its error bar in a GPU's memory."""
    return cluster.memory / (1 + accuracy_of(stack, cluster, "node").memory)  # the same in all bands


def safe_peaks(workload: Workload, cluster: Cluster, layouts: Columns) -> Number:
    """The same of each layout, by the stack that predicts it."""
    stacks = workload.tool.compiled, workload.tool.stack
    compiled, others = (safe_peak(stack, cluster) for stack in stacks)
    return np.where(workload.compiles(cluster.gpu, layouts), compiled, others)


def accuracy_of(stack: str, cluster: Cluster, band: str) -> Accuracy:
    """Error bars of predictions for a stack on the cluster's GPUs. band: of accuracy.BANDS."""
    return accuracy(stack, "cpu" if cluster.gpu.processor else cluster.gpu.name, band)
