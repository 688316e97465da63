"""What fits: the largest sequence, batch or model, and what to change where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshtune.errors import NothingFits, UserError
from meshtune.plan.cluster import Cluster, room
from meshtune.plan.hardware import catalogue
from meshtune.plan.memory.timeline import CATEGORIES, EVENTS
from meshtune.plan.models import models
from meshtune.plan.search import Choice, Plan, search
from meshtune.plan.workload import Workload
from meshtune.units import human

Others = Callable[[], Mapping[str, Workload]]  # settings that train something lighter
LESS = 0.85  # of what was predicted for a run that ran out of memory may another one need


# nothing fits #


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
        largest = max(CATEGORIES, key=lambda part: getattr(m, part))
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


def out_of_memory(now: Choice, workload: Workload, others: Others = dict) -> list[str]:
    """When a run ran out of memory under the layout `now`: what was predicted for it, and what needs less."""
    m, cluster = now.memory, now.cluster
    parts = sorted(CATEGORIES, key=lambda name: -getattr(m, name))
    listed = ", ".join(f"{name} {human(getattr(m, name))}" for name in parts if getattr(m, name) >= 1)
    found = [
        f"Predicted for {now.layout}: {human(m.peak)} at most ({EVENTS[int(m.event)]}): {listed}. "
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


def _first(
    workload: Workload, cluster: Cluster, gpus: int | None = None, fixed: Mapping[str, Any] | None = None
) -> Choice | None:
    """The best layout, if any fits; of another number of GPUs where one is given."""
    try:
        plan = search(workload, cluster.of_size(gpus) if gpus else cluster, fixed=fixed)
    except UserError:
        return None
    return plan.best(1)[0] if len(plan) else None


# the largest that fits #


def batches(workload: Workload, cluster: Cluster, sizes: Sequence[int]) -> dict[int, Choice | None]:
    """The best layout for each global batch size; None where none fits."""
    return {size: _first(replace(workload, global_batch_size=size), cluster) for size in sizes}


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
