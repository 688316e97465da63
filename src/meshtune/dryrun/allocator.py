"""Bytes that PyTorch's CUDA caching allocator reserves for a sequence of allocations and frees.

    request   bytes on a stream: rounded to 512 B, taken from the smallest free block of that stream that fits
    block     allocated or free; what a request leaves of it is split off, free neighbours are merged
    segment   what the driver gave: 2 MiB for requests up to 1 MiB, 20 MiB below 10 MiB, else the request's
              own size in 2 MiB; never given back, but where the GPU has no more memory

`reserved` are the bytes of all segments, `active` those of allocated blocks. With expandable segments, a
stream has one segment for small and one for large requests, which grows by pages of 2 and 20 MiB.

The names of constants and of rules are those of torch 2.13: c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp, with its default settings. Streams are names; a stream reuses only its own
blocks, as torch's does where nothing calls record_stream (FSDP2, and NCCL's collectives since torch 2.7).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are rounded up to it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool, a page where segments expand
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: requests from here on have a segment of their own
LARGE_BUFFER = 20 << 20  # large_segment_size: a segment for smaller ones, a page where segments expand
ROUND_LARGE = 2 << 20  # kRoundLarge: segments of their own are rounded up to it
ADDRESSES = (
    LARGE_BUFFER << 16
)  # bytes of addresses of an expandable segment; torch's have 9/8 of the GPU's memory


class Request(NamedTuple):
    """An allocation or a free."""

    at: int  # operation, by number
    key: Any  # of the allocation, hashable
    bytes: int  # asked for
    allocated: bool  # False: freed
    stream: str = "compute"


class Event(NamedTuple):
    """An action of the allocator, as torch records it for a snapshot."""

    at: int  # operation, by number
    action: (
        str  # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, …_unmap, oom
    )
    address: int
    bytes: int
    stream: str
    key: Hashable = None  # of the allocation; None: of a segment


@dataclass(eq=False, slots=True)
class Block:
    """Neighbouring bytes of one segment: allocated, free, or addresses without memory."""

    stream: str
    small: bool  # of the small pool
    address: int
    bytes: int
    asked: int = 0  # bytes of the request that it was allocated for
    key: Hashable = None
    allocated: bool = False
    mapped: bool = True  # False: addresses of an expandable segment without memory
    before: Block | None = None  # in the same segment
    after: Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.bytes, self.address


class Segment(NamedTuple):
    """Neighbouring memory that the driver gave."""

    stream: str
    small: bool
    blocks: list[Block]  # by address, as they were when the segment was listed


@dataclass
class Replay:
    """An allocator's bytes and actions during a sequence of requests, without what was before it."""

    events: list[Event] = field(default_factory=list)  # if the allocator records them
    active: int = 0  # peak
    reserved: int = 0  # peak
    flushes: int = 0  # times that the GPU was full and all free segments were given back (num_alloc_retries)
    out_of_memory: Request | None = None  # the request that did not fit; the replay ends with it
    segments: list[Segment] = field(default_factory=list)  # at the end


class OutOfMemory(Exception):
    """The allocator may not reserve the bytes that a request needs."""


class Allocator:
    """One GPU's caching allocator.

    expandable: PYTORCH_ALLOC_CONF=expandable_segments:True. capacity: bytes that it can reserve; None:
    any. record: note every event. `active`, `reserved` and `flushes` are those now.
    """

    def __init__(
        self, *, expandable: bool = False, capacity: int | None = None, record: bool = False
    ) -> None:
        self.expandable, self.record = expandable, record
        self.capacity = capacity
        self.active = self.reserved = self.flushes = 0
        self.heads: list[Block] = []  # the first block of each segment, in order of allocation
        self.living: dict[Hashable, Block] = {}  # allocated blocks by key
        self.events: list[Event] = []
        self.at = -1  # operation of the events
        self._free: dict[tuple[str, bool], list[Block]] = defaultdict(list)  # by size, then address
        self._unmapped: dict[tuple[str, bool], list[Block]] = defaultdict(list)  # by address
        self._next_address = LARGE_BUFFER << 8

    def allocate(self, size: int, stream: str = "compute", key: Hashable = None) -> Block:
        """Return an allocated block of at least `size` bytes, which must be positive (`malloc`)."""
        need = max(MIN_BLOCK_SIZE, _rounded(size, MIN_BLOCK_SIZE))
        small = need <= SMALL_SIZE
        block = self._cached(need, stream, small) or self._new(need, stream, small)
        if block is None:
            self.flushes += 1
            self._flush()
            block = self._new(need, stream, small)
        if block is None:
            self._note("oom", 0, size, stream)
            raise OutOfMemory
        least = MIN_BLOCK_SIZE if small or self.expandable else SMALL_SIZE + 1  # should_split
        if block.bytes - need >= least:
            self._insert(self._split(block, need))
        block.allocated, block.asked, block.key = True, size, key
        self.living[key] = block
        self.active += block.bytes
        self._note("alloc", block.address, size, stream, key)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, merged with free neighbours (`free_block`)."""
        for action in ("free_requested", "free_completed"):
            self._note(action, block.address, block.asked, block.stream, block.key)
        self.active -= block.bytes
        self.living.pop(block.key, None)
        block.allocated, block.asked, block.key = False, 0, None
        self._insert(self._merged(block))

    def segments(self) -> list[Segment]:
        """Neighbouring blocks that have memory, as torch's snapshot counts segments."""
        found: list[Segment] = []
        for block in self.heads:
            while block is not None:
                if block.mapped:
                    if block.before is None or not block.before.mapped:
                        found.append(Segment(block.stream, block.small, []))
                    found[-1].blocks.append(replace(block, before=None, after=None))
                block = block.after
        return found

    def _cached(self, need: int, stream: str, small: bool) -> Block | None:
        """Take the best free block out of its pool, if one is large enough (`get_free_block`)."""
        pool = self._free[stream, small]
        place = bisect_left(pool, (need, 0), key=lambda block: block.order)
        if place == len(pool):
            return None
        if self.expandable:  # a block that can grow counts with what it can grow by
            while place + 1 < len(pool) and _expandable(pool[place + 1]) < _expandable(pool[place]):
                place += 1
        return pool.pop(place)

    def _new(self, need: int, stream: str, small: bool) -> Block | None:
        """Return memory that is new to the allocator (`alloc_block`); None: the GPU has no more."""
        if self.expandable:
            return self._grown(need, stream, small)
        size = _segment(need, small)
        if self.capacity is not None and self.reserved + size > self.capacity:
            return None
        block = Block(stream, small, self._addresses(size), size)
        self.heads.append(block)
        self.reserved += size
        self._note("segment_alloc", block.address, size, stream)
        return block

    def _grown(self, need: int, stream: str, small: bool) -> Block | None:
        """Map memory behind or between blocks of an expandable segment (`try_allocate_expandable_block`)."""
        block = self._room(need, stream, small)
        if not block.mapped and not self._map(block, min(block.bytes, need)):
            return None
        while block.bytes < need:
            gap = block.after
            assert gap is not None
            if not self._map(gap, min(need - block.bytes, gap.bytes)):
                return None
            block = gap  # merged with what was before it
        self._remove(block)
        return block

    def _room(self, need: int, stream: str, small: bool) -> Block:
        """The first block of neighbours that are free or without memory and have room for `need` bytes
        (`find_expandable_block`).
        """
        for gap in self._unmapped[stream, small]:
            first = gap.before if gap.before and not gap.before.allocated else gap
            room, block = 0, first
            while room < need and block is not None and not block.allocated:
                room, block = room + block.bytes, block.after
            if room >= need:
                return first
        segment = Block(stream, small, self._addresses(ADDRESSES), ADDRESSES, mapped=False)
        self.heads.append(segment)
        self._insert(segment)
        return segment

    def _map(self, gap: Block, size: int) -> bool:
        """Give memory to the first `size` bytes of a gap, in whole pages, and merge it with free neighbours;
        False: the GPU has no more (`map_block`).
        """
        size = _rounded(size, _page(gap))
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self._remove(gap)
        if size < gap.bytes:
            self._insert(self._split(gap, size))
        gap.mapped = True
        self.reserved += size
        self._note("segment_map", gap.address, size, gap.stream)
        self._insert(self._merged(gap))
        return True

    def _flush(self) -> None:
        """Give back all memory without allocated blocks (`release_cached_blocks`)."""
        for key in [*self._free]:
            for block in [*self._free[key]]:
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._remove(block)
                    self.heads.remove(block)
                    self.reserved -= block.bytes
                    self._note("segment_free", block.address, block.bytes, block.stream)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block (`unmap_block`)."""
        page = _page(block)
        first, end = _rounded(block.address, page), (block.address + block.bytes) // page * page
        if first >= end:
            return
        self._remove(block)
        if first > block.address:
            rest = self._split(block, first - block.address)
            self._insert(block)
            block = rest
        if end < block.address + block.bytes:
            self._insert(self._split(block, end - block.address))
        block.mapped = False
        self.reserved -= block.bytes
        self._note("segment_unmap", block.address, block.bytes, block.stream)
        block = self._merged(block)
        if block.before is None and block.after is None:
            self.heads.remove(block)
        else:
            self._insert(block)

    def _split(self, block: Block, size: int) -> Block:
        """Cut a block behind `size` bytes and return the rest, in no pool yet."""
        rest = Block(
            block.stream, block.small, block.address + size, block.bytes - size,
            mapped=block.mapped, before=block, after=block.after,
        )  # fmt: skip
        if rest.after:
            rest.after.before = rest
        block.after, block.bytes = rest, size
        return rest

    def _merged(self, block: Block) -> Block:
        """Merge a free block, in no pool, with free neighbours, a gap with gaps (`try_merge_blocks`)."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            self._remove(other)
            if other is block.before:
                block.address, block.before = other.address, other.before
                if other.before:
                    other.before.after = block
                else:
                    self.heads[self.heads.index(other)] = block
            else:
                block.after = other.after
                if other.after:
                    other.after.before = block
            block.bytes += other.bytes
        return block

    def _pool(self, block: Block) -> list[Block]:
        return (self._free if block.mapped else self._unmapped)[block.stream, block.small]

    def _insert(self, block: Block) -> None:
        key = (lambda each: each.order) if block.mapped else (lambda each: (each.address,))
        insort(self._pool(block), block, key=key)

    def _remove(self, block: Block) -> None:
        self._pool(block).remove(block)

    def _addresses(self, size: int) -> int:
        """First address of `size` bytes that no segment has had, at the beginning of a page."""
        address = self._next_address
        self._next_address += _rounded(size, LARGE_BUFFER)
        return address

    def _note(self, action: str, address: int, size: int, stream: str, key: Hashable = None) -> None:
        if self.record:
            self.events.append(Event(self.at, action, address, size, stream, key))


def replay(requests: Iterable[Request], allocator: Allocator | None = None) -> Replay:
    """Send requests through an allocator; None: a new one.

    A request of 0 bytes allocates nothing. Ends early at the first request that does not fit.
    """
    allocator, found = allocator or Allocator(), Replay()
    seen, flushes = len(allocator.events), allocator.flushes
    found.active, found.reserved = allocator.active, allocator.reserved
    for request in requests:
        allocator.at = request.at
        if request.bytes == 0:
            continue
        if not request.allocated:
            allocator.free(allocator.living[request.key])
        else:
            try:
                allocator.allocate(request.bytes, request.stream, request.key)
            except OutOfMemory:
                found.out_of_memory = request
                break
        found.active = max(found.active, allocator.active)
        found.reserved = max(found.reserved, allocator.reserved)
    found.segments = allocator.segments()
    found.events, found.flushes = allocator.events[seen:], allocator.flushes - flushes
    return found


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _segment(need: int, small: bool) -> int:
    """Bytes of the segment for a request (`get_allocation_size`)."""
    if small:
        return SMALL_BUFFER
    return LARGE_BUFFER if need < MIN_LARGE_ALLOC else _rounded(need, ROUND_LARGE)


def _page(block: Block) -> int:
    return SMALL_BUFFER if block.small else LARGE_BUFFER


def _expandable(block: Block) -> int:
    """Bytes that a free block has or can grow to."""
    return block.bytes + (block.after.bytes if block.after and not block.after.mapped else 0)
