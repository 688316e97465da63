"""Objectives on whole answers give in every layout what they give on one rank: losses, rewards, the model."""

import json
from pathlib import Path

import pytest
import torch
from cases import cases
from families import FAMILIES
from layouts import check, make_folder, trained
from tiny import write_rows
from transformers import AutoModelForCausalLM

from meshtune.rundir import RunDir

ONE = "mb4-ga4"
OBJECTIVES = {
    "dpo": ("dpo.sft_weight=0.1", "dpo.beta=0.5"),
    "ipo": ("objective=dpo", "dpo.loss_type=ipo"),
    "kto": ("kto.beta=0.5", "kto.undesirable_weight=0.7"),
    "orpo": (),
    "simpo": ("simpo.label_smoothing=0.1",),
    "reward": ("reward.center_coefficient=0.01",),
}
LAYOUTS = [
    ("dpo", "dp2"), ("kto", "zero3x2-mb2-ga4"), ("orpo", "tp2-sp"), ("dpo", "cp2"), ("kto", "ulysses2-full"),
    ("simpo", "pp2-zbv"), ("dpo", "zero3x2-tp2-sp-pp2-1f1b"), ("kto", "cp2-tp2-sp"), ("orpo", "cp2-pp2-1f1b"),
    ("ipo", "zero2x2-cp2"), ("reward", "zero3x2"), ("reward", "tp2-sp"), ("reward", "zero2x2-tp2-pp2-1f1b"),
    ("reward", "cp2-pp2-zbv"), ("reward", "ulysses2-tp2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and pairs and judged rows of very unequal lengths."""
    path = tmp_path_factory.mktemp("preferences")
    torch.manual_seed(0)
    config = FAMILIES["llama"](vocab_size=301, num_hidden_layers=4)
    make_folder(path, AutoModelForCausalLM.from_config(config))
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()]
        others = [row["completion"] for row in (*rows[7:], *rows[:7])]
        pairs = [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other, "margin": number % 3 / 4}
            for number, (row, other) in enumerate(zip(rows, others, strict=True))
            if other != row["completion"]
        ]
        judged = [row | {"label": number % 3 != 0} for number, row in enumerate(rows)]
        write_rows(path / f"{name}-pairs.jsonl", pairs)
        write_rows(path / f"{name}-kto.jsonl", judged)
    return path


def words(folder: Path, objective: str) -> list[str]:
    kind = "kto" if objective == "kto" else "pairs"
    files = [f"data.train={folder}/train-{kind}.jsonl", f"data.eval={folder}/test-{kind}.jsonl"]
    named = [] if objective == "ipo" else [f"objective={objective}"]
    return [*files, *named, *OBJECTIVES[objective], "data.seq_len=128", "data.overlong=cut"]


@pytest.mark.parametrize(("objective", "layout"), cases(LAYOUTS, test=[("dpo", "cp2")], ci=4))
def test_a_layout_gives_what_one_rank_gives(
    objective: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    ours = trained(folder, tmp_path / "ours", layout, "fp64", *words(folder, objective))
    whole = trained(folder, tmp_path / "whole", ONE, "fp64", *words(folder, objective))
    check(ours, whole, "fp64")
    for kind in ("train", "eval"):
        both = zip(RunDir(ours.folder).rows(kind), RunDir(whole.folder).rows(kind), strict=True)
        for mine, theirs in both:
            measured = [name for name in theirs if "/" in name or name in ("kl", "nll_loss")]
            assert len(measured) >= 4
            for name in measured:
                if name == "rewards/accuracies" and (kind, theirs["step"]) == ("train", 1):
                    continue  # nothing has moved yet: rewards are 0 but for rounding
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name
