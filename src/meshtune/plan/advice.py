"""What a plan means, in sentences: how it was reached, why the usual alternatives lost, what to change first.

Every sentence carries the numbers of a layout that was predicted; nothing is a rule of thumb.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from meshtune.errors import NothingFits, UserError
from meshtune.layout import RECOMPUTE
from meshtune.model.support import Traits
from meshtune.plan import memory
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import catalogue
from meshtune.plan.search import MARGIN, Choice, Plan, explained, search
from meshtune.plan.seconds import Seconds
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.units import count, duration, human

GOALS = ("speed", "cost", "gpus", "memory")
LESS = 0.85  # of what was predicted for a run that ran out of memory may another one need
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
        largest = max(memory.CATEGORIES, key=lambda part: getattr(m, part))
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


def room(cluster: Cluster) -> str:
    """What a GPU has, and what of it a plan uses."""
    return f"{human(cluster.memory)}, of which {human(cluster.memory * (1 - MARGIN))} are used at most"


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


def out_of_memory(now: Choice, workload: Workload, others: Others = dict) -> list[str]:
    """When a run ran out of memory under the layout `now`: what was predicted for it, and what needs less."""
    m, cluster = now.memory, now.cluster
    parts = sorted(memory.CATEGORIES, key=lambda name: -getattr(m, name))
    listed = ", ".join(f"{name} {human(getattr(m, name))}" for name in parts if getattr(m, name) >= 1)
    found = [
        f"Predicted for {now.layout}: {human(m.peak)} at most ({memory.MOMENTS[int(m.moment)]}): {listed}. "
        f"The largest part is {parts[0]}."
    ]
    smaller = replace(cluster, memory=min(cluster.memory, LESS * m.peak))
    plan = search(workload, smaller, margin=0.0)
    fitting = [
        f"layout={each.layout} ({human(each.memory.peak)}, "
        f"{each.seconds.total / now.seconds.total - 1:+.0%} time)"
        for each in plan.best(2)
    ]
    if not fitting:
        fitting = list(remedies(workload, smaller, others))
    said = (
        "What needs less, quickest first: " + "; ".join(fitting)
        if fitting
        else "Nothing tried here needs less"
    )
    return [*found, said + "."]


# sizes of clusters, batches, models #


def by_goal(plans: Mapping[int, Plan], goal: str, others: Others = dict) -> tuple[int, Choice]:
    """(GPUs, the best layout) of these cluster sizes: the quickest step, the fewest GPU-seconds a token, the
    fewest GPUs, or the least memory. Raises NothingFits where no size has a layout that fits.
    """
    if goal not in GOALS:
        raise UserError(f"--goal {goal} is no goal; goals: {', '.join(GOALS)}.")
    found = {
        gpus: _by_memory(plan) if goal == "memory" else plan.best(1)[0]
        for gpus, plan in plans.items()
        if len(plan)
    }
    if not found:
        raise nothing(plans[max(plans)], others)
    keys = {
        "speed": lambda gpus: found[gpus].seconds.total,
        "cost": lambda gpus: found[gpus].seconds.total * gpus,
        "gpus": lambda gpus: gpus,
        "memory": lambda gpus: found[gpus].memory.peak,
    }
    gpus = min(found, key=keys[goal])
    return gpus, found[gpus]


def _by_memory(plan: Plan) -> Choice:
    return plan.choice(int(np.argmin(plan.memory.peak)))


Others = Callable[[], Mapping[str, Workload]]  # settings that train something lighter


def nothing(plan: Plan, others: Others = dict) -> UserError:
    """What to raise when a plan is empty: NothingFits, or where every layout is refused, the reasons."""
    if len(plan.near.tp):
        return NothingFits(nothing_fits(plan, others))
    reasons = [
        f"{each.reason.rstrip('.')} ({each.count} layouts, such as {each.example})" for each in plan.rejected
    ]
    where = f"{plan.cluster.gpus} x {plan.cluster.gpu.name}"
    return Refused(
        f"{plan.workload.model} can't be trained under any layout of {where}: {'; '.join(reasons)}."
    )


class Refused(UserError):
    """Every layout is refused, whatever its memory."""


def nothing_fits(plan: Plan, others: Others = dict) -> list[str]:
    """Why, and what would: the nearest layout, then more GPUs, shorter sequences, LoRA, larger GPUs."""
    w, c = plan.workload, plan.cluster
    near = plan.nearest(1)
    found = [
        f"No layout of {c.gpus} x {c.gpu.name} ({room(c)}) fits {w.model} at {w.seq_len} tokens"
        + (" with what is fixed of it." if plan.fixed else ".")
    ]
    if near:
        m = near[0].memory
        largest = max(memory.CATEGORIES, key=lambda part: getattr(m, part))
        found.append(
            f"The nearest, {near[0].layout}, needs {human(m.peak)}: {human(getattr(m, largest))} of it "
            f"{largest}."
        )
    else:
        found += [
            f"{each.reason.rstrip('.')} ({each.count} layouts, such as {each.example})."
            for each in plan.rejected[:4]
        ]
    fitting = list(remedies(plan.workload, plan.cluster, others))
    if plan.fixed and (free := _first(w, c)):
        fitting.insert(0, f"layout={free.layout} ({human(free.memory.peak)})")
    found.append(
        "What would fit: " + "; ".join(fitting) + "." if fitting else "Nothing tried here would fit."
    )
    return found


def remedies(w: Workload, c: Cluster, others: Others = dict) -> Iterator[str]:
    """The least change of each kind that fits, with its layout: more GPUs, shorter sequences, less precise,
    lighter, larger GPUs.
    """
    for what, choice in _remedies(w, c, others):
        yield f"{what} layout={choice.layout} ({human(choice.memory.peak)})"


def _remedies(w: Workload, c: Cluster, others: Others) -> Iterator[tuple[str, Choice]]:
    for factor in (2, 3, 4, 6, 8, 12, 16) if c.gpu.name != "cpu" else ():  # processors share one memory
        if found := _first(w, c, c.gpus * factor):
            yield f"cluster.gpus={c.gpus * factor}", found
            break
    for parts in (2, 4, 8, 16):
        if w.seq_len % parts == 0 and (found := _first(replace(w, seq_len=w.seq_len // parts), c)):
            yield f"data.seq_len={w.seq_len // parts}", found
            break
    if w.precision in ("bf16", "fp32"):
        for precision in ("bf16", "bf16-pure"):
            if precision != w.precision and (found := _first(replace(w, precision=precision), c)):
                yield f"train.precision={precision}", found
                break
    for what, lighter in others().items():
        if found := _first(lighter, c):
            yield what, found
    for gpu in sorted(catalogue().values(), key=lambda gpu: gpu.memory):
        node = gpu.node if c.node == c.gpu.node else c.node
        larger = replace(
            c, gpu=gpu, memory=gpu.memory, link=gpu.link, network=gpu.network, node=node
        )  # fmt: skip
        if gpu.memory > 1.1 * c.memory and gpu.name != "cpu" and (found := _first(w, larger, c.gpus)):
            yield f"cluster.gpu={gpu.name}", found
            break


def _first(
    workload: Workload, cluster: Cluster, gpus: int | None = None, fixed: Mapping[str, Any] | None = None
) -> Choice | None:
    """The best layout, if any fits; of another number of GPUs where one is given."""
    try:
        plan = search(workload, cluster.of_size(gpus) if gpus else cluster, fixed=fixed)
    except UserError:
        return None
    return plan.best(1)[0] if len(plan) else None


def batches(workload: Workload, cluster: Cluster, sizes: Sequence[int]) -> dict[int, Choice | None]:
    """The best layout for each global batch size; None where none fits."""
    return {size: _first(replace(workload, global_batch_size=size), cluster) for size in sizes}


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


def largest(workload: Workload, cluster: Cluster, what: str) -> tuple[Any, Choice]:
    """The largest `what` that fits (seq_len in tokens, in steps of 1024 beyond that; batch in sequences at
    once, at the given length; model: of models.toml), with its best layout. Raises NothingFits where not even
    the smallest does.
    """
    if what == "seq_len":
        return _largest(lambda n: _first(replace(workload, seq_len=n), cluster), 256, 2**24, 1024)
    if what == "batch":
        return _largest_batch(workload, cluster)
    if what == "model":
        for name, shape in sorted(models().items(), key=lambda item: -float(item[1].work.parameters)):
            r = workload.lora_r
            work = shape.work if r is None else shape.work.adapted(r)
            if found := _first(replace(workload, model=name, work=work, traits=shape.traits), cluster):
                return name, found
        raise NothingFits(f"None of {', '.join(models())} fits {cluster.gpus} x {cluster.gpu.name}.")
    raise UserError(f"--max {what} is nothing to look for; write --max seq_len, --max batch or --max model.")


def _largest_batch(workload: Workload, cluster: Cluster) -> tuple[int, Choice]:
    """The most sequences that the data ranks together take at once, without accumulating."""

    def fits(size: int) -> Choice | None:
        at_once = {"gradient_accumulation_steps": 1}
        return _first(replace(workload, global_batch_size=size), cluster, fixed=at_once)

    powers = (2**n for n in range(24))
    found = {}
    for size in powers:  # few sequences leave data ranks without any, so that the least may not fit
        choice = fits(size)
        if choice is not None:
            found[size] = choice
        elif found or size > cluster.gpus:
            break
    if not found:
        raise nothing(search(workload, cluster))
    low, high = max(found), 2 * max(found)
    while high - low > cluster.gpus:
        middle = (low + high) // 2 // cluster.gpus * cluster.gpus
        if middle <= low:
            break
        choice = fits(middle)
        if choice is None:
            high = middle
        else:
            low, found[middle] = middle, choice
    return low, found[low]


@dataclass(frozen=True)
class Shape:
    work: Work
    traits: Traits


@cache
def models() -> dict[str, Shape]:
    """Well-known models from their published shapes (models.toml)."""
    tables = tomllib.loads(files("meshtune.plan").joinpath("models.toml").read_text("utf-8"))
    return {name: _shape(name, table) for name, table in tables.items()}


def _shape(name: str, t: Mapping[str, Any]) -> Shape:
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary")
    work = Work.of_shape(**{each: t[each] for each in names}, tied=float(t.get("tied", False)))
    cuts = ((t["ffn"], "features of the MLP"),)
    return Shape(work, Traits(name, t["layers"], t["heads"], t["kv_heads"], t["vocabulary"], True, cuts))


def _largest(fits: Any, least: int, most: int, grain: int) -> tuple[int, Choice]:
    """By doubling, then by halving the interval; `fits` gives a Choice or None."""
    best = fits(least)
    if best is None:
        raise NothingFits(f"Not even {least} tokens fit.")
    low = least
    while low * 2 <= most and (found := fits(low * 2)):
        low, best = low * 2, found
    high = low * 2
    while high - low > grain:
        middle = (low + high) // 2 // grain * grain or grain
        if middle <= low:
            break
        if found := fits(middle):
            low, best = middle, found
        else:
            high = middle
    return low, best


# the run #


@dataclass(frozen=True)
class Run:
    """What a whole run costs. price: of a GPU-hour, in whatever money."""

    steps: int
    seconds: float
    gpu_hours: float
    cost: float | None

    @classmethod
    def of(cls, choice: Choice, steps: int) -> Run:
        seconds = steps * choice.seconds.total
        hours = seconds * choice.layout.world / 3600
        price = choice.cluster.price
        return cls(steps, seconds, hours, None if price is None else hours * price)

    def sentence(self) -> str:
        """In words."""
        cost = "" if self.cost is None else f", {self.cost:,.2f} at the price given"
        return f"{self.steps} steps take {duration(self.seconds)}: {self.gpu_hours:,.1f} GPU-hours{cost}."


def _than(slower: float) -> str:
    if abs(slower) < 0.005:
        return "be as fast"
    return f"be {abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
