"""One rule for what a mistyped name may mean, wherever a name is answered."""

import pytest
from golden import refuses

from meshtune.errors import UserError, did_you_mean, edits, nearest
from meshtune.optimizers import OPTIMIZERS
from meshtune.tools.export import check_tool


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [("trian", "train", 1), ("", "ab", 2), ("same", "same", 0), ("abc", "xyz", 3)],
)
def test_edits_are_counted(first: str, second: str, count: int) -> None:
    assert edits(first, second) == edits(second, first) == count


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cosin", ["cosine"]),
        ("Linaer", ["linear"]),
        ("consnie", ["cosine"]),  # two edits of seven letters
        ("sine", []),  # two of four
        ("constantine", []),  # three
        ("", []),
    ],
)
def test_names_at_most_two_edits_away_are_near(name: str, near: list[str]) -> None:
    assert nearest(name, ["cosine", "linear", "constant"]) == near


def test_all_of_the_same_distance_are_named() -> None:
    assert did_you_mean(nearest("tpp2", ["dp2", "tp2", "pp2"])) == "; did you mean tp2 or pp2?"
    assert did_you_mean([]) == "."


@pytest.mark.parametrize("name", ["sgd", "adagrad", "lamb"])
def test_an_optimizer_that_is_not_there_is_not_taken_for_another(name: str) -> None:
    with refuses(UserError):
        OPTIMIZERS[name]
    with refuses(UserError):
        OPTIMIZERS["loin"]


def test_a_tool_that_is_not_there_is_not_taken_for_another() -> None:
    with refuses(UserError):
        check_tool("megaton-core")
