"""Benched layouts become run folders that calibrate fits; plans read the file that it writes."""

import tomllib
from pathlib import Path

import pytest
from command import Command
from own_machine import OWN_MACHINE


def test_a_folder_without_runs_is_refused(meshtune: Command, tmp_path: Path) -> None:
    probe = tmp_path / "my-cluster.toml"
    probe.write_text(OWN_MACHINE)
    ended = meshtune("calibrate", tmp_path, "--cluster", probe, "--out", tmp_path / "new.toml", code=2)
    assert f"{tmp_path} holds no run: there is no metrics.jsonl in it or in its folders." in ended.err
    ended = meshtune("calibrate", tmp_path, "--cluster", probe, "--out", probe, code=2)
    assert "my-cluster.toml exists" in ended.err


@pytest.mark.all
def test_benched_layouts_calibrate_a_file_that_plans_read(
    tiny: Path, meshtune: Command, tmp_path: Path
) -> None:
    probe, file, runs = tmp_path / "my-cluster.toml", tmp_path / "new.toml", tmp_path / "runs"
    probe.write_text(OWN_MACHINE)
    words = [f"model.name={tiny / 'model'}", "model.init=random", "data.seq_len=64", "train.precision=fp32"]
    words += ["train.device=cpu", f"cluster={probe}"]
    layouts = "mb8-ga1,mb8-ga1-full,mb16-ga1,mb8-ga2,mb32-ga1"
    ended = meshtune("bench", *words, "--layouts", layouts, "--steps", "2", "--out", runs)
    ended = meshtune("calibrate", runs, "--cluster", probe, "--out", file, "--json")
    document = ended.json
    assert sorted(Path(run["run"]).name for run in document["runs"]) == sorted(layouts.split(","))
    score = document["held_out"]["all"]
    assert score["after"]["runs"] == 5
    written = tomllib.loads(file.read_text())
    assert written["calibrated"]["runs"] == document["runs"]
    [(name, one)] = document["fitted"].items()
    assert written["kind"]["efficiency"][name] == one["after"] != one["before"]
    compared = meshtune("plan", "compare", runs / "mb8-ga1", "--json").json
    assert compared["missing"] == {}
    assert compared["at_start"]["parts"] == pytest.approx(compared["today"]["parts"])
    meshtune("plan", *words[:-1], f"cluster={file}", "cluster.gpus=1", "--json")


def test_a_folder_is_compared_as_a_run_or_refused(meshtune: Command, tmp_path: Path) -> None:
    ended = meshtune("plan", "compare", tmp_path, code=2)
    assert "there is no metrics.jsonl in it" in ended.err
    (tmp_path / "metrics.jsonl").touch()
    ended = meshtune("plan", "compare", tmp_path, "a.yaml", "--params", "1e9", code=2)
    assert "a.yaml has no use in plan compare of runs" in ended.err
    assert "--params has no use in plan compare of runs" in ended.err
    ended = meshtune("plan", "compare", f"{tmp_path},dp8", code=2)
    assert f"plan compare names the run {tmp_path} and dp8" in ended.err
    assert "has no run row" in meshtune("plan", "compare", tmp_path, code=2).err
