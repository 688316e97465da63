"""The scripts of examples/python run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "plan.py": r"GPU-milliseconds a step",
    "rows.py": r"finished after 20 steps",
    "loss.py": r"focal loss",
    "callbacks.py": r"is below 3.0",
}  # name -> what it prints, among other things


def test_every_script_is_tested() -> None:
    assert {file.name for file in (ROOT / "examples/python").glob("*.py")} == SCRIPTS.keys()


@pytest.mark.parametrize("script", cases(SCRIPTS))
def test_an_example_in_python_runs(script: str, tmp_path: Path) -> None:
    for name in ("quickstart", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [sys.executable, f"examples/python/{script}"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert SCRIPTS[script] in ended.stdout + ended.stderr
