"""Other global batches: near one that the data ranks do not divide, and a quarter to four times it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshtune.errors import UserError
from meshtune.plan.candidates import nearest_sizes
from meshtune.plan.cluster import Cluster
from meshtune.plan.phrases import memory_need, sequences
from meshtune.plan.search import Choice, Plan, best_fitting, explained, search
from meshtune.plan.workload import Workload
from meshtune.units import human, significant

WORTH = 0.02  # gain in speed from which another batch is worth a sentence


# near one that does not divide #


def nearest_sentences(plan: Plan, best: Choice) -> list[str]:
    """The faster of the `nearest_sizes` below and above the plan's batch, each with its gain and layout.

    best: the chosen layout, which they are compared with. Gains below WORTH are left out, and all where times
    mean nothing.
    """
    if not plan.cluster.timed:
        return []
    workload, size = plan.workload, plan.workload.global_batch_size
    gains: dict[bool, tuple[float, int, Choice]] = {}  # by whether the batch is larger
    for other in nearest_sizes(size, plan.cluster, plan.fixed):
        if choice := best_fitting(workload.of_batch(other), plan.cluster, plan.fixed_of_batches):
            gain = choice.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
            if gain > gains.get(other > size, (WORTH,))[0]:
                gains[other > size] = (gain, other, choice)
    order = sorted(gains.values(), key=lambda entry: (-round(entry[0], 2), abs(entry[1] - size)))
    return [
        f"{sequences(other)} instead of {size}: {gain:.0%} faster ({choice.layout}), "
        f"{choice.tokens_per_second_per_gpu:,.0f} {plan.cluster.speed_unit}; "
        f"{choice.layout.data_ranks} data ranks divide them. Set train.global_batch_size={other}."
        for gain, other, choice in order
    ]


# a quarter to four times #


def batch_sizes(workload: Workload) -> list[int]:
    """Global batch sizes to compare, in sequences: a quarter to four times the workload's."""
    size = workload.global_batch_size
    return [other for other in (size // 4, size // 2, size, 2 * size, 4 * size) if other >= 1]


def best_of_batches(
    workload: Workload, cluster: Cluster, sizes: Sequence[int], fixed: Mapping[str, Any] | None = None
) -> dict[int, Choice | None]:
    """The best layout for each global batch size in `sizes`; None where none fits. fixed: as in `search`."""
    return {size: best_fitting(workload.of_batch(size), cluster, fixed) for size in sizes}


def reasons_for_none(
    workload: Workload, cluster: Cluster, choices: Mapping[int, Choice | None], fixed: Mapping[str, Any]
) -> dict[int, str]:
    """Why `choices` has no layout for a size: its memory, or fixed fields that don't make such a batch."""
    reasons = {}
    for size in (size for size, choice in choices.items() if choice is None):
        try:
            search(workload.of_batch(size), cluster, fixed=fixed)
            reasons[size] = "no layout fits."
        except UserError as error:
            reasons[size] = error.problems[0]
    return reasons


def batch_sentences(
    workload: Workload, choices: Mapping[int, Choice | None], reasons: Mapping[int, str] | None = None
) -> list[str]:
    """Speed, updates per token and memory of each global batch size; one sentence if all are as fast.

    choices: the best layout by size, in sequences, ascending; None: there is none, for the reason in
    `reasons` (`reasons_for_none`). As fast: within 2 % of each other, with a layout for every size. No speeds
    where predicted times mean nothing.
    """
    current = choices.get(workload.global_batch_size)
    speeds = [choice.tokens_per_second_per_gpu for choice in choices.values() if choice]
    updates = {
        size: f"{significant(1e6 / (size * workload.seq_len), 2)} optimizer updates per million tokens"
        for size in choices
    }
    timed = current is None or current.cluster.timed
    if current and timed and None not in choices.values() and max(speeds) / min(speeds) < 1 + WORTH:
        fewest, most = min(choices), max(choices)
        return [
            f"From {fewest} to {most} sequences the speed differs by less than {WORTH:.0%}; choose by "
            f"convergence: {updates[fewest]} with {fewest} sequences, {updates[most].split()[0]} with {most}."
        ]
    sentences = []
    for size, choice in choices.items():
        if choice is None:
            sentences.append(f"{sequences(size)}: {(reasons or {}).get(size, 'no layout fits.')}")
            continue
        speed, facts = choice.tokens_per_second_per_gpu, []
        if choice.cluster.timed:
            ratio = ""
            if current is not None and size != workload.global_batch_size:
                ratio = speed / current.tokens_per_second_per_gpu
                ratio = f" ({ratio:.2f} x that of {workload.global_batch_size})"
            facts.append(f"{speed:,.0f} {choice.cluster.speed_unit}{ratio}")
        facts += [updates[size], f"{human(choice.memory.peak)} ({choice.layout})"]
        sentence = f"{sequences(size)}: {', '.join(facts)}."
        sentences.append(sentence + (_outgrown(workload, size, choice, current) if current else ""))
    return sentences


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
