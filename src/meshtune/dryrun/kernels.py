"""Kernels of a traced step: how many, what they compute and move, how long that takes; by place and phase.

    blocks          per block and micro-batch: the mean one, which is what a developer of kernels looks at
    embedding       outside of the blocks, before the first of them: rotary embeddings and masks too
    head and loss   outside of the blocks, behind the last of them: the last norm too
    communication   collectives, and FSDP2's copies into and out of their buffers
    optimizer       all that is done once a step: norm of the gradients, clipping, update

Without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshtune.dryrun.costs import Costs, moved_bytes, runs
from meshtune.meter.trace import FORWARD, UPDATE, Operation, RankTrace, StepTrace, module_place

BLOCKS, EMBEDDING, HEAD, COMMUNICATION, UPDATES = PLACES = (
    "blocks", "embedding", "head and loss", "communication", "optimizer",
)  # fmt: skip


@dataclass
class Kernels:
    """Kernels of one operation, in one place and phase of a step."""

    place: str  # one of PLACES
    phase: str  # one of meter.trace.PHASES
    name: str  # of the operation; of a collective, with its axis
    launches: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0  # read and written in the GPU's memory; of collectives, of the whole tensor
    seconds: float = 0.0  # predicted, without others on the GPU

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; 0 where none is."""
        return self.flops / self.bytes if self.bytes else 0.0

    def add(self, other: Kernels, times: float = 1.0) -> None:
        """Add `times` another's numbers to these."""
        self.launches += times * other.launches
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.seconds += times * other.seconds


@dataclass
class KernelTable:
    """Kernels of a step of one rank; those that take longest come first."""

    rows: list[Kernels] = field(default_factory=list)  # of the whole step
    blocks: float = 0.0  # forwards of a block in the step: blocks of the rank, times micro-batches

    def of_block(self) -> list[Kernels]:
        """Rows of the mean block, for one micro-batch."""
        of_blocks = [row for row in self.rows if row.place == BLOCKS]
        means = [Kernels(row.place, row.phase, row.name) for row in of_blocks]
        for mean, row in zip(means, of_blocks, strict=True):
            mean.add(row, 1 / (self.blocks or 1.0))
        return means

    def totals(self) -> list[Kernels]:
        """Sums by place and phase, named by the place, in the order of PLACES and of a step."""
        sums = _sums(replace(row, name=row.place) for row in self.rows)
        return sorted(sums, key=lambda row: PLACES.index(row.place))

    def kinds(self) -> list[Kernels]:
        """Sums over the phases, those that take longest first."""
        return sorted(_sums(replace(row, phase="") for row in self.rows), key=lambda row: -row.seconds)


def _sums(rows: Iterable[Kernels]) -> list[Kernels]:
    sums: dict[tuple[str, str, str], Kernels] = {}
    for row in rows:
        key = row.place, row.phase, row.name
        sums.setdefault(key, Kernels(*key)).add(row)
    return [*sums.values()]


def kernel_table(trace: RankTrace, costs: Costs | None = None, step: int = 2) -> KernelTable:
    """Count the kernels of a step; micro-batches that were not traced are as the steady one.

    costs: None leaves all seconds 0. step: 1 or 2.
    """
    traced = trace.steps[step - 1]
    outside, sums = _outside(traced), dict[tuple[str, str, str], Kernels]()
    forwards: dict[tuple[str, int], float] = {}
    for each in traced.operations:
        if not runs(each):
            continue
        place, times = _place(each, outside), trace.times(each)
        row = _row(each, place, traced, costs)
        key = place, each.phase, row.name
        sums.setdefault(key, Kernels(place, each.phase, row.name)).add(row, times)
        if place == BLOCKS and each.phase == FORWARD:
            forwards[block_of(each.module), each.micro_batch] = times
    rows = sorted(sums.values(), key=lambda row: -row.seconds)
    return KernelTable(rows, sum(forwards.values()))


def block_of(module: str) -> str:
    """Path of the block that a module is in, such as "model.layers.3"; "" outside of blocks."""
    place = module_place(module)
    return "" if place.block is None else f"{place.before}.{place.block}"


def _outside(step: StepTrace) -> dict[str, str]:
    """Place of each module outside of the blocks, by whether it runs before the first of them."""
    places: dict[str, str] = {}
    reached: set[tuple[int, int]] = set()  # stages and micro-batches that have come to a block
    for each in step.operations:
        if each.phase != FORWARD or not runs(each) or each.micro_batch < 0:
            continue
        if block_of(each.module):
            reached.add((each.stage, each.micro_batch))
        else:
            behind = (each.stage, each.micro_batch) in reached
            places.setdefault(each.module, HEAD if behind else EMBEDDING)
    return places | {"": HEAD}


def _place(each: Operation, outside: dict[str, str]) -> str:
    if each.collective is not None or each.name.startswith("fsdp."):
        return COMMUNICATION
    if each.phase == UPDATE:
        return UPDATES
    return BLOCKS if block_of(each.module) else outside.get(each.module, HEAD)


def _row(each: Operation, place: str, step: StepTrace, costs: Costs | None) -> Kernels:
    """Numbers of one operation."""
    if (collective := each.collective) is not None:
        name = f"{collective.op} {collective.axis}"
        seconds = costs.collective(collective) if costs else 0.0
        return Kernels(place, each.phase, name, 1, 0, collective.bytes, seconds)
    seconds = costs.compute(each, step.storages) if costs else 0.0
    return Kernels(place, each.phase, each.name, each.kernels, each.flops, moved_bytes(each), seconds)
