"""Ten dense families under tensor, sharded data and pipeline parallelism: each as on one rank."""

from pathlib import Path

import pytest
import torch
from cases import cases
from families import FAMILIES, RECURRENT, exact
from layouts import TOLERANCES, Trained, check, differences, make_folder, trained
from transformers import AutoModelForCausalLM, XGLMConfig

DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "starcoder2", "cohere"]


LAYOUTS = {  # of a family, besides tp2-sp, whose plan is each family's own
    "llama": ["zero3x2"],
    "gemma2": ["zero3x2", "pp2-1f1b"],  # scaled embeddings
    "gemma3": ["pp2-1f1b"],  # two tables of positions
    "phi3": ["zero3x2"],  # fused projections
    "starcoder2": ["pp2-1f1b"],  # biases, and a tied embedding
    "cohere": ["pp2-1f1b"],  # a scaled head
}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A family's tiny model with its data, and one rank's run with it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param](vocab_size=301, initializer_range=0.05)
    make_folder(folder, AutoModelForCausalLM.from_config(config))
    with exact():
        return folder, trained(folder, folder / "one", "mb4-ga4", "fp64", forked=True)


@pytest.mark.parametrize(
    ("family", "layout"),
    cases(
        [(family, layout) for family in DENSE for layout in ("tp2-sp", *LAYOUTS.get(family, ()))],
        ci=[("gemma2", "pp2-1f1b"), ("phi3", "zero3x2"), ("starcoder2", "tp2-sp")],
    ),
    indirect=["family"],
    scope="module",
)
def test_family_gives_the_numbers_of_one_rank(
    layout: str, family: tuple[Path, Trained], tmp_path: Path
) -> None:
    folder, reference = family
    with exact():
        check(trained(folder, tmp_path / "run", layout, "fp64", forked=True), reference, "fp64")


@pytest.mark.all
def test_a_table_of_positions_in_a_buffer_is_added_once(tmp_path: Path) -> None:
    """XGLM, in fp32: transformers' own attention of it has no fp64. Parameters are not compared: gradients of
    its keys' biases are rounding alone, which AdamW makes as large as any.
    """
    torch.manual_seed(0)
    config = XGLMConfig(
        vocab_size=301, d_model=64, ffn_dim=96, num_layers=4, attention_heads=4, dropout=0.0,
        attention_dropout=0.0, init_std=0.05, max_position_embeddings=256,
    )  # fmt: skip
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    one, two = (
        trained(tmp_path, tmp_path / layout, layout, "fp32", "model.attention=eager", "data.packing=false")
        for layout in ("mb4-ga4", "pp2-1f1b")
    )
    loss, norm, _, _ = differences(two, one)
    assert loss <= TOLERANCES["fp32"][0] and norm <= TOLERANCES["fp32"][1]


@pytest.mark.parametrize(
    ("name", "layouts"),
    cases(
        [
            ("lfm2", ["dp2", "zero2x2", "zero3x2-full", "pp2-1f1b"]),
            ("mamba2", ["zero1x2", "zero3x2-selective", "pp2-1f1b-full"]),
            ("zamba2", ["zero1x2", "zero3x2-full"]),
        ]
    ),
    ids=["lfm2", "mamba2", "zamba2"],
)
def test_recurrent_family_gives_the_numbers_of_one_rank(
    name: str, layouts: list[str], tmp_path: Path
) -> None:
    """Zamba2's blocks share their attention: under ZeRO its parameters are in two groups of blocks."""
    torch.manual_seed(0)
    config = RECURRENT[name](vocab_size=301, initializer_range=0.05)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    with exact():
        reference = trained(tmp_path, tmp_path / "one", "mb4-ga4", "fp64", forked=True)
        for layout in layouts:
            check(trained(tmp_path, tmp_path / layout, layout, "fp64", forked=True), reference, "fp64")
