"""docs/playbook.md: its sentences have the numbers of its tables, which are made from rows."""

import re
from pathlib import Path

import numpy as np
import pytest
from measured import FAILED, read
from playbook import Graded, ran
from playbook_study import BEGIN, PICTURES, by_group, changes, write_sweep

from meshtune.report.experiments.database import read_sweep_rows
from meshtune.report.experiments.page import sweep_page
from meshtune.report.experiments.rows import sweep_of

PAGE = Path(__file__).parents[2] / "docs" / "playbook.md"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Database of the runs on 8 and 16 GPUs, 10 % too fast by prediction, 3 slow ones, 2 failed ones."""
    every = ran()
    rows = [row for row in every if row["gpus"] in ("8", "16") and not row["state"]]
    rows += [row for row in every if row["state"] == "slow"][:3]
    speed = np.array([float(row["tokens_per_s_per_gpu"]) for row in rows])
    memory = np.array([float(row["peak_mem_gib"]) for row in rows])
    found = Graded(rows, speed, speed, 1.1 * speed, memory, memory)
    return write_sweep(tmp_path_factory.mktemp("study"), found, read(FAILED)[:2])


def test_rows_become_a_sweep_with_the_pictures_of_the_page(study):
    page = sweep_page(study)
    assert page.facts["experiments"] == {"done": 94, "failed": 2}
    keys = {panel.key for panel in page.panels}
    assert all(keys >= {*row} for rows in PICTURES.values() for row in rows)
    assert "3 runs in the slow state, 0 nearly full" in page.html() and "8 to 128 GPUs h100" in page.subtitle
    sweep = sweep_of(read_sweep_rows(study))
    _, _, first, *_ = by_group(sweep, {})
    assert first.startswith("| 1.34B | 8 | 0 | 30 | dp8 mb2 | 39.2% | 50 |") and first.endswith("| 100% |")
    assert any(line.startswith("| tp 1 → 2 | × 0.6") for line in changes(sweep))


def test_each_figure_of_a_sentence_is_in_the_numbers():
    sentences, _, numbers = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert [figure for figure in re.findall(r"\d+\.\d+(?!\d*B)", sentences) if figure not in numbers] == []
