"""Measure this machine: each task is an operation that 1, 2, 4 … ranks run at once.

    round 0     every task once, to warm up and to choose how many operations a sample has
    round 1 …   every task in turn, so that a slow minute of the machine reaches all of them alike

Ranks that a task does not need wait for its end. On CPU the ranks are processes that share the cores, so
computing is measured with each number of them; GPUs share nothing but links, so only collectives are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshtune.attention import flash
from meshtune.attention.core import attend_rows
from meshtune.compat import all_gather_single, reduce_scatter_single
from meshtune.data.boundaries import row_boundaries
from meshtune.errors import UserError, is_out_of_memory, reason_of
from meshtune.launch import Rank
from meshtune.placement.census import Attention
from meshtune.study.probe_kind import Figure
from meshtune.units import counted, duration, notice

notice_once = cache(notice)  # operations of several lengths have the same sentence
MOST_SILENT = 5.0  # seconds between lines of progress, about
MOST_OPERATIONS = 500  # of a sample: a GPU's queue holds about a thousand


def rank_counts(world: int) -> list[int]:
    """Numbers of ranks to measure: 1, 2, 4 … and all of them."""
    return sorted({2**power for power in range(world.bit_length()) if 2**power <= world} | {world})


def probe_rank(
    rank: Rank, sizes: Sizes, device_type: str, threads: Mapping[int, int], seconds: float
) -> list[Figure] | None:
    """Measure every task on this rank; the main rank returns the figures, the others None.

    threads: CPU threads of each rank, by the number of ranks at work. seconds: no further round begins that
    would end later. Raises UserError if a GPU stops answering.
    """
    with answering(), flash.built_in():
        own_gpu = f":{torch.cuda.current_device()}" if device_type == "cuda" else ""
        device = torch.device(device_type + own_gpu)
        team = Team(rank, device)
        tasks = [*tasks_of(sizes, list(team.groups), device_type)]
        repeats: list[list[float]] = [[] for _ in tasks]
        counts = [1] * len(tasks)
        began = said = time.perf_counter()
        for done in range(sizes.rounds + 1):
            whole = f"round {done} of {sizes.rounds}" if done else ""
            for number, task in enumerate(tasks):
                torch.set_num_threads(threads[task.ranks])
                taken = team.sample(task, counts[number], warm_up=not done or counts[number] > 1)
                if done:
                    repeats[number].append(taken)
                else:
                    sample = sizes.sample if task.ranks == 1 else sizes.shared_sample
                    counts[number] = max(1, min(MOST_OPERATIONS, ceil(sample / max(taken, 1e-9))))
                elapsed = time.perf_counter() - began
                last = number == len(tasks) - 1
                if rank.main and (last or began + elapsed - said > MOST_SILENT):
                    said = began + elapsed
                    part = f"{number + 1} of {counted(len(tasks), 'operation')}"
                    what = whole if whole and last else ", ".join(filter(None, [whole, part]))
                    notice(f"meshtune: probe: {what} measured, {duration(elapsed)} so far …")
            late = elapsed * (done + 2) / (done + 1) > seconds
            if team.agreed(float(late and done >= sizes.least_rounds)):
                break
    figures = [
        Figure(task.kind, task.what, task.ranks, tuple(times))
        for task, times in zip(tasks, repeats, strict=True)
    ]
    return figures if rank.main else None


class Team:
    """The ranks of a probe, with a process group for each number of them that works at once."""

    def __init__(self, rank: Rank, device: torch.device) -> None:
        self.number, self.device = rank.number, device
        self.alone = not (dist.is_available() and dist.is_initialized())
        world = 1 if self.alone else dist.get_world_size()
        self.groups: dict[int, Group] = {  # ranks -> their group; None: no group is needed
            ranks: dist.new_group(range(ranks)) if ranks > 1 else None for ranks in rank_counts(world)
        }

    def agreed(self, value: float, group: Group = None) -> float:
        """Mean of a value over the group's ranks, None: all; each waits for the others. Between CPUs."""
        if self.alone:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, group=group)
        return float(shared) / dist.get_world_size(group)

    def sample(self, task: Task, count: int, *, warm_up: bool) -> float:
        """Seconds of one operation, the mean of `count` on each rank that runs it; the same on every rank.

        warm_up: run it once before.
        """
        taken = 0.0
        if self.number < task.ranks:
            operation = task.prepare(self.device, self.groups[task.ranks])
            if warm_up:
                operation()
            self.synchronize()
            if task.ranks > 1:
                self.agreed(0.0, self.groups[task.ranks])
            taken = self.timed(operation, count, host=task.host)
        world = 1 if self.alone else dist.get_world_size()
        return self.agreed(taken) * world / task.ranks

    def timed(self, operation: Operation, count: int, *, host: bool) -> float:
        """Seconds of one of `count` operations; host: until the last is launched."""
        began = time.perf_counter()
        for _ in range(count):
            operation()
        launched = time.perf_counter()
        self.synchronize()
        return ((launched if host else time.perf_counter()) - began) / count

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def answering() -> Iterator[None]:
    """Turn the error of a GPU that stopped answering into a UserError."""
    try:
        yield
    except RuntimeError as error:
        lost = "CUDA error" in str(error) or "NCCL" in str(error)
        if is_out_of_memory(error) or not lost:
            raise
        raise UserError(
            f"A GPU stopped answering while it was measured: {reason_of(error)} Nothing was written; look at "
            "nvidia-smi, and run the probe again."
        ) from error


# Tasks #

# matmul      forward, gradients of inputs and of weights, as F.linear and its backward compute them
# attention   through attention/core.py, causal, one document a row
# memory      a copy, and a sum of two tensors
# collective  all_reduce, all_gather, reduce_scatter over 2, 4 … ranks; a send between two
# host        small operations, whose time is Python's, torch's and, on CUDA, the launch's


Operation = Callable[[], object]  # runs it once
Group = Any  # a process group, or None for a single rank
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = ((512, 1408), (576, 1536), (2048, 8192), (4096, 14336))  # (hidden, MLP): 28 M, 135 M, 1 B, 8 B
WIDTH = 512  # features of queries in an attention: by the number of heads
MUCH = 2048  # hidden size from which gradients of inputs, as large a matmul as the forward, are left out
DRAWN = 2**16  # random values
SMALL = 64  # elements of the tensors of host's operations


@dataclass(frozen=True)
class Sizes:
    """Sizes of the operations that are measured on a kind of device."""

    dtype: str  # of most matmuls and of attention: what a run's precision is likely to be
    other: str  # the other dtype, of a few matmuls
    tokens: int  # of a block's matmuls
    squares: tuple[int, ...]  # of square matmuls
    blocks: tuple[tuple[int, int], ...]  # (hidden size, MLP size)
    attended: int  # tokens of an attention, in rows of each length
    lengths: tuple[int, ...]  # of documents
    copied: tuple[int, ...]  # bytes of a tensor that is copied
    exchanged: tuple[int, ...]  # bytes of a whole tensor that is exchanged
    sample: float = 0.04  # seconds of a sample, at least
    shared_sample: float = 0.12  # the same of several ranks, some tens of a scheduler's time slices
    rounds: int = 7  # of samples, as far as the time allows
    least_rounds: int = 3


MIB = 2**20
CPU = Sizes(
    "fp32", "bf16", 256, (128, 256, 512, 1024), BLOCKS, 2048, (128, 512, 2048), (8 * MIB, 64 * MIB),
    (MIB // 16, MIB, 16 * MIB),
)  # fmt: skip
CUDA = Sizes(
    "bf16", "fp32", 8192, (512, 1024, 2048, 4096, 8192), BLOCKS, 16384, (512, 2048, 8192),
    (256 * MIB, 1024 * MIB), (MIB // 4, 4 * MIB, 64 * MIB, 256 * MIB), sample=0.02,
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """An operation that `ranks` ranks run at once."""

    kind: str
    what: Mapping[str, Any]
    ranks: int
    prepare: Callable[[torch.device, Group], Operation]  # makes its tensors on a rank of the group
    host: bool = False  # True: timed until it is launched, not until it is through


def tasks_of(sizes: Sizes, counts: Sequence[int], device_type: str) -> Iterator[Task]:
    """Yield every task for these numbers of ranks; GPUs compute separately."""
    for ranks in counts:
        if ranks == 1:
            yield from _computing(sizes)
        elif device_type == "cpu":
            yield from _computing_together(sizes, ranks)
        if ranks > 1:
            yield from _collectives(sizes, ranks)


def _computing(sizes: Sizes) -> Iterator[Task]:
    """Tasks of a single rank."""
    tokens = sizes.tokens
    for size in sizes.squares:
        yield matmul(1, "forward", sizes.dtype, size, size, size)
    for hidden, wide in sizes.blocks:
        yield matmul(1, "forward", sizes.dtype, tokens, hidden, hidden)
        yield matmul(1, "forward", sizes.dtype, tokens, wide, hidden)
        if hidden < MUCH:
            yield matmul(1, "inputs", sizes.dtype, tokens, wide, hidden)
        yield matmul(1, "weights", sizes.dtype, tokens, wide, hidden)
    middle = sizes.squares[len(sizes.squares) // 2]
    for odd in (8, 1):  # rows of operands that aren't multiples of 128 bytes, and not even of 16
        yield matmul(1, "forward", sizes.dtype, middle, middle + odd, middle + odd)
    for size in sizes.squares[-2:]:
        yield matmul(1, "forward", sizes.other, size, size, size)
    for head in (64, 128, 256):
        for length in sizes.lengths if head < 256 else sizes.lengths[-2:]:
            yield attention(1, sizes, head, length, "forward")
            yield attention(1, sizes, head, length, "backward")
    yield from _memory_and_host(sizes, 1)


def _computing_together(sizes: Sizes, ranks: int) -> Iterator[Task]:
    """A part of the tasks of a single rank, which ranks that share the cores run at once."""
    hidden, wide = sizes.blocks[0]
    middle = sizes.squares[len(sizes.squares) // 2]
    yield matmul(ranks, "forward", sizes.dtype, middle, middle, middle)
    yield matmul(ranks, "forward", sizes.dtype, sizes.tokens, wide, hidden)
    yield matmul(ranks, "weights", sizes.dtype, sizes.tokens, wide, hidden)
    for pass_ in ("forward", "backward"):
        yield attention(ranks, sizes, 64, sizes.lengths[len(sizes.lengths) // 2], pass_)
    yield from _memory_and_host(sizes, ranks)


def _memory_and_host(sizes: Sizes, ranks: int) -> Iterator[Task]:
    for size in sizes.copied:
        yield Task("memory", {"form": "copy", "bytes": size}, ranks, partial(_copy, size))
        yield Task("memory", {"form": "add", "bytes": size}, ranks, partial(_add, size))
    for form in HOST:
        yield Task("host", {"form": form}, ranks, HOST[form], host=True)


def _collectives(sizes: Sizes, ranks: int) -> Iterator[Task]:
    for size in sizes.exchanged:
        for form in COLLECTIVES if ranks > 2 else (*COLLECTIVES, "send"):
            prepare = partial(_send if form == "send" else COLLECTIVES[form], size)
            yield Task("collective", {"form": form, "bytes": size}, ranks, prepare)


# operations #


def values(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values in a tensor, the same again and again, which is quick; a GPU's matmuls of zeros take less
    power than real ones.
    """
    some = torch.randn(DRAWN, device=device, dtype=dtype)
    return some.repeat(ceil(prod(shape) / DRAWN))[: prod(shape)].view(shape)


def matmul(ranks: int, form: str, dtype: str, tokens: int, rows: int, cols: int) -> Task:
    """A pass of a linear layer with weights [rows, cols]; form: forward, inputs or weights."""
    what = {"form": form, "dtype": dtype, "tokens": tokens, "rows": rows, "cols": cols}
    return Task("matmul", what, ranks, partial(_matmul, form, dtype, (tokens, rows, cols)))


def _matmul(form: str, dtype: str, sizes: tuple[int, int, int], device: torch.device, _: Group) -> Operation:
    tokens, rows, cols = sizes
    of_dtype = DTYPES[dtype]
    if form == "forward":
        return partial(
            F.linear, values(device, tokens, cols, dtype=of_dtype), values(device, rows, cols, dtype=of_dtype)
        )
    gradient = values(device, tokens, rows, dtype=of_dtype)
    if form == "inputs":
        return partial(torch.mm, gradient, values(device, rows, cols, dtype=of_dtype))
    return partial(torch.mm, gradient.t(), values(device, tokens, cols, dtype=of_dtype))


def attention(ranks: int, sizes: Sizes, head: int, length: int, form: str) -> Task:
    """Causal attention of documents of one length, each a row; form: forward or backward."""
    tokens = max(length, sizes.attended)
    what: dict[str, Any] = {"form": form, "dtype": sizes.dtype, "tokens": tokens, "length": length}
    what |= {"head": head, "width": 2 * head * max(1, WIDTH // head)}  # of queries and values, all heads
    return Task("attention", what, ranks, partial(_attention, what))


def _attention(what: dict[str, Any], device: torch.device, _: Group) -> Operation:
    """Make the operation; on a GPU `what` gets the version of FlashAttention that runs, as "flash"."""
    form, dtype, tokens, length, head = (what[key] for key in ("form", "dtype", "tokens", "length", "head"))
    rows, heads = tokens // length, max(1, WIDTH // head)
    q, k, v = (
        values(device, rows, heads, length, head, dtype=DTYPES[dtype]).requires_grad_() for _ in range(3)
    )
    documents = row_boundaries(((length,),) * rows, length).map(lambda tensor: tensor.to(device))
    shape = Attention(heads, heads, head, head)
    version, notes = flash.choose(flash.versions_here(device), [shape], q.dtype, device)
    if device.type == "cuda" and "flash" not in what:
        what["flash"] = version
        for note in notes:
            notice_once(f"meshtune: probe: heads of {head}: {note}")
    attend = partial(attend_rows, q, k, v, documents, head**-0.5, 0.0, None, None)
    if form == "forward":
        return attend
    out = attend()
    return partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)


def _copy(size: int, device: torch.device, _: Group) -> Operation:
    source = values(device, size // 4)
    return partial(torch.empty_like(source).copy_, source)


def _add(size: int, device: torch.device, _: Group) -> Operation:
    one, other = values(device, size // 4), values(device, size // 4)
    return partial(torch.add, one, other, out=torch.empty_like(one))


def _all_reduce(size: int, device: torch.device, group: Group) -> Operation:
    return partial(dist.all_reduce, torch.zeros(size // 4, device=device), group=group)


def _all_gather(size: int, device: torch.device, group: Group) -> Operation:
    whole, part = _whole_and_part(size, device, group)
    return partial(all_gather_single, whole, part, group)


def _reduce_scatter(size: int, device: torch.device, group: Group) -> Operation:
    whole, part = _whole_and_part(size, device, group)
    return partial(reduce_scatter_single, part, whole, group)


def _whole_and_part(size: int, device: torch.device, group: Group) -> tuple[Tensor, Tensor]:
    part = torch.zeros(size // 4 // dist.get_world_size(group), device=device)
    return torch.zeros(part.numel() * dist.get_world_size(group), device=device), part


def _send(size: int, device: torch.device, group: Group) -> Operation:
    tensor = torch.zeros(size // 4, device=device)
    first = dist.get_rank() == 0
    return partial(dist.send, tensor, 1, group=group) if first else partial(dist.recv, tensor, 0, group=group)


COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


HOST: Mapping[str, Callable[[torch.device, Group], Operation]] = {
    "add": lambda device, _: partial(values(device, SMALL).add_, 1.0),
    "multiply": lambda device, _: partial(
        torch.mul, values(device, SMALL).requires_grad_(), values(device, SMALL)
    ),
    "linear": lambda device, _: partial(
        F.linear, values(device, 1, SMALL).requires_grad_(), values(device, SMALL, SMALL)
    ),
}
