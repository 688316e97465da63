"""Seconds that the host needs to start one operation of a model, whatever it computes."""

import time

import torch
from torch import Tensor, nn

from meshtune.meter.ledger import Ledger

BLOCKS, REPEATS = 8, 8  # of the passes that are timed; times that they are
WIDTH = 8  # numbers that an operation works on


class Block(nn.Module):
    """A residual block as Hugging Face's models write it, in small: a norm, a gate, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(self.gate(self.up(normed)))


def seconds_per_operation() -> float:
    """Mean seconds that this thread's processor works on an operation of a model without a size, forward and
    backward: Python, modules, autograd. To measure it takes some 20 ms.
    """
    with torch.random.fork_rng(devices=()):  # the run's own draws stay as they are
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x = torch.ones(1, WIDTH)
    with Ledger(torch.device("cpu")) as ledger:
        model(x).sum().backward()
    began = time.thread_time()
    for _ in range(REPEATS):
        model(x).sum().backward()
    return (time.thread_time() - began) / REPEATS / ledger.operations
