"""`meshtune bench` on CPU ranks: measured memory equals the dry run's to the byte, parts add up."""

from pathlib import Path

import pytest
from command import Command

pytestmark = pytest.mark.slow


def small(tiny: Path) -> list[str]:
    """Settings of a tiny model with random weights and data, on CPU."""
    model = [f"model.name={tiny / 'model'}", "model.init=random"]
    return [*model, "data.seq_len=64", "train.precision=fp32", "train.device=cpu"]


def test_layouts_are_timed_beside_plan_and_dry_run_and_a_failure_is_a_result(
    tiny: Path, meshtune: Command
) -> None:
    layouts = "mb2-ga2,zero3x2-mb2-ga1-full,pp2-1f1b-mb1-ga4,tp2-sp-mb2-ga2"
    ended = meshtune("bench", *small(tiny), "--layouts", layouts, "--steps", "3", "--json")
    assert ended.code == 0, ended.stderr
    documents = ended.json["layouts"]
    assert [one["layout"] for one in documents] == layouts.split(",")
    for one in documents:
        found = one["measured"]
        assert found["memory"] == one["simulated"]["memory"], one["layout"]
        assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"])
        assert len(found["time_rows"]) == found["steps"] == 3
        assert {row["rank"] for row in found["memory_rows"]} == set(range(one["world"]))
        assert one["predicted"]["memory"]["peak"] > 0 and one["predicted"]["parts"] is None  # CPUs: not timed
    by_layout = {one["layout"]: one["measured"]["parts"] for one in documents}
    assert by_layout["zero3x2-mb2-ga1-full"]["recomputation"] > 0 == by_layout["mb2-ga2"]["recomputation"]
    assert by_layout["pp2-1f1b-mb1-ga4"]["bubble"] > 0 == by_layout["tp2-sp-mb2-ga2"]["bubble"]
    assert by_layout["tp2-sp-mb2-ga2"]["communication"] > 0 == by_layout["mb2-ga2"]["communication"]


def test_a_layout_that_does_not_end_in_time_is_named_with_the_reason(tiny: Path, meshtune: Command) -> None:
    long = ("layout=mb1-ga1", "--limit", "1", "--steps", "100000")
    ended = meshtune("bench", *small(tiny), *long, "--json")
    assert ended.code == 3
    assert "did not end within" in ended.json["layouts"][0]["failed"]
