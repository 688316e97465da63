"""Options of the loss and the optimizer under the techniques: as on one rank."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cases import cases
from layouts import Trained, check, trained

ONE = "mb4-ga4"
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
    "dora": (
        "method=lora",
        "lora.r=4",
        "lora.use_dora=true",
        "lora.use_rslora=true",
        "lora.layers_to_transform=[0, 3, 6]",
    ),
    "lion": ("train.optimizer=lion", "train.learning_rate=1e-3", "train.adam_eps=1e-8"),
    "adafactor": ("train.optimizer=adafactor", "train.adam_eps=1e-8"),
    "muon": ("train.optimizer=muon",),
    "muon-lora": ("train.optimizer=muon", "method=lora", "lora.r=4", "lora.modules_to_save=[lm_head]"),
}
# The techniques that an option has to do with. Under adafactor's and muon's no rank has a part of a tensor.
TECHNIQUES = {
    "smoothing": "tp2-sp cp2 pp2-1f1b zero3x2-tp2-sp-pp2-1f1b",
    "noise": "dp2 tp2-sp cp2 pp2-zbv",
    "lora": "zero3x2 tp2-sp ulysses2 pp2-zb-v2 zero3x2-tp2-sp-pp2-1f1b",
    "dora": "dp2 zero3x2 tp2 pp2-zbv zero3x2-tp2-sp-pp2-1f1b",
    "lion": "zero3x2 tp2 pp2-1f1b zero3x2-tp2-sp-pp2-1f1b",
    "adafactor": "dp2 cp2 pp2-zbv dp2-pp2-1f1b",
    "muon": "dp2 ulysses2 pp2-zbv dp2-pp2-1f1b",
    "muon-lora": "pp2-1f1b dp2-pp2-1f1b",
}


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Function(option) -> one rank's run with it, made once."""
    runs = tmp_path_factory.mktemp("options")
    return cache(lambda option: trained(folder, runs / option, ONE, "fp64", *OPTIONS[option]))


@pytest.mark.parametrize(
    ("option", "layout"),
    cases(
        [(option, layout) for option in OPTIONS for layout in TECHNIQUES[option].split()],
        ci=[
            ("smoothing", "zero3x2-tp2-sp-pp2-1f1b"),
            ("noise", "cp2"),
            ("lora", "ulysses2"),
            ("dora", "tp2"),
            ("lion", "pp2-1f1b"),
            ("adafactor", "dp2-pp2-1f1b"),
            ("muon", "dp2"),
            ("muon-lora", "pp2-1f1b"),
        ],
    ),
)
def test_options_give_the_numbers_of_one_rank(
    option: str, layout: str, folder: Path, alone: Callable[[str], Trained], tmp_path: Path
) -> None:
    ours = trained(folder, tmp_path / "run", layout, "fp64", *OPTIONS[option])
    check(ours, alone(option), "fp64")


GOES_ON = {  # option -> (layout before, layout after)
    "adafactor": [("dp2-pp2-1f1b", ONE), (ONE, "cp2")],
    "muon": [("dp2-pp2-1f1b", ONE), ("dp2", "pp2-zbv")],
    "lion": [("zero3x2-tp2-sp", ONE), ("pp2-1f1b", "zero1x2")],
    "noise": [("cp2", "tp2-sp")],
    "lora": [("zero3x2-tp2-sp", "pp2-1f1b")],
    "dora": [("zero3x2-tp2-sp", "pp2-1f1b")],
}


@pytest.mark.parametrize("option", cases(GOES_ON, ci=["muon", "dora"]))
def test_a_run_with_an_option_goes_on_in_another_layout(option: str, folder: Path, tmp_path: Path) -> None:
    words = ("train.max_steps=4", *OPTIONS[option])
    whole = trained(folder, tmp_path / "whole", ONE, "fp64", *words)
    for before, after in GOES_ON[option]:
        run = tmp_path / f"{before}-{after}"
        trained(folder, run, before, "fp64", *words, "train.max_steps=2")
        check(trained(folder, run, after, "fp64", *words), whole, "fp64")
