"""The order of layouts that fit: by step time, the first of them also by the memory that it leaves free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from meshtune.placement.columns import Number
from meshtune.plan.accuracy import Accuracy, accuracy

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster

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
    return cluster.memory / (1 + accuracy_of(stack, cluster).memory)


def accuracy_of(stack: str, cluster: Cluster) -> Accuracy:
    """Error bars of predictions for a stack on the cluster's GPUs."""
    return accuracy(stack, "cpu" if cluster.gpu.processor else cluster.gpu.name)
