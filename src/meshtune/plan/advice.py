"""What a plan means, in sentences: how it was reached, why the usual alternatives lost, what to change first.

Every sentence carries the numbers of a layout that was predicted; nothing is a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import RECOMPUTE
from meshtune.plan.cluster import room
from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.search import Choice, Plan, explained, search
from meshtune.plan.seconds.step import Seconds
from meshtune.plan.workload import Workload
from meshtune.units import count, duration, human

# what a part of a step's time is spent on, in a sentence
SPENT = {
    "compute": "computing",
    "tensor": "messages between tensor-parallel ranks",
    "context": "messages between context-parallel ranks",
    "pipeline": "handing hidden states to the next stage",
    "data": "messages about weights and gradients between data ranks",
    "optimizer": "the optimizer's step",
    "bubble": "waiting for other stages of the pipeline",
    "host": "the host launching small pieces of work",
}


# how it was reached #


def steps(plan: Plan, choice: Choice) -> list[str]:
    """From the batch to the layout, in the order in which an engineer would think."""
    w, c, layout = plan.workload, plan.cluster, choice.layout
    parameters = float(w.work.parameters)
    trainable = parameters * float(w.work.trainable)
    whole = explained(w, c, type(layout)(gradient_accumulation_steps=w.global_batch_size, recompute="full"))
    states = sum(getattr(whole.memory, name) for name in ("weights", "gradients", "optimizer"))
    found = [
        f"Global batch: {w.global_batch_size} sequences of {w.seq_len} tokens, {count(w.tokens)} tokens a "
        "step." + (f" A token's document has {w.document_tokens:.0f} tokens." if w.document_tokens else ""),
        f"Model: {count(parameters)} parameters"
        + ("" if trainable >= parameters else f", {count(trainable)} of them trained")
        + f"; weights, gradients and optimizer state of one whole copy: {human(states)} "
        f"({states / parameters:.1f} bytes a parameter), a GPU has {human(c.memory)}.",
        f"Micro-batch: {layout.micro_batch_size} sequence{'s' * (layout.micro_batch_size > 1)}. "
        + _larger(plan, choice),
        f"GPUs: {layout.world} = "
        + " x ".join(f"{getattr(layout, axis)} {axis}" for axis in ("tp", "cp", "pp"))
        + f" x {layout.data_ranks} data ranks ({_sharding(layout)}).",
        f"Accumulation: {w.global_batch_size} / ({layout.micro_batch_size} x {layout.data_ranks}) = "
        f"{layout.gradient_accumulation_steps} micro-batch{'es' * (layout.gradient_accumulation_steps > 1)} "
        "a step.",
    ]
    return found


def _larger(plan: Plan, choice: Choice) -> str:
    """What speaks against the next larger micro-batch of the same layout."""
    layout, w = choice.layout, plan.workload
    if layout.gradient_accumulation_steps % 2:
        each = w.global_batch_size // layout.data_ranks
        return (
            f"A data rank's {each} of the batch leave no larger one."
            if each == layout.micro_batch_size
            else ""
        )
    doubled = replace(
        layout, micro_batch_size=2 * layout.micro_batch_size,
        gradient_accumulation_steps=layout.gradient_accumulation_steps // 2,
    )  # fmt: skip
    other = explained(w, plan.cluster, doubled)
    if not other.fits:
        return f"{doubled.micro_batch_size} would need {human(other.memory.peak)}."
    slower = other.seconds.total / choice.seconds.total - 1
    return f"{doubled.micro_batch_size} would fit, and {_than(slower)}."


def _sharding(layout: Any) -> str:
    if layout.zero == 0:
        return "plain data parallel" if layout.data_ranks > 1 else "one"
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "everything"}[layout.zero]
    return f"ZeRO-{layout.zero}: {what} in {layout.dp_shard * layout.cp} shards" + (
        f", {layout.dp_replicate} times" if layout.dp_replicate > 1 else ""
    )


# why others lost #


@dataclass(frozen=True)
class Alternative:
    """A well-known way to lay a run out. choice: its best layout, fitting or not; None: there is none."""

    name: str
    choice: Choice | None
    sentence: str


def alternatives(plan: Plan, best: Choice | None = None) -> list[Alternative]:
    """The well-known layouts, each with why it is not the one chosen (None: the quickest)."""
    if not len(plan):
        return []
    best = best or plan.choice(0)
    gpus, node = plan.cluster.gpus, plan.cluster.node
    alone = {"tp": 1, "cp": 1, "pp": 1}
    ways: list[tuple[str, Mapping[str, Any], Any]] = [
        ("plain data parallel", alone | {"dp_shard": 1}, lambda c: c.zero == 0),
        *(
            (f"ZeRO-{zero} alone", alone | {"zero": zero, "dp_replicate": 1}, None) for zero in (1, 2, 3)
        ),
        (
            "ZeRO-3 inside the node, replicas across",
            alone | {"zero": 3},
            lambda c: (c.dp_replicate > 1) & (c.dp_shard <= node),
        ),
        ("tensor parallel inside the node", {"tp": min(node, gpus), "cp": 1, "pp": 1}, None),
        ("pipeline parallel", {"cp": 1}, lambda c: c.pp > 1),
        ("context parallel", {"pp": 1, "tp": 1}, lambda c: c.cp > 1),
    ]  # fmt: skip
    return [_alternative(plan, best, *way) for way in ways if gpus > 1]


def _alternative(plan: Plan, best: Choice, name: str, fixed: Mapping[str, Any], where: Any) -> Alternative:
    mask = np.ones(len(plan), bool)
    for field, value in fixed.items():
        mask &= getattr(plan.columns, field) == value
    if where is not None:
        mask &= where(plan.columns)
    places = np.flatnonzero(mask)
    if len(places):
        return _behind(name, plan.choice(int(places[0])), best)
    try:
        other = search(plan.workload, plan.cluster, fixed=fixed, where=where)
    except UserError as error:
        inner = fixed.get("tp", 1) * fixed.get("cp", 1) * fixed.get("pp", 1)
        ranks, size = plan.cluster.gpus // inner, plan.workload.global_batch_size
        if size % ranks:
            few = (
                f"it has {ranks} data ranks, which the global batch of {size} sequences does not share out to"
            )
            return Alternative(name, None, f"is not possible: {few}.")
        return Alternative(name, None, f"is not possible: {error.problems[0]}")
    if len(other):  # what was asked for has something else fixed
        return _behind(name, other.choice(0), best)
    near = other.nearest(1)
    if near:
        m = near[0].memory
        largest = max(CATEGORIES, key=lambda part: getattr(m, part))
        return Alternative(
            name, near[0],
            f"does not fit: {near[0].layout} needs {human(m.peak)}, {human(getattr(m, largest))} of it "
            f"{largest}; a GPU has {room(plan.cluster)}.",
        )  # fmt: skip
    refused = max(other.rejected, key=lambda each: each.count, default=None)
    return Alternative(
        name, None, f"is not possible: {refused.reason.rstrip('.')}." if refused else "is not possible here."
    )


def _behind(name: str, choice: Choice, best: Choice) -> Alternative:
    if choice.layout == best.layout:
        return Alternative(name, choice, "is the one chosen.")
    return Alternative(name, choice, f"({choice.layout}) {against(choice, best)}")


def against(other: Choice, best: Choice) -> str:
    """Why `other` is behind `best`: the part of its step that costs most more."""
    more = other.seconds.total / best.seconds.total - 1
    extra = {f.name: getattr(other.seconds, f.name) - getattr(best.seconds, f.name) for f in fields(Seconds)}
    largest = max(extra, key=lambda part: extra[part])
    if more < -0.005:
        return (
            f"takes {-more:.0%} less, and holds {human(other.memory.peak)} against {human(best.memory.peak)}."
        )
    if more < 0.005:
        return f"is as fast, and holds {human(other.memory.peak)} against {human(best.memory.peak)}."
    on = SPENT[largest]
    if largest == "compute":
        heavier = RECOMPUTE.index(other.layout.recompute) > RECOMPUTE.index(best.layout.recompute)
        on = "computing again what it does not keep" if heavier else "computing, in smaller products"
    return f"takes {more:.0%} longer: {duration(extra[largest])} a step more on {on}."


# what to change first #


def changes(plan: Plan, best: Choice | None = None) -> list[str]:
    """What to change first for more speed than the one chosen (None: the quickest), and for less memory; each
    was predicted.
    """
    if not len(plan):
        return []
    best, found = best or plan.choice(0), []
    largest = max(fields(Seconds), key=lambda f: getattr(best.seconds, f.name) * (f.name != "compute")).name
    share = getattr(best.seconds, largest) / best.seconds.total
    if share >= 0.01:
        spent = duration(getattr(best.seconds, largest))
        found.append(f"After computing, most of a step goes to {SPENT[largest]}: {spent}, {share:.0%}.")
    for what, workload in _variations(plan.workload):
        try:
            other = search(workload, plan.cluster, fixed=plan.fixed)
        except UserError:
            continue
        if len(other):
            choice = other.best(1)[0]
            gain = choice.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
            if gain > 0.02:
                found.append(f"{what}: {gain:.0%} more tokens per second ({choice.layout}).")
    lower = [place for place in plan.pareto() if plan.memory.peak[place] < 0.95 * best.memory.peak]
    for less in (plan.choice(place) for place in lower[:2]):
        found.append(
            f"Less memory: {less.layout} holds {human(less.memory.peak)} instead of "
            f"{human(best.memory.peak)} and takes {less.seconds.total / best.seconds.total - 1:.0%} longer."
        )
    return found


def _variations(workload: Workload) -> Iterator[tuple[str, Workload]]:
    size = workload.global_batch_size
    yield f"train.global_batch_size={2 * size}", replace(workload, global_batch_size=2 * size)
    if not workload.compile:
        yield "train.compile=true", replace(workload, compile=True)
    if workload.precision == "fp32":
        yield "train.precision=bf16", replace(workload, precision="bf16")


# global batches #


def batch_sizes(workload: Workload) -> list[int]:
    """A quarter to four times the global batch."""
    size = workload.global_batch_size
    return [n for n in (size // 4, size // 2, size, 2 * size, 4 * size) if n >= 1]


def batch_sentences(workload: Workload, found: Mapping[int, Choice | None]) -> list[str]:
    """Large against small: what a batch costs and gives, for the same number of tokens."""
    own = found.get(workload.global_batch_size)
    sentences = []
    speeds = [each.tokens_per_second_per_gpu for each in found.values() if each]
    if own and None not in found.values() and max(speeds) / min(speeds) < 1.02:
        few, many = min(found), max(found)
        updates = [f"{1e6 / (size * workload.seq_len):.2g}" for size in (many, few)]
        return [
            f"From {few} to {many} sequences the speed is the same within 2 %: choose by how training goes, "
            f"{' to '.join(updates)} updates a million tokens."
        ]
    for size, choice in found.items():
        if choice is None:
            sentences.append(f"{size} sequences: no layout fits.")
            continue
        speed, updates = choice.tokens_per_second_per_gpu, 1e6 / (size * workload.seq_len)
        faster = "" if own is None else f", {speed / own.tokens_per_second_per_gpu:.2f} x the speed"
        sentences.append(
            f"{size} sequences: {speed:,.0f} tokens/s/GPU{faster}, {updates:.2g} updates a million tokens, "
            f"{human(choice.memory.peak)} ({choice.layout})."
        )
    return sentences


def _than(slower: float) -> str:
    if abs(slower) < 0.005:
        return "be as fast"
    return f"be {abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
