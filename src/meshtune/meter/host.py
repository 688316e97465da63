"""Seconds that the host needs to start one operation of a model, whatever it computes."""

import time

import torch
from torch import Tensor, nn

from meshtune.meter.ledger import Ledger

BLOCKS = 8  # of the passes that are timed
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


class OperationCost:
    """Measures what an operation of a model without a size costs this thread, forward and backward: Python,
    modules, autograd.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=()):  # the run's own draws stay as they are
            self._model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self._x = torch.ones(1, WIDTH)
        with Ledger(torch.device("cpu")) as ledger:
            self._pass()
        self._operations = ledger.operations

    def seconds(self) -> float:
        """Seconds of processor time an operation, now: the quicker of two passes, as caches are cold in the
        first. Takes some 4 ms. A processor's speed changes within seconds: compare with a time measured just
        before.
        """
        return min(self._pass(), self._pass()) / self._operations

    def _pass(self) -> float:
        began = time.thread_time()
        self._model(self._x).sum().backward()
        return time.thread_time() - began
