"""A step of one rank as it happened: its operations, and the storages that they allocated and freed.

    operations   in the order in which the host issued them: each with its phase, module, FLOPs, bytes
    storages     every allocation of memory: bytes, category (ledger.py), who made it
    changes      allocations and frees, each at an operation: replaying them gives the bytes at any time

Plain values without torch, so that whatever reads a trace (an allocator, streams, pictures) is arithmetic.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# FSDP2's operators that copy gradients into the flat input of a reduce-scatter; the second is torch 2.15's.
GRADIENT_COPIES = ("chunk_cat", "chunk_cat_mixed_dtype")
WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER = "weights", "gathered_weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY = "activations", "logits", "communication", "temporary"
CATEGORIES: tuple[str, ...] = (
    WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY,
)  # fmt: skip
# Operators of parallel/offload.py, which copy hidden states to host memory and back.
OFFLOADS = TO_HOST, TO_DEVICE = "meshtune.to_host.default", "meshtune.to_device.default"
HOST_BUFFER = "host_buffer"  # the one that allocates host memory, which is not the device's
FORWARD, BACKWARD, RECOMPUTATION, UPDATE = "forward", "backward", "recomputation", "optimizer"
WITHOUT_GRADIENTS = "forward without gradients"  # before a step's first forward (kto)
PHASES = (WITHOUT_GRADIENTS, FORWARD, BACKWARD, RECOMPUTATION, UPDATE)
NUMBERED = re.compile(r"^(.+?)\.(\d+)(?=\.|$)(.*)$")  # a module in a list, as blocks are


@dataclass(slots=True, frozen=True)
class Collective:
    """A collective, or a send or receive between two ranks."""

    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send or receive
    axis: str  # along which the ranks differ: an axis of layout.AXES, or several joined by "+"
    ranks: int  # of the group
    # of the whole tensor: what an all-gather makes, what a reduce-scatter reads; what is sent, or received of
    # an all-to-all if that is more
    bytes: int
    stride: int = 1  # from a rank of the group to its next one in the world
    peer: int | None = None  # of a send or receive: the other rank in the world
    waits: bool = True  # the compute stream waits for it where it is issued; False: where its result is read


class CollectiveKind(NamedTuple):
    """Collectives of a step that are alike."""

    op: str  # as Collective.op
    axis: str
    ranks: int
    count: int
    bytes: int  # of all `count` together


@dataclass(slots=True)
class Operation:
    """One operation that was dispatched."""

    name: str  # torch's, such as "aten.mm.default"
    phase: str  # one of PHASES
    module: str  # path in the whole model, such as "model.layers.3.mlp.up_proj"; "": outside of modules
    micro_batch: int  # number in the step, from 0; -1: of no micro-batch
    stage: int  # number of the pipeline stage; -1: of none
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it reads
    dtype: str  # of the first of its results, such as "bfloat16"; "": it has none
    flops: int = 0
    read: int = 0  # bytes of the tensors that it reads
    written: int = 0  # bytes of the tensors that it writes; 0 for a view
    kernels: int = 1  # launched on a GPU; 0: a view, an allocation, or on the host
    reads: tuple[int, ...] = ()  # storages, by number
    writes: tuple[int, ...] = ()
    collective: Collective | None = None
    pairs: float = 0.0  # of attention: (query, key) pairs that are computed, over all rows, for one head


@dataclass(slots=True)
class Storage:
    """One allocation, until it is freed or changes its size."""

    bytes: int
    category: str  # of CATEGORIES, the last one that it had
    module: str  # where it was made, as Operation.module
    made_by: str  # name of the operation that made it; "": it existed before the step
    phase: str  # one of PHASES; "": before the step
    micro_batch: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    name: str = ""  # of the parameter that it belongs to, where it does
    state: str = ""  # of the optimizer, such as exp_avg or master


@dataclass(slots=True, frozen=True)
class Change:
    """A storage is allocated or freed."""

    at: int  # during this operation, or after it and before the next; -1: before the first
    storage: int  # its number
    allocated: bool  # False: freed


@dataclass(slots=True)
class StepTrace:
    """One step of one rank."""

    step: int  # 1: before optimizer state exists; 2: like all later ones
    operations: list[Operation] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)  # (first operation, phase of PhaseMemory)
    peaks: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)  # by phase: bytes, by category
    host_reads: Counter[str] = field(default_factory=Counter)  # line of source -> reads from the device
    host_copies: Counter[str] = field(default_factory=Counter)  # line -> tensors of Python's numbers
    host_bytes: int = 0  # of pinned buffers for what is offloaded, not in `storages`
    host_waits: list[int] = field(default_factory=list)  # operation behind which the host waits for a read

    def offloaded_bytes(self, name: str) -> int:
        """Bytes that copies of one of OFFLOADS move."""
        return sum(each.written for each in self.operations if each.name == name)

    def collectives(self) -> list[Collective]:
        """Collectives, in their order."""
        return [each.collective for each in self.operations if each.collective is not None]

    def peak(self) -> tuple[int, int]:
        """(Bytes, number of the operation during which they are reached) of the step's peak."""
        most, at, now = 0, -1, 0
        for change in self.changes:
            size = self.storages[change.storage].bytes
            now += size if change.allocated else -size
            if now > most:
                most, at = now, change.at
        return most, at

    def composition(self) -> dict[str, int]:
        """Bytes by category at the step's peak, each category as it was then."""
        return max(self.peaks.values(), default=(0, {}), key=lambda peak: peak[0])[1]

    def living_at(self, operation: int) -> dict[int, Storage]:
        """Storages by number when the bytes are highest during `operation`."""
        living: dict[int, Storage] = {}
        best, most, now = living, -1, 0
        for change in self.changes:
            if change.at > operation:
                break
            storage = self.storages[change.storage]
            if change.allocated:
                living[change.storage] = storage
                now += storage.bytes
            else:
                del living[change.storage]
                now -= storage.bytes
            if change.at == operation and now > most:
                best, most = dict(living), now
        return best if most >= 0 else dict(living)

    def timeline(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield (operation, bytes by category) after each change, in order."""
        sizes = Counter(dict.fromkeys(CATEGORIES, 0))
        for change in self.changes:
            storage = self.storages[change.storage]
            sizes[storage.category] += storage.bytes if change.allocated else -storage.bytes
            yield change.at, dict(sizes)


@dataclass(slots=True)
class RankTrace:
    """The first two steps of one rank."""

    rank: int
    coordinates: dict[str, int]  # index on each axis of layout.AXES
    stages: tuple[int, ...]  # of the pipeline; () without one
    steps: list[StepTrace]
    micro_batches: int  # traced
    of: int  # micro-batches of the step; those that were not traced are like the steady one
    steady: int = -1  # number of a micro-batch in the middle of those traced; -1: all were
    seconds: float = 0.0  # that the trace took
    substitutes: tuple[str, ...] = ()  # operations that were run by a stand-in
    reference: StepTrace | None = None  # its pass before the first step; None: there is none

    @property
    def every(self) -> list[StepTrace]:
        """The reference's pass, if there is one, and the steps."""
        return [*filter(None, [self.reference]), *self.steps]

    def times(self, operation: Operation) -> int:
        """How often an operation runs in a step: those of the steady micro-batch stand for others too."""
        untraced = self.of - self.micro_batches
        return 1 + untraced if untraced and operation.micro_batch == self.steady else 1

    def collectives(self, step: StepTrace) -> Counter[Collective]:
        """How often each collective runs in a step, in the order of their first ones."""
        counts: Counter[Collective] = Counter()
        for operation in step.operations:
            if operation.collective is not None:
                counts[operation.collective] += self.times(operation)
        return counts

    def collective_kinds(self, step: StepTrace) -> list[CollectiveKind]:
        """Collectives of a step by operation, axis and number of ranks, in the order of their first ones."""
        counts: Counter[tuple[str, str, int]] = Counter()
        sizes: Counter[tuple[str, str, int]] = Counter()
        for each, count in self.collectives(step).items():
            counts[each.op, each.axis, each.ranks] += count
            sizes[each.op, each.axis, each.ranks] += count * each.bytes
        return [CollectiveKind(*kind, count, sizes[kind]) for kind, count in counts.items()]


class Place(NamedTuple):
    """A module, with the block's number cut out of its name."""

    before: str  # "model.layers"; or the whole name of a module that is in no block
    block: int | None  # None: in no block
    after: str  # ".mlp.up_proj"


def module_place(module: str) -> Place:
    """A module's path with the block's number cut out of it."""
    if parts := NUMBERED.match(module):
        return Place(parts[1], int(parts[2]), parts[3])
    return Place(module, None, "")
