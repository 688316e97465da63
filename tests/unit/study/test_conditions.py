"""Conditions of a sweep: what they mean, and what is refused."""

from typing import Any

import pytest
from golden import refuses

from meshtune.errors import UserError
from meshtune.study.conditions import Condition

SETTINGS: dict[str, Any] = {
    "layout.tp": 4, "data.seq_len": 512, "model.name": "models/5M", "data.packing": True, "train.seed": None,
    "train.adam_betas": [0.9, 0.95],
}  # fmt: skip


def holds(text: str) -> bool:
    return Condition.parse(text).holds(SETTINGS.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layout.tp <= 2 or data.seq_len >= 512", True),
        ("layout.tp <= 2 and data.seq_len >= 512", False),
        ("not layout.tp == 4", False),
        ("1 < layout.tp <= 4", True),
        ("layout.tp * data.seq_len // 8 == 256 and -layout.tp < 0 and data.seq_len % 3 == 2", True),
        ("data.seq_len / layout.tp + 1 == 129", True),
        ("'5M' in model.name and model.name not in ['models/28M', 'other']", True),
        ("data.packing and train.seed == null", True),
        ("data.packing == false", False),
        ("train.adam_betas == (0.9, 0.95) and layout.tp in (4, 8)", True),
    ],
)
def test_a_condition_is_evaluated(text: str, expected: bool) -> None:
    assert holds(text) is expected


def test_the_names_are_the_settings_in_it() -> None:
    names = Condition.parse("layout.tp <= 2 or layout.tp * data.seq_len > 8 and data.packing == true").names
    assert names == ("layout.tp", "data.seq_len", "data.packing")


def test_a_part_that_is_not_reached_is_not_evaluated() -> None:
    assert Condition.parse("layout.tp == 4 or layout.tp / 0 > 1").holds(SETTINGS.__getitem__)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "open('x')", "[one for one in (1, 2)]", "lambda: 1",
        "layout.tp ** 9",
        "model.name[0] == 'm'", "f'{layout.tp}'", "(tp := 2)", "layout.tp if 1 else 2", "1 << 40", "{1: 2}",
        "layout.tp is 4", "model.name.upper() == 'X'", "b'x' == model.name", "1j == 1",
    ],
)  # fmt: skip
def test_whatever_else_python_has_is_refused_before_it_is_evaluated(text: str) -> None:
    with refuses(UserError):
        Condition.parse(text)


@pytest.mark.parametrize("text", ["layout.tp <=", "", "  ", 3, None, "(" * 200, "1" * 2000, "a\0b"])
def test_what_is_no_expression_is_refused_with_a_sentence(text: Any) -> None:
    with pytest.raises(UserError, match="where: "):  # with Python's own words for some
        Condition.parse(text)


@pytest.mark.parametrize(
    "text", ["model.name < 3", "layout.tp % 0 == 1", "model.name * 9 == 1", "1 in layout.tp"]
)
def test_values_that_can_t_be_compared_are_named(text: str) -> None:
    with pytest.raises(UserError, match=r"has no answer with .*(model.name = models/5M|layout.tp = 4)"):
        holds(text)
