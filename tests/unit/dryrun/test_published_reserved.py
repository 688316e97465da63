"""Memory that torchtitan's runs reserved, and its step dry-run: validation/reserved.py and its table."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "validation"))
import reserved

from meshtune import dryrun
from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.workspaces import Workspaces
from meshtune.layout import Layout
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
        layout, _, published, active, simulated, difference, _, own = table[row["id"]]
        assert (own == "-") == bool(reserved.why_not(row))
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


def test_each_replay_has_its_column():
    row = next(row for row in reserved.rows() if row["id"] == "titan-01")
    replays = [Replay(active=gib * GIB, reserved=(gib + 1) * GIB) for gib in (60, 50, 40)]
    (line,) = re.findall(r"^\| titan-01 .+", reserved.page([reserved.Result(row, *replays)]), re.M)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert [cells[place] for place in (4, 5, 7, 8)] == ["60.0", "61.0", "51.0", "41.0"]
    untraced = reserved.Result(row, None, None, replays[2], "no ring")
    assert "| - (target) | - | 41.0 |\n" in reserved.page([untraced])


@pytest.mark.all
def test_the_last_column_is_the_step_that_dryrun_traces(tmp_path: Path):
    shape = reserved.Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=512)
    own, _ = reserved.replays(reserved.ours, shape, Layout.parse("zero3x2-mb1-ga1-full"), 256, "hopper")
    reserved.config_of(shape, 256).save_pretrained(tmp_path)
    settings = {
        "model": {"name": str(tmp_path)}, "data": {"seq_len": 256},
            "train": {"global_batch_size": 2, "compile": False},  # as `ours`
        "cluster": {"gpu": "h100-sxm", "gpus": 2},
    }  # fmt: skip
    (trace,) = dryrun(settings, layout="zero3x2-mb1-ga1-full").traces
    assert own.active == replay_steps(trace.steps, workspaces=Workspaces("hopper"))[1].active


@pytest.mark.all
def test_the_eager_row_is_reserved_as_published():
    (row,) = (row for row in reserved.rows() if row["id"] == "titan-01")
    found = reserved.result(row)
    assert found.counts and found.plain and abs(found.difference or 1.0) <= reserved.TARGET
    simulated = [f"{each.reserved / GIB:.1f}" for each in (found.plain, found.ours) if each]
    assert simulated == [cells()["titan-01"][place] for place in (4, 7)], "reserved.md is out of date"
