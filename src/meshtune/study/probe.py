"""Measure this machine: each task is an operation that 1, 2, 4 … ranks run at once.

    round 0     every task once, to warm up and to choose how many operations a sample has
    round 1 …   every task in turn, so that a slow minute of the machine reaches all of them alike

Ranks that a task does not need wait for its end. On CPU the ranks are processes that share the cores, so
computing is measured with each number of them; GPUs share nothing but links, so only collectives are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil

import torch
import torch.distributed as dist

from meshtune.errors import UserError, is_out_of_memory, reason_of
from meshtune.launch import Rank
from meshtune.study.probe_figures import Figure
from meshtune.study.probe_tasks import Group, Operation, Sizes, Task, tasks_of
from meshtune.units import counted, duration, notice

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
    with answering():
        own_gpu = f":{torch.cuda.current_device()}" if device_type == "cuda" else ""
        device = torch.device(device_type + own_gpu)
        team = Team(rank, device)
        tasks = [*tasks_of(sizes, list(team.groups), device_type)]
        repeats: list[list[float]] = [[] for _ in tasks]
        counts = [1] * len(tasks)
        began = time.perf_counter()
        for done in range(sizes.rounds + 1):
            for number, task in enumerate(tasks):
                torch.set_num_threads(threads[task.ranks])
                taken = team.sample(task, counts[number], warm_up=not done or counts[number] > 1)
                if done:
                    repeats[number].append(taken)
                else:
                    sample = sizes.sample if task.ranks == 1 else sizes.shared_sample
                    counts[number] = max(1, min(MOST_OPERATIONS, ceil(sample / max(taken, 1e-9))))
            elapsed = time.perf_counter() - began
            if rank.main:
                what = f"round {done} of {sizes.rounds}" if done else counted(len(tasks), "operation")
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
