"""What the planner says that real steps hold, against what they do: a part of validation/memory_grid.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import memory_grid

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["mb2-ga2", "zero3x2-mb2-ga2", "tp2-sp-mb2-ga2", "pp2-1f1b-mb1-ga4", "mb2-ga2-full"],
)
def test_the_planner_knows_what_a_step_holds(layout: str, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run(
        [sys.executable, "validation/memory_grid.py", "--layouts", layout, "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, check=True,
    )  # fmt: skip
    rows, states = memory_grid.compare(layout, json.loads(out.read_text())[layout])

    assert rows and states
    for each in states:
        assert each.measured == each.predicted
    for row in rows:
        assert row.predicted == pytest.approx(row.measured, rel=0.02), row
        if row.phase != "optimizer":  # an update has nothing but states
            assert row.rest_predicted == pytest.approx(row.rest, rel=0.02), row
