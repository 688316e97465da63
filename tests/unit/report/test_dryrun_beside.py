"""The planner's prediction beside the dry run: a layout by part, several in a row each."""

from typing import Any

from golden import says

from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.dryrun.beside import conclusions, layouts_table, side_by_side, simulated_memory
from meshtune.units import GIB


def document(layout: str, *, timed: bool = True, fullest_rank: int = 4) -> dict[str, Any]:
    """A document of `dryrun --json` of the ranks 0 and 4, the second of which has the higher peak."""
    memory = dict.fromkeys(CATEGORIES, 0) | {"weights": 2 * GIB, "overhead": GIB, "peak": 3 * GIB}
    on_ranks = [{"logits": GIB, "peak": GIB, "event": "loss"}, memory | {"event": "update"}]
    time = dict.fromkeys(PARTS, 0.0) | {"compute": 0.9, "data": 0.2, "total": 1.1}
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": 1.0}
    ranks = [
        {
            "rank": 4 * (size - 1),
            "peak_bytes": size * GIB,
            "predicted": dict.fromkeys(CATEGORIES, 0) | on_ranks[size - 1],
            "steps": [
                {},
                {
                    "by_category": {"weights": size * GIB},
                    "timeline": [["forward a", {"weights": GIB}], ["backward b", {"weights": size * GIB}]],
                },
            ],
        }
        for size in (1, 2)
    ]
    return {
        "layout": layout,
        "fits": timed,
        "need_bytes": 4 * GIB,
        "fullest_rank": fullest_rank,
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
        "data": ("0.20 s", "0.0 ms", "+0.20 s"),
        "step": ("1.1 s", "1.0 s", "+10.0%"),
    }


def test_the_compared_rank_and_both_events_are_named() -> None:
    note, *others = side_by_side(document("dp2-mb1-ga1")).notes
    says(note)
    assert "another pipeline rank" not in " ".join(others)


def test_a_rank_is_compared_with_the_prediction_for_the_same_one() -> None:
    one = document("pp2-mb1-ga1", fullest_rank=0)
    listing = side_by_side(one)
    rows = {row[0]: row[1:] for row in listing.rows}
    assert rows["weights"] == ("0 B", "1.00 GiB", "-100.0%")
    assert rows["logits"] == ("1.00 GiB", "0 B", "+1.00 GiB")
    assert rows["memory"] == ("1.00 GiB", "4.00 GiB", "-75.0%")
    says(listing.notes[0])
    says(listing.notes[1])


def test_the_tensors_of_the_category_that_is_off_most_are_named() -> None:
    one = document("dp2-mb1-ga1")
    parts = [
        ("logits", "logits", 4),
        ("a block's forward", "activations", 2),
        ("last norm", "activations", 1),
    ]
    one["ranks"][1]["predicted"] |= {"logits": 4 * GIB, "activations": 3 * GIB} | {
        "tensors": [{"name": name, "category": part, "bytes": size * GIB} for name, part, size in parts]
    }
    one["ranks"][1]["steps"][1]["by_category"]["logits"] = 4 * GIB
    says(side_by_side(one).notes[1])


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
    says(conclusions([first, second]))
    first["fits"] = False
    second["fits"] = False
    says(next(conclusions([first, second])))
