"""A plan in sentences: how it was reached, why the usual alternatives lost, what to change first.

Every sentence carries numbers of layouts that were predicted, says what they are compared with, and names a
cause only if the parts of both predictions show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from meshtune.layout import MODEL_AXES, Layout
from meshtune.optimizers import caution
from meshtune.placement.columns import Columns
from meshtune.plan.candidates import is_uneven
from meshtune.plan.changes import BATCHES, NOTABLE_SAVING, Change, Outcome, best_layout, changes, searched
from meshtune.plan.machine import machine_of
from meshtune.plan.phrases import (
    device,
    documents,
    longer,
    memory_limit,
    memory_margin,
    sequences,
    spent,
)
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import Choice, Plan, best_fitting, explained
from meshtune.plan.seconds.step import PARTS, TIE, StepTime
from meshtune.plan.workload import Workload
from meshtune.precision import PRECISIONS
from meshtune.units import count, counted, duration, human, significant

# The first only where no nearest batch is faster.
FASTER = ("batch", "compile", "dropout", "states", "sums", "moments", "precision")
NOTABLE_COST, NOTABLE_GAIN = 0.01, 0.02  # shares of a step, of speed
NEAR = 0.9  # share of a GPU's memory, with the error bar, above which a layout that needs less is named
LOSSES = 0.05, 0.5  # shares of the time that a layout which needs less memory may take longer
NOTABLE = 0.1  # share of a difference in compute from which a kind of work is named as its cause
NAMED = 3  # parts of a step that one comparison names at most


COMPUTE = {  # kinds of work of `StepTime.compute_parts`
    "matmuls": "matmuls",
    "attention": "attention",
    "elementwise": "elementwise operations",
    "copies": "copying into and out of ZeRO's buffers",
    "accumulation": "adding up gradients",
    "recomputation": "recomputation",
    "head": "head and loss",
    "mismatched": "the forward over mismatched answers",
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
            ratio = other.seconds.total / choice.seconds.total
            if ratio < 1 - TIE:
                yield f"{other.layout} {longer(ratio)}, but {barely(other)}."
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
    copied = ", with the copy of the head's gradient at the peak" * bool(workload.work.head_trainable)
    checkpoint = human(workload.checkpoint_bytes)
    saved = f" A checkpoint has {checkpoint} of weights and optimizer states." * (workload.tool is MESHTUNE)
    ranks, steps = layout.data_ranks, layout.gradient_accumulation_steps
    model_axes = " x ".join(f"{getattr(layout, axis)} {axis}" for axis in MODEL_AXES)
    return [
        f"Global batch: {sequences(batch)} of {workload.seq_len} tokens, {count(workload.tokens)} tokens a "
        f"step.{packed and f' {packed}'}",
        f"Model: {count(parameters)} parameters"
        + (f", {count(trained)} of them trained" * (trained < parameters))
        + f". Weights, gradients and optimizer state of one unsharded copy need {human(states)} "
        f"({states / parameters:.1f} bytes per parameter{copied}); "
        f"a {device(cluster)} has {human(cluster.memory)}, and {memory_margin(cluster)}.{saved}",
        f"Micro-batch: {sequences(layout.micro_batch_size)}{_larger_micro_batch(plan, choice)}",
        f"{'Ranks' if cluster.gpu.processor else 'GPUs'}: {layout.world} = {model_axes} x {ranks} data "
        f"rank{'s' * (ranks > 1)} ({_sharding(layout)}).",
        f"Accumulation: {batch} / ({layout.micro_batch_size} x {ranks}) = {steps} "
        f"micro-batch{'es' * (steps > 1)} a step.",
        *_experts(workload, layout, cluster.node),
        *_uneven(plan, choice),
    ]


def _experts(workload: Workload, layout: Layout, node: int) -> Iterator[str]:
    """Yield a sentence on where the experts of a block are, if ranks split them. node: GPUs in one."""
    if layout.ep > 1:
        experts, copies = workload.traits.experts, layout.token_ranks // layout.ep
        inside = node % layout.ep == 0 or layout.world <= node
        shards = f" in {layout.expert_shards} shards" * (layout.expert_shards > 1)
        yield (
            f"Experts: {experts} = {layout.ep} ranks x {experts // layout.ep}, a group of ranks "
            f"{'inside a node' if inside else 'over several nodes'}. Each is on {counted(copies, 'rank')}"
            f"{shards}."
        )


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


class Alternative(NamedTuple):
    """A well-known kind of layout, against the chosen layout."""

    name: str
    choice: Choice | None  # its best layout, or if none fits the one that needs least; None: there is none
    sentence: str  # continues the name


def alternatives(plan: Plan, best: Choice | None = None) -> list[Alternative]:
    """The well-known kinds of layout, each with why it is not the chosen one.

    Neighbours that one reason makes impossible are one, with both names. best: the chosen layout; None: the
    plan's first. Empty for one GPU, and if nothing fits.
    """
    if not len(plan) or plan.cluster.gpus == 1:
        return []
    usual = (change for change in changes(plan.workload, plan.cluster) if change.kind == "usual")
    found = [_alternative(plan, best or plan.choice(0), change) for change in usual]
    several = [list(alike) for _, alike in groupby(found, key=lambda alternative: alternative.sentence)]
    return [_together(alike) if len(alike) > 1 else alike[0] for alike in several]


def _together(alike: Sequence[Alternative]) -> Alternative:
    """Alternatives that one reason makes impossible, as one with all names."""
    *names, last = (one.name for one in alike)
    sentence = alike[0].sentence.replace("is not", "are not", 1)
    return Alternative(f"{', '.join(names)} and {last}", None, sentence)


def _alternative(plan: Plan, best: Choice, kind: Change) -> Alternative:
    """The kind's best layout against `best`, or why there is none that fits.

    It is the plan's, or if it has none of this kind the best with the plan's fixed fields left open.
    """
    mask = np.ones(len(plan), bool) if kind.where is None else kind.where(plan.columns)
    for field, value in kind.fixed.items():
        mask = mask & (getattr(plan.columns, field) == value)
    choice, reason = plan.choice(int(mask.argmax())) if mask.any() else None, ""
    if choice is None:
        choice, reason = best_layout(kind)
    if choice is None or reason:
        return Alternative(kind.words, choice, reason)
    if choice.layout == best.layout:
        whole = all(kind.fixed.get(axis) == 1 for axis in MODEL_AXES)
        sentence = f"is {'' if whole else 'part of '}the chosen layout ({best.layout})."
        return Alternative(kind.words, choice, sentence)
    return Alternative(kind.words, choice, f"({choice.layout}) {comparison(plan.workload, choice, best)}")


def comparison(workload: Workload, other: Choice, best: Choice) -> str:
    """Compare step times with the chosen layout `best`, and name the parts whose time grows most.

    At most NAMED of them, until the rest is at most the last one named. Where `other` isn't slower, within
    TIE: compare memory instead. The result continues the name of `other`.
    """
    more = other.seconds.total / best.seconds.total - 1
    needs = f"{human(other.memory.peak)} instead of {human(best.memory.peak)}"
    if more < -TIE:
        joined = "but" if other.memory.peak > best.memory.peak else "and"
        return f"{longer(1 + more)} than the chosen layout, {joined} needs {needs}."
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


def compute_parts(workload: Workload, choice: Choice) -> dict[str, float]:
    """Seconds of `choice.seconds.compute` by kind of work, COMPUTE's names."""
    workload = choice.decided(workload)
    machine = machine_of(workload, choice.cluster)
    layouts = Columns.of([choice.layout])
    time = StepTime(workload.work, layouts, machine, workload.seq_len, workload.document_tokens)
    return {kind: float(np.squeeze(seconds)) for kind, seconds in time.compute_parts.items()}


def compute_cause(workload: Workload, other: Choice, best: Choice, *, like: float) -> str:
    """The kinds of work that make `other` compute longer than `best`, as the end of a sentence.

    Kinds below NOTABLE of the difference are left out; those that take less are among them. like: see
    `duration`.
    """
    longer_parts, parts = (compute_parts(workload, choice) for choice in (other, best))
    more = {kind: longer_parts[kind] - parts[kind] for kind in parts}
    least = NOTABLE * sum(more.values())
    notable = sorted((kind for kind in more if abs(more[kind]) >= least), key=lambda kind: -more[kind])
    names = {kind: COMPUTE[kind] for kind in notable}
    slower = more["attention"] > 0 and other.layout.cp > best.layout.cp == 1
    if slower and "attention" in names:
        names["attention"] += ", slower under context parallelism"
    return f" ({'; '.join(f'{names[kind]}: {_signed(more[kind], like)}' for kind in notable)})"


def _signed(seconds: float, like: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{duration(abs(seconds), like=like)}"


# what to change first #


def cautions(plan: Plan, best: Choice) -> list[str]:
    """A caution of precision and optimizer, and the largest cost of the chosen layout besides compute."""
    own = caution(plan.workload.precision, plan.workload.optimizer)
    return [*([own] if own else []), *_largest_cost(best)]


def faster(plan: Plan, best: Choice, undropped: Workload | None = None) -> list[str]:
    """Batches near one that the data ranks can't share, and settings, that are faster; the fastest first.

    best: the chosen layout, which all are compared with. undropped: as in `changes`.
    """
    nearest = _nearest_batches(plan, best)
    every = [*nearest, *_faster(plan, best, FASTER[1:] if nearest else FASTER, undropped)]
    return [outcome.sentence() for outcome in sorted(every, key=lambda one: -round(one.speed, 2))]


def faster_in_8_bits(plan: Plan, best: Choice) -> list[str]:
    """A sentence on train.precision=fp8 where it is faster than `best`."""
    return [outcome.sentence() for outcome in _faster(plan, best, ("fp8",))]


def safer(plan: Plan, best: Choice) -> list[Outcome]:
    """The fastest layout whose peak with its error bar is at most NEAR of a GPU's memory; [] where `best` is
    as small, or none fits so.
    """
    room = NEAR * plan.cluster.memory / (1 + best.accuracy.memory)
    if best.memory.peak <= room:
        return []
    choice = best_fitting(plan.workload, replace(plan.cluster, memory_budget=room), plan.fixed)
    return [Outcome.of_layout("less memory", plan.workload, choice, best)] if choice else []


def lighter(plan: Plan, best: Choice) -> list[Outcome]:
    """The layouts that need least memory for each of LOSSES of time at most, the fastest first, each once.

    None that saves less than NOTABLE_SAVING of the chosen one's memory.
    """
    ratio, peak = plan.seconds.total / best.seconds.total, plan.memory.peak
    saving = peak < (1 - NOTABLE_SAVING) * best.memory.peak
    found: dict[int, Outcome] = {}
    for loss in LOSSES:
        if (places := np.flatnonzero(saving & (ratio < 1 + loss))).size:
            place = int(places[peak[places].argmin()])
            choice = plan.choice(place)
            found.setdefault(place, Outcome.of_layout("less memory", plan.workload, choice, best))
    return list(found.values())


def nearest_batches(plan: Plan, best: Choice) -> list[str]:
    """The faster of the `nearest_sizes` below and above the plan's batch, each with its gain and layout.

    best: the chosen layout, which they are compared with. Gains below NOTABLE_GAIN are left out.
    """
    return [outcome.sentence() for outcome in _nearest_batches(plan, best)]


def _nearest_batches(plan: Plan, best: Choice) -> list[Outcome]:
    size, of_plan = plan.workload.global_batch_size, changes(plan.workload, plan.cluster, fixed=plan.fixed)
    near = (change for change in of_plan if change.kind == "nearest batch")
    gains: dict[bool, Outcome] = {}  # by whether the batch is larger
    for outcome in searched(near, plan.fixed_of_batches, best):
        larger = outcome.change.workload.global_batch_size > size
        if outcome.speed > (gains[larger].speed if larger in gains else NOTABLE_GAIN):
            gains[larger] = outcome
    return sorted(gains.values(), key=lambda one: -round(one.speed, 2))


def _largest_cost(best: Choice) -> Iterator[str]:
    """Yield a sentence on the part of a step, but compute, that takes longest, if it is notable."""
    beside_compute = (part for part in PARTS if part != "compute")
    largest = max(beside_compute, key=lambda part: getattr(best.seconds, part))
    seconds = getattr(best.seconds, largest)
    share = seconds / best.seconds.total
    if share >= NOTABLE_COST:
        what = spent(largest, best.layout)
        yield f"Largest cost besides compute: {what}, {duration(seconds)} a step ({share:.0%})."


def _faster(
    plan: Plan, best: Choice, kinds: Sequence[str], undropped: Workload | None = None
) -> Iterator[Outcome]:
    """Yield settings with which the best layout is notably faster than `best`; updates stay as exact."""
    trained = PRECISIONS[plan.workload.precision].trained
    kinds = [
        kind
        for kind in kinds
        if kind != "states" or best.memory.optimizer > NOTABLE_SAVING * best.memory.peak
    ]
    some = (
        change
        for change in changes(plan.workload, plan.cluster, undropped=undropped)
        if change.kind in kinds and PRECISIONS[change.workload.precision].trained == trained
    )
    fixed = plan.fixed_of_batches
    # Compiled blocks refuse some layouts: then one without the fixed recomputation, else any other.
    others = {name: value for name, value in fixed.items() if not name.startswith("recompute")}, {}
    for change in some:
        elsewhere = change._replace(words=f"{change.words} and another layout")
        tried = [(change, fixed), *((elsewhere, other) for other in others if change.kind == "compile")]
        found = (outcome for one, kept in tried for outcome in searched([one], kept, best))
        outcome = next(found, None)
        if outcome and outcome.speed > NOTABLE_GAIN:
            yield outcome


# other global batches: a quarter to four times #


def batch_sentences(plan: Plan) -> list[str]:
    """Speed, memory and updates per token of other global batches; one sentence if all are as fast: within
    NOTABLE_GAIN of each other, with a layout for every size.
    """
    workload, best = plan.workload, plan.choice(0)
    others = [change for change in changes(workload, plan.cluster) if change.kind in BATCHES]
    predicted = [(change, *best_layout(change, plan.fixed_of_batches)) for change in others]
    updates = {
        size: significant(1e6 / (size * workload.seq_len), 2)
        for size in (workload.global_batch_size, *(change.workload.global_batch_size for change in others))
    }
    speeds = [best.tokens_per_second_per_gpu]
    speeds += [choice.tokens_per_second_per_gpu for _, choice, reason in predicted if choice and not reason]
    if len(speeds) > len(others) and max(speeds) / min(speeds) < 1 + NOTABLE_GAIN:
        fewest, most = min(updates), max(updates)
        return [
            f"From {fewest} to {most} sequences the speed differs by less than {NOTABLE_GAIN:.0%}; choose by "
            f"convergence: {updates[fewest]} optimizer updates per million tokens with {fewest} sequences, "
            f"{updates[most]} with {most}."
        ]
    sentences = []
    for change, choice, reason in predicted:
        sentence = f"{change.words} {reason}"
        if choice and not reason:
            update = f"{updates[change.workload.global_batch_size]} optimizer updates per million tokens"
            instead = f"instead of {updates[workload.global_batch_size]}"
            sentence = f"{Outcome(change, choice, best).sentence()} {update} {instead}."
        sentences.append(sentence)
    return sentences
