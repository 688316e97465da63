"""Tasks in queues that run side by side, as kernels on streams: when each of them begins and ends.

A queue runs its tasks one after the other. A task begins when it is the first of its queue, all tasks that it
waits for have ended, and the host has issued it. The host issues a rank's tasks in their order and runs ahead
of them, but for a synchronisation, where it waits for a task. Without torch.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Task:
    """One task of one rank."""

    queue: tuple[int, str]  # rank, and name of the stream
    seconds: float  # without others on its GPU
    host: float = 0.0  # seconds of the host to issue it
    after: list[int] = field(default_factory=list)  # numbers of the tasks that it waits for
    reads: int = -1  # number of the task that the host waits for before it issues this one; -1: none
    slows: bool = False  # what is computed meanwhile takes longer
    computes: bool = False  # it takes longer while such a task runs
    begin: float = -1.0
    end: float = -1.0
    issued: float = -1.0  # when the host had issued it
    cause: int = -1  # number of the last of `after` to end, if the task waited for it longest; -1: it did not
    slowed: dict[int, float] | None = None  # seconds that it lost, by the task that ran meanwhile; None: none


class Stuck(Exception):
    """Tasks that wait for each other in a circle."""


class Run:
    """All tasks of all ranks, run together.

    contention: share of the time during a task that `slows` by which computation takes longer.
    """

    def __init__(self, tasks: Sequence[Task], contention: float) -> None:
        self.tasks, self.contention = tasks, contention
        self.queues: dict[tuple[int, str], deque[int]] = {}
        self.hosts: dict[int, deque[int]] = {}
        self.clocks: dict[int, float] = {}  # of each rank's host
        self.followers: dict[int, list[int]] = {}  # tasks that wait for a task
        self.readers: dict[int, list[int]] = {}  # ranks whose host waits for a task
        self.missing = [0] * len(tasks)
        self.left = [task.seconds for task in tasks]  # of work, at full speed
        self.since = [0.0] * len(tasks)  # when `left` was last counted
        self.slowing: dict[int, list[int]] = {}  # by rank: tasks that run now and slow computation
        self.computing: dict[int, int] = {}  # by rank: the task that computes now
        self.version = [0] * len(tasks)
        self.events: list[tuple[float, int, int, int]] = []  # time, order, task, version; -1: it may begin
        self.order = 0
        for number, task in enumerate(tasks):
            self.queues.setdefault(task.queue, deque()).append(number)
            self.hosts.setdefault(task.queue[0], deque()).append(number)
            after = set(task.after)
            self.missing[number] = len(after)
            for other in after:
                self.followers.setdefault(other, []).append(number)

    def to_end(self) -> float:
        """Run all tasks, which get their times; seconds until the last one has ended."""
        for rank in self.hosts:
            self.clocks[rank] = 0.0
            self._issue(rank)
        for queue in self.queues:
            self._begin_first(queue, 0.0)
        done = 0
        while self.events:
            now, _, number, version = heapq.heappop(self.events)
            if version == -1:
                self._begin_first(self.tasks[number].queue, now)
            elif version == self.version[number]:
                self._finish(number, now)
                done += 1
        if done < len(self.tasks):
            waiting = [f"{rank}: {stream}" for (rank, stream), queue in self.queues.items() if queue]
            raise Stuck(f"{len(self.tasks) - done} tasks wait for each other on {', '.join(waiting)}.")
        return max((task.end for task in self.tasks), default=0.0)

    def _issue(self, rank: int) -> None:
        """Advance a rank's host up to its next synchronisation with a task that has not ended."""
        queue, clock = self.hosts[rank], self.clocks[rank]
        while queue:
            task = self.tasks[queue[0]]
            if task.reads >= 0:
                read = self.tasks[task.reads]
                if read.end < 0:
                    self.readers.setdefault(task.reads, []).append(rank)
                    break
                clock = max(clock, read.end)
            clock += task.host
            task.issued = clock
            queue.popleft()
        self.clocks[rank] = clock

    def _begin_first(self, queue: tuple[int, str], now: float) -> None:
        """Begin the first task of a queue if it waits for nothing."""
        waiting = self.queues[queue]
        if not waiting:
            return
        number = waiting[0]
        task = self.tasks[number]
        if task.begin >= 0 or self.missing[number] or task.issued < 0:
            return
        if task.issued > now:
            self._push(task.issued, number, -1)
            return
        task.begin = self.since[number] = now
        rank = queue[0]
        if task.slows:
            self._catch_up(rank, now)
            self.slowing.setdefault(rank, []).append(number)
            self._plan_end(rank, now)
        if task.computes:
            self.computing[rank] = number
            self._plan_end(rank, now)
        else:
            self._push(now + task.seconds, number, self.version[number])

    def _catch_up(self, rank: int, now: float) -> None:
        """Count what a rank's computation has done since it was last counted."""
        if (number := self.computing.get(rank, -1)) < 0:
            return
        passed, beside = now - self.since[number], self.slowing.get(rank)
        self.since[number] = now
        if beside:
            worked = passed / (1 + self.contention)
            task = self.tasks[number]
            task.slowed = task.slowed or {}
            task.slowed[beside[0]] = task.slowed.get(beside[0], 0.0) + passed - worked
            passed = worked
        self.left[number] -= passed

    def _plan_end(self, rank: int, now: float) -> None:
        """Push the event at which a rank's computation ends at its present speed."""
        if (number := self.computing.get(rank, -1)) < 0:
            return
        slow = 1 + self.contention if self.slowing.get(rank) else 1.0
        self.version[number] += 1
        self._push(now + max(self.left[number], 0.0) * slow, number, self.version[number])

    def _push(self, time: float, number: int, version: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, number, version))

    def _finish(self, number: int, now: float) -> None:
        """End a task, and begin what has waited for it."""
        task = self.tasks[number]
        rank = task.queue[0]
        if task.computes:
            self._catch_up(rank, now)
            del self.computing[rank]
        if task.slows:
            self._catch_up(rank, now)
            self.slowing[rank].remove(number)
            self._plan_end(rank, now)
        task.end = now
        self.queues[task.queue].popleft()
        woken = [task.queue]
        for follower in self.followers.get(number, ()):
            self.missing[follower] -= 1
            self.tasks[follower].cause = number
            woken.append(self.tasks[follower].queue)
        for reader in self.readers.get(number, ()):
            self._issue(reader)
            woken += [queue for queue in self.queues if queue[0] == reader]
        for queue in woken:
            self._begin_first(queue, now)
