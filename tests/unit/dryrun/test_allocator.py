"""The model of torch's caching allocator: hand-counted sequences, torch's own unit test, and properties."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtune.dryrun import allocator
from meshtune.dryrun.allocator import Allocator, OutOfMemory, Replay, Request, replay

MIB = 1 << 20


def sizes(*requested: int) -> list[Request]:
    """Allocations of so many bytes on one stream, none of them freed."""
    return [Request(number, number, size, True) for number, size in enumerate(requested)]


@pytest.mark.parametrize(
    ("requested", "active", "reserved"),
    [
        ([0], 0, 0),  # torch returns no memory
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB], MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 21 * MIB, 40 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 B are split off
        ([11 * MIB], 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not
        ([11 * MIB - 1], 12 * MIB, 12 * MIB),
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
        ([19 * MIB - 512], 19 * MIB - 512, 20 * MIB),
    ],
)
def test_rounding_and_segments(requested, active, reserved):
    found = replay(sizes(*requested))
    assert (found.active, found.reserved) == (active, reserved)


@pytest.mark.parametrize(
    ("size", "mallocs", "reserved"),
    [
        (512, 1, 2 * MIB),
        (MIB, 2, 4 * MIB),
        (MIB + 512, 1, 20 * MIB),
        (10 * MIB - 512, 2, 40 * MIB),
        (10 * MIB + 512, 3, 36 * MIB),
    ],
)
def test_as_in_torchs_unit_test(size, mallocs, reserved):
    """`b = a.clone()`, then five times `b = b.clone() + 1`: test/test_cuda.py,
    test_graph_memory_stats_and_use_result_after_destroy_graph.
    """
    requests = [Request(0, "b0", size, True)]
    for step in range(5):
        requests += [
            Request(step, f"clone{step}", size, True),
            Request(step, f"b{step + 1}", size, True),
            Request(step, f"clone{step}", size, False),
            Request(step, f"b{step}", size, False),
        ]
    found = replay(requests, Allocator(record=True))
    assert sum(event.action == "segment_alloc" for event in found.events) == mallocs
    assert found.reserved == reserved


def test_constants_are_those_of_the_installed_torch():
    torch = find_spec("torch")
    assert torch and torch.origin
    text = (Path(torch.origin).parent / "include/c10/core/AllocatorConfig.h").read_text()
    names = {
        "kMinBlockSize = ": "MIN_BLOCK_SIZE", "kSmallSize = ": "SMALL_SIZE",
        "kSmallBuffer = ": "SMALL_BUFFER", "kMinLargeAlloc = ": "MIN_LARGE_ALLOC",
        "kRoundLarge = ": "ROUND_LARGE", "large_segment_size_{": "LARGE_BUFFER",
    }  # fmt: skip
    for theirs, ours in names.items():
        found = re.search(re.escape(theirs) + r"(\d+)", text)
        assert found and int(found[1]) == getattr(allocator, ours), ours


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals():
    gpu = Allocator()
    large, small, same = (gpu.allocate(size * MIB) for size in (30, 24, 24))
    for block in (large, small, same):
        gpu.free(block)
    assert gpu.allocate(22 * MIB).address == small.address
    assert gpu.allocate(23 * MIB) is same
    assert gpu.allocate(20 * MIB).address == large.address
    assert gpu.reserved == 78 * MIB


def test_free_neighbours_are_merged():
    gpu = Allocator()
    left, middle, right = (gpu.allocate(6 * MIB) for _ in range(3))
    gpu.free(left)
    gpu.free(right)  # 6 and, with the rest of the segment, 8 MiB
    assert gpu.allocate(9 * MIB).address != left.address
    gpu.free(middle)
    assert gpu.allocate(20 * MIB).address == left.address
    assert gpu.reserved == 40 * MIB


def test_a_stream_does_not_reuse_the_blocks_of_another():
    requests = [
        Request(0, "a", 30 * MIB, True, "all-gather"),
        Request(1, "a", 30 * MIB, False, "all-gather"),
        Request(2, "b", 30 * MIB, True, "compute"),
    ]
    assert replay(requests).reserved == 60 * MIB
    assert replay([request._replace(stream="compute") for request in requests]).reserved == 30 * MIB


def test_a_full_gpu_is_given_its_free_segments_back_once():
    requests = [
        Request(0, "a", 60 * MIB, True),
        Request(1, "a", 60 * MIB, False),
        Request(2, "b", 80 * MIB, True),
    ]
    found = replay(requests, Allocator(capacity=100 * MIB, record=True))
    assert (found.flushes, len(found.segments), found.out_of_memory) == (1, 1, None)
    assert found.reserved == 80 * MIB
    assert [event.action for event in found.events if "segment" in event.action] == [
        "segment_alloc", "segment_free", "segment_alloc",
    ]  # fmt: skip


def test_memory_that_is_free_in_pieces_does_not_help_unless_segments_expand():
    """The first 30 and the last 40 of 100 MiB are free: 60 need a new segment, or 20 more of the old one."""
    requests = [Request(0, "all", 100 * MIB, True), Request(1, "all", 100 * MIB, False)]
    requests += [Request(2, "first", 30 * MIB, True), Request(2, "middle", 30 * MIB, True)]
    requests += [Request(3, "first", 30 * MIB, False), Request(4, "late", 60 * MIB, True)]
    full = replay(requests, Allocator(capacity=150 * MIB))
    assert (full.flushes, full.out_of_memory) == (1, requests[-1])
    assert replay(requests).reserved == 160 * MIB
    assert replay(requests, Allocator(capacity=150 * MIB, expandable=True)).reserved == 120 * MIB


def test_an_expandable_segment_grows_by_pages_and_fills_its_gaps():
    gpu = Allocator(expandable=True)
    first, second = gpu.allocate(30 * MIB), gpu.allocate(30 * MIB)
    assert (gpu.reserved, len(gpu.segments())) == (60 * MIB, 1)
    gpu.free(second)
    assert gpu.allocate(50 * MIB).address == first.address + 30 * MIB  # 30 MiB were free, 20 are added
    assert gpu.reserved == 80 * MIB
    gpu.allocate(1)
    assert (gpu.reserved, len(gpu.segments())) == (82 * MIB, 2)


def test_pages_of_a_full_gpu_are_unmapped():
    gpu = Allocator(expandable=True, capacity=100 * MIB)
    first = gpu.allocate(50 * MIB, "one")  # three pages
    kept = gpu.allocate(5 * MIB, "one")
    gpu.free(first)
    gpu.allocate(70 * MIB, "two")  # the two pages that `first` had alone are enough
    assert (gpu.flushes, gpu.reserved, gpu.active) == (1, 100 * MIB, 75 * MIB)
    gpu.free(kept)
    with pytest.raises(OutOfMemory):
        gpu.allocate(40 * MIB, "two")


def random_requests(draws) -> list[Request]:
    """Allocations and frees from (size, stream, which living one is freed first; -1: none)."""
    requests, living = [], []
    for number, (size, stream, freed) in enumerate(draws):
        if freed >= 0 and living:
            old = living.pop(freed % len(living))
            requests.append(old._replace(at=number, allocated=False))
        requests.append(Request(number, number, size, True, stream))
        living.append(requests[-1])
    return [*requests, *(each._replace(at=len(draws), allocated=False) for each in living)]


DRAWS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 3 * MIB), st.integers(MIB, 90 * MIB)),
        st.sampled_from(["compute", "all-gather"]),
        st.integers(-1, 40),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(DRAWS, st.booleans())
def test_properties(draws, expandable):
    requests = random_requests(draws)
    gpu = Allocator(expandable=expandable)
    asked: dict[object, int] = {}
    for request in requests:
        replay([request], gpu)
        if request.allocated:
            asked[request.key] = request.bytes
        else:
            del asked[request.key]
        assert sum(asked.values()) <= gpu.active <= gpu.reserved
        if expandable:  # nothing but the rounding to 512 bytes is added
            assert gpu.active == sum(-(-size // 512) * 512 for size in asked.values())
    assert (gpu.active, gpu.flushes) == (0, 0)
    assert gpu.reserved == replay(requests, Allocator(expandable=expandable)).reserved, "nothing given back"


@settings(max_examples=60, deadline=None)
@given(DRAWS, st.booleans())
def test_when_all_is_free_its_blocks_are_whole_segments_that_a_full_gpu_gets_back(draws, expandable):
    gpu, living = Allocator(expandable=expandable), {}
    for request in random_requests(draws):
        if request.allocated:
            living[request.key] = gpu.allocate(request.bytes, request.stream)
        else:
            gpu.free(living.pop(request.key))
    assert all(len(segment.blocks) == 1 for segment in gpu.segments())
    gpu.capacity = max(gpu.reserved, 20 * MIB)
    gpu.allocate(size := gpu.capacity // (20 * MIB) * 20 * MIB, "another")
    assert (gpu.flushes, gpu.reserved, len(gpu.segments())) == (1, size, 1)


@settings(max_examples=30, deadline=None)
@given(DRAWS)
def test_without_frees_expandable_segments_reserve_less_than_a_page_too_much(draws):
    requests = random_requests([(size, stream, -1) for size, stream, _ in draws])[: len(draws)]
    pages = {(stream, size <= MIB): 2 * MIB if size <= MIB else 20 * MIB for size, stream, _ in draws}
    found = replay(requests, Allocator(expandable=True))
    assert found.reserved < found.active + sum(pages.values())


@settings(max_examples=30, deadline=None)
@given(DRAWS)
def test_no_byte_is_in_two_blocks(draws):
    """Addresses of living allocations never overlap, with a GPU that is nearly full as without a limit."""
    requests = random_requests(draws)
    most = replay(requests).active
    for capacity in (None, most + 40 * MIB):
        for expandable in (False, True):
            living: dict[object, tuple[int, int]] = {}
            for event in replay(
                requests, Allocator(expandable=expandable, capacity=capacity, record=True)
            ).events:
                if event.action == "alloc":
                    taken = (event.address, event.address + event.bytes)
                    assert all(taken[1] <= low or high <= taken[0] for low, high in living.values())
                    living[event.key] = taken
                elif event.action == "free_completed":
                    del living[event.key]


def test_a_replay_of_nothing():
    assert replay([]) == Replay()
