"""A plan in sentences: how it was reached, why the usual alternatives lost, what to change first.

Every sentence carries numbers of layouts that were predicted, says what they are compared with, and names a
cause only if the parts of both predictions show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import MODEL_AXES, Layout
from meshtune.placement.columns import Columns, Number
from meshtune.plan.candidates import is_uneven
from meshtune.plan.changes import NOTABLE_SAVING, Outcome, changes, searched
from meshtune.plan.cluster import Cluster
from meshtune.plan.machine import machine_of
from meshtune.plan.phrases import (
    device,
    documents,
    indivisible,
    longer,
    memory_limit,
    memory_margin,
    memory_need,
    sequences,
    spent,
)
from meshtune.plan.search import Choice, Plan, best_fitting, explained, search
from meshtune.plan.seconds.step import PARTS, TIE, compute_parts
from meshtune.plan.workload import Workload
from meshtune.precision import PRECISIONS
from meshtune.units import count, duration, human, significant

FASTER = ("batch", "compile", "precision")  # the first only where no nearest batch is faster
NOTABLE_COST, NOTABLE_GAIN = 0.01, 0.02  # shares of a step, of speed
MOST_LIGHTER = 2  # layouts that need less memory
NOTABLE = 0.1  # share of a difference in compute from which a kind of work is named as its cause
NAMED = 3  # parts of a step that one comparison names at most


class Cause(NamedTuple):
    """A kind of work in `compute_parts`, as a reason for more compute than another layout's."""

    name: str  # in a list of several with their seconds
    clause: str  # after "because", where it is the only one


CAUSES = {
    "matmuls": Cause("matmuls", "its matmuls are less efficient"),
    "attention": Cause("attention", "attention is slower under context parallelism"),
    "elementwise": Cause("elementwise operations", "its elementwise operations are split over fewer ranks"),
    "copies": Cause("copying into and out of ZeRO's buffers", "copies around ZeRO's collectives take longer"),
    "accumulation": Cause("adding up gradients", "adding up gradients of micro-batches takes longer"),
    "recomputation": Cause("recomputation", "it recomputes more"),
    "head": Cause("head and loss", "its head and loss take longer"),
}


# what comes first: a fixed layout, and one that fits barely #


def verdict(plan: Plan, choice: Choice) -> list[str]:
    """At most one sentence on fixed fields of the layout, and one on a chosen layout that fits barely or
    stands in the place of one that does.

    choice: the chosen layout, one of the plan's.
    """
    return [*_of_fixed(plan, choice), *_of_safety(plan, choice)]


def barely(choice: Choice) -> str:
    """A clause on a peak that may exceed the memory: "fits barely: 75.9 GiB ± 3.8 GiB of 79.1"."""
    peak, cluster = choice.memory.peak, choice.cluster
    return (
        f"fits barely: {human(peak)} ± {human(peak * choice.accuracy.memory)} of a {device(cluster)}'s "
        f"{human(cluster.memory)}"
    )


def _of_fixed(plan: Plan, choice: Choice) -> Iterator[str]:
    """Yield how much faster the best layout is without the fixed fields, or less memory it needs."""
    if not plan.fixed or not (free := best_fitting(plan.workload, plan.cluster)):
        return
    more = choice.seconds.total / free.seconds.total - 1
    needs = f"{human(free.memory.peak)} instead of {human(choice.memory.peak)}"
    if more > TIE:
        yield (
            f"The layout is fixed, at least in part: a step takes {more:.0%} longer than in the best of all "
            f"layouts, {free.layout} ({needs}). layout=auto chooses it."
        )


def _of_safety(plan: Plan, choice: Choice) -> Iterator[str]:
    """Yield a sentence if the chosen layout fits barely, or a faster one that does was passed over."""
    seconds = plan.seconds.total
    if choice.safe:
        faster = np.flatnonzero(~plan.safe & (plan.uneven == plan.uneven[:1]))
        if len(faster):
            other = plan.choice(int(faster[seconds[faster].argmin()]))
            gain = 1 - other.seconds.total / choice.seconds.total
            if gain > TIE:
                yield f"{other.layout} would take {gain:.1%} less time, but {barely(other)}."
        return
    places = np.flatnonzero(plan.safe)
    if not len(places):
        yield f"{choice.layout} {barely(choice)}; no layout that was ranked fits safely."
        return
    safe = plan.choice(int(places[seconds[places].argmin()]))
    costs = f"needs {human(safe.memory.peak)}; a step {longer(safe.seconds.total / choice.seconds.total)}"
    yield f"{choice.layout} {barely(choice)}. The nearest that is safe, {safe.layout}, {costs}."


# how it was reached #


def reasoning(plan: Plan, choice: Choice) -> list[str]:
    """Sentences from the global batch to the layout, in the order in which an engineer would think.

    choice: the chosen layout, one of the plan's.
    """
    workload, cluster, layout = plan.workload, plan.cluster, choice.layout
    batch, packed = workload.global_batch_size, documents(workload)
    parameters = float(workload.work.parameters)
    trained = parameters * float(workload.work.trainable)
    one_copy = Layout(gradient_accumulation_steps=batch, recompute="full")
    memory = explained(workload, cluster, one_copy).memory
    states = memory.weights + memory.gradients + memory.optimizer
    ranks, steps = layout.data_ranks, layout.gradient_accumulation_steps
    model_axes = " x ".join(f"{getattr(layout, axis)} {axis}" for axis in MODEL_AXES)
    return [
        f"Global batch: {sequences(batch)} of {workload.seq_len} tokens, {count(workload.tokens)} tokens a "
        f"step.{packed and f' {packed}'}",
        f"Model: {count(parameters)} parameters"
        + (f", {count(trained)} of them trained" * (trained < parameters))
        + f". Weights, gradients and optimizer state of one unsharded copy need {human(states)} "
        f"({states / parameters:.1f} bytes per parameter); a {device(cluster)} has {human(cluster.memory)}, "
        f"and {memory_margin(cluster)}.",
        f"Micro-batch: {sequences(layout.micro_batch_size)}{_larger_micro_batch(plan, choice)}",
        f"{'Ranks' if cluster.gpu.processor else 'GPUs'}: {layout.world} = {model_axes} x {ranks} data "
        f"rank{'s' * (ranks > 1)} ({_sharding(layout)}).",
        f"Accumulation: {batch} / ({layout.micro_batch_size} x {ranks}) = {steps} "
        f"micro-batch{'es' * (steps > 1)} a step.",
        *_uneven(plan, choice),
    ]


def _uneven(plan: Plan, choice: Choice) -> Iterator[str]:
    """Yield a sentence if uneven degrees of tp or cp rank behind the chosen layout but are faster, or are
    its own because nothing else fits.
    """
    places = np.flatnonzero(plan.uneven)
    if not len(places):
        return
    fastest = plan.choice(int(places[0]))
    degrees = [
        f"{axis}{size}"
        for axis in ("tp", "cp")
        if axis not in plan.fixed
        and is_uneven(size := getattr(fastest.layout, axis), plan.workload, plan.cluster)
    ]
    why = (
        f"{' and '.join(degrees)} divides neither a node of {plan.cluster.node} GPUs nor the "
        f"{plan.workload.traits.heads} attention heads"
    )
    faster = 1 - fastest.seconds.total / choice.seconds.total
    if plan.uneven.all():
        yield f"Degrees: {why}; all layouts that fit have such a degree."
    elif faster > TIE:
        yield f"Degrees: {fastest.layout} would take {faster:.1%} less time, but ranks last: {why}."


def _larger_micro_batch(plan: Plan, choice: Choice) -> str:
    """The end of the sentence on the micro-batch: why it is not twice as large in the same layout.

    "." where the accumulation steps are odd, so that it can't be.
    """
    layout, workload = choice.layout, plan.workload
    micro_batch, steps = layout.micro_batch_size, layout.gradient_accumulation_steps
    if steps == 1:
        return ", all that a data rank gets of the global batch."
    if steps % 2:
        return "."
    doubled = replace(layout, micro_batch_size=2 * micro_batch, gradient_accumulation_steps=steps // 2)
    if refusals := workload.refusals(doubled):
        return f". {2 * micro_batch} can't run: {refusals[0]}"
    other = explained(workload, plan.cluster, doubled)
    if not other.fits:
        need, limit = human(other.memory.peak), memory_limit(plan.cluster)
        return f". The same layout with {2 * micro_batch} would need {need} a rank; {limit}."
    ratio = other.seconds.total / choice.seconds.total
    return f". {2 * micro_batch} would fit; a step {longer(ratio)}."


def _sharding(layout: Layout) -> str:
    """The data ranks' replicas and shards: "2 replicas of 32 ZeRO-3 shards"."""
    if layout.zero == 0:
        return "plain data parallelism" if layout.data_ranks > 1 else "no data parallelism"
    replicas = f"{layout.dp_replicate} replicas of " * (layout.dp_replicate > 1)
    return f"{replicas}{layout.shard_ranks} ZeRO-{layout.zero} shards"


# why others lost #


@dataclass(frozen=True)
class Alternative:
    """A well-known kind of layout, against the chosen layout."""

    name: str
    choice: Choice | None  # its best layout, or if none fits the one that needs least; None: there is none
    sentence: str  # continues the name


class Kind(NamedTuple):
    """A well-known kind of layout, as what a search for it fixes and filters."""

    name: str
    fixed: Mapping[str, Any]  # fields of Layout
    where: Callable[[Columns], Number] | None = None  # mask of its layouts; None: all with `fixed`


def alternatives(plan: Plan, best: Choice | None = None) -> list[Alternative]:
    """The well-known kinds of layout, each with why it is not the chosen one.

    best: the chosen layout; None: the plan's first. Empty for one GPU, and if nothing fits.
    """
    gpus, node = plan.cluster.gpus, plan.cluster.node
    if not len(plan) or gpus == 1:
        return []
    alone = dict.fromkeys(MODEL_AXES, 1)
    kinds = (
        Kind("plain data parallel", alone | {"dp_shard": 1}, lambda layouts: layouts.zero == 0),
        *(Kind(f"ZeRO-{zero} alone", alone | {"zero": zero, "dp_replicate": 1}) for zero in (1, 2, 3)),
        Kind(
            "HSDP with ZeRO-3 shards inside a node",
            alone | {"zero": 3},
            lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard <= node),
        ),
        Kind("tensor parallel over the whole node", alone | {"tp": min(node, gpus)}),
        Kind("pipeline parallel without cp", {"cp": 1}, lambda layouts: layouts.pp > 1),
        Kind("context parallel without tp or pp", {"pp": 1, "tp": 1}, lambda layouts: layouts.cp > 1),
    )
    return [*_grouped(_alternative(plan, best or plan.choice(0), kind) for kind in kinds)]


def _grouped(alternatives: Iterable[Alternative]) -> Iterator[Alternative]:
    """Yield the alternatives; neighbours that one reason makes impossible become one, with both names."""
    for sentence, several in groupby(alternatives, key=lambda one: one.sentence):
        group = list(several)
        if len(group) == 1:
            yield group[0]
        else:
            *names, last = (one.name for one in group)
            name = f"{', '.join(names)} and {last}"
            yield Alternative(name, None, sentence.replace("is not", "are not", 1))


def _alternative(plan: Plan, best: Choice, kind: Kind) -> Alternative:
    """The kind's best layout against `best`, or why there is none that fits.

    It is the plan's, or if it has none of this kind the best with the plan's fixed fields left open.
    """
    mask = np.ones(len(plan), bool)
    for field, value in kind.fixed.items():
        mask &= getattr(plan.columns, field) == value
    if kind.where is not None:
        mask &= kind.where(plan.columns)
    places = np.flatnonzero(mask)
    if len(places):
        return _compared(plan.workload, kind, plan.choice(int(places[0])), best)
    try:
        others = search(plan.workload, plan.cluster, fixed=kind.fixed, where=kind.where)
    except UserError as error:
        model_ranks = math.prod(kind.fixed.get(axis, 1) for axis in MODEL_AXES)
        data_ranks, batch = plan.cluster.gpus // model_ranks, plan.workload.global_batch_size
        reason = error.problems[0]
        if batch % data_ranks:
            reason = indivisible(batch, data_ranks)
        return Alternative(kind.name, None, f"is not possible: {reason}")
    if len(others):  # the plan's own fixed fields kept it out
        return _compared(plan.workload, kind, others.choice(0), best)
    if nearest := others.nearest(1):
        choice = nearest[0]
        need, limit = memory_need(choice.memory), memory_limit(plan.cluster)
        return Alternative(kind.name, choice, f"does not fit: {choice.layout} needs {need}; {limit}.")
    return Alternative(kind.name, None, f"is not possible{_most_refused(others)}")


def _most_refused(plan: Plan) -> str:
    """The end of a sentence: what refuses most layouts of a plan without any that needs too much memory.

    Where the GPUs can't share the global batch and no degree of tp was fixed, the sentence says that only
    data ranks that divide the batch were considered.
    """
    refused = max(plan.rejected, key=lambda rejected: rejected.count, default=None)
    if not refused:
        return " here."
    batch = plan.workload.global_batch_size
    limited = batch % plan.cluster.gpus and "tp" not in plan.fixed
    where = f"where the data ranks divide {sequences(batch)}, " if limited else ""
    return f": {where}{refused.reason.rstrip('.')}."


def _compared(workload: Workload, kind: Kind, choice: Choice, best: Choice) -> Alternative:
    """`choice`, the kind's best layout, against `best`, the chosen one."""
    if choice.layout == best.layout:
        whole = all(kind.fixed.get(axis) == 1 for axis in MODEL_AXES)
        sentence = f"is {'' if whole else 'part of '}the chosen layout ({best.layout})."
        return Alternative(kind.name, choice, sentence)
    return Alternative(kind.name, choice, f"({choice.layout}) {comparison(workload, choice, best)}")


def comparison(workload: Workload, other: Choice, best: Choice) -> str:
    """Compare step times with the chosen layout `best`, and name the parts whose time grows most.

    At most NAMED of them, until what is left is no more than the last one named. Where `other` is no slower,
    within TIE: compare memory instead. The result continues the name of `other`.
    """
    more = other.seconds.total / best.seconds.total - 1
    needs = f"{human(other.memory.peak)} instead of {human(best.memory.peak)}"
    if more < -TIE:
        joined = "but" if other.memory.peak > best.memory.peak else "and"
        return f"takes {-more:.0%} less time than the chosen layout, {joined} needs {needs}."
    if more < TIE:
        return f"is as fast as the chosen layout, and needs {needs}."
    extra = {part: getattr(other.seconds, part) - getattr(best.seconds, part) for part in PARTS}
    total = rest = sum(extra.values())
    named = []
    for part in sorted(PARTS, key=lambda part: -extra[part])[:NAMED]:
        what = f"for {spent(part, other.layout)}"
        if part == "compute":
            what = f"compute{compute_cause(workload, other, best, like=total)}"
        named.append(f"{duration(extra[part], like=total)} more {what}")
        rest -= extra[part]
        if rest <= extra[part]:
            break
    others = duration(abs(rest), like=total)
    if others != duration(0.0, like=total):
        named.append(f"all else takes {others} {'more' if rest > 0 else 'less'}")
    return (
        f"takes {more:.{int(more < 0.02)}%} ({duration(total)} a step) longer than the chosen layout: "
        f"{'; '.join(named)}."
    )


def compute_cause(workload: Workload, other: Choice, best: Choice, *, like: float) -> str:
    """The kinds of work that make `other` compute longer than `best`, as the end of a sentence.

    Compares the `compute_parts` of both; kinds below NOTABLE of the difference are left out. One kind is
    named as the cause, several with their seconds, those that take less among them. like: see `duration`.
    """
    parts = [
        compute_parts(
            workload.work, Columns.of([choice.layout]), machine_of(workload, choice.cluster),
            workload.seq_len, workload.document_tokens,
        )
        for choice in (other, best)
    ]  # fmt: skip
    more = {kind: float(np.squeeze(parts[0][kind] - parts[1][kind])) for kind in parts[0]}
    least = NOTABLE * sum(more.values())
    notable = sorted((kind for kind in more if abs(more[kind]) >= least), key=lambda kind: -more[kind])
    if len(notable) == 1:
        return f", because {CAUSES[notable[0]].clause}"
    names = {kind: CAUSES[kind].name for kind in notable}
    slower = more["attention"] > 0 and other.layout.cp > best.layout.cp == 1
    if slower and "attention" in names:
        names["attention"] += ", slower under context parallelism"
    return f" ({'; '.join(f'{names[kind]}: {_signed(more[kind], like)}' for kind in notable)})"


def _signed(seconds: float, like: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{duration(abs(seconds), like=like)}"


# what to change first #


def advised(plan: Plan, best: Choice, *, faster: bool = True) -> list[str]:
    """Faster batches near one that the data ranks can't share, a caution of the precision, the largest cost
    besides compute, then settings that are faster and layouts that need less memory.

    best: the chosen layout, which all are compared with. faster: whether to try what may be faster.
    """
    caution = PRECISIONS[plan.workload.precision].caution
    nearest = nearest_batches(plan, best) if faster else []
    return [
        *nearest,
        *([caution] if caution else []),
        *_largest_cost(best),
        *(_faster(plan, best, FASTER[1:] if nearest else FASTER) if faster else []),
        *islice(_lighter(plan, best), MOST_LIGHTER),
    ]


def nearest_batches(plan: Plan, best: Choice) -> list[str]:
    """The faster of the `nearest_sizes` below and above the plan's batch, each with its gain and layout.

    best: the chosen layout, which they are compared with. Gains below NOTABLE_GAIN are left out.
    """
    size, of_plan = plan.workload.global_batch_size, changes(plan.workload, plan.cluster, fixed=plan.fixed)
    near = (change for change in of_plan if change.kind == "nearest batch")
    gains: dict[bool, Outcome] = {}  # by whether the batch is larger
    for outcome in searched(near, plan.fixed_of_batches, best):
        larger = outcome.change.workload.global_batch_size > size
        if outcome.speed > (gains[larger].speed if larger in gains else NOTABLE_GAIN):
            gains[larger] = outcome
    return [outcome.sentence() for outcome in sorted(gains.values(), key=lambda one: -round(one.speed, 2))]


def _largest_cost(best: Choice) -> Iterator[str]:
    """Yield a sentence on the part of a step, but compute, that takes longest, if it is notable."""
    beside_compute = (part for part in PARTS if part != "compute")
    largest = max(beside_compute, key=lambda part: getattr(best.seconds, part))
    seconds = getattr(best.seconds, largest)
    share = seconds / best.seconds.total
    if share >= NOTABLE_COST:
        what = spent(largest, best.layout)
        yield f"Largest cost besides compute: {what}, {duration(seconds)} a step ({share:.0%})."


def _faster(plan: Plan, best: Choice, kinds: Sequence[str]) -> Iterator[str]:
    """Yield settings with which the best layout is notably faster than `best`; updates stay as exact."""
    trained = PRECISIONS[plan.workload.precision].trained
    some = (
        change
        for change in changes(plan.workload, plan.cluster)
        if change.kind in kinds and PRECISIONS[change.workload.precision].trained == trained
    )
    for outcome in searched(some, plan.fixed_of_batches, best):
        if outcome.speed > NOTABLE_GAIN:
            yield outcome.sentence()


def _lighter(plan: Plan, best: Choice) -> Iterator[str]:
    """Yield layouts that need notably less memory than `best`, the fastest first.

    None whose step takes longer by a larger factor than its peak is smaller. Of those whose times differ by
    less than a percent, the one with least memory.
    """
    smaller: dict[str, Choice] = {}  # by its time against the best one's
    for place in plan.pareto():
        lower = best.memory.peak / plan.memory.peak[place]
        ratio = plan.seconds.total[place] / best.seconds.total
        if ratio < lower > 1 / (1 - NOTABLE_SAVING):
            smaller[longer(ratio)] = plan.choice(place)
    for choice in smaller.values():
        yield Outcome.of_layout("less memory", plan.workload, choice, best).sentence()


# other global batches: a quarter to four times #


def batch_sizes(workload: Workload) -> list[int]:
    """Global batch sizes to compare, in sequences: a quarter to four times the workload's."""
    size = workload.global_batch_size
    return [other for other in (size // 4, size // 2, size, 2 * size, 4 * size) if other >= 1]


def best_of_batches(
    workload: Workload, cluster: Cluster, sizes: Sequence[int], fixed: Mapping[str, Any] | None = None
) -> dict[int, Choice | None]:
    """The best layout for each global batch size in `sizes`; None where none fits. fixed: as in `search`."""
    return {size: best_fitting(workload.of_batch(size), cluster, fixed) for size in sizes}


def batch_sentences(plan: Plan, choices: Mapping[int, Choice | None] | None = None) -> list[str]:
    """Speed, updates per token and memory of each global batch size; one sentence if all are as fast.

    choices: the best layout by size, in sequences, ascending; None: those of `batch_sizes`. As fast: within
    NOTABLE_GAIN of each other, with a layout for every size.
    """
    workload, batch = plan.workload, plan.workload.global_batch_size
    if choices is None:
        others = [size for size in batch_sizes(workload) if size != batch]
        best = best_of_batches(workload, plan.cluster, others, plan.fixed_of_batches)
        choices = dict(sorted({**best, batch: plan.choice(0)}.items()))
    current = choices.get(batch)
    speeds = [choice.tokens_per_second_per_gpu for choice in choices.values() if choice]
    updates = {
        size: f"{significant(1e6 / (size * workload.seq_len), 2)} optimizer updates per million tokens"
        for size in choices
    }
    if current and None not in choices.values() and max(speeds) / min(speeds) < 1 + NOTABLE_GAIN:
        fewest, most = min(choices), max(choices)
        return [
            f"From {fewest} to {most} sequences the speed differs by less than {NOTABLE_GAIN:.0%}; choose by "
            f"convergence: {updates[fewest]} with {fewest} sequences, {updates[most].split()[0]} with {most}."
        ]
    sentences = []
    for size, choice in choices.items():
        if choice is None:
            sentences.append(f"{sequences(size)}: {_reason_for_none(plan, size)}")
            continue
        speed, ratio = choice.tokens_per_second_per_gpu, ""
        if current and size != batch:
            ratio = f" ({speed / current.tokens_per_second_per_gpu:.2f} x that of {batch})"
        sentence = (
            f"{sequences(size)}: {speed:,.0f} {choice.cluster.speed_unit}{ratio}, {updates[size]}, "
            f"{human(choice.memory.peak)} ({choice.layout})."
        )
        sentences.append(sentence + (_outgrown(workload, size, choice, current) if current else ""))
    return sentences


def _reason_for_none(plan: Plan, size: int) -> str:
    """Why a global batch has no layout: its memory, or fixed fields that don't make such a batch."""
    try:
        search(plan.workload.of_batch(size), plan.cluster, fixed=plan.fixed_of_batches)
    except UserError as error:
        return error.problems[0]
    return "no layout fits."


def _outgrown(workload: Workload, size: int, choice: Choice, current: Choice) -> str:
    """A sentence on the memory that the current pipeline would need with a larger batch, which is slower
    because of it; else "". Each micro-batch of a step has a receive buffer.

    size: of the larger batch. choice: its best layout.
    """
    steps, rest = divmod(size, current.layout.data_ranks * current.layout.micro_batch_size)
    slower = choice.tokens_per_second_per_gpu < current.tokens_per_second_per_gpu
    if rest or current.layout.pp == 1 or size <= workload.global_batch_size or not slower:
        return ""
    layout = replace(current.layout, gradient_accumulation_steps=steps)
    larger = explained(workload.of_batch(size), current.cluster, layout)
    need = memory_need(larger.memory)
    return (
        "" if larger.fits else f" The pipeline of {workload.global_batch_size} ({layout}) would need {need}."
    )
