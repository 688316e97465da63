"""Run folders written at commit 359a444 (tests/data/make_runs.py) still go on, load and report."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from command import Command, end

from meshtune.rundir import RunDir

ARCHIVE = Path(__file__).parents[1] / "data" / "runs-359a444.tar.xz"
RUNS = ("one-rank", "zero3x2", "lora")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folders, with their paths made this machine's."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for file in tmp_path.rglob("*"):
        if file.suffix in (".yaml", ".json", ".jsonl", ".md"):
            file.write_text(file.read_text().replace("{{ROOT}}", str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("name", cases(RUNS, ci=["one-rank"]))
def test_a_run_of_an_earlier_version_goes_on_with_its_losses(
    name: str, earlier: Path, begin: Any, begin_fork: Any
) -> None:
    start = begin if name == "zero3x2" else begin_fork  # ranks are forked from a process without threads
    expected = json.loads((earlier / "expected.json").read_text())[name]
    ended = end(start("train", earlier / name / "config.yaml", "train.max_steps=6"))
    assert "Going on from the checkpoint of step 3" in ended.err
    rows = RunDir(earlier / name).rows("train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["loss"] == pytest.approx(expected[str(row["step"])], rel=2e-6)


@pytest.mark.ci
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_loads_and_reports(name: str, earlier: Path, meshtune: Command) -> None:
    run = earlier / name
    held_out = RunDir(run).rows("eval")[-1]["loss"]
    assert meshtune("eval", run, "--json").json["loss"] == pytest.approx(held_out, rel=1e-6)
    meshtune("generate", run, "--prompt", "Say red 7", "--max-new-tokens", "4")
    meshtune("export", run, earlier / "exported", "--step", "3")
    assert (earlier / "exported").is_dir()
    meshtune("report", run)
    assert (run / "report.html").stat().st_size > 100_000
