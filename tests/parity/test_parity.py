"""Every layout gives the numbers of one rank: losses, gradient norms, and the exported model.

Three steps with accumulation over packed documents with very unequal labels, each layout through the
same `build` and `train` as a user's run. The layouts of the grid are trained once for all questions.
"""

import json
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from cases import cases
from grid import GRID, ONE, SINGLE, Grid, pairs, values
from layouts import Trained, check, trained, whole
from torch import nn

from meshtune.layout import CP_METHODS, SCHEDULES
from meshtune.rundir import RunDir

ALONE = """
dp2 zero1x2 zero2x2 zero3x2 tp2 tp2-sp tp2-sp-regather cp2 ulysses2
pp2-gpipe pp2-1f1b pp2-interleaved1f1b-v2 pp2-loopedbfs-v2 pp2-zb-v2 pp2-zbv pp2-dualpipev
tp4 dp2-zero2x2
"""
# A pair of techniques that is in a layout with a third is not tried alone too.
TWO = """
tp2-sp-regather-attention tp2-attention cp2-full
ulysses2-attention pp2-1f1b-attention pp2-interleaved1f1b-v2-full pp2-zbv-attention
dp2-full2 zero3x2-linear2 zero3x2-selective2 tp2-sp-selective2 pp2-1f1b-full2
pp2-interleaved1f1b-v2-selective1
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
zero1x2-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga4-linear zero3x2-tp2-sp-pp2-1f1b-full cp2-tp2-sp-pp2-1f1b
zero3x2-cp2-pp2-1f1b-attention dp2-tp2-pp2-interleaved1f1b-v2-mb2-ga4-selective zero3x2-cp2-tp2-sp-full
"""
LAYOUTS = [layout for layout in [*TWO.split(), *FOUR.split(), *EIGHT.split()] if layout not in GRID]
# Where a layout continues a run of the grid's; "one" is one rank.
CONTINUES = [
    ("zero3x2-tp2-sp-selective", ONE), (ONE, "zero3x2-tp2-sp"), ("cp2-pp2-zbv", "zero3x4"),
    ("dp2-pp2-interleaved1f1b-v2-mb2-ga4-attention", "cp2-tp2-sp"), ("tp2-sp-pp2-loopedbfs-v2", "pp4-1f1b"),
    ("zero3x2-tp2-sp-pp2-1f1b-full", "dp2-tp2"), ("ulysses2-pp2-zb-v2", "zero1x2-tp2"),
]  # fmt: skip


def test_the_grid_covers_every_technique_and_every_pair_of_axes() -> None:
    used: dict[str, set[str]] = {}
    for name in GRID:
        for axis, value in values(whole(name)).items():
            used.setdefault(axis, set()).add(value)
    assert used["data"] == {"dp", "zero1", "zero2", "zero3"}
    assert used["context"] == set(CP_METHODS)
    assert used["tensor"] == {"tp", "tp+sp", "tp+sp+regather"}
    assert used["pipeline"] == set(SCHEDULES)
    assert {mode.rstrip("0123456789") for mode in used["recompute"]} == {
        "attention",
        "selective",
        "linear",
        "full",
    }
    axes = ["context", "data", "pipeline", "recompute", "tensor"]
    assert set(combinations(axes, 2)) - pairs() == set()


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], test=SINGLE, ci=GRID))
def test_a_layout_is_one_rank_in_fp64(layout: str, grid: Grid, reference: Callable[[str], Trained]) -> None:
    check(grid(layout, "fp64"), reference("fp64"), "fp64")


@pytest.mark.parametrize("layout", cases(GRID, ci=3))
def test_a_layout_is_as_near_to_one_rank_in_fp32_as_its_rounding(
    layout: str, grid: Grid, reference: Callable[[str], Trained]
) -> None:
    check(grid(layout, "fp32"), reference("fp32"), "fp32")


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], test=SINGLE, ci=GRID))
def test_a_layout_exports_the_folder_of_one_rank(
    layout: str, grid: Grid, reference: Callable[[str], Trained]
) -> None:
    ours, theirs = RunDir(grid(layout, "fp64").folder).model, RunDir(reference("fp64").folder).model
    assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}
    for file in theirs.glob("*.json"):
        assert json.loads((ours / file.name).read_text()) == json.loads(file.read_text()), file.name


@pytest.mark.parametrize("layout", cases([*SINGLE, *GRID], test=SINGLE, ci=GRID))
def test_a_layout_reads_the_global_batches_of_one_rank(
    layout: str, grid: Grid, reference: Callable[[str], Trained]
) -> None:
    for ours, theirs in zip(
        RunDir(grid(layout, "fp64").folder).rows("train"),
        RunDir(reference("fp64").folder).rows("train"),
        strict=True,
    ):
        for name in ("step", "tokens", "label_tokens", "learning_rate"):
            assert ours[name] == theirs[name], name


# Of 8 blocks; in 4 stages only inputs of the first one leave.
OFFLOADED = [
    "mb4-ga4-offload", "zero2x2-offload", "zero3x2-offload5", "tp2-sp-offload", "pp2-1f1b-offload",
    "pp2-interleaved1f1b-v2-offload", "pp2-gpipe-offload3", "cp2-offload", "zero3x2-tp2-sp-pp2-1f1b-offload",
    "ulysses2-offload",
]  # fmt: skip


@pytest.mark.parametrize("layout", cases(OFFLOADED, ci=5))
def test_offloaded_inputs_change_no_bit(layout: str, folder: Path, tmp_path: Path) -> None:
    ours, full = (
        trained(folder, tmp_path / name, name, "fp32", "eval.every=2")
        for name in (layout, layout.replace("offload", "full"))
    )
    assert (ours.losses, ours.norms, ours.evaluated) == (full.losses, full.norms, full.evaluated)
    assert ours.evaluated and all(
        torch.equal(ours.tensors[name], full.tensors[name]) for name in full.tensors
    )


COMPILED = [layout for layout in GRID if not any(word in layout for word in ("zb", "dual", "regather"))]


@pytest.mark.parametrize("layout", cases(COMPILED))
def test_compiled_blocks_give_the_numbers_of_one_rank(
    layout: str, folder: Path, reference: Callable[[str], Trained], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Train with forward and backward graphs as the compiler makes them, which run as they are."""

    def compile(module: nn.Module) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile)
    ours = trained(folder, tmp_path / "run", layout, "fp64", "train.compile=true", forked=True)
    check(ours, reference("fp64"), "fp64")


TILED = [  # 64 columns, 4 rows a micro-batch
    ("mb4-ga4-full", ()),
    ("zero3x2-tp2-sp-selective2", ()),
    ("tp2-sp-regather-pp2-interleaved1f1b-v2", ("method=lora", "lora.r=4")),
    ("zero2x2-mb8-ga1", ("train.step_in_backward=true", "train.max_grad_norm=0")),
    ("cp2-pp2-1f1b-offload", ("method=qlora", "lora.r=4", "lora.modules_to_save=[layers.3.mlp]")),
    ("dp2-tp2-attention", ("log.gradient_noise_scale=2",)),
]


@pytest.mark.parametrize(("layout", "words"), cases(TILED, test=1, ci=5))
def test_mlps_in_tiles_are_those_of_one_rank(
    layout: str, words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    tiled = trained(folder, tmp_path / "tiled", layout, "fp64", *words, "train.mlp_tile=30")
    whole_words = [word for word in words if "backward" not in word]
    plain = trained(folder, tmp_path / "plain", ONE, "fp64", *whole_words)
    check(tiled, plain, "fp64")


@pytest.fixture(scope="session")
def four_steps(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One rank's run that never stopped."""
    return trained(folder, tmp_path_factory.mktemp("whole") / "run", ONE, "fp64", "train.max_steps=4")


@pytest.mark.parametrize(("before", "after"), cases(CONTINUES, ci=3))
def test_a_run_continues_in_another_layout(
    before: str, after: str, folder: Path, grid: Grid, four_steps: Trained, tmp_path: Path
) -> None:
    shutil.copytree(grid(before, "fp64").folder, tmp_path / "run")
    ours = trained(folder, tmp_path / "run", after, "fp64", "train.max_steps=4")
    check(ours, four_steps, "fp64")


def test_the_table_is_long_enough() -> None:
    assert len({*LAYOUTS, *GRID}) >= 60
    assert {whole(layout).world for layout in LAYOUTS} == {2, 4, 8}


@pytest.mark.parametrize("layout", cases(LAYOUTS, ci=1))
def test_a_further_layout_gives_the_numbers_of_one_rank(
    layout: str, folder: Path, reference: Callable[[str], Trained], tmp_path: Path
) -> None:
    check(trained(folder, tmp_path / "run", layout, "fp32"), reference("fp32"), "fp32")


@pytest.mark.parametrize("layout", cases([layout for layout in ALONE.split() if layout not in SINGLE], ci=1))
def test_each_technique_is_exact_in_fp64(
    layout: str, folder: Path, reference: Callable[[str], Trained], tmp_path: Path
) -> None:
    check(trained(folder, tmp_path / "run", layout, "fp64"), reference("fp64"), "fp64")
