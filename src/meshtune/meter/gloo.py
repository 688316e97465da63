"""Exact counts of memory on CPU ranks: collectives whose tensors nobody else holds when they return."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Functions of torch.distributed that wait; some have two names, by torch's version.
WAITING = (
    "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip


@contextmanager
def released() -> Iterator[None]:
    """While open, a collective that waits returns only when gloo's worker thread holds its tensors no more.

    The thread lets go of them some time after it has woken who waits: until then a tensor that the step has
    freed would be counted. Nothing without a process group of gloo.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != "gloo":
        yield
        return
    real = {name: getattr(dist, name) for name in WAITING if hasattr(dist, name)}
    for name, collective in real.items():
        setattr(dist, name, partial(_call_and_wait, collective))
    try:
        yield
    finally:
        for name, collective in real.items():
            setattr(dist, name, collective)


def _call_and_wait(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors: list[Any] = [each for each in args if isinstance(each, Tensor)]
    users = [tensor._use_count() for tensor in tensors]
    work = collective(*args, **kwargs)
    while work is None and any(
        tensor._use_count() > count for tensor, count in zip(tensors, users, strict=True)
    ):
        time.sleep(1e-4)
    return work
