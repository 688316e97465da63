"""Requests of steps to a GPU's allocator: a trace's storages on their streams, and the kernels' workspaces.

FSDP2 allocates on other streams than the one that computes (torch 2.13, fsdp/_fully_shard):

    all_gather_copy_in    foreach_all_gather: the shards in the compute dtype, and the gathered buffer
    reduce_scatter        foreach_reduce: the reduced gradient shards, and their cast to the parameter's dtype
    all_reduce            foreach_reduce with replicas: that cast

Its whole parameters (foreach_all_gather_copy_out, FSDPParam.alloc_all_gather_outputs) and the input of a
reduce-scatter (foreach_reduce) are allocated on the stream that computes. No stream but the allocating one is
told of a tensor (record_stream): FSDP2 keeps references instead, which the trace has seen.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshtune.dryrun.allocator import Allocator, Replay, Request, replay
from meshtune.dryrun.workspaces import Workspaces
from meshtune.meter.trace import COMMUNICATION, GRADIENT_COPIES, UPDATE, StepTrace, Storage

COMPUTE, GATHER, REDUCE, ALL_REDUCE = "compute", "all_gather_copy_in", "reduce_scatter", "all_reduce"


class StorageKey(NamedTuple):
    """A storage of a step."""

    step: int
    storage: int


class WorkspaceKey(NamedTuple):
    """A workspace; of an operation of a step, or lasting: then both are -1."""

    name: str
    step: int = -1
    operation: int = -1


def replay_steps(
    steps: Sequence[StepTrace],
    *,
    workspaces: Workspaces | None = None,
    expandable: bool = False,
    capacity: int | None = None,
    record: bool = False,
) -> list[Replay]:
    """Replay steps one after the other on one allocator: a replay of each, up to one that runs out of memory.

    workspaces: None leaves them out. Others: as in `Allocator`.
    """
    allocator = Allocator(expandable=expandable, capacity=capacity, record=record)
    replays: list[Replay] = []
    for requests in requests_of(steps, workspaces):
        replays.append(replay(requests, allocator))
        if replays[-1].out_of_memory:
            break
    return replays


def requests_of(steps: Sequence[StepTrace], workspaces: Workspaces | None = None) -> Iterator[list[Request]]:
    """Yield the requests of each step; keys are StorageKeys and WorkspaceKeys.

    What the step before has left is not requested again, but freed where the step does not have it.
    """
    left: dict[StorageKey, Storage] = {}
    lasting: set[str] = set()
    for step in steps:
        before = _carried(left, step)
        keys = [before.get(number, StorageKey(step.step, number)) for number in range(len(step.storages))]
        gone = left.keys() - before.values()
        requests = [Request(-1, key, left[key].bytes, False) for key in left if key in gone]
        streams, changes = streams_of(step), defaultdict(list)
        for change in step.changes:
            number = change.storage
            if change.at >= 0 or not change.allocated or number not in before:
                size, stream = step.storages[number].bytes, streams[number]
                changes[change.at].append(Request(change.at, keys[number], size, change.allocated, stream))
        requests += changes[-1]
        for number, operation in enumerate(step.operations):
            own = 0  # a kernel takes its workspace once its results are allocated
            for request in changes[number]:
                if not request.allocated or step.storages[request.key.storage].made_by != operation.name:
                    break
                own += 1
            taken = _taken(step, number, workspaces, lasting) if workspaces else []
            requests += [*changes[number][:own], *taken, *changes[number][own:]]
        yield requests
        living = step.living_at(len(step.operations))  # at the end of the step
        left = {keys[number]: storage for number, storage in living.items()}


def streams_of(step: StepTrace) -> list[str]:
    """The stream on which each storage is allocated."""
    streams = [COMPUTE] * len(step.storages)
    gradients: set[int] = set()  # inputs of FSDP2's reduce-scatters
    cast_on: dict[int, str] = {}  # reduced gradients -> the stream on which they are cast
    for operation in step.operations:
        collective = operation.collective.op if operation.collective else ""
        if operation.name == "fsdp.all_gather_copy_in.default":
            for number in {*operation.reads, *operation.writes}:
                if step.storages[number].category == COMMUNICATION:  # else a shard in the compute dtype
                    streams[number] = GATHER
        elif operation.name in {f"fsdp.{name}.default" for name in GRADIENT_COPIES}:
            gradients.update(operation.writes)
        elif collective == "reduce_scatter" and gradients.intersection(operation.reads):
            for number in set(operation.writes) - gradients:
                streams[number] = cast_on[number] = REDUCE
        elif collective == "all_reduce":
            cast_on |= dict.fromkeys(cast_on.keys() & operation.reads, ALL_REDUCE)
        elif operation.name == "aten._to_copy.default" and operation.phase != UPDATE:
            for number in cast_on.keys() & operation.reads:
                for copy in operation.writes:
                    streams[copy] = cast_on[number]
    return streams


def _taken(step: StepTrace, number: int, workspaces: Workspaces, lasting: set[str]) -> list[Request]:
    """Requests for the workspaces of an operation, which frees the temporary ones. lasting: taken so far."""
    operation, requests = step.operations[number], []
    for name, size in workspaces.lasting(operation):
        if name not in lasting:
            lasting.add(name)
            requests.append(Request(number, WorkspaceKey(name), size, True))
    taken = [
        Request(number, WorkspaceKey(name, step.step, number), size, True)
        for name, size in workspaces.temporary(operation)
    ]
    return [*requests, *taken, *(request._replace(allocated=False) for request in taken)]


def _carried(left: Mapping[StorageKey, Storage], step: StepTrace) -> dict[int, StorageKey]:
    """Storages that existed before the step, by number -> their keys in the step before.

    They have the same name, category and size; those that are alike are matched by order. left: of the step
    before.
    """
    known: dict[tuple[str, str, int], deque[StorageKey]] = defaultdict(deque)
    for key, storage in left.items():
        known[storage.name, storage.category, storage.bytes].append(key)
    found = {}
    for change in step.changes:
        storage = step.storages[change.storage]
        alike = known[storage.name, storage.category, storage.bytes]
        if change.at == -1 and change.allocated and alike:
            found[change.storage] = alike.popleft()
    return found
