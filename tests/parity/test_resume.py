"""A checkpoint of tied embeddings and of fused projections continues in any layout.

Those of the grid are in test_parity.py.
"""

from pathlib import Path

import pytest
import torch
from cases import cases
from families import FAMILIES
from layouts import check, make_folder, trained
from transformers import AutoModelForCausalLM

ONE = "mb4-ga4"


@pytest.mark.parametrize("layout", cases(["pp2-zbv", "tp2-sp-pp2-1f1b"], ci=1))
def test_both_copies_of_a_tied_embedding_go_on(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = FAMILIES["llama"](vocab_size=301, num_hidden_layers=4, tie_word_embeddings=True)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    trained(tmp_path, tmp_path / "run", layout, "fp64", "train.max_steps=2")
    ours = trained(tmp_path, tmp_path / "run", layout, "fp64", "train.max_steps=4")
    check(ours, trained(tmp_path, tmp_path / "whole", ONE, "fp64", "train.max_steps=4"), "fp64")


@pytest.mark.parametrize("method", cases(["full", "lora"]))
def test_fused_projections_go_on_in_another_layout(method: str, tmp_path: Path) -> None:
    """A rank of zero3x2-tp2 has rows of keys and of values, which are far apart in the whole matrix."""
    words = ("method=lora", "lora.r=4") if method == "lora" else ()
    torch.manual_seed(0)
    config = FAMILIES["phi3"](vocab_size=301)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    whole = trained(tmp_path, tmp_path / "whole", ONE, "fp64", "train.max_steps=4", *words)
    layouts = [
        ("tp2-pp2-1f1b", "zero3x2-tp2-sp"),
        *([] if words else [("zero3x2-tp2-sp", ONE), (ONE, "zero1x2-tp2")]),
    ]
    for before, after in layouts:
        run = tmp_path / before.replace(ONE, "one")
        trained(tmp_path, run, before, "fp64", "train.max_steps=2", *words)
        check(trained(tmp_path, run, after, "fp64", "train.max_steps=4", *words), whole, "fp64")
