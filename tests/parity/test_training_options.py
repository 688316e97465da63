"""Options of the loss and the optimizer under the techniques: as on one rank."""

from pathlib import Path

import pytest
from cases import cases
from layouts import Trained, check, trained

OPTIONS = {
    "smoothing": ("train.label_smoothing=0.1",),
    "noise": ("train.neftune_alpha=5",),
    "lora": (
        "method=lora",
        "lora.r=4",
        "lora.use_rslora=true",
        "lora.layers_to_transform=[0, 3, 6]",
        "lora.modules_to_save=[embed_tokens, lm_head, model.norm, layers.3.mlp]",
    ),
    "lion": ("train.optimizer=lion", "train.learning_rate=1e-3", "train.adam_eps=1e-8"),
    "adafactor": ("train.optimizer=adafactor", "train.adam_eps=1e-8"),
}
WHOLE = ["dp2", "cp2", "ulysses2", "pp2-1f1b", "pp2-zbv", "dp2-pp2-1f1b"]  # no rank has a part of a tensor
TECHNIQUES = [
    "dp2", "zero3x2", "tp2", "tp2-sp", "cp2", "ulysses2", "pp2-1f1b", "pp2-zb-v2", "pp2-zbv",
    "zero3x2-tp2-sp-pp2-1f1b",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """One rank's run with each option."""
    runs = tmp_path_factory.mktemp("options")
    return {name: trained(folder, runs / name, "mb4-ga4", "fp64", *OPTIONS[name]) for name in OPTIONS}


@pytest.mark.parametrize(
    ("option", "layout"),
    cases(
        [
            (option, layout)
            for option in OPTIONS
            for layout in (WHOLE if option == "adafactor" else TECHNIQUES)
        ],
        default=[("smoothing", "tp2-sp")],
    ),
)
def test_options_give_the_numbers_of_one_rank(
    option: str, layout: str, folder: Path, alone: dict[str, Trained], tmp_path: Path
) -> None:
    ours = trained(folder, tmp_path / "run", layout, "fp64", *OPTIONS[option])
    check(ours, alone[option], "fp64")
