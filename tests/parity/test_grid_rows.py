"""Rows of the grid's runs: memory and collectives are the dry run's, the peak is the planner's, and the parts
of a step are its time.
"""

from collections import Counter

import pytest
from cases import cases
from grid import GRID, SINGLE, Grid, Traced

from meshtune.layout import Layout
from meshtune.meter.parts import AXIS_PARTS
from meshtune.meter.rows import fullest_memory
from meshtune.meter.trace import Collective
from meshtune.rundir import RunDir

IN_CI = ["zero3x2-tp2-sp-selective"]
DRY_RUN_IN_CI = ["zero3x2"]
PLANNED = 0.03  # of the fullest rank's peak, in a model whose smallest tensors count
PLANNED_BEYOND = {"tp4-sp", "tp2-pp2-dualpipev-mb2-ga8", "dp2-zero2x2-pp2-1f1b-selective"}
BEYOND = pytest.mark.xfail(strict=True, reason="see TODO.md, The dry run")


def read(grid: Grid, layout: str) -> tuple[RunDir, Layout]:
    """The grid's run in fp32 and the whole layout that it chose."""
    run = RunDir(grid(layout, "fp32").folder)
    return run, Layout.parse(run.rows("run")[0]["layout"])


def part(collective: Collective, layout: Layout) -> str:
    """Part of a step's time that a collective is in, as the run's clock names it by the group."""
    axes = collective.axis.split("+")
    if len(axes) == 1:
        return AXIS_PARTS[axes[0]]
    everyone = collective.ranks == layout.world
    return "other" if everyone and (layout.tp > 1 or layout.pp > 1) else "data"


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], ci=DRY_RUN_IN_CI))
def test_a_run_has_the_collectives_of_its_dry_run(layout: str, grid: Grid, dry_run: Traced) -> None:
    run, chosen = read(grid, layout)
    sent = {axis: tuple(both) for axis, both in run.rows("time")[1]["traffic"].items()}
    calls, sizes = Counter[str](), Counter[str]()
    for collective in dry_run(layout)[0].steps[1].collectives():
        calls[part(collective, chosen)] += 1
        sizes[part(collective, chosen)] += collective.bytes
    more = {axis: (number - calls[axis], size - sizes[axis]) for axis, (number, size) in sent.items()}
    assert calls.keys() <= sent.keys()
    assert {*more.values()} == {(0, 0)}  # what ranks measured is gathered by their hosts


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], ci=DRY_RUN_IN_CI))
def test_a_run_holds_the_bytes_of_its_dry_run(layout: str, grid: Grid, dry_run: Traced) -> None:
    run, _ = read(grid, layout)
    measured = {row["rank"]: row["phases"] for row in run.rows("memory") if row["step"] == 2}
    for rank, trace in dry_run(layout).items():
        phases = trace.steps[1].peaks
        assert measured[rank].keys() == phases.keys()
        for phase, (peak, parts) in phases.items():
            real, traced = Counter(measured[rank][phase]), Counter({"peak": peak, **parts})
            if phase == "optimizer" and "pp" in layout:
                # gloo's thread may hold a message for a moment after the wait for it: then the phase is
                # fullest a few operations later, with other temporaries.
                for counter in (real, traced):
                    counter["peak"] -= counter.pop("temporary", 0)
            assert +real == +traced, (rank, phase)


@pytest.mark.parametrize(
    "layout",
    cases(
        [
            pytest.param(layout, marks=BEYOND) if layout in PLANNED_BEYOND else layout
            for layout in [*SINGLE, *GRID]
        ],
        ci=IN_CI,
    ),
)
def test_the_planner_knows_the_peak_of_a_run(layout: str, grid: Grid) -> None:
    run, _ = read(grid, layout)
    planned = run.rows("run")[0]["predicted"]["memory"]["peak"]
    measured = fullest_memory(run.rows("memory"))["peak"]
    assert planned == pytest.approx(measured, rel=PLANNED)


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], ci=IN_CI))
def test_the_parts_of_a_step_are_its_time(layout: str, grid: Grid) -> None:
    """The rest is what the other parts of a step leave: their sum tells only that they are not too long."""
    run, chosen = read(grid, layout)
    rows = run.rows("time")
    assert len(rows) == 3
    for row in rows:
        parts = row["parts"]
        assert sum(parts.values()) == pytest.approx(row["seconds"], rel=1e-6)
        assert parts["forward"] > 0 and parts["backward"] > 0 and parts["optimizer"] > 0
        assert (parts["recomputation"] > 0) == (chosen.recompute != "none")
        assert len(row["busy"]) == len(row["loading"]) == chosen.world
        axes = {AXIS_PARTS[axis] for axis in AXIS_PARTS if getattr(chosen, axis) > 1}
        assert axes <= row["traffic"].keys() <= axes | {"other"}
        if chosen.pp > 1:
            most = chosen.gradient_accumulation_steps * chosen.virtual_stages
            assert all(1 <= count <= most for count in row["in_flight"])
            assert len(row["in_flight"]) == len(row["idle"]) == chosen.world
