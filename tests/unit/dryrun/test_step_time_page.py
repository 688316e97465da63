"""The committed table of step times by the planner and by dry run: validation/step_time.py."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "validation"))
import step_time

NEAR = 0.08  # share by which a published speed may differ


def test_the_table_has_every_layout_and_its_figures_agree() -> None:
    text = step_time.PAGE.read_text("utf-8")
    lines = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.M)
    assert [layout for layout, _ in lines] == [*step_time.LAYOUTS]
    for _, rest in lines:
        step, difference, *parts = (cell.strip() for cell in rest.split("|"))
        planned, simulated = (float(number.replace(",", "")) for number in step.split("/"))
        assert float(difference.strip("%")) == pytest.approx(100 * (simulated / planned - 1), abs=0.6)
        for column, whole in enumerate((planned, simulated)):
            sums = sum(float(part.split("/")[column].replace(",", "")) for part in parts)
            assert sums == pytest.approx(whole, abs=5)  # each is rounded


def test_the_published_speed_is_simulated() -> None:
    published, simulated = re.search(
        r"([\d,]+) tokens/s/GPU are published, ([\d,]+) simulated", step_time.PAGE.read_text("utf-8")
    ).groups()  # type: ignore[union-attr]
    (row,) = (row for row in step_time.reserved.rows() if row["id"] == step_time.PUBLISHED)
    assert float(published.replace(",", "")) == float(row["tokens_per_s_per_gpu"])
    assert float(simulated.replace(",", "")) == pytest.approx(float(published.replace(",", "")), rel=NEAR)
