"""Memory that torchtitan's runs reserved, and its step dry-run: validation/reserved.py and its table."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "validation"))
import reserved

from meshtune.units import GIB


def cells() -> dict[str, list[str]]:
    """Cells of the committed table by row."""
    lines = re.findall(r"^\| (titan-[\w-]+) \| (.+) \|$", reserved.PAGE.read_text(encoding="utf-8"), re.M)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in lines}


def test_the_table_has_every_published_row_and_its_eager_one_is_within_the_target():
    table = cells()
    assert [row["id"] for row in reserved.rows()] == [*table]
    targets = {row["id"] for row in reserved.rows() if row["precision"] == "bf16" and row["compile"] == "0"}
    assert targets == {"titan-01"}
    for row in reserved.rows():
        layout, _, published, active, simulated, difference, *_ = table[row["id"]]
        assert float(published) == pytest.approx(float(row["peak_mem_gib"]), abs=0.05)
        if reserved.why_not(row):
            assert (layout, simulated, difference) == ("-", "-", "-")
        elif simulated != "-":
            assert float(active) < float(simulated)
            share = float(simulated) / float(published) - 1
            assert float(difference.split("%")[0]) == pytest.approx(100 * share, abs=0.15)
            assert ("target" in difference) == (row["id"] in targets)
            if row["id"] in targets:
                assert abs(share) <= reserved.TARGET == 0.08


def test_what_is_not_published_is_not_chosen():
    unknown = {row["id"] for row in reserved.rows() if not row["micro_batch"]}
    assert unknown >= {"titan-13", "titan-14"}
    assert all("not published" in reserved.why_not(row) for row in reserved.rows() if row["id"] in unknown)


@pytest.mark.slow
def test_the_eager_row_is_reserved_as_published():
    (row,) = (row for row in reserved.rows() if row["id"] == "titan-01")
    found = reserved.result(row)
    assert found.counts and found.plain and abs(found.difference or 1.0) <= reserved.TARGET
    assert f"{found.plain.reserved / GIB:.1f}" == cells()["titan-01"][4], "reserved.md is out of date"
