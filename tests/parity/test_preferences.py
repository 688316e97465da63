"""Objectives on whole answers give in every layout what they give on one rank: losses, rewards, the model."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

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
    "reward": ("reward.center_coefficient=0.01",),
}
METHODS = {
    "full": (),
    "lora": ("method=lora", "lora.r=4", "lora.alpha=8"),
    "qlora": ("method=qlora", "lora.r=4", "lora.alpha=8"),
}
EVERYWHERE = (  # of the two objectives that differ most: pairs, and judged answers with a pass of their own
    "dp2", "zero1x2-mb2-ga4", "zero2x2-cp2", "zero3x2-mb2-ga4", "zero3x4-full", "dp2-zero3x2", "tp2-sp",
    "tp4", "cp2", "ulysses2-full", "cp2-tp2-sp", "pp2-1f1b-selective", "pp2-interleaved1f1b", "pp2-zbv",
    "zero3x2-tp2-sp-pp2-1f1b",
)  # fmt: skip
ROWS = [
    *(("dpo", "full", layout) for layout in EVERYWHERE), *(("kto", "full", layout) for layout in EVERYWHERE),
    *(("ipo", "full", layout) for layout in ("zero2x2-cp2", "tp2-sp", "pp2-zbv", "dp2-ulysses2")),
    *(("orpo", "full", layout) for layout in ("tp2-sp", "cp2-pp2-1f1b", "zero3x2", "pp2-zbv")),
    *(("simpo", "full", layout) for layout in ("pp2-zbv", "cp2", "zero2x2-tp2", "dp2-full")),
    *(("reward", "full", layout) for layout in (
        "zero3x2", "tp2-sp", "zero2x2-tp2-pp2-1f1b", "cp2-pp2-zbv", "ulysses2-tp2"
    )),
    ("dpo", "lora", "zero3x2-tp2-sp"), ("dpo", "qlora", "zero3x2"), ("dpo", "qlora", "cp2"),
    ("dpo", "qlora", "pp2-1f1b-full"), ("kto", "lora", "cp2-pp2-1f1b"), ("kto", "qlora", "zero2x2-cp2"),
    ("orpo", "lora", "pp2-zbv"), ("simpo", "qlora", "dp2-pp2-1f1b"),
    ("reward", "lora", "zero3x2-tp2"), ("reward", "qlora", "pp2-1f1b"),
]  # fmt: skip
CI = [
    ("kto", "full", "zero3x2-mb2-ga4"), ("orpo", "full", "tp2-sp"), ("simpo", "full", "pp2-zbv"),
    ("reward", "full", "zero2x2-tp2-pp2-1f1b"), ("dpo", "qlora", "zero3x2"),
    ("reward", "lora", "zero3x2-tp2"),
]  # fmt: skip
Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function(objective, method, layout, steps=3, before="") -> a run in fp64 of a tiny model, made once, on
    pairs or judged rows of very unequal lengths. before: layout of its first two steps; "": the same.
    """
    path = tmp_path_factory.mktemp("preferences")
    torch.manual_seed(0)
    config = FAMILIES["llama"](vocab_size=301, num_hidden_layers=4)
    make_folder(path, AutoModelForCausalLM.from_config(config))
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()]
        others = [row["completion"] for row in (*rows[7:], *rows[:7])]
        pairs = [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": other,
                "margin": number % 3 / 4,
            }
            for number, (row, other) in enumerate(zip(rows, others, strict=True))
            if other != row["completion"]
        ]
        judged = [row | {"label": number % 3 != 0} for number, row in enumerate(rows)]
        write_rows(path / f"{name}-pairs.jsonl", pairs)
        write_rows(path / f"{name}-kto.jsonl", judged)

    @cache
    def of(objective: str, method: str, layout: str, steps: int = 3, before: str = "") -> Trained:
        output = path / f"{objective}-{method}-{before}-{layout}-{steps}"
        if before:
            shutil.copytree(of(objective, method, before, 2).folder, output)
        kind = "kto" if objective == "kto" else "pairs"
        named = [] if objective == "ipo" else [f"objective={objective}"]
        return trained(
            path, output, layout, "fp64", f"data.train={path}/train-{kind}.jsonl",
            f"data.eval={path}/test-{kind}.jsonl", *named, *OBJECTIVES[objective], *METHODS[method],
            "data.seq_len=128", "data.overlong=cut", f"train.max_steps={steps}",
        )  # fmt: skip

    return of


@pytest.mark.parametrize(("objective", "method", "layout"), cases(ROWS, test=[("dpo", "full", "cp2")], ci=CI))
def test_a_layout_gives_what_one_rank_gives(objective: str, method: str, layout: str, run: Run) -> None:
    ours = run(objective, method, layout)
    same(ours, run(objective, method, ONE))
    if objective == "dpo":  # nothing has moved: each pair's loss is that of equal rewards
        first = RunDir(ours.folder).rows("train")[0]
        assert first["loss"] - 0.1 * first["nll_loss"] == pytest.approx(math.log(2), abs=1e-6)


CONTINUES = [  # objective, method, layout before, layout after
    ("dpo", "full", "zero3x2-mb2-ga4", "tp2-sp"), ("kto", "lora", "pp2-1f1b", "cp2"),
    ("reward", "qlora", ONE, "zero3x2"), ("kto", "full", "zero3x2-mb2-ga4", "zero3x2-mb2-ga4"),
    ("reward", "lora", "tp2-sp", "tp2-sp"), ("dpo", "full", "pp2-zbv", "pp2-zbv"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "method", "before", "after"), cases(CONTINUES, ci=1))
def test_a_run_continues_in_another_layout(
    objective: str, method: str, before: str, after: str, run: Run
) -> None:
    """Its reference's values are those from before its first step. In the same layout no bit differs."""
    ours = run(objective, method, after, 4, before)
    same(ours, run(objective, method, ONE, 4))
    if before == after:
        whole = run(objective, method, after, 4)
        assert (ours.losses, ours.norms) == (whole.losses, whole.norms)
        assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in ours.tensors.items())


# (objective, layout, family): windows of mistral and gemma2 are shorter than a pair.
SHARED = [
    ("orpo", "mb4-ga4", "mistral"), ("dpo", "tp2-sp", "llama"), ("simpo", "pp2-1f1b", "mistral"),
    ("ipo", "zero3x2-mb2-ga4", "gemma2"), ("orpo", "cp2", "mistral"), ("dpo", "ulysses2-full", "llama"),
    ("reward", "tp2-sp", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "layout", "family"), cases(SHARED, test=1, ci=2))
def test_a_prompt_that_is_computed_once_changes_nothing(
    objective: str, layout: str, family: str, tmp_path: Path
) -> None:
    """All pairs are packed into one sequence, so that batches are the same; each has 16 copies of it."""
    torch.manual_seed(0)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(FAMILIES[family](vocab_size=301)))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    longest = sorted(rows, key=lambda row: len(row["prompt"]))[-5:]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"] + " red"}
        for row, other in pairwise(longest)
    ]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    named = [] if objective == "ipo" else [f"objective={objective}"]
    given = [f"data.{part}={tmp_path}/pairs.jsonl" for part in ("train", "eval")]
    given += [*named, *OBJECTIVES[objective], "data.seq_len=1024"]
    with exact():  # gradients of the two copies of a prompt would be rounded apart
        whole = trained(tmp_path, tmp_path / "whole", ONE, "fp64", *given, forked=True)
        shared = *given, "data.shared_prompts=true"
        ours = trained(tmp_path, tmp_path / "ours", layout, "fp64", *shared, forked=True)
    same(ours, whole)
    tokens = [RunDir(run.folder).rows("train")[0]["tokens"] for run in (ours, whole)]
    assert tokens[0] < 0.8 * tokens[1]


def same(ours: Trained, whole: Trained) -> None:
    """Check that a run has the losses, the numbers in its rows and the model of another."""
    check(ours, whole, "fp64")
    for kind in ("train", "eval"):
        mine, theirs = (RunDir(each.folder).rows(kind) for each in (ours, whole))
        steps = {row["step"]: row for row in theirs}
        for row in mine:
            its = steps.get(row["step"]) or {}
            measured = [name for name in its if "/" in name or name in ("kl", "nll_loss")]
            assert len(measured) >= 4 or not its
            for name in measured:
                if name == "rewards/accuracies" and (kind, row["step"]) == ("train", 1):
                    continue  # nothing has moved yet: rewards are 0 but for rounding
                assert row[name] == pytest.approx(its[name], rel=1e-6, abs=1e-7), name
