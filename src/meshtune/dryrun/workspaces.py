"""Memory that kernels take for themselves: bytes by operation, from the table of workspaces.toml."""

import math
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.meter.trace import BACKWARD, RECOMPUTATION, Operation, RankTrace

Shapes = tuple[tuple[int, ...], ...]
BLOCK = 128  # rows that flash attention's backward computes at a time, at most


@dataclass(frozen=True)
class Buffer:
    """A kernel's memory while it runs; the fields are the keys of a [[buffer]] in workspaces.toml."""

    of: tuple[str, ...]
    name: str
    size: tuple[int | str, ...]
    source: str
    kernel: str = ""
    grouped: bool = False
    dtype: str = ""
    above: int = 0
    without: dict[str, int] = field(default_factory=dict)

    def bytes(self, operation: Operation, architecture: str) -> int:
        sizes = SIZES[operation.name](operation.shapes)
        if self.without.get(architecture, 0) == sizes.get("head"):
            return 0
        if self.grouped and sizes["heads"] == sizes["key_heads"]:
            return 0
        if self.above and sizes["tokens"] <= self.above:
            return 0
        if self.dtype and self.dtype != operation.dtype:
            return 0
        return math.prod(sizes[each] if isinstance(each, str) else each for each in self.size)


@dataclass(frozen=True)
class Lasting:
    """A library's memory, kept once it is taken; the fields are the keys of a [[lasting]]."""

    of: tuple[str, ...]
    name: str
    bytes: dict[str, int]
    source: str


@dataclass(frozen=True)
class Row:
    """A line of the table of workspaces."""

    name: str
    operations: int  # of a step that take it; of a lasting one, threads
    bytes: int  # that the largest one took; of a lasting one, of all threads
    source: str


class Workspaces:
    """The workspaces of one architecture of plan/hardware.toml, such as "hopper", and of the attention kernel
    of plan/kernels.toml that runs our attention on it.
    """

    def __init__(self, architecture: str, kernel: str = "flash-2") -> None:
        known = {name for each in _lasting() for name in each.bytes}
        if architecture not in known:
            raise UserError(
                f"No workspaces are known for the architecture {architecture!r}; known: "
                f"{', '.join(sorted(known))}."
            )
        self.architecture, self.kernel = architecture, kernel

    def temporary(self, operation: Operation) -> list[tuple[str, int]]:
        """(Name, bytes) of what an operation takes while it runs."""
        own = {"flash-3": "flash-4"}.get(self.kernel, self.kernel)  # 3 allocates the same
        kernel = own if operation.name.startswith("meshtune.") else "flash-2"
        buffers = [each for each in _buffers().get(operation.name, ()) if each.kernel in ("", kernel)]
        return [
            (buffer.name, size) for buffer in buffers if (size := buffer.bytes(operation, self.architecture))
        ]

    def lasting(self, operation: Operation) -> list[tuple[str, int]]:
        """(Name that begins with the thread, bytes) of what a thread's first such operation takes to keep."""
        thread = "backward" if operation.phase in (BACKWARD, RECOMPUTATION) else "main"
        return [
            (f"{thread}: {each.name}", each.bytes[self.architecture])
            for each in _lasting()
            if operation.name in each.of
        ]

    def table(self, trace: RankTrace) -> list[Row]:
        """A row for each workspace that a later step of a rank takes, the largest first."""
        count: Counter[str] = Counter()
        most: Counter[str] = Counter()
        kept: dict[str, int] = {}
        for operation in trace.steps[-1].operations:
            for name, size in self.temporary(operation):
                count[name] += trace.times(operation)
                most[name] = max(most[name], size)
            kept |= self.lasting(operation)
        for thread, size in kept.items():
            name = thread.partition(": ")[2]
            count[name] += 1
            most[name] += size
        sources = {each.name: each.source for group in _buffers().values() for each in group}
        sources |= {each.name: each.source for each in _lasting()}
        return [Row(name, count[name], size, sources[name]) for name, size in most.most_common()]


def _attention(shapes: Shapes, padded: int, batch: int) -> dict[str, int]:
    """Sizes of attention. shapes: of one document, or of all of them one after the other: queries and keys
    [tokens, heads, head]. padded: rows of its backward's buffers. batch: sequences in the shapes.
    """
    (queries, heads, head), (keys, key_heads, _) = shapes
    head = -(-head // 8) * 8
    unit = 32 if head <= 128 else 64
    return {
        "queries": batch * queries, "keys": batch * keys, "padded_queries": padded,
        "padded_keys": padded + batch * (keys - queries), "heads": heads,
        "key_heads": key_heads, "head": head, "padded_head": -(-head // unit) * unit,
    }  # fmt: skip


def _varlen(shapes: Shapes) -> dict[str, int]:
    """Arguments: gradient, query, key, value, output, logsumexp, boundaries of queries …"""
    _, query, key, value, _, _, boundaries, *_ = shapes
    return _operator(query, key, value, boundaries, tensors=2)


def _operator(query: Any, key: Any, value: Any, boundaries: Any, *_: Any, tensors: int = 1) -> dict[str, int]:
    """Shapes of its arguments. tensors: how many like the values, and like the output, are padded."""
    size = max(query[-1], value[-1])
    both = (*query[:2], size), (*key[:2], size)
    sizes = _attention(both, query[0] + BLOCK * (boundaries[0] - 1), batch=1)
    return sizes | {"unlike": tensors * (query[-1] != value[-1])}


def _padded(shapes: Shapes) -> dict[str, int]:
    """Arguments: gradient, query, key, value …, each [batch, heads, tokens, head]."""
    _, (batch, heads, tokens, head), (_, key_heads, keys, _), *_ = shapes
    rows = batch * -(-tokens // BLOCK) * BLOCK
    return _attention(((tokens, heads, head), (keys, key_heads, head)), rows, batch)


def _embedding(shapes: Shapes) -> dict[str, int]:
    """Arguments: gradient of the output, token numbers."""
    gradient, tokens, *_ = shapes
    return {"hidden": gradient[-1], "tokens": math.prod(tokens)}


def _sort(shapes: Shapes) -> dict[str, int]:
    """Arguments: numbers of experts, in one row for all tokens; several rows are sorted in other ways."""
    row, *_ = shapes
    return {"tokens": row[0] if len(row) == 1 else 0}


SIZES: dict[str, Callable[[Shapes], dict[str, int]]] = {
    "meshtune.attention.default": lambda shapes: _operator(*shapes),
    "meshtune.attention_backward.default": _varlen,
    "aten._scaled_dot_product_flash_attention_backward.default": _padded,
    "aten._scaled_dot_product_efficient_attention_backward.default": _padded,
    "meshtune_dryrun.flex_attention_backward.default": _padded,
    "aten.embedding_dense_backward.default": _embedding,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
}


@cache
def tables() -> dict[str, list[dict]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def _buffers() -> dict[str, tuple[Buffer, ...]]:
    """Buffers by operator."""
    buffers = [Buffer(**table) for table in tables()["buffer"]]
    return {name: tuple(each for each in buffers if name in each.of) for name in SIZES}


@cache
def _lasting() -> tuple[Lasting, ...]:
    return tuple(Lasting(**table) for table in tables()["lasting"])
