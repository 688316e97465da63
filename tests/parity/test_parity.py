"""Every layout gives the numbers of one rank: losses, gradient norms, and the exported model.

Three steps with accumulation over packed documents with very unequal labels; each layout through the same
`build` and `train` that a user's run goes through.
"""

from pathlib import Path

import pytest
from cases import cases
from layouts import Trained, check, trained, whole

ALONE = """
dp2 zero1x2 zero2x2 zero3x2 tp2 tp2-sp tp2-sp-regather cp2 ulysses2
pp2-gpipe pp2-1f1b pp2-interleaved1f1b-v2 pp2-loopedbfs-v2 pp2-zb-v2 pp2-zbv pp2-dualpipev
"""
# A pair of techniques that is in a layout with a third is not tried alone too.
TWO = """
tp2-sp-regather-attention tp2-attention cp2-full
ulysses2-attention pp2-1f1b-attention pp2-interleaved1f1b-v2-full pp2-zbv-attention
dp2-full2 zero3x2-full2 zero3x2-selective2 tp2-sp-selective2 pp2-1f1b-full2 pp2-interleaved1f1b-v2-selective1
"""
FOUR = """
dp4 zero3x4 dp2-zero1x2 dp2-zero2x2 dp2-zero3x2 tp4-sp cp4
zero1x2-tp2 zero2x2-tp2-sp zero3x2-tp2-sp-selective
dp2-cp2 zero2x2-ulysses2 cp2-tp2-sp
dp2-pp2-1f1b zero1x2-pp2-1f1b zero3x2-pp2-gpipe zero3x2-pp2-interleaved1f1b-v2
ulysses2-pp2-1f1b ulysses2-tp2-sp tp2-sp-pp2-zbv cp2-pp2-zbv tp2-pp2-loopedbfs-v2
zero3x2-tp2-sp-regather tp2-sp-regather-pp2-1f1b zero3x2-cp2-full2 zero3x2-pp2-1f1b-selective2
tp2-pp2-dualpipev-mb2-ga8 zero1x2-pp2-dualpipev-mb2-ga4 ulysses2-pp2-zb-v2
zero1x2-pp2-zb-v2 zero1x2-pp2-zbv dp2-pp2-dualpipev-mb2-ga4 tp2-pp2-zbv
pp4-1f1b pp4-interleaved1f1b-v2-mb2-ga8 pp4-zbv-mb2-ga8 pp4-dualpipev-mb2-ga8
"""
EIGHT = """
zero3x8-mb1-ga2 dp2-zero2x2-pp2-1f1b-mb1-ga4 dp2-zero3x2-tp2-sp-mb1-ga4
zero1x2-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga4-selective zero3x2-tp2-sp-pp2-1f1b-full cp2-tp2-sp-pp2-1f1b
zero3x2-cp2-pp2-1f1b-attention dp2-tp2-pp2-interleaved1f1b-v2-mb2-ga4-selective zero3x2-cp2-tp2-sp-full
"""
LAYOUTS = [*TWO.split(), *FOUR.split(), *EIGHT.split()]
ALONE_DEFAULT = "zero3x2 tp2-sp cp2 ulysses2 pp2-1f1b"
DEFAULT = """
zero3x2-full2 cp2-tp2-sp zero1x2-pp2-zbv
"""


def test_the_table_is_long_enough() -> None:
    assert len(set(LAYOUTS)) >= 40
    assert {whole(layout).world for layout in LAYOUTS} == {2, 4, 8}


@pytest.mark.parametrize("layout", cases(LAYOUTS, default=DEFAULT.split()))
def test_layout_gives_the_numbers_of_one_rank(
    layout: str, folder: Path, reference: dict[str, Trained], tmp_path: Path
) -> None:
    check(trained(folder, tmp_path / "run", layout, "fp32"), reference["fp32"], "fp32")


@pytest.mark.parametrize("layout", cases(ALONE.split(), default=ALONE_DEFAULT.split()))
def test_each_technique_is_exact_in_fp64(
    layout: str, folder: Path, reference: dict[str, Trained], tmp_path: Path
) -> None:
    check(trained(folder, tmp_path / "run", layout, "fp64"), reference["fp64"], "fp64")
