"""Every family through the front door: plain transformers' loss, LoRA, and dropout that resumes exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from families import FAMILIES, FAMILY_CASES
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.data.batch import Batch
from meshtune.train import loop

VOCABULARY = (
    304  # as the tiny tokenizer has, and the one that transformers gives to the Qwen2 family by itself
)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """`folder("gpt2", attn_pdrop=0.1)`: a model folder of that family, made by save_pretrained."""

    def make(family: str, **changes: Any) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](vocab_size=VOCABULARY, **changes))
        model.save_pretrained(tmp_path / family)
        AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@torch.no_grad()
def plain_loss(model: Path, batch: Batch) -> float:
    """The batch's loss by transformers alone: each document by itself, eager attention, no padding."""
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    total = 0.0
    for micro in batch.micro_batches:
        for row, lengths in enumerate(micro.documents):
            at = 0
            for length in lengths:
                ids, labels = micro.input_ids[row, at : at + length], micro.labels[row, at : at + length]
                logits = reference(ids[None]).logits[0]
                total += float(
                    torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                )
                at += length
    return total / batch.label_tokens


def first_batch(run: loop.Run) -> Batch:
    return next(iter(run.loader))[0]


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_the_first_loss_of_every_family_is_that_of_plain_transformers(
    family: str, folder: Callable[..., Path], settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    model = folder(family)
    run = build.build(config.load(None, settings(f"model.name={model}", "train.max_steps=2")))
    batch = first_batch(run)
    assert max(len(row) for micro in batch.micro_batches for row in micro.documents) > 1, "packed"
    loop.train(run)
    rows = run.folder.rows("train")
    assert rows[0]["loss"] == pytest.approx(plain_loss(model, batch), rel=1e-5)
    assert rows[1]["grad_norm"] > 0
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model, dtype=torch.float32)
    trained = dict(run.passes.parallel.stages[0].model.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.named_parameters())


@pytest.mark.parametrize("family", cases(["llama", "gemma2", "gpt2"], ci=["gpt2"]))
def test_lora_starts_at_the_loss_of_plain_transformers_and_peft_loads_it(
    family: str, folder: Callable[..., Path], train: Callable[..., loop.Run]
) -> None:
    model = folder(family)
    run = train(
        f"model.name={model}", "train.max_steps=2", "method=lora", "lora.r=4", "train.learning_rate=0.01"
    )
    assert run.folder.rows("train")[0]["loss"] == pytest.approx(plain_loss(model, first_batch(run)), rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        before = base.eval()(ids).logits
        theirs = PeftModel.from_pretrained(base, str(run.folder.model)).eval()(ids).logits
        run.passes.parallel.stages[0].model.set_attn_implementation("eager")
        ours = run.passes.parallel.stages[0].model.eval()(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, theirs, atol=1e-3), "two steps must show"


@pytest.mark.all
def test_a_model_with_dropout_resumes_bit_for_bit(
    folder: Callable[..., Path], train: Callable[..., loop.Run], tmp_path: Path
) -> None:
    model = folder("gpt2", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
    lasting = (f"model.name={model}", "train.lr_scheduler=constant")
    whole = train("train.max_steps=6", f"output={tmp_path / 'whole'}", *lasting)
    train("train.max_steps=3", f"output={tmp_path / 'parts'}", *lasting)
    resumed = train("train.max_steps=6", f"output={tmp_path / 'parts'}", *lasting)
    assert resumed.folder.rows("run")[-1]["resumed_from"] == 3
    assert [row["loss"] for row in whole.folder.rows("train")] == [
        row["loss"] for row in resumed.folder.rows("train")
    ]
    there = resumed.optimizer.state()
    assert all(torch.equal(tensor, there[name]) for name, tensor in whole.optimizer.state().items())
    assert whole.folder.rows("train")[0]["loss"] != pytest.approx(
        plain_loss(model, first_batch(whole)), rel=1e-4
    ), "dropout acts"
