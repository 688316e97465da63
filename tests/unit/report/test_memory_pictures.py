"""Pictures and tables of docs/memory.md: those that scripts/memory_pictures.py makes of dry runs."""

import re
import runpy
from pathlib import Path

import pytest
from hand_traces import simulation_of, time_of, trace_of

from meshtune.dryrun.simulation import Simulation

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| ([\w ]+) \|" + r" ([^|]*) \|" * 6 + "$", re.M)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "memory_pictures.py"))


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[str, ...]]:
    """Rows of the page's table of peaks: first step and later ones of each mode."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    return {name: cells for name, *cells in ROW.findall(page[: page.index("## Bytes per parameter")])}


def test_the_picture_has_the_peaks_of_the_table(table):
    text = (ROOT / "docs" / "images" / "memory-steps.svg").read_text(encoding="utf-8")
    assert re.findall(r">peak ([\d.]+ GiB)<", text) == [*table["peak"]]
    assert re.findall(r">recompute: (\w+)<", text) == ["none", "selective", "full"]


def test_the_first_step_is_smaller_and_the_parts_add_up(table):
    sizes = [[float(size.split()[0]) for size in table["peak"]][place::2] for place in (0, 1)]
    assert all(first < later for first, later in zip(*sizes, strict=True))
    parts = list(table)[: list(table).index("peak")]
    for column, peak in enumerate(table["peak"]):
        cells = [table[name][column].replace(",", "").split() for name in parts if table[name][column]]
        total = sum(float(size) * {"B": 2**-30, "MiB": 2**-10, "GiB": 1}[unit] for size, unit in cells)
        assert total == pytest.approx(float(peak.split()[0]), abs=0.12)


def run_of() -> Simulation:
    return simulation_of("zero3x8-mb1-ga1", trace_of(), times=[time_of(0)] * 2)


def test_modes_are_drawn_over_axes_of_equal_length(tmp_path, script):
    text = script["memory_picture"](tmp_path / "x.svg", {"none": run_of(), "full": run_of()}).read_text()
    assert text.count(">peak 227 MiB<") == 2 and "recompute: full" in text
    assert "Streams of rank 0" in script["streams_picture"](tmp_path / "y.svg", run_of()).read_text()
    lines = script["peaks"]({"none": run_of(), "full": run_of()}).splitlines()
    assert lines[0] == "|  | `none`, first | `none`, later | `full`, first | `full`, later |"
    assert "| optimizer |  | 40.0 MiB |  | 40.0 MiB |" in lines


@pytest.mark.all
def test_a_dry_run_has_the_peaks_of_the_page(script, table):
    column = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in
              script["peaks"]({"none": script["simulated"]("none")}).splitlines()}  # fmt: skip
    for name in ("weights", "activations", "logits", "peak"):
        assert [cell.strip() for cell in column[name]] == [*table[name][:2]]
