"""Stand-ins for what a fake world lacks: operations without an implementation, and what a message holds.

Each has the shapes, strides and saved tensors of the real one (tests compare them where that can run), and is
named in the trace (`RankTrace.substitutes`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class HeldWork:
    """The handle of a message that keeps what it sends alive, as a real process group's does.

    until_waited: NCCL lets go of the tensor when the host has waited for it; False: gloo with the handle.
    """

    def __init__(self, work: Any, tensor: Tensor, *, until_waited: bool) -> None:
        self.work, self.tensor, self.until_waited = work, tensor, until_waited

    def wait(self, *args: Any) -> Any:
        if self.until_waited:
            self.tensor = None
        return self.work.wait(*args)


@contextmanager
def held_messages(kernels: str) -> Iterator[str]:
    """Make torch.distributed's isend return handles that hold the tensor; yields what a trace says of it."""
    real = dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> HeldWork:
        return HeldWork(real(tensor, *args, **kwargs), tensor, until_waited=kernels == "cuda")

    dist.isend = distributed_c10d.isend = isend
    try:
        yield "torch.distributed.isend: holds what it sends"
    finally:
        dist.isend = distributed_c10d.isend = real


@contextmanager
def installed(kernels: str) -> Iterator[tuple[str, ...]]:
    """Install all stand-ins for a kind of kernels, "cpu" or "cuda"; yields what a trace says of them."""
    with ExitStack() as stack:
        yield (stack.enter_context(held_messages(kernels)),)
