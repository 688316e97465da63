"""Evaluation of a target on other rows than its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import says
from tiny import write_rows

from meshtune.api.evaluate import evaluated
from meshtune.commands.evaluate import rounded
from meshtune.errors import UserError


def test_rows_that_are_named_replace_a_held_out_part_of_the_training_rows(tiny: Path, tmp_path: Path) -> None:
    data = {
        "train": str(tiny / "train.jsonl"),
        "eval_split": 0.5,
        "cache": str(tmp_path / "cache"),
        "seq_len": 64,
    }
    config = {"model": {"name": str(tiny / "model")}, "data": data, "train": {"precision": "fp32"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    counts: list[str] = []
    answered = ["eval.exact_match=2", "eval.max_new_tokens=3"]
    row = evaluated(str(file), [f"data.eval={tiny / 'test.jsonl'}", *answered], counts.append)
    assert counts[0].startswith("evaluating: ") and counts[0].endswith(" batches")
    assert counts[-1] == "evaluating: 6 of 6 tokens of answers"
    assert row["label_tokens"] != evaluated(str(file), [])["label_tokens"]
    del data["eval_split"]
    file.write_text(yaml.safe_dump(config))
    assert row["label_tokens"] == evaluated(str(file), [f"data.eval={tiny / 'test.jsonl'}"])["label_tokens"]
    assert "lost" not in row
    short = evaluated(str(file), [f"data.eval={tiny / 'test.jsonl'}", "data.seq_len=8"])
    says("\n".join(short["lost"]))


def test_figures_on_the_terminal_are_rounded() -> None:
    figures = {
        "loss": 5.521144562873287,
        "perplexity": 249.92092376150094,
        "tokens": 5776,
        "label_tokens": 12345,
        "exact_match": 0.125,
        "answers_cut": 2,
    }
    assert rounded(figures | {"seconds": 0.7963559}) == {
        "loss": "5.5211",
        "perplexity": "249.9",
        "tokens": "5,776",
        "labelled tokens": "12,345",
        "exact match": "12.5%",
        "time": "0.80 s",
    }


def test_adapters_in_bf16_have_the_loss_of_the_runs_own_evaluation(train: Callable[..., Any]) -> None:
    run = train("method=lora", "train.precision=bf16", "train.learning_rate=0.1")
    assert evaluated(str(run.folder.path), [])["loss"] == run.folder.rows("eval")[-1]["loss"]


@pytest.mark.parametrize(
    "words", [("objective=dpo",), ("objective=kto", "method=lora"), ("objective=simpo",)]
)
def test_preferences_are_evaluated_as_the_run_did(
    words: tuple[str, ...], train: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    """By the reference's values in the run's cache and, with another cache, by those of the model before its
    first step, which the trained weights are not.
    """
    files = []
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (tiny / f"{name}.jsonl").read_text().splitlines()]
        made = [row | {"label": number % 3 != 0} for number, row in enumerate(rows)]
        if "objective=kto" not in words:
            made = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "none"} for r in rows]
        files.append(
            f"data.{'eval' if name == 'test' else name}={write_rows(tmp_path / f'{name}.jsonl', made)}"
        )
    precise = [
        "train.learning_rate=0.01",
        "train.precision=bf16",
        "eval.exact_match=2",
        "eval.max_new_tokens=2",
    ]
    run = train(*words, *files, *precise).folder
    theirs = run.rows("eval")[-1]
    assert abs(theirs["rewards/margins"]) > 1e-3 and "exact_match" in theirs
    for more in ([], [f"data.cache={tmp_path}/other"], files[1:]):  # the last: without the training rows
        ours = evaluated(str(run.path), more)
        for name in {*theirs} - {"kind", "step", "seconds"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-9), (name, more)
    unit = "answers" if "objective=kto" in words else "pairs"
    assert theirs[unit] == len(made)
    if "objective=dpo" in words:
        with pytest.raises(UserError) as refused:  # it has nothing to compare with
            evaluated(str(tiny / "model"), [*words, files[1]])
        says(str(refused.value))
