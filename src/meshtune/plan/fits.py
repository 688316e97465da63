"""Search for what fits: the largest sequence, batch or model, and what to change where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshtune.errors import NothingFits, UserError
from meshtune.layout import Layout
from meshtune.plan.candidates import nearest_sizes
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import catalogue
from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES, EVENTS
from meshtune.plan.models import models
from meshtune.plan.phrases import memory_limit, memory_need
from meshtune.plan.search import Choice, Plan, best_fitting, search
from meshtune.plan.workload import Workload
from meshtune.precision import PRECISIONS, narrower
from meshtune.units import counted, human

Lighter = Callable[[], Mapping[str, Workload]]  # returns workloads that need less, by the setting for them
NEXT_TRY = 0.85  # of the predicted peak of a run that ran out of memory: the most that another may need
MORE_GPUS = (2, 3, 4, 6, 8, 12, 16)  # times the cluster's, to try
SHORTER = (2, 4, 8, 16)  # parts of the sequence length, to try


# nothing fits #


class Refused(UserError):
    """Error: every layout is refused, whatever memory it needs."""


def empty_plan_error(plan: Plan, lighter: Lighter = dict) -> UserError:
    """Return the error for an empty plan: NothingFits, or Refused with the reasons if no layout can run.

    lighter: as in `remedies`.
    """
    if len(plan.near.tp):
        return NothingFits(nothing_fits(plan, lighter))
    where = f"{plan.cluster.gpus} x {plan.cluster.gpu.name}"
    if plan.fixed:
        refused = f"No layout of {where} with the fields of it that are fixed can train {plan.workload.model}"
        return Refused(f"{refused}: {sentence}" for sentence in refusals(plan))
    return Refused(
        f"{plan.workload.model} can't be trained under any layout of {where}: {'; '.join(_reasons(plan))}."
    )


def refusals(plan: Plan) -> list[str]:
    """Sentences that refuse the examples of a plan in which every layout is refused, each once."""
    examples = [Layout.parse(rejected.example) for rejected in plan.rejected]
    return list(dict.fromkeys(sentence for one in examples for sentence in plan.workload.refusals(one)))


def nothing_fits(plan: Plan, lighter: Lighter = dict) -> list[str]:
    """Sentences that say how much the smallest layout needs, and which `remedies` would fit.

    Where the plan has fixed fields, the best layout without them is one more.
    """
    workload, cluster = plan.workload, plan.cluster
    sentences = [
        f"No layout of {cluster.gpus} x {cluster.gpu.name} fits {workload.model} at {workload.seq_len} tokens"
        f"{' with the fields of it that are fixed' * bool(plan.fixed)}; {memory_limit(cluster)}."
    ]
    if nearest := plan.nearest(1):
        need = memory_need(nearest[0].memory)
        sentences.append(f"The layout that needs least is {nearest[0].layout}: {need}.")
    else:
        sentences += [f"{reason}." for reason in _reasons(plan)[:4]]
    fitting = list(remedies(workload, cluster, lighter))
    if plan.fixed and (free := best_fitting(workload, cluster)):
        fitting.insert(0, f"layout={free.layout} ({human(free.memory.peak)})")
    sentences.append(
        f"What would fit: {'; '.join(fitting)}."
        if fitting
        else "None of the changes that were tried would fit."
    )
    return [*sentences, *_cautions(fitting)]


def _reasons(plan: Plan) -> list[str]:
    """Reasons for which layouts were refused, each with their number and an example."""
    return [
        f"{rejected.reason.rstrip('.')} ({counted(rejected.count, 'layout')}, such as {rejected.example})"
        for rejected in plan.rejected
    ]


def remedies(workload: Workload, cluster: Cluster, lighter: Lighter = dict) -> Iterator[str]:
    """Settings that fit, each with its layout and memory: the least change of each kind.

    No memory budget, a global batch that the data ranks share, more GPUs, shorter sequences, lower precision,
    every workload that `lighter` returns, larger GPUs. Each is searched for with no field of the layout
    fixed.
    """
    for setting, choice in _remedies(workload, cluster, lighter):
        yield f"{setting} layout={choice.layout} ({human(choice.memory.peak)})"


def _cautions(settings: Sequence[str]) -> list[str]:
    """The cautions of precisions that `settings`, sentences of `remedies`, offer."""
    return [
        precision.caution
        for name, precision in PRECISIONS.items()
        if precision.caution and any(setting.startswith(f"train.precision={name} ") for setting in settings)
    ]


def _remedies(workload: Workload, cluster: Cluster, lighter: Lighter) -> Iterator[tuple[str, Choice]]:
    """(setting, best layout under it) for each kind of change in `remedies` that makes something fit."""
    unbounded = replace(cluster, memory_budget=None)
    if cluster.memory_budget and (choice := best_fitting(workload, unbounded)):
        yield "cluster.memory_budget_gib=null", choice
    batch = workload.global_batch_size
    for size in sorted(nearest_sizes(batch, cluster, {}), key=lambda size: abs(size - batch)):
        if choice := best_fitting(workload.of_batch(size), cluster):
            yield f"train.global_batch_size={size}", choice
            break
    for factor in () if cluster.gpu.processor else MORE_GPUS:  # processors share one memory
        if choice := best_fitting(workload, cluster, gpus=cluster.gpus * factor):
            yield f"cluster.gpus={cluster.gpus * factor}", choice
            break
    for parts in SHORTER:
        shorter = replace(workload, seq_len=workload.seq_len // parts)
        if workload.seq_len % parts == 0 and (choice := best_fitting(shorter, cluster)):
            yield f"data.seq_len={shorter.seq_len}", choice
            break
    for precision in narrower(workload.precision):
        if precision not in workload.tool.precisions:
            continue
        if choice := best_fitting(replace(workload, precision=precision), cluster):
            yield f"train.precision={precision}", choice
            break
    for setting, other in lighter().items():
        if choice := best_fitting(other, cluster):
            yield setting, choice
    for gpu in sorted(catalogue().values(), key=lambda gpu: gpu.memory):
        if gpu.memory <= 1.1 * cluster.memory or gpu.processor:
            continue
        node = gpu.node if cluster.node == cluster.gpu.node else cluster.node
        larger = replace(
            cluster, gpu=gpu, memory=gpu.memory, link=gpu.link, network=gpu.network, node=node,
            host_memory=None,
        )  # fmt: skip
        if choice := best_fitting(workload, larger):
            yield f"cluster.gpu={gpu.name}", choice
            break


def out_of_memory(failed: Choice, workload: Workload, lighter: Lighter = dict) -> list[str]:
    """Sentences for a run that ran out of memory: its predicted peak by category, and what needs less.

    That is at most NEXT_TRY of the predicted peak: up to two other layouts or, if there is none, `remedies`.
    failed: the run's layout and what was predicted for it. lighter: as in `remedies`.
    """
    memory = failed.memory
    bytes_of = {category: getattr(memory, category) for category in CATEGORIES}
    largest_first = sorted(CATEGORIES, key=lambda category: -bytes_of[category])
    listed = ", ".join(
        f"{CATEGORY_NAMES[category]} {human(bytes_of[category])}"
        for category in largest_first
        if bytes_of[category] >= 1
    )
    predicted = (
        f"Predicted for {failed.layout}: a peak of {human(memory.peak)} (at: {EVENTS[int(memory.event)]}): "
        f"{listed}. The largest part is {CATEGORY_NAMES[largest_first[0]]}."
    )
    smaller = replace(failed.cluster, memory=min(failed.cluster.memory, NEXT_TRY * memory.peak))
    others = search(workload, replace(smaller, memory_margin=0.0)).best(2)
    fitting = [f"layout={one.layout} ({human(one.memory.peak)}{_slower(one, failed)})" for one in others]
    fitting = fitting or list(remedies(workload, smaller, lighter))
    if not fitting:
        return [predicted, "None of the changes that were tried needs less."]
    return [predicted, f"What needs less, fastest first: {'; '.join(fitting)}.", *_cautions(fitting)]


def _slower(choice: Choice, failed: Choice) -> str:
    """The change of step time, as ", +4% time"; "" where predicted times mean nothing."""
    more = choice.seconds.total / failed.seconds.total - 1
    return f", {more:+.0%} time" if choice.cluster.timed else ""


# the largest that fits #


def largest(workload: Workload, cluster: Cluster, what: str) -> tuple[Any, Choice]:
    """(value, best layout) of the largest `what` that fits; no field of the layout is fixed.

    what: "seq_len", in tokens, 256, 512 or a multiple of 1024; "batch", in sequences of a global batch
    without accumulation; "model", the name in models.toml of the one with most parameters. Raises NothingFits
    (for "batch" Refused, if no layout can run) if not even the smallest fits, UserError for another `what`.
    """
    if what == "seq_len":
        return _largest_seq_len(workload, cluster)
    if what == "batch":
        return _largest_batch(workload, cluster)
    if what == "model":
        by_size = sorted(models().items(), key=lambda item: -float(item[1].work.parameters))
        for name, model in by_size:
            if 2 * model.work.parameters > cluster.memory * cluster.gpus:  # not even its weights in bf16
                continue
            work = model.work if workload.lora_r is None else model.work.adapted(workload.lora_r)
            if choice := best_fitting(replace(workload, model=name, work=work, traits=model.traits), cluster):
                return name, choice
        raise NothingFits(f"None of {', '.join(models())} fits {cluster.gpus} x {cluster.gpu.name}.")
    raise UserError(
        f"plan max {what}: the largest of it can't be searched for. Write plan max seq_len, plan max batch "
        "or plan max model."
    )


def _largest_batch(workload: Workload, cluster: Cluster) -> tuple[int, Choice]:
    """(sequences, layout) of the largest global batch that fits without accumulation.

    It is a power of two, or a multiple of the cluster's GPUs. Raises NothingFits or Refused if none fits.
    """
    fitting: dict[int, Choice] = {}

    def fits(size: int) -> bool:
        choice = best_fitting(workload.of_batch(size), cluster, {"gradient_accumulation_steps": 1})
        if choice:
            fitting[size] = choice
        return choice is not None

    for size in (2**power for power in range(24)):
        # a batch smaller than the cluster may need layouts that fit less well: go on
        if not fits(size) and (fitting or size > cluster.gpus):
            break
    if not fitting:
        raise empty_plan_error(search(workload, cluster))
    low = _bisect(fits, max(fitting), 2 * max(fitting), cluster.gpus)
    return low, fitting[low]


def _largest_seq_len(workload: Workload, cluster: Cluster) -> tuple[int, Choice]:
    """(tokens, layout) of the longest sequence: by doubling from 256, then by bisection in steps of 1024.

    256, 512 or a multiple of 1024, below 2^25. Raises NothingFits if 256 tokens don't fit.
    """
    shortest, longest, step = 256, 2**24, 1024
    fitting: dict[int, Choice] = {}

    def fits(seq_len: int) -> bool:
        choice = best_fitting(replace(workload, seq_len=seq_len), cluster)
        if choice:
            fitting[seq_len] = choice
        return choice is not None

    if not fits(shortest):
        raise NothingFits(f"Not even sequences of {shortest} tokens fit.")
    low = shortest
    while low * 2 <= longest and fits(low * 2):
        low *= 2
    low = _bisect(fits, low, 2 * low, step)
    return low, fitting[low]


def _bisect(fits: Callable[[int], bool], low: int, high: int, step: int) -> int:
    """The largest multiple of `step` that fits between low, which fits, and high, taken not to; else low.

    Sizes between them are taken to fit up to some size and no further.
    """
    while high - low > step:
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
