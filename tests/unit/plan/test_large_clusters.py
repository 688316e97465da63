"""Clusters and batches of any size are answered in seconds, or refused with a sentence."""

import time
from functools import partial

import pytest
from golden import refuses
from made_plans import machines, workload

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.columns import at
from meshtune.plan.candidates import EVERY_DEGREE, EVERY_MICRO_BATCH, divisors, micro_batches
from meshtune.plan.search import explained, peaks_of_ranks, search

job = partial(workload, "llama-3.1-70b", seq_len=8192)


@pytest.mark.all
@pytest.mark.parametrize(("gpus", "size"), [(100_000, 1_000_000), (720_720, 720_720), (1_000_000, 10**12)])
def test_a_very_large_cluster_is_searched_in_seconds(gpus: int, size: int) -> None:
    started = time.process_time()
    plan = search(job(size), machines(gpus))
    assert time.process_time() - started < 10  # 720,720 GPUs took four minutes and 8 GiB
    assert 1000 < len(plan) < plan.considered < 2_000_000
    assert not plan.uneven.any()


@pytest.mark.ci
def test_a_large_cluster_has_few_candidates() -> None:
    """2,520 = 2^3 · 3^2 · 5 · 7 has 48 divisors: with uneven degrees there were 9.7 million layouts."""
    plan = search(job(2520), machines(2520))
    assert len(plan) and plan.considered < 600_000
    assert not plan.uneven.any()


@pytest.mark.all
def test_beyond_some_gpus_uneven_degrees_are_considered_only_where_no_others_make_the_batch() -> None:
    assert 840 <= EVERY_DEGREE < 2520
    beside = search(job(840), machines(840))
    assert beside.uneven.any() and not beside.uneven.all()
    assert not search(job(2520), machines(2520)).uneven.any()
    assert search(job(1024), machines(10_000)).uneven.all()


def test_a_part_with_many_divisors_has_micro_batches_of_powers_of_two() -> None:
    sizes = {option["micro_batch_size"] for option in micro_batches(job(720_720), 1, {})}
    assert sizes == {1, 2, 4, 8, 16}
    every = {option["micro_batch_size"] for option in micro_batches(job(360), 1, {})}
    assert every == set(divisors(360)) and len(every) <= EVERY_MICRO_BATCH
    fixed = micro_batches(job(720_720), 1, {"micro_batch_size": 9})
    assert {option["gradient_accumulation_steps"] for option in fixed} == {720_720 // 9}


@pytest.mark.parametrize("size", [10**12, 999_999_999_989])
def test_a_batch_beyond_what_a_layout_can_say_is_refused(size: int) -> None:
    with refuses(UserError):
        search(workload("llama-3.1-8b", size, 8192), machines(8), fixed={"micro_batch_size": 1})


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("zero3x64-mb1-ga1", [0]),
        ("zero3x8-pp8-1f1b-mb1-ga8", [0, 6, 7]),
        ("zero3x8-pp8-zbv-mb1-ga16", [0, 1, 7]),
    ],
)
def test_the_planned_memory_is_that_of_the_fullest_pipeline_rank(layout: str, ranks: list[int]) -> None:
    plan, one = job(64), Layout.parse(layout)
    peaks = {place: at(rank.memory(), 0) for place, rank in peaks_of_ranks(plan, machines(64), one).items()}
    most = explained(plan, machines(64), one).memory
    assert [*peaks] == ranks
    assert max(each.peak for each in peaks.values()) == most.peak
    assert most.as_dict() in [each.as_dict() for each in peaks.values()]
