"""Ten dense families under tensor, sharded data and pipeline parallelism: each as on one rank."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, exact
from layouts import Trained, check, make_folder, trained
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "starcoder2", "cohere"]


@pytest.fixture(scope="module", params=DENSE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A family's tiny model with its data, and one rank's run with it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param](vocab_size=301, initializer_range=0.05)
    make_folder(folder, AutoModelForCausalLM.from_config(config))
    with exact():
        return folder, trained(folder, folder / "one", "mb4-ga4", "fp64", forked=True)


@pytest.mark.parametrize("layout", ["tp2-sp", "zero3x2", "pp2-1f1b"])
def test_family_gives_the_numbers_of_one_rank(
    layout: str, family: tuple[Path, Trained], tmp_path: Path
) -> None:
    folder, reference = family
    with exact():
        check(trained(folder, tmp_path / "run", layout, "fp64", forked=True), reference, "fp64")
