"""Layouts as a user runs them: `meshtune train` on GSM8K under six of them gives the losses of one rank."""

from pathlib import Path

import pytest
import torch
from cases import cases
from command import end, start
from tiny import make_llama, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune.rundir import RunDir

LAYOUTS = ["zero3x2", "cp2", "ulysses2", "zero1x2-pp2-zbv", "dp2-tp2-full", "zero2x2-tp2-sp"]
STEPS = 3


@pytest.fixture(scope="module")
def settings(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny Llama, and a short fp32 run on GSM8K with evaluation and samples."""
    folder = tmp_path_factory.mktemp("gsm8k")
    text = (gsm8k / "test.jsonl").read_text("utf-8").splitlines()
    (folder / "train.jsonl").write_text("\n".join(text[:300]) + "\n", "utf-8")
    (folder / "eval.jsonl").write_text("\n".join(text[300:340]) + "\n", "utf-8")
    make_tokenizer(text, 1000).save_pretrained(folder / "model")
    make_llama(vocab_size=1000, intermediate_size=96, num_hidden_layers=4).save_pretrained(folder / "model")
    return [
        f"model.name={folder / 'model'}", f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}", "data.columns={prompt: question, completion: answer}",
        f"data.cache={folder / 'cache'}", "data.seq_len=256", "train.global_batch_size=8",
        f"train.max_steps={STEPS}", "train.precision=fp32", "train.learning_rate=1e-3", "log.to=[jsonl]",
        "checkpoint.every=0", "eval.samples=2", "eval.max_new_tokens=8",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("one") / "run")
    end(start("train", *settings, f"output={run.path}"))
    return run


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_a_layout_gives_the_losses_samples_and_model_of_one_rank(
    layout: str, settings: list[str], one: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    ended = end(start("train", *settings, f"layout={layout}", f"output={run.path}", "--json"))
    assert ended.json["steps"] == STEPS
    for kind, steps in (("train", STEPS), ("eval", 1)):
        ours, theirs = run.rows(kind), one.rows(kind)
        assert len(ours) == len(theirs) == steps
        for row, expected in zip(ours, theirs, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert row["label_tokens"] == expected["label_tokens"]
    assert run.samples() == one.samples()
    AutoTokenizer.from_pretrained(run.model)
    loaded = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(one.model).state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-3, atol=1e-4)
