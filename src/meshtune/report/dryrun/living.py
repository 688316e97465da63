"""Living storages at the peak of a step: by category, by module, and as groups of tensors that are alike.

model.layers.0.mlp.up_proj  112 MiB ┐
model.layers.1.mlp.up_proj  112 MiB ├─> model.layers.0-31.mlp.up_proj  32 × 112 MiB
…                                   ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from meshtune.meter.trace import (
    CATEGORIES,
    COMMUNICATION,
    GATHERED,
    LOGITS,
    Operation,
    Place,
    StepTrace,
    Storage,
    module_place,
)
from meshtune.report.draw.thin import thinned
from meshtune.units import ranges

OUTSIDE = "outside of modules"
RECEIVING = ("all_gather", "reduce_scatter", "all_to_all", "receive")  # collectives with a buffer of results


@dataclass(frozen=True)
class Peak:
    """The highest bytes of a step, and what they consist of."""

    bytes: int
    operation: Operation | None  # during which they are reached; None: before the first one
    storages: tuple[Storage, ...]  # that live then; made_by is the collective that wrote them, if one did
    vocabulary: int  # columns of the logits on this rank; 0: it has none

    @classmethod
    def of(cls, step: StepTrace) -> Peak:
        size, at = step.peak()
        operation = step.operations[at] if at >= 0 else None
        columns = (each.shape[-1] for each in step.storages if each.category == LOGITS and each.shape)
        received = {
            number: f"{each.collective.op} over {each.collective.axis}"
            for each in step.operations
            if each.collective and each.collective.op in RECEIVING
            for number in each.writes
        }
        storages = (
            replace(storage, made_by=received[number]) if number in received else storage
            for number, storage in step.living_at(at).items()
        )
        return cls(size, operation, tuple(storages), max(columns, default=0))

    def parts(self) -> dict[str, int]:
        """Bytes by category, in the order of CATEGORIES."""
        return parts_of(self.storages)

    def event(self) -> str:
        """The operation as a phrase: "during aten.mm.default of lm_head, backward of micro-batch 0"."""
        return f"during {described(self.operation)}" if self.operation else "before the first operation"


def described(operation: Operation) -> str:
    """An operation with its module, phase and micro-batch as a phrase."""
    module = f" of {operation.module}" if operation.module else ""
    number = f" of micro-batch {operation.micro_batch}" if operation.micro_batch >= 0 else ""
    return f"{operation.name}{module}, {operation.phase}{number}"


def parts_of(storages: Iterable[Storage]) -> dict[str, int]:
    """Bytes by category, in the order of CATEGORIES, those without any too."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    for storage in storages:
        sizes[storage.category] += storage.bytes
    return sizes


def place_of(storage: Storage) -> Place:
    """Module of the parameter that the storage belongs to, else the module that made it."""
    return module_place(storage.name.rpartition(".")[0] or storage.module)


class Row(NamedTuple):
    """Bytes by category of one module, or of all blocks together."""

    name: str
    blocks: int  # how many; 0: it isn't a block
    parts: dict[str, int]


def by_module(storages: Iterable[Storage]) -> list[Row]:
    """Bytes by category of each module outside of the blocks, and of all blocks together, most first."""
    groups: dict[str, list[Storage]] = defaultdict(list)
    numbers: dict[str, set[int]] = defaultdict(set)
    for storage in storages:
        place = place_of(storage)
        key = f"{place.before}." if place.block is not None else place.before or OUTSIDE
        groups[key].append(storage)
        if place.block is not None:
            numbers[key].add(place.block)
    rows = [
        Row(f"blocks {ranges(numbers[key])}" if key in numbers else key, len(numbers[key]), parts_of(some))
        for key, some in groups.items()
    ]
    return sorted(rows, key=lambda row: -sum(row.parts.values()))


@dataclass(frozen=True)
class Alike:
    """Living tensors that differ only in the number of the block or micro-batch."""

    before: str  # name of their module, up to the block's number; "": outside of modules
    after: str  # what follows the number
    blocks: tuple[int, ...]  # numbers, ascending; (): in no block
    parameter: str  # last part of the name of the parameter that they belong to; "": to none
    states: tuple[str, ...]  # of the optimizer, such as exp_avg
    made_by: str  # operation; "": they existed before the step
    shape: tuple[int, ...]
    dtype: str
    category: str  # of CATEGORIES
    phase: str  # of PHASES; "": before the step
    count: int
    bytes: int  # of all of them

    @property
    def name(self) -> str:
        """Module, and parameter if there is one: "model.layers.0-31.mlp.up_proj"."""
        module = f"{self.before}.{ranges(self.blocks)}{self.after}" if self.blocks else self.before
        return ".".join(part for part in (module, self.parameter) if part) or OUTSIDE


def alike(storages: Sequence[Storage]) -> list[Alike]:
    """Groups of storages that are alike, most bytes first."""
    groups: dict[tuple[object, ...], list[tuple[Place, Storage]]] = defaultdict(list)
    for storage in storages:
        place = place_of(storage)
        in_block = place.block is not None
        made = (storage.made_by, storage.bytes, storage.dtype, storage.category, storage.phase)
        groups[place.before, place.after, in_block, storage.name.rpartition(".")[2], made].append(
            (place, storage)
        )
    return sorted(map(_group, groups.values()), key=lambda group: -group.bytes)


def _group(members: Sequence[tuple[Place, Storage]]) -> Alike:
    place, first = members[0]
    blocks = sorted({place.block for place, _ in members if place.block is not None})
    return Alike(
        before=place.before,
        after=place.after,
        blocks=tuple(blocks),
        parameter=first.name.rpartition(".")[2],
        states=tuple(sorted({storage.state for _, storage in members} - {""})),
        made_by=first.made_by,
        shape=first.shape,
        dtype=first.dtype,
        category=first.category,
        phase=first.phase,
        count=len(members),
        bytes=sum(storage.bytes for _, storage in members),
    )


def is_received(tensors: Alike) -> bool:
    """True for the buffer of a receive between stages, which the ledger sees first when it is viewed."""
    return tensors.category == COMMUNICATION and tensors.made_by in (
        "receive over pp", "aten.view.default", "aten.detach.default",
    )  # fmt: skip


def made_by(tensors: Alike) -> str:
    """Operation and phase that made tensors: "mm, forward"; for the optimizer's the names of its states."""
    if tensors.states:
        return ", ".join(tensors.states)
    if not tensors.made_by and tensors.category != GATHERED:
        return "before the step"
    if tensors.category == GATHERED:  # the ledger sees it when it gets its memory, or is first read
        name = "all_gather"
    else:
        name = "receive" if is_received(tensors) else operation(tensors.made_by)
    return f"{name}, {tensors.phase}" if tensors.phase else name


def operation(name: str) -> str:
    """Name of an operator without its usual namespace and overload: "mm" of "aten.mm.default"."""
    return name.removeprefix("aten.").removesuffix(".default")


def levels(step: StepTrace, most: int) -> list[tuple[int, dict[str, int]]]:
    """(Operation, its highest bytes by category) in the order of a step, at most `most` of them.

    An operation whose bytes are those after the one before it is left out. What exists before the step counts
    as the first operation's. Of too many the peaks of the sum and of each category stay.
    """
    highest: dict[int, dict[str, int]] = {}
    after: dict[int, dict[str, int]] = {}  # as the operation before has left them
    sizes = dict.fromkeys(CATEGORIES, 0)
    for at, some in groupby(step.timeline(), key=lambda level: max(level[0], 0)):
        events = [sizes, *(each for _, each in some)]
        highest[at], sizes = max(events, key=lambda each: sum(each.values())), events[-1]
        if sizes != highest[at]:
            after[at + 1] = sizes
    every = sorted((after | highest).items())
    rows = set(thinned([[sum(each.values()) for _, each in every]], most - len(CATEGORIES)))
    rows |= {max(range(len(every)), key=lambda row: every[row][1][name]) for name in CATEGORIES if every}
    return [every[row] for row in sorted(rows)]
