"""Seconds that the host needs to start one operation, whatever it computes."""

import time
from statistics import median

import torch

from meshtune.meter.ledger import Ledger

LENGTH, REPEATS = 20, 15  # operations of the forward pass; passes that are timed


def seconds_per_operation() -> float:
    """Median seconds of an operation on 8 numbers, in passes forward and backward on the processor.

    Autograd's work is in it, that of a model's own Python is not. To measure it takes some 10 ms.
    """
    start = torch.ones(1, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)

    def passes() -> None:
        x = start
        for _ in range(LENGTH // 2):
            x = torch.nn.functional.silu(x @ weight)
        x.sum().backward()

    with Ledger(torch.device("cpu")) as ledger:
        passes()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        passes()
        seconds.append(time.perf_counter() - began)
    return median(seconds) / ledger.operations
