"""Objectives on whole answers give in every layout what they give on one rank: losses, rewards, the model."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from cases import cases
from families import FAMILIES, exact
from layouts import Trained, check, make_folder, trained
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
}
LAYOUTS = [
    ("dpo", "dp2"), ("kto", "zero3x2-mb2-ga4"), ("orpo", "tp2-sp"), ("dpo", "cp2"), ("kto", "ulysses2-full"),
    ("simpo", "pp2-zbv"), ("dpo", "zero3x2-tp2-sp-pp2-1f1b"), ("kto", "cp2-tp2-sp"), ("orpo", "cp2-pp2-1f1b"),
    ("ipo", "zero2x2-cp2"),
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
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other}
            for row, other in zip(rows, others, strict=True)
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
    check_all(ours, whole)


# (objective, layout, family): windows of mistral and gemma2 are shorter than a pair.
SHARED = [
    ("orpo", "mb4-ga4", "mistral"), ("dpo", "tp2-sp", "llama"), ("simpo", "pp2-1f1b", "mistral"),
    ("ipo", "zero3x2-mb2-ga4", "gemma2"), ("orpo", "cp2", "mistral"), ("dpo", "ulysses2-full", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "layout", "family"), cases(SHARED, test=1, ci=2))
def test_a_prompt_that_is_computed_once_changes_nothing(
    objective: str, layout: str, family: str, folder: Path, tmp_path: Path
) -> None:
    """All pairs are packed into one sequence, so that batches are the same; each has 16 copies of it."""
    folder = Path(copytree(folder, tmp_path / "data"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family](vocab_size=301)).save_pretrained(folder / "model")
    pairs = [json.loads(line) for line in (folder / "train-pairs.jsonl").read_text().splitlines()]
    longest = sorted(pairs, key=lambda pair: len(pair["prompt"]))[-4:]
    write_rows(tmp_path / "pairs.jsonl", longest)
    given = [*words(folder, objective), f"data.train={tmp_path}/pairs.jsonl", "data.seq_len=1024"]
    with exact():  # gradients of the two copies of a prompt would be rounded apart
        whole = trained(folder, tmp_path / "whole", ONE, "fp64", *given, forked=True)
        shared = *given, "data.shared_prompts=true"
        ours = trained(folder, tmp_path / "ours", layout, "fp64", *shared, forked=True)
    check_all(ours, whole)
    tokens = [RunDir(run.folder).rows("train")[0]["tokens"] for run in (ours, whole)]
    assert tokens[0] < 0.8 * tokens[1]


def check_all(ours: Trained, whole: Trained) -> None:
    """Assert that both runs came to the same, also in what they measured."""
    check(ours, whole, "fp64")
    for kind in ("train", "eval"):
        both = zip(RunDir(ours.folder).rows(kind), RunDir(whole.folder).rows(kind), strict=True)
        for mine, theirs in both:
            measured = [name for name in theirs if "/" in name or name in ("kl", "nll_loss")]
            assert len(measured) >= 5
            for name in measured:
                if name == "rewards/accuracies" and (kind, theirs["step"]) == ("train", 1):
                    continue  # nothing has moved yet: rewards are 0 but for rounding
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name
