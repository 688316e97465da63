"""`meshtune bench` on CPU ranks: measured memory equals the dry run's to the byte, parts add up."""

import json
import pickle
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from command import Command
from torch.cuda import _memory_viz

from meshtune.meter.rows import fullest_memory
from meshtune.rundir import RunDir

HIDDEN, WIDE, KEYS = 64, 128, 32  # of tiny.py's model
BLOCK = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * WIDE + 2)  # parameters


def small(tiny: Path) -> list[str]:
    """Settings of a tiny model with random weights and data, on CPU."""
    model = [f"model.name={tiny / 'model'}", "model.init=random"]
    return [*model, "data.seq_len=64", "train.precision=fp32", "train.device=cpu"]


@pytest.mark.all
def test_layouts_are_timed_beside_plan_and_dry_run_and_a_failure_is_a_result(
    tiny: Path, meshtune: Command
) -> None:
    layouts = "mb2-ga2,zero3x2-mb2-ga1-full,pp2-1f1b-mb1-ga4,tp2-sp-mb2-ga2,cp2-mb2-ga2"
    ended = meshtune("bench", *small(tiny), "--layouts", layouts, "--steps", "3", "--json")
    documents = ended.json["layouts"]
    assert [one["layout"] for one in documents] == layouts.split(",")
    for one in documents:
        found = one["measured"]
        # Ranks that share sequences differ by the logits of a few tokens.
        alike = [row for row in found["memory_rows"] if row["rank"] == one["simulated"]["rank"]]
        held = {name: size for name, size in fullest_memory(alike).items() if size}
        assert held == one["simulated"]["memory"], one["layout"]
        assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"])
        assert len(found["time_rows"]) == found["steps"] == 3
        assert {row["rank"] for row in found["memory_rows"]} == set(range(one["world"]))
        assert one["predicted"]["memory"]["peak"] > 0 and one["predicted"]["parts"] is None  # CPUs: not timed
    by_layout = {one["layout"]: one["measured"]["parts"] for one in documents}
    assert by_layout["zero3x2-mb2-ga1-full"]["recomputation"] > 0 == by_layout["mb2-ga2"]["recomputation"]
    assert by_layout["pp2-1f1b-mb1-ga4"]["bubble"] > 0 == by_layout["tp2-sp-mb2-ga2"]["bubble"]
    assert by_layout["tp2-sp-mb2-ga2"]["communication"] > 0 == by_layout["mb2-ga2"]["communication"]


@pytest.mark.ci
def test_a_known_shape_is_benched_with_random_weights_and_cut(meshtune: Command) -> None:
    ended = meshtune(
        "bench", "model.name=llama-3.2-1b", "model.overrides.num_hidden_layers=1", "data.seq_len=16",
        "model.overrides.hidden_size=64", "model.overrides.intermediate_size=64", "train.device=cpu",
        "model.overrides.vocab_size=256", "layout=mb1-ga1", "--steps", "1", "--json",
    )  # fmt: skip
    (document,) = ended.json["layouts"]
    assert document["measured"]["memory"] == document["simulated"]["memory"]


@pytest.mark.all
def test_models_of_other_depths_than_their_folder_s_are_benched(tiny: Path, meshtune: Command) -> None:
    parameters = []
    for blocks in (1, 8):
        cut = f"model.overrides.num_hidden_layers={blocks}"
        (document,) = meshtune("bench", *small(tiny), cut, "layout=mb1-ga1", "--steps", "1", "--json").json[
            "layouts"
        ]
        assert document["measured"]["memory"] == document["simulated"]["memory"]
        parameters.append(document["measured"]["run_row"]["parameters"])
    assert parameters[1] - parameters[0] == 7 * BLOCK


@pytest.mark.ci
def test_a_layout_that_does_not_end_in_time_is_named_with_the_reason(tiny: Path, meshtune: Command) -> None:
    long = ("layout=mb1-ga1", "--limit", "1", "--steps", "100000")
    ended = meshtune("bench", *small(tiny), *long, "--json", code=3)
    assert "did not end within" in ended.json["layouts"][0]["failed"]


@pytest.mark.all
def test_the_largest_micro_batch_is_found_within_a_budget_beside_the_planner_s(
    tiny: Path, meshtune: Command
) -> None:
    ended = meshtune(
        "bench", *small(tiny), "--layouts", "mb1-ga1", "--find-micro-batch", "--json",
        "cluster.memory_budget_gib=0.01",
    )  # fmt: skip
    (document,) = ended.json["layouts"]
    peaks = {one["size"]: one["peak"] for one in document["tried"]}
    runs = {one["size"] for one in document["tried"] if one["runs"]}
    budget = 0.01 * 2**30
    assert all((peak <= budget) == (size in runs) for size, peak in peaks.items())
    assert document["micro_batch"] == max(runs) and document["micro_batch"] + 1 in peaks
    assert abs(document["planned"] - document["micro_batch"]) <= 1
    refused = meshtune("bench", *small(tiny), "--layouts", "mb1-ga1", "--find-micro-batch", code=2)
    assert "cluster.memory_budget_gib" in refused.err


@pytest.mark.all
def test_with_data_the_simulation_has_its_batch_and_traces_are_written(
    tiny: Path, tmp_path: Path, settings: Callable[..., list[str]], meshtune: Command
) -> None:
    words = settings("train.device=cpu", "data.eval=[]", f"output={tmp_path / 'unused'}")
    traces = tmp_path / "traces"
    options = ("--layouts", "zero3x2-mb1-ga1", "--steps", "2", "--json", "--profile", str(traces))
    ended = meshtune("bench", *words, *options, "--out", str(tmp_path / "runs"))
    (document,) = ended.json["layouts"]
    assert document["measured"]["data"] == "data.train"
    assert document["measured"]["memory"] == document["simulated"]["memory"]
    rows = RunDir(tmp_path / "runs" / "zero3x2-mb1-ga1").rows()
    run, end = rows[0], rows[-1]
    assert (run["kind"], end["kind"], end["step"]) == ("run", "end", 6)
    assert datetime.fromisoformat(run["started"]) <= datetime.fromisoformat(end["ended"])
    assert run["data_digest"] and run["parameters"] > 0
    assert 0.3 < run["label_share"] < 0.9
    assert not (tmp_path / "unused").exists()
    files = sorted(path.name for path in (traces / "zero3x2-mb1-ga1").iterdir())
    assert files == ["rank-0.json", "rank-0.pickle", "rank-1.json", "rank-1.pickle"]
    events = json.loads((traces / "zero3x2-mb1-ga1" / "rank-1.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    snapshot = pickle.loads((traces / "zero3x2-mb1-ga1" / "rank-1.pickle").read_bytes())
    assert "html" in _memory_viz.trace_plot(snapshot)


@pytest.mark.all
def test_logits_are_planned_for_the_labels_of_the_data(
    tiny: Path, settings: Callable[..., list[str]], meshtune: Command
) -> None:
    words = settings("train.device=cpu", "data.eval=[]", "data.seq_len=512")
    (document,) = meshtune("bench", *words, "--layouts", "mb4-ga1", "--steps", "1", "--json").json["layouts"]
    planned, measured = (document[name]["memory"] for name in ("predicted", "measured"))
    assert planned["logits"] == pytest.approx(measured["logits"], rel=0.02), "60 % of the tokens"
    assert planned["peak"] == pytest.approx(measured["peak"], rel=0.03)
