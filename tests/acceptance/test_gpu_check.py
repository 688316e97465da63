"""`make gpu-check` with tiny models on this processor: every kind of figure runs, and is in the page."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HERE = {"missing": ["trl"], "torch": "2", "transformers": "5", "cuda": None}


@pytest.mark.all
@pytest.mark.timeout(580)
@pytest.mark.parametrize("part", [2, 3, 6, 7])  # the others have only tests, which need a GPU
def test_a_part_runs_with_tiny_models(part: int, tmp_path: Path) -> None:
    options = ["--tiny", "--part", str(part), "--minutes", "9", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_check.py", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("gpu-tiny-*.json")
    figures = json.loads(file.read_text())["figures"]
    page = file.with_suffix(".md").read_text()
    for name, figure in figures.items():
        assert "error" not in figure and not figure.get("failed") and not figure.get("exit_code"), figure
        assert f"| {name}" in page
    assert any("skipped" not in figure for figure in figures.values())


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The check with tiny models, of which nothing has run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu.figures import Check  # pyright: ignore[reportMissingImports]
    from gpu.models import SMALL  # pyright: ignore[reportMissingImports]

    return Check(tmp_path, SMALL, tmp_path / "probe.toml")


def test_the_page_of_what_waits_names_every_figure_and_every_part_has_time(check: Any) -> None:
    from gpu.parts import parts  # pyright: ignore[reportMissingImports]

    pages = (BENCHMARKS / "GPU.md").read_text().split("\n## Run")[0]
    files = {file.stem.removeprefix("test_gpu_") for file in (BENCHMARKS.parent / "tests/gpu").glob("test_*")}
    named = parts(check)
    for number, (part, figures) in enumerate(named.items(), 1):
        (section,) = [one for one in pages.split("\n\n") for one in [one] if f"{number}. **{part}**" in one]
        text = section.split(f"{number}. **{part}**")[1].split(f"\n{number + 1}. **")[0]
        assert not [figure.name for figure in figures if f"`{figure.name}`" not in text]
    assert files <= {figure.name for figures in named.values() for figure in figures}


def test_a_figure_is_skipped_for_packages_and_for_time(check: Any) -> None:
    from gpu.parts import parts, skipped  # pyright: ignore[reportMissingImports]

    peers = {figure.name: figure for figure in parts(check)["peers"]}
    assert skipped(peers["1b-trl"], HERE, 500) == "missing: trl"
    assert skipped(peers["1b-trainer"], HERE, 500) is None
    assert skipped(peers["1b-trainer"], HERE, 11) == "11 s left"
    assert skipped(peers["1b-liger"], HERE, 500) == "needs a GPU"


def test_results_are_written_after_each_figure_and_a_later_part_adds(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu.results import Results  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    Results(tmp_path, HERE).add("peers/1b-trl", {"skipped": "missing: trl"})
    Results(tmp_path, HERE).add("peers/1b-hand", {"tokens_per_second": 1234.0, "step_seconds": 0.5})
    for folder in (tmp_path, tmp_path / "out"):
        (page,) = folder.glob("*.md")
        assert "| peers/1b-hand | 1,234 | 0.5000 s |" in page.read_text()
        assert "| peers/1b-trl | missing: trl |" in page.read_text()


@pytest.mark.all
def test_a_command_that_takes_too_long_is_killed_with_what_it_started(check: Any, tmp_path: Path) -> None:
    """A layout's process has a session of its own, and would hold the GPU's memory."""
    import psutil
    from gpu.figures import command  # pyright: ignore[reportMissingImports]

    script = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'], start_new_session=True); open('pid', 'w').write(str(child.pid)); time.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        command("-c", script, seconds=5, cwd=tmp_path)
    child = int((tmp_path / "pid").read_text())
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone
