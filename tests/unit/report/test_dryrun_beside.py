"""The planner's prediction beside the dry run: a layout by part, several in a row each."""

from typing import Any

from meshtune.commands.verify import conclusions
from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.dryrun.beside import layouts_table, side_by_side, simulated_memory
from meshtune.units import GIB


def document(layout: str, *, timed: bool = True) -> dict[str, Any]:
    """A document of `dryrun --json` of two ranks, the second of which needs more."""
    memory = dict.fromkeys(CATEGORIES, 0) | {"weights": 2 * GIB, "overhead": GIB, "peak": 3 * GIB}
    time = dict.fromkeys(PARTS, 0.0) | {"compute": 0.9, "data": 0.2, "total": 1.1}
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": 1.0}
    ranks = [
        {
            "reserved_bytes": size * GIB,
            "peak_bytes": (size - 1) * GIB,
            "steps": [{}, {"by_category": {"weights": (size - 1) * GIB}}],
        }
        for size in (2, 3)
    ]
    return {
        "layout": layout,
        "fits": timed,
        "need_bytes": 4 * GIB,
        "ranks": ranks,
        "predicted": {"memory": memory, "time": time if timed else None},
        "time": {"seconds": 1.0, "parts": parts} if timed else None,
    }


def test_parts_of_the_fullest_rank_stand_beside_the_prediction() -> None:
    assert simulated_memory(document("dp2-mb1-ga1")) == {"weights": 2 * GIB, "overhead": 2 * GIB}
    rows = {row[0]: row[1:] for row in side_by_side(document("dp2-mb1-ga1")).rows}
    assert rows == {
        "weights": ("2.00 GiB", "2.00 GiB", "+0.0%"),
        "overhead": ("1.00 GiB", "2.00 GiB", "-50.0%"),
        "memory": ("3.00 GiB", "4.00 GiB", "-25.0%"),
        "compute": ("0.90 s", "1.0 s", "-10.0%"),
        "data": ("0.20 s", "0.0 ms", ""),
        "step": ("1.1 s", "1.0 s", "+10.0%"),
    }


def test_several_layouts_have_a_row_each_and_no_times_where_one_has_none() -> None:
    listing = layouts_table([document("dp2-mb1-ga1"), document("mb2-ga1")])
    assert listing.rows[0] == (
        "dp2-mb1-ga1", "3.00 GiB", "4.00 GiB", "-25.0%", "1.1 s", "1.0 s", "+10.0%", "yes",
    )  # fmt: skip
    untimed = layouts_table([document("dp2-mb1-ga1"), document("mb2-ga1", timed=False)])
    assert untimed.rows[1] == ("mb2-ga1", "3.00 GiB", "4.00 GiB", "-25.0%", "no")


def test_conclusions_say_what_the_simulation_does_not_confirm() -> None:
    first, second = document("dp2-mb1-ga1"), document("mb2-ga1")
    assert [*conclusions([first, second])] == []
    second["time"]["seconds"] = 0.9
    assert [*conclusions([first, second])] == [
        "Simulated, mb2-ga1 is the fastest that fits, 10.0% less time than dp2-mb1-ga1."
    ]
    first["fits"] = False
    assert [*conclusions([first, second])] == [
        "dp2-mb1-ga1 does not fit when simulated; the best one that does is mb2-ga1."
    ]
    second["fits"] = False
    assert "None of these layouts fits" in next(conclusions([first, second]))
