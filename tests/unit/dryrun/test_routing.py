"""How a dry run spreads tokens over ranks with experts, and what it refuses."""

from pathlib import Path

import pytest
from golden import refuses, says

from meshtune.dryrun.routing import Routing, routing_for
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.rundir import RunDir

EP4 = Layout.parse("zero3x8-ep4-mb1-ga1")


@pytest.mark.parametrize(
    ("routing", "chosen", "rows"),
    [
        (Routing(), 2, [6, 6, 6, 4]),
        (Routing("worst"), 2, [22, 0, 0, 0]),
        (Routing("worst"), 3, [22, 11, 0, 0]),  # a rank has two experts
        (Routing("measured", {5: 2.0}), 2, [11, 4, 4, 3]),
        (Routing("measured", {5: 9.0}), 2, [22, 0, 0, 0]),
        (Routing("measured", {4: 2.0}), 2, [6, 6, 6, 4]),
    ],
)
def test_no_row_is_dropped(routing: Routing, chosen: int, rows: list[int]) -> None:
    assert routing.rows(11, chosen, 2, 4, block=5) == rows
    assert sum(rows) == 11 * chosen


def test_a_routing_that_no_run_has_measured_or_no_rank_shows_is_refused_or_named(tmp_path: Path) -> None:
    def routed(kind: str, layout: Layout = EP4, experts: int = 8) -> Routing:
        return routing_for(kind, layout, experts=experts, model="tiny", output=str(tmp_path))

    for wrong in ({"kind": "even"}, {"kind": "worst", "experts": 0}, {"kind": "measured"}):
        with refuses(UserError):
            routed(**wrong)
    run, loads = RunDir(tmp_path), ("fullest", "largest", "mean", "entropy", "unused")
    run.append({"kind": "run", "layout": "dp4-ep4-mb2-ga1"})
    for step, most in ((1, [1.5, 3.0]), (2, [2.5, 2.0])):
        row = {"kind": "experts", "step": step, "layers": [1, 2], "fullest_rank": most}
        run.append({name: [1, 2] for name in loads} | row)
    measured = routed("measured")
    assert measured.fullest == {1: 1.5, 2: 3.0}
    with refuses(UserError):
        routed("measured", Layout.parse("zero3x8-ep2-mb1-ga1"))
    without_ep = [routed(kind, Layout.parse("zero3x8-mb1-ga1")) for kind in ("worst", "measured")]
    assert {routing.kind for routing in without_ep} == {"balanced"}
    for routing in (measured, routed("worst"), *without_ep):
        says(routing.note)
