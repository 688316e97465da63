"""Medians and parts of measured steps, and the tables of a benched layout."""

import io
from typing import Any

import pytest
from rich.console import Console

from meshtune.meter.parts import PARTS
from meshtune.plan.step_parts import MeasuredRun
from meshtune.report.study import layouts_table, side_by_side
from meshtune.study.bench import Measured


def measured(seconds: list[float], **changed: Any) -> Measured:
    parts = dict.fromkeys(PARTS, 0.0) | {"forward": 1.0, "backward": 2.0, "rest": 1.0}
    rows = [
        {"kind": "time", "step": 4 + at, "seconds": each, "parts": parts} for at, each in enumerate(seconds)
    ]
    memory = [
        {
            "kind": "memory",
            "step": step,
            "rank": rank,
            "phases": {"forward": sizes | {"peak": sum(sizes.values())}},
        }
        for step, rank, sizes in [
            (1, 0, {"weights": 9, "activations": 90}),
            (3, 0, {"weights": 10, "activations": 20}),
            (3, 1, {"weights": 10, "activations": 30}),
        ]
    ]
    facts: dict[str, Any] = {
        "layout": "dp2-mb1", "device": "a GPU", "device_type": "cuda", "world": 2, "tokens": 1000.0,
        "seconds": seconds, "time": rows, "memory": memory, "flops": 6e12, "peak_flops_per_second": 3e12,
        "run": {"kind": "run", "data": []}, "end": {"kind": "end"}, "peak_bytes": 99,
    }  # fmt: skip
    return Measured(**facts | changed)


def test_the_step_is_the_median_and_its_parts_add_up_to_it() -> None:
    found = measured([4.0, 5.0, 100.0])
    assert found.step_seconds == 5.0
    assert sum(found.parts.values()) == pytest.approx(5.0)
    assert found.parts["backward"] == pytest.approx(2.5)
    assert found.spread == pytest.approx((52.5 - 4.5) / 5)
    assert measured([4.0]).spread == 0.0
    facts = found.as_dict()
    assert facts["tokens_per_second_per_gpu"] == 100.0
    assert facts["mfu"] == pytest.approx(6e12 / (5 * 2 * 3e12))
    assert facts["data"] == "random tokens"


def test_memory_is_the_fullest_rank_s_in_the_last_watched_step() -> None:
    assert measured([4.0]).as_dict()["memory"] == {"weights": 10, "activations": 30, "peak": 40}
    assert measured([4.0], memory=[]).as_dict()["memory"] == {}
    of_rank_0 = measured([4.0], compared=0).as_dict()["memory"]  # which a dry run has simulated
    assert of_rank_0 == {"weights": 10, "activations": 20, "peak": 30}


def test_uneven_experts_are_in_a_result_and_in_what_the_planner_reads() -> None:
    loads = [{"kind": "experts", "step": step, "fullest_rank": [1.2, 1.4]} for step in (4, 5)]
    found = measured([4.0, 5.0], experts=loads)
    assert found.as_dict()["imbalance"] == pytest.approx(1.3)
    run = {"kind": "run", "layout": "zero3x2-ep2-mb1"}
    assert MeasuredRun.of("run", [run, *found.time, *loads]).imbalance == pytest.approx(1.3)
    assert measured([4.0]).as_dict()["imbalance"] == 1 == MeasuredRun.of("run", [run, *found.time]).imbalance


def rendered(*tables: Any) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_tables_show_each_part_thrice_and_reasons_of_failures() -> None:
    forward = {"forward": 0.5, "communication": 0.25}
    document = {
        "layout": "dp2-mb1", "world": 2, "failed": None, "measured": measured([4.0]).as_dict(),
        "predicted": {
            "step_seconds": None, "parts": None, "memory": {"weights": 20, "logits": 7, "peak": 27},
            "event": "loss",
        },
        "simulated": {
            "step_seconds": 5.0, "parts": forward, "memory": {"weights": 10, "peak": 40}, "rank": 3,
            "event": "backward b",
        },
    }  # fmt: skip
    failed = document | {"layout": "dp2-mb64", "measured": None, "failed": "Out of memory. 80 GiB."}
    text = rendered(layouts_table([failed, document], "tokens/s/GPU"), *side_by_side(document))
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "dp2-mb1 125 4.0 s 0.0% 25.0% 99 B" in lines
    assert "dp2-mb64: Out of memory. 80 GiB." in lines
    assert "weights 20 B 10 B 10 B +100.0% +0.0%" in lines
    assert "logits 7 B 0 B 0 B +7 B" in lines
    assert "Memory of rank 3, which holds most when simulated. Its peak is predicted in the loss" in text
    assert "step 5.0 s 4.0 s +25.0%" in lines
    assert any(line.startswith("exposed communication 0.25 s") for line in lines), text
    assert next(side_by_side(failed)).rows[0][3] == ""  # nothing was measured
