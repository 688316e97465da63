"""A checkpoint of any layout goes on in any other, optimizer state included, as if nothing had happened."""

from pathlib import Path

import pytest
from layouts import check, trained

ONE = "mb4-ga4"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, "zero3x2-tp2-sp"),
        ("zero3x2-tp2-sp", ONE),
        ("zero3x4", "dp2-tp2"),
        ("dp2-pp2-1f1b", "cp2-tp2-sp"),
        pytest.param("zero1x2-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga4", "zero3x4", marks=pytest.mark.slow),
        ("tp2-pp2-zbv", "pp4-1f1b"),
    ],
)
def test_a_run_goes_on_in_another_layout(before: str, after: str, folder: Path, tmp_path: Path) -> None:

    trained(folder, tmp_path / "run", before, "fp64", "train.max_steps=2")
    ours = trained(folder, tmp_path / "run", after, "fp64", "train.max_steps=4")
    check(ours, trained(folder, tmp_path / "whole", ONE, "fp64", "train.max_steps=4"), "fp64")
