"""Latent attention and mixtures of experts under tensor parallelism: each layout as on one rank.

In fp64, where experts run by transformers' loop.
"""

from pathlib import Path

import pytest
import torch
from cases import cases
from families import SPARSE, exact
from layouts import Trained, check, make_folder, trained
from transformers import AutoModelForCausalLM

ONE = "mb4-ga4"
LORA = ("method=lora", "lora.r=4")
LAYOUTS = ["tp2", "tp2-sp-regather", "zero3x2-tp2-sp-pp2-1f1b", "cp2-tp2-sp"]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family's tiny model with its data."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = SPARSE[request.param](vocab_size=301, initializer_range=0.05)
    return make_folder(folder, AutoModelForCausalLM.from_config(config), experts="eager")


def run(folder: Path, name: str, layout: str, *words: str) -> Trained:
    with exact():
        return trained(folder, folder / name, layout, "fp64", *words, forked=True)


@pytest.mark.parametrize(
    "family",
    cases(["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss"], ci=["deepseek_v3"]),
    indirect=True,
)
@pytest.mark.parametrize("words", [(), LORA], ids=["full", "lora"])
def test_tensor_parallel_layouts_give_the_numbers_of_one_rank(family: Path, words: tuple[str, ...]) -> None:
    method = "lora" if words else "full"
    reference = run(family, f"{method}-one", ONE, *words)
    for layout in LAYOUTS:
        check(run(family, f"{method}-{layout}", layout, *words), reference, "fp64")


@pytest.mark.ci
@pytest.mark.parametrize("family", ["deepseek_v2"], indirect=True)
def test_a_checkpoint_continues_with_another_tp(family: Path) -> None:
    words = ("train.max_steps=4",)
    whole = run(family, "whole", ONE, *words)
    run(family, "run", "zero3x2-tp2-sp", "train.max_steps=2")
    check(run(family, "run", "tp2-pp2-1f1b", *words), whole, "fp64")
