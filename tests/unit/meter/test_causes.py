"""Causes of slow runs, from rows: each by its own numbers, none for healthy rows, and what they cost."""

from pathlib import Path
from typing import Any

import pytest
from golden import says

from meshtune.layout import Layout
from meshtune.meter.causes import MIN_STEPS, THRESHOLDS, Cause, causes
from meshtune.meter.parts import PARTS

STEPS = 20


def run_row(layout: str = "dp2-mb2-ga2", **facts: Any) -> dict[str, Any]:
    return {"kind": "run", "layout": str(Layout.parse(layout)), "device_type": "cpu", **facts}


def time_row(step: int, **facts: Any) -> dict[str, Any]:
    """One healthy step of 1 s on two ranks."""
    parts = dict.fromkeys(PARTS, 0.0) | {
        "forward": 0.3, "backward": 0.55, "communication": 0.05, "optimizer": 0.08, "loading": 0.001,
        "rest": 0.019,
    }  # fmt: skip
    return {
        "kind": "time", "step": step, "seconds": 1.0, "parts": parts, "exposed": {"data": 0.05},
        "busy": [0.94 + 0.02 * (step % 2), 0.95], "loading": [0.001, 0.001], "padding": 0.03,
        "traffic": {"data": [8, 10_000_000]}, "head_start": 0.1, "launching": 0.05, "host_seconds": 0.95,
    } | facts  # fmt: skip


def rows(*, layout: str = "dp2-mb2-ga2", steps: int = STEPS, run: Any = None, **facts: Any) -> list[Any]:
    """Rows of a run of healthy steps but for `facts`; a callable fact gets the step's number."""

    def at(step: int) -> dict[str, Any]:
        return {name: fact(step) if callable(fact) else fact for name, fact in facts.items()}

    return [run_row(layout, **(run or {})), *(time_row(step, **at(step)) for step in range(3, 3 + steps))]


def names(found: list[Cause]) -> list[str]:
    return [cause.name for cause in found]


def parts(**seconds: float) -> dict[str, float]:
    return time_row(1)["parts"] | seconds


def test_healthy_steps_have_no_cause() -> None:
    assert causes(rows()) == []
    assert causes([]) == []


def test_launching_is_judged_by_the_steps_that_measured_it_next_to_their_own_time() -> None:
    """A processor at half its clock takes twice as long for operations and for the step. A step that waits
    loses a smaller share of its time to them than of its processor's.
    """

    def measured(share: float) -> list[Cause]:
        clock = {4: 2.0, 5: 2.0, 6: 1.0}
        return causes(
            rows(
                launching=lambda step: share * clock[step] if step in clock else None,
                seconds=lambda step: clock.get(step, 4.0),
                host_seconds=0.5,
            )
        )

    assert names(measured(0.4)) == ["small micro-batches"] and measured(0.2) == []


SLOW = {
    "slow rank": {"busy": [0.6, 0.95]},
    "waiting for data": {"loading": [0.0, 0.3]},
    "small micro-batches": {"launching": 0.4},
    "recompilation": {"seconds": lambda step: 1.0 + step % 2, "recompilations": lambda step: step % 2},
    "slow collectives": {"exposed": {"data": 0.4}},
    "overlap is off": {"head_start": 1e-4, "exposed": {"data": 0.2}},
    "padding": {"padding": 0.4},
    "allocator retries": {
        "seconds": lambda step: 1.0 + (step % 4 == 0), "allocator_retries": lambda step: int(step % 4 == 0)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_each_cause_is_named_by_its_own_numbers(name: str) -> None:
    first, *others = causes(rows(**SLOW[name]))
    assert first.name == name and not others
    assert first.share >= THRESHOLDS[name].share
    assert (
        first.evidence.endswith(".") and first.remedy.endswith(".") and f"{first.share:.0%}" in first.sentence
    )
    assert Cause.of_row(first.row()) == first


def test_the_slow_rank_is_told_with_how_much_and_must_be_the_same_one_in_most_steps() -> None:
    (cause,) = causes(rows(busy=[0.6, 0.9]))
    assert cause.share == pytest.approx(0.3)
    says(cause.evidence)
    assert causes(rows(busy=lambda step: [0.6, 0.9] if step % 2 else [0.9, 0.6])) == []
    stages = rows(layout="pp2-mb2-ga2", busy=[0.6, 0.9])  # stages of one rank each differ by themselves
    assert causes(stages) == []


def test_saving_counts_without_the_last_checkpoint_which_every_run_writes() -> None:
    healthy = rows()
    last = healthy[-1]["step"]
    saves = [{"kind": "save", "step": step, "seconds": 2.0} for step in (5, 10, 15)]
    (cause,) = causes([*healthy, *saves])
    assert cause.name == "slow saving" and cause.share == pytest.approx(6 / 26)
    assert causes([*healthy, {"kind": "save", "step": last, "seconds": 9.0}]) == []


def test_one_hiccup_of_the_loader_is_no_cause() -> None:
    slow = rows(seconds=lambda step: 9.0 if step == 7 else 1.0)
    slow[5]["loading"] = [8.0, 8.0]
    assert causes(slow) == []


def test_a_gpu_that_is_never_behind_its_host_has_small_micro_batches() -> None:
    gpu: dict[str, Any] = {"device_type": "cuda"}
    assert names(causes(rows(run=gpu, backlog=0.001, launching=None))) == ["small micro-batches"]
    assert causes(rows(run=gpu, backlog=0.05, launching=None)) == []


def test_a_gpu_is_slowed_if_half_of_the_drivers_answers_tell_so() -> None:
    answer = {"kind": "device", "gpu": "GPU-3", "clock": 1200.0, "full_clock": 1980.0, "limits": ["heat"]}
    free = answer | {"limits": []}
    (cause,) = causes([*rows(), answer, answer, free])
    says(cause.evidence)
    assert cause.name == "slowed GPU"
    assert causes([*rows(), answer, free, free]) == []


def test_collectives_are_held_against_the_plan_and_the_slowest_usual_link() -> None:
    slow: dict[str, Any] = {"exposed": {"data": 0.4}}
    planned = {"predicted": {"time": {"compute": 0.8, "data": 0.3}}}
    assert names(causes(rows(**slow))) == ["slow collectives"]  # 8 · 2 ms + 10 MB at 0.1 GB/s is 0.116 s
    assert causes(rows(run=planned, **slow)) == []


def test_parts_that_take_twice_their_plan_are_named_where_nothing_else_is() -> None:
    """The plan's passes are with the host's launches, as the measured ones."""
    parts = {"forward": 0.1, "backward": 0.3, "recomputation": 0.0, "optimizer": 0.08}
    planned = {"predicted": {"time": {"compute": 0.2, "host": 0.2}, "parts": parts}}
    (cause,) = causes(rows(run=planned))
    says(cause.evidence)
    assert cause.name == "slower than planned"
    assert names(causes(rows(run=planned, loading=[0.3, 0.3]))) == ["waiting for data"]


def test_uneven_experts_cost_what_the_other_ranks_wait() -> None:
    loads = {"kind": "experts", "step": 3, "layers": [0], "fullest": [4.0], "fullest_rank": [2.0]}
    (cause,) = causes([*rows(run={"expert_share": 0.6}), loads])
    assert cause.name == "uneven experts" and cause.share == pytest.approx(0.6 * 0.85 / 2)
    assert causes([*rows(run={"expert_share": 0.6}), loads | {"fullest_rank": [1.0]}]) == []
    for late, expected in ((0.3, ["uneven experts"]), (0.6, ["slow rank", "uneven experts"])):
        found = causes([*rows(run={"expert_share": 0.6}, busy=[0.3 + late, 0.3]), loads])
        assert names(found) == expected


def test_the_costliest_come_first_and_three_at_most() -> None:
    found = causes(rows(loading=[0.2, 0.2], padding=0.5, launching=0.3, exposed={"data": 0.4}))
    assert names(found) == ["padding", "slow collectives", "small micro-batches"]


def test_warm_up_steps_few_steps_and_earlier_starts_do_not_count() -> None:
    slow = rows(loading=[0.3, 0.3])
    assert causes(slow[:MIN_STEPS]) == []
    assert names(causes(slow[: MIN_STEPS + 1])) == ["waiting for data"]
    assert causes([row | {"warm_up": True} for row in slow]) == []
    assert causes([*slow, *rows()]) == []


def test_the_page_has_the_table_of_thresholds() -> None:
    page = (Path(__file__).parents[3] / "docs/measuring.md").read_text(encoding="utf-8")
    for name, row in THRESHOLDS.items():
        assert f"| {name} | {row.share:.0%} | {row.quantity} | {row.limit:g} | {row.reason} |" in page
