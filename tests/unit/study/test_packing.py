"""Which experiment of a sweep starts next, and the time left."""

import pytest

from meshtune.study.runner import Devices, Estimate
from meshtune.study.store import DONE, WAITING, Row


def row(number: int, world: int, seconds: float | None = None, plan: float | None = None) -> Row:
    return Row(number, str(number), {}, None, world, DONE if seconds else WAITING, seconds, plan, None, None)


def started(devices: Devices, worlds: list[int]) -> list[tuple[int, tuple[str, ...]]]:
    """(number, GPUs) of the experiments of these worlds that start at once."""
    waiting, running = [row(number, world) for number, world in enumerate(worlds, 1)], []
    while choice := devices.next(waiting, [gpus for _, gpus in running]):
        waiting.remove(choice[0])
        running.append((choice[0].number, choice[1]))
    return running


def test_the_largest_that_fits_on_the_free_gpus_starts_first() -> None:
    eight = Devices(tuple("01234567"), jobs=8)
    assert started(eight, [1, 4, 2, 4, 1]) == [(2, tuple("0123")), (4, tuple("4567"))]
    assert started(eight, [1, 5, 2, 4, 1]) == [(2, tuple("01234")), (3, ("5", "6")), (1, ("7",))]
    assert started(eight, [16]) == []
    assert started(Devices(("3", "5"), jobs=1), [1, 1]) == [(1, ("3",))]


def test_what_runs_on_the_processor_beside_gpus_needs_none_of_them() -> None:
    """Eight CPU ranks would never find eight of two GPUs, and the sweep would wait for ever."""
    two, waiting = Devices(("0", "1"), jobs=2), [row(1, 8), row(2, 1)]
    assert two.next(waiting, [], {1}) == (waiting[1], ("0",))
    assert two.next(waiting[:1], [("0",)], {1}) == (waiting[0], ())
    assert two.next(waiting[:1], []) is None


def test_on_a_processor_they_run_in_their_order() -> None:
    assert started(Devices(), [1, 8, 2]) == [(1, ())]
    assert started(Devices(jobs=2), [1, 8, 2]) == [(1, ()), (2, ())]


def test_the_time_left_is_by_the_number_of_ranks_where_no_plan_is_known() -> None:
    estimate = Estimate.of([row(1, 1, 10.0), row(2, 1, 20.0), row(3, 4, 60.0)])
    assert estimate.seconds(row(4, 1)) == 15 and estimate.seconds(row(4, 4)) == 60
    assert estimate.seconds(row(4, 2)) == 30  # the mean of all
    waiting = [row(4, 1), row(5, 4)]
    assert estimate.left(waiting, {row(6, 1): 5.0}, Devices()) == 15 + 60 + 10
    gpus = Devices(tuple("01234567"), jobs=8)
    assert estimate.left([*waiting, row(7, 4), row(8, 4)], {}, gpus) == pytest.approx((15 + 3 * 4 * 60) / 8)
    assert Estimate.of([]).left(waiting, {}, Devices()) is None


def test_with_plans_the_time_left_is_what_a_start_takes_and_a_part_that_grows_with_the_step() -> None:
    ended = [
        row(number, 1, 20.0 + 30.0 * plan, plan) for number, plan in enumerate((0.1, 0.2, 0.4, 0.8, 1.6))
    ]
    estimate = Estimate.of(ended)
    assert estimate.seconds(row(9, 1, None, 3.2)) == pytest.approx(116)
    assert estimate.seconds(row(9, 1)) == pytest.approx(estimate.of_world[1])
