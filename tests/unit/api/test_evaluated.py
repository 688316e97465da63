"""Evaluation of a target on other rows than its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from golden import says

from meshtune.api.evaluate import evaluated
from meshtune.commands.evaluate import rounded


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
