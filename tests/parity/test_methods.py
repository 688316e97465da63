"""LoRA and bf16 under the techniques: as on one rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import cases
from layouts import Trained, check, differences, trained

LORA = ("method=lora", "lora.r=4", "lora.alpha=8")
TECHNIQUES = [
    "dp2", "zero1x2", "zero3x2", "tp2-sp", "cp2", "ulysses2", "pp2-1f1b", "pp2-interleaved1f1b-v2", "pp2-zbv",
    "pp2-dualpipev",
]  # fmt: skip


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(folder, tmp_path_factory.mktemp("lora") / "one", "mb4-ga4", "fp64", *LORA)


@pytest.mark.parametrize(
    "layout",
    cases(
        [
            *TECHNIQUES,
            "zero3x2-tp2-sp",
            "zero2x2-tp2-sp-pp2-1f1b-full",
            "zero3x2-full2",
            "pp2-1f1b-selective2",
        ],
        ci=["zero3x2-tp2-sp", "cp2", "pp2-dualpipev"],
    ),
)
def test_lora_gives_the_adapters_of_one_rank(
    layout: str, folder: Path, adapted: Trained, tmp_path: Path
) -> None:
    ours = trained(folder, tmp_path / "run", layout, "fp64", *LORA)
    assert all(".lora_" in name for name in ours.tensors)
    check(ours, adapted, "fp64")


@pytest.fixture(scope="module")
def rounded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(folder, tmp_path_factory.mktemp("bf16") / "one", "mb4-ga4", "bf16")


@pytest.mark.parametrize(
    "layout",
    cases(
        [
            "dp2",
            "zero3x2",
            "zero1x2-pp2-zbv-mb1-ga8",
            "ulysses2",
            "tp2-sp",
            "pp2-dualpipev-mb2-ga8",
            "pp2-zb",
            "cp2",
            "zero3x2-tp2-sp-pp2-1f1b",
        ],
        ci=["zero3x2-tp2-sp-pp2-1f1b"],
    ),
)
def test_bf16_is_as_near_to_one_rank_as_its_rounding(
    layout: str, folder: Path, rounded: Trained, reference: Callable[[str], Trained], tmp_path: Path
) -> None:
    """One rank's own bf16 run is that far from fp32; another order of sums may be as far from it, no more."""
    ours = trained(folder, tmp_path / "run", layout, "bf16")
    own = differences(rounded, reference("fp32"))
    for found, allowed in zip(differences(ours, rounded)[:3], own[:3], strict=True):
        assert found < allowed, (found, allowed)
