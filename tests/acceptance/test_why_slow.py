"""The page of validation/why_slow.py; the trial itself compares times, and is a part of `make test-all`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import why_slow


def test_the_page_counts_what_was_right() -> None:
    outcomes = [
        why_slow.Outcome("padding", seed, "mb2-ga1", "twice as wide", ["padding (30%): …"], passed, 3.0, 1.0)
        for seed, passed in enumerate((True, False))
    ]
    page = why_slow.table(outcomes)
    assert "| padding | padding | 1 of 2 |" in page and "| **no** |" in page
