"""The first sentences of a plan: the cost of a fixed layout, and whether the chosen one fits safely."""

import pytest
from made_plans import machines, workload

from meshtune.layout import PartialLayout
from meshtune.plan.advice import faster, verdict
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.search import SAFE_COST, Plan, search

BARELY = "zero2x16-mb1-ga4-selective8"  # the quickest of all, whose error bar exceeds an H100


def plan(layout: str = "auto", seq_len: int = 8192, margin: float | None = None) -> Plan:
    cluster = machines(16, memory_margin=margin)
    return search(workload(seq_len=seq_len), cluster, fixed=PartialLayout.parse(layout).given)


@pytest.mark.parametrize("margin", [None, 0.0])
@pytest.mark.parametrize("seq_len", [2048, 8192, 32768])
def test_the_chosen_layout_is_safe_where_that_costs_little(seq_len: int, margin: float | None) -> None:
    found = plan(seq_len=seq_len, margin=margin)
    chosen, seconds = found.choice(0), found.seconds.total
    quickest = seconds.min()
    error = chosen.accuracy.memory
    assert [chosen.memory.peak * (1 + error) <= found.cluster.memory] == [chosen.safe]
    assert chosen.safe == bool((seconds[found.safe] <= quickest * (1 + SAFE_COST)).any())
    assert chosen.as_dict()["memory"]["safe"] == chosen.safe


def test_a_layout_that_fits_barely_is_passed_over_and_named() -> None:
    found = plan()
    assert found.choice(0).safe and str(found.choice(0).layout) != BARELY
    (said,) = verdict(found, found.choice(0))
    assert said.startswith(f"{BARELY} takes 1.5% less time, but fits barely: 75.9 GiB ± ")
    assert verdict(plan(seq_len=2048), plan(seq_len=2048).choice(0)) == []


def test_a_fixed_layout_says_first_what_it_costs_and_that_it_fits_barely() -> None:
    free, found = plan().choice(0), plan(BARELY)
    (barely,) = verdict(found, found.choice(0))  # as fast as the best: no sentence on that
    assert barely.startswith(f"{BARELY} fits barely: 75.9 GiB ± 3.26 GiB of a GPU's 79.1 GiB")
    assert barely.endswith("no layout that was ranked fits safely.")
    slow = plan("zero3x16-mb1-ga4-full")
    (said,) = verdict(slow, slow.choice(0))
    more = slow.choice(0).seconds.total / free.seconds.total - 1
    assert (
        more > 0.05
        and f"a step takes {more:.0%} longer than in the best" in said
        and str(free.layout) in said
    )


def test_the_nearest_layout_that_is_safe_is_named_with_its_cost() -> None:
    found = plan()
    barely = next(found.choice(place) for place in range(len(found)) if not found.safe[place])
    (said,) = verdict(found, barely)
    safe = min((one for one in found.best(100) if one.safe), key=lambda one: one.seconds.total)
    more = safe.seconds.total / barely.seconds.total - 1
    assert f"The nearest that is safe, {safe.layout}, needs " in said
    assert said.endswith(f"a step takes {more:.1%} longer.")


def test_other_batches_of_a_fixed_layout_change_its_accumulation_only() -> None:
    found = plan("zero3x16-mb2-ga2-full", seq_len=2048)
    offer = offer_of(found)
    small, *others = Answer(found.workload, (offer,), offer).batch_advice
    assert small.startswith(
        "a quarter of the global batch is not possible: No layout of 16 GPUs with dp_shard"
    )
    assert all(
        f" layout=zero3x16-mb2-ga{steps}-full)" in said for steps, said in zip((1, 4, 8), others, strict=True)
    )
    assert not any("does not fit" in said for said in (small, *others))


def test_compiled_blocks_are_named_for_a_fixed_layout() -> None:
    found = plan("zero3x16-mb1-ga4-full", seq_len=2048)
    (said,) = [line for line in faster(found, found.choice(0)) if "train.compile=true" in line]
    assert said.startswith("compiled blocks (train.compile=true): ")
