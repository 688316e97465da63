"""Why the planner's best layouts differ from a published study's (validation/best_layouts.py)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "validation"))

from best_layouts import PREFIX, WORDS, Compared, compared, reasons
from measured import LARGE, read


@pytest.fixture(scope="module")
def pair() -> Compared:
    """A published layout that the planner would not choose."""
    rows = [row for file in LARGE for row in read(file) if row["id"].startswith(PREFIX)]
    (row,) = [row for row in rows if (row["model"], row["gpus"]) == ("nanotron-80b", "128")]
    return compared(row)


def test_the_parts_of_a_step_add_up_to_what_the_published_layout_loses(pair):
    slower = sum(pair.parts.values())
    assert pair.loses == pytest.approx(100 * slower / (100 + slower)) and pair.loses > 10
    first, second = sorted(pair.parts, key=lambda part: -abs(pair.parts[part]))[:2]
    assert pair.why == f"{WORDS[first]} {pair.parts[first]:+.0f}, {WORDS[second]} {pair.parts[second]:+.0f}"
    assert pair.why in pair.line


def test_the_paragraph_counts_layouts_beyond_the_error_of_the_prediction(pair):
    first = max(pair.parts, key=lambda part: pair.parts[part])
    beyond = reasons([pair], pair.loses / 2)
    assert "the best one in 0:" in beyond and f"most of all in: {WORDS[first]} (1)." in beyond
    within = reasons([pair], pair.loses * 2)
    assert "the best one in 1:" in within and "most of all" not in within
