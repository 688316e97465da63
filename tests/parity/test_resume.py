"""A checkpoint of any layout goes on in any other, optimizer state included, as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from cases import cases
from families import FAMILIES
from layouts import Trained, check, make_folder, trained
from transformers import AutoModelForCausalLM

ONE = "mb4-ga4"


@pytest.fixture(scope="module")
def four_steps(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One rank's run that never stopped."""
    return trained(folder, tmp_path_factory.mktemp("whole") / "run", ONE, "fp64", "train.max_steps=4")


@pytest.mark.parametrize(
    ("before", "after"),
    cases(
        [
            (ONE, "zero3x2-tp2-sp"),
            ("zero3x2-tp2-sp", ONE),
            ("zero3x4", "dp2-tp2"),
            ("dp2-pp2-1f1b", "cp2-tp2-sp"),
            ("zero1x2-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga4", "zero3x4"),
            ("tp2-pp2-zbv", "pp4-1f1b"),
        ],
        default=[("zero3x2-tp2-sp", ONE)],
    ),
)
def test_a_run_goes_on_in_another_layout(
    before: str, after: str, folder: Path, four_steps: Trained, tmp_path: Path
) -> None:
    trained(folder, tmp_path / "run", before, "fp64", "train.max_steps=2")
    ours = trained(folder, tmp_path / "run", after, "fp64", "train.max_steps=4")
    check(ours, four_steps, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2-zbv", "tp2-sp-pp2-1f1b"])
def test_both_copies_of_a_tied_embedding_go_on(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = FAMILIES["llama"](vocab_size=301, num_hidden_layers=4, tie_word_embeddings=True)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    trained(tmp_path, tmp_path / "run", layout, "fp64", "train.max_steps=2")
    ours = trained(tmp_path, tmp_path / "run", layout, "fp64", "train.max_steps=4")
    check(ours, trained(tmp_path, tmp_path / "whole", ONE, "fp64", "train.max_steps=4"), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("method", [(), ("method=lora", "lora.r=4")], ids=["full", "lora"])
def test_fused_projections_go_on_in_another_layout(method: tuple[str, ...], tmp_path: Path) -> None:
    """A rank of zero3x2-tp2 has rows of keys and of values, which are far apart in the whole matrix."""
    torch.manual_seed(0)
    config = FAMILIES["phi3"](vocab_size=301)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    whole = trained(tmp_path, tmp_path / "whole", ONE, "fp64", "train.max_steps=4", *method)
    layouts = [
        ("tp2-pp2-1f1b", "zero3x2-tp2-sp"),
        *([] if method else [("zero3x2-tp2-sp", ONE), (ONE, "zero1x2-tp2")]),
    ]
    for before, after in layouts:
        run = tmp_path / before.replace(ONE, "one")
        trained(tmp_path, run, before, "fp64", "train.max_steps=2", *method)
        check(trained(tmp_path, run, after, "fp64", "train.max_steps=4", *method), whole, "fp64")
