"""The same data in the same order: transformers.Trainer's losses, gradient norms, rates and weights are ours.

Trainer gets the loader's own micro-batches in Hugging Face's form (labels not shifted, right padding with an
attention mask), already collated, in order. Everything else is its own: model, loss, accumulation, AdamW,
clipping, schedule.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from meshtune import config
from meshtune.api import build
from meshtune.data.batch import MicroBatch
from meshtune.train import loop

GLOBAL, MICRO, WARMUP, PEAK = 8, 2, 3, 3e-3  # accumulation 4


def hugging_face(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Labels where their tokens are, padding at the right, masked."""
    labels = torch.full_like(micro.labels, -100)
    labels[:, 1:] = micro.labels[:, :-1]
    lengths = torch.tensor([sum(row) for row in micro.documents])
    mask = (torch.arange(labels.shape[1]) < lengths[:, None]).long()
    return {"input_ids": micro.input_ids, "attention_mask": mask, "labels": labels}


class Losses(TrainerCallback):
    """Every log of a step, unrounded."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            self.rows.append(logs)


def trainer_run(
    model: Path, batches: list[MicroBatch], steps: int, folder: Path
) -> tuple[list[dict[str, float]], Any]:
    rows = Losses()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1,
            gradient_accumulation_steps=GLOBAL // MICRO, learning_rate=PEAK, lr_scheduler_type="cosine",
            warmup_steps=WARMUP, weight_decay=0.1, max_grad_norm=1.0, logging_steps=1,
            logging_nan_inf_filter=False, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, train_sampling_strategy="sequential", remove_unused_columns=False, seed=0,
        ),
        train_dataset=[hugging_face(micro) for micro in batches],  # type: ignore[arg-type]
        data_collator=lambda one: one[0],
        callbacks=[rows],
    )  # fmt: skip
    trainer.train()
    return rows.rows, trainer.model


def compare(settings: list[str], model: Path, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train with both; returns our rows. Asserts what the module's docstring says."""
    words = [
        f"train.max_steps={steps}", f"train.global_batch_size={GLOBAL}", f"layout=mb{MICRO}",
        "data.packing=false", "train.precision=fp32", f"train.learning_rate={PEAK}",
        "train.lr_scheduler=cosine", f"train.warmup_steps={WARMUP}", "train.weight_decay=0.1",
        "train.max_grad_norm=1.0",
    ]  # fmt: skip
    run = build.build(config.load(None, [*settings, *words]))
    batches = [batch for batch, _ in itertools.islice(iter(run.loader), steps)]
    flat = [micro for batch in batches for micro in batch.micro_batches]
    counts = [micro.label_tokens for micro in flat]
    assert len(flat) == steps * 4, "accumulation 4"
    assert max(counts) > 3 * min(counts), "unequal label counts"
    loop.train(run)
    ours = run.folder.rows("train")
    theirs, trained = trainer_run(model, flat, steps, folder / "trainer")

    assert len(ours) == len(theirs) == steps
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-9)):
        assert [row[key] for row in ours] == pytest.approx(
            [row[key] for row in theirs], rel=tolerance, abs=0
        ), key
    mine = dict(run.passes.parallel.stages[0].model.named_parameters())
    for name, weight in trained.named_parameters():
        assert (mine[name] - weight).norm() <= 1e-4 * weight.norm(), name
    assert any(row["grad_norm"] > 1 for row in ours), "clipping must act"
    return ours


def test_twenty_steps_have_the_losses_of_transformers_trainer(
    settings: Callable[..., list[str]], tiny: Path, tmp_path: Path
) -> None:
    rows = compare(settings(), tiny / "model", 20, tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.ci
def test_gsm8k_has_the_losses_of_transformers_trainer(gsm8k: Path, gsm8k_model: Path, tmp_path: Path) -> None:
    settings = [
        f"model.name={gsm8k_model}", f"data.train={gsm8k / 'test.jsonl'}",
        "data.columns={prompt: question, completion: answer}", "data.seq_len=256",
        f"data.cache={tmp_path / 'cache'}", f"output={tmp_path / 'run'}", "log.to=[jsonl]",
        "checkpoint.every=0",
    ]  # fmt: skip
    compare(settings, gsm8k_model, 6, tmp_path)
