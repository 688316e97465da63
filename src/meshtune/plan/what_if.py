"""The best layout for other numbers of GPUs, global batches and sequence lengths, each searched for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from meshtune.errors import UserError
from meshtune.plan.cluster import Cluster
from meshtune.plan.search import Choice, search

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer

TIMES_GPUS = (0.25, 0.5, 1, 2)  # of the chosen cluster's
TIMES_BATCH = (0.5, 1, 2)  # of the workload's
TIMES_SEQ_LEN = (0.5, 1, 2)

Key = tuple[int, int, int]  # (GPUs, sequences of a global batch, tokens of a sequence)


@dataclass(frozen=True)
class WhatIf:
    """The best layouts around an answer, one for each combination of the three lists."""

    gpus: tuple[int, ...]
    batches: tuple[int, ...]
    seq_lens: tuple[int, ...]
    choices: Mapping[Key, Choice | None]  # None: nothing fits, or no layout makes the batch


def what_if(answer: Answer, known: Mapping[tuple[int, int], Choice | None]) -> WhatIf:
    """Search around the answer's cluster, batch and sequence length: 35 searches at most.

    known: (global batch size, GPUs) -> best layout, as `Answer.batches`; these are not searched for again.
    """
    workload, cluster = answer.workload, answer.choice.cluster
    clusters = {one.gpus: one for times in TIMES_GPUS if (one := _of_size(cluster, cluster.gpus * times))}
    batches = _multiples(workload.global_batch_size, TIMES_BATCH)
    seq_lens = _multiples(workload.seq_len, TIMES_SEQ_LEN)
    choices: dict[Key, Choice | None] = {}
    for gpus, batch, seq_len in product(clusters, batches, seq_lens):
        if (gpus, batch, seq_len) == (cluster.gpus, workload.global_batch_size, workload.seq_len):
            choices[gpus, batch, seq_len] = answer.choice
            continue
        if seq_len == workload.seq_len and (batch, gpus) in known:
            choices[gpus, batch, seq_len] = known[batch, gpus]
            continue
        other = replace(workload.of_batch(batch), seq_len=seq_len)
        try:
            plan = search(other, clusters[gpus])
        except UserError:  # no layout makes the batch
            choices[gpus, batch, seq_len] = None
            continue
        choices[gpus, batch, seq_len] = plan.choice(0) if len(plan) else None
    return WhatIf(tuple(clusters), batches, seq_lens, choices)


def _of_size(cluster: Cluster, gpus: float) -> Cluster | None:
    """The cluster with this number of GPUs; None if it is no whole number or does not fill whole nodes."""
    try:
        return cluster.of_size(int(gpus)) if gpus >= 1 and gpus == int(gpus) else None
    except UserError:
        return None


def _multiples(number: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """The multiples of a number that are whole and above 0."""
    every = (number * one for one in times)
    return tuple(int(multiple) for multiple in every if multiple >= 1 and multiple == int(multiple))
