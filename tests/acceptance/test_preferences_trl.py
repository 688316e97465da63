"""The same preferences, all in each step: TRL's losses, rewards, log-probabilities and weights are ours.

TRL gets rows of plain text and does all else itself. It adds bos and eos as we do; answers begin with a
space, so that text is cut into the same tokens. KTO's mismatched answers are those of the row before in TRL
and of the document after in meshtune, whose batch is in order of length: TRL's rows are the longest first.
Packed documents are in the order of their rows.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from test_trainer_parity import Losses
from tiny import make_llama, make_rows, make_tokenizer, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.train import loop

ROWS, MICRO, STEPS, RATE, EPS = 6, 2, 5, 1e-3, 1e-3
ROUNDING = 2e-5  # of rewards: fp32 differences of log-probabilities of about -165
ROWS_ARE = {  # settings and layout of a step with all rows; packed, they are one sequence
    "padded": ("data.packing=false", f"train.global_batch_size={ROWS}", f"layout=mb{MICRO}"),
    "packed": ("data.packing=true", "train.global_batch_size=1", "layout=mb1"),
    "shared": ("data.shared_prompts=true", "train.global_batch_size=1", "layout=mb1"),
}
EXPERIMENTS = "trl.experimental"
# name -> (objective, our settings, module and name of TRL's trainer, its settings)
OBJECTIVES: dict[str, tuple[str, list[str], str, str, dict[str, Any]]] = {
    "dpo": ("dpo", ["dpo.beta=0.3"], "trl", "DPO", {"beta": 0.3}),
    "kto": (
        "kto", ["kto.beta=0.3", "kto.desirable_weight=1.2", "kto.undesirable_weight=0.7"],
        "trl", "KTO", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    ),
    "hinge": ("dpo", ["dpo.loss_type=hinge"], "trl", "DPO", {"loss_type": "hinge"}),
    "ipo": (
        "dpo", ["dpo.loss_type=ipo", "dpo.beta=0.5"], "trl", "DPO", {"loss_type": "ipo", "beta": 0.5}
    ),
    "robust": (
        "dpo", ["dpo.loss_type=robust", "dpo.label_smoothing=0.2"],
        "trl", "DPO", {"loss_type": "robust", "label_smoothing": 0.2},
    ),
    "dpo-sft": (
        "dpo", ["dpo.sft_weight=0.2"],
        "trl", "DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
    ),
    "orpo": ("orpo", ["orpo.beta=0.4"], f"{EXPERIMENTS}.orpo", "ORPO", {"beta": 0.4}),
    "simpo": (
        "simpo", ["simpo.beta=2.5", "simpo.gamma=0.8", "simpo.label_smoothing=0.1", "simpo.sft_weight=0.3"],
        f"{EXPERIMENTS}.cpo", "CPO",
        {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.8, "label_smoothing": 0.1, "cpo_alpha": 0.3},
    ),
    "reward": (
        "reward", ["reward.center_coefficient=0.01"], "trl", "Reward", {"center_rewards_coefficient": 0.01}
    ),
}  # fmt: skip


def rows_of(objective: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of very unequal numbers of tokens, the longest first."""
    made = [row | {"completion": f" {row['completion']}"} for row in make_rows(40, seed=3)]
    by_length = {len(tokenizer(row["prompt"] + row["completion"])["input_ids"]): row for row in made}
    chosen = [by_length[length] for length in sorted(by_length, reverse=True)]
    chosen = chosen[:: len(chosen) // ROWS][:ROWS]
    if objective == "kto":
        return [row | {"label": number % 3 != 1} for number, row in enumerate(chosen)]
    others = [row["completion"] for row in (*chosen[1:], chosen[0])]
    margins = [{"margin": number / 4} if objective == "reward" else {} for number in range(ROWS)]
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other} | margin
        for row, other, margin in zip(chosen, others, margins, strict=True)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that adds bos."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("preferences-trl")
    tokenizer = make_tokenizer([row["prompt"] + " " + row["completion"] for row in make_rows(120)], 300)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save_pretrained(folder)
    make_llama().save_pretrained(folder)
    return folder


def scored(model: Path, folder: Path) -> Path:
    """The same model with a score in place of its head, which TRL and meshtune start from."""
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def trl_run(
    case: str, model: Path, tokenizer: Any, rows: list[dict[str, Any]], folder: Path
) -> tuple[list[dict[str, float]], Any]:
    """TRL's logs of each step, and the model that it trained."""
    from datasets import Dataset

    _, _, module, name, own = OBJECTIVES[case]
    trl, logs = importlib.import_module(module), Losses()
    kind = AutoModelForSequenceClassification if case == "reward" else AutoModelForCausalLM
    trainer = getattr(trl, f"{name}Trainer")(
        model=kind.from_pretrained(model, dtype=torch.float32),
        args=getattr(trl, f"{name}Config")(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1, learning_rate=RATE, lr_scheduler_type="constant",
            warmup_steps=0, weight_decay=0.0, adam_epsilon=EPS, max_grad_norm=0.0, logging_steps=1,
            logging_nan_inf_filter=False, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, train_sampling_strategy="sequential", seed=0,
            **own,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[logs],
    )  # fmt: skip
    trainer.train()
    return logs.rows, trainer.model


@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    ("case", "rows_are"),
    cases(
        [
            *((case, "padded") for case in OBJECTIVES),
            *((case, "packed") for case in ("dpo", "kto", "ipo", "orpo", "reward")),
            *((case, "shared") for case in ("dpo", "simpo", "orpo")),
        ],
        test=[("dpo", "packed")],
        ci=[("kto", "padded")],
    ),
)
def test_five_steps_are_those_of_trl(case: str, rows_are: str, model: Path, tmp_path: Path) -> None:
    objective, words, *_ = OBJECTIVES[case]
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = scored(model, tmp_path / "scored") if objective == "reward" else model
    rows = rows_of(objective, tokenizer)
    file = write_rows(tmp_path / "rows.jsonl", rows if rows_are == "padded" else rows[::-1])
    run = build.build(config.load(None, [
        f"model.name={model}", f"data.train={file}", f"data.cache={tmp_path / 'cache'}", "data.separator=''",
        "data.seq_len=512", f"objective={objective}", *words, *ROWS_ARE[rows_are],
        f"train.max_steps={STEPS}", "train.precision=fp32", f"train.learning_rate={RATE}",
        "train.lr_scheduler=constant", "train.warmup_steps=0", "train.weight_decay=0",
        f"train.adam_eps={EPS}", "train.max_grad_norm=0", "log.to=[jsonl]", "checkpoint.every=0",
        f"output={tmp_path / 'run'}",
    ]))  # fmt: skip
    loop.train(run)
    ours = run.folder.rows("train")
    theirs, trained = trl_run(case, model, tokenizer, rows, tmp_path / "trl")
    assert len(ours) == len(theirs) == STEPS
    for mine, its in zip(ours, theirs, strict=True):
        names = {"loss", "grad_norm", "kl"} & mine.keys() | {name for name in mine if "/" in name}
        assert len(names) >= 6
        if objective == "reward":  # TRL's names are others
            its = {"rewards/accuracies": its["accuracy"], "rewards/margins": its["margin"], **its}
            names -= {"rewards/chosen", "rewards/rejected"}
        # Rewards of step 1 are 0 where there is a reference.
        for name in sorted(names - ({"rewards/accuracies"} if mine["step"] == 1 else set())):
            rounding = ROUNDING if "/" in name or name == "kl" else 0
            relative = 2e-5 if name == "grad_norm" else 1e-5
            assert mine[name] == pytest.approx(its[name], rel=relative, abs=rounding), (mine["step"], name)
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.1 and ours[-1].get("kl", 1) > 0, "something must be learned"
    weights = dict(run.passes.parallel.stages[0].model.named_parameters())
    for name, weight in trained.named_parameters():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
