"""The search for the largest micro-batch tries few sizes, and finds the largest that runs."""

import pytest

from meshtune.study.beside import MOST, Tried, largest


@pytest.mark.parametrize("first", [1, 4, 7])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 100, MOST, 10 * MOST])
def test_the_largest_that_runs_is_found(most: int, first: int) -> None:
    found, tried = largest(lambda size: Tried(size, size <= most, None), first)
    assert found == min(most, MOST)
    sizes = [one.size for one in tried]
    assert len(sizes) == len(set(sizes)) <= 26 and max(sizes) <= MOST


def test_sizes_are_doubled_and_then_halved_between() -> None:
    _, tried = largest(lambda size: Tried(size, size <= 11, None))
    assert [one.size for one in tried] == [1, 2, 4, 8, 16, 12, 10, 11]
