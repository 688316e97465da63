"""Held-out accuracy and margin of preferences over three seeds, and the same training by TRL.

    python benchmarks/preferences.py ../shared/data/gsm8k [--steps 60] [--seeds 3] [--json FILE.json]

On GSM8K the base of convergence.py learns the answers of two thirds of the rows; pairs of the others have the
right answer, and the same with another last number. On the quickstart's data it is the model of
`make quickstart`, which has to be there, with its own pairs; exact match is of its answers to test.jsonl.
Both trainers start from the same weights, with as large steps and the same settings, each in its own order of
pairs, and evaluate their models themselves.
"""

import argparse
import json
import re
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from convergence import COMMON, HELD_OUT, make_base

from meshtune import train

ROOT = Path(__file__).parents[1]
PAIRS = 8  # of a step
RATE = {"dpo": 5e-5, "lora": 5e-4, "reward": 2e-4, "trl": 5e-5}
KINDS = {
    "dpo": ("objective=dpo",),
    "lora": ("objective=dpo", "method=lora", "lora.r=16"),
    "reward": ("objective=reward",),
}
MEASURED = {"loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}


def pairs_of(lines: list[str]) -> list[dict[str, str]]:
    """Pairs of rows of GSM8K: the answer, and the same with its last number one larger."""
    rows = [json.loads(line) for line in lines]
    return [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": re.sub(r"\d+(?=\D*$)", lambda last: str(int(last[0]) + 1), row["answer"]),
        }
        for row in rows
    ]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def meshtune_run(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The rows of the evaluations of a run."""
    found = train({}, [*COMMON, f"output={folder}", *settings], nproc=1)
    return [row for row in found.rows if row["kind"] == "eval"]


def trl_run(model: Path, files: dict[str, Path], seed: int, steps: int, scratch: Path) -> dict[str, float]:
    """Train by DPOTrainer and evaluate with it; its model is saved to scratch/model."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    names = {name: str(file) for name, file in files.items()}
    rows = load_dataset("json", data_files=names, cache_dir=str(scratch / "cache"))
    rows = rows.map(lambda row: {"prompt": row["prompt"] + "\n"})
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=DPOConfig(
            output_dir=str(scratch / "trl"), max_steps=steps, per_device_train_batch_size=PAIRS, seed=seed,
            learning_rate=RATE["trl"], lr_scheduler_type="cosine", warmup_steps=round(0.03 * steps),
            weight_decay=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_strategy="no", beta=0.1,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["eval"],
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(str(scratch / "model"))
    return {ours: found[f"eval_{name}"] for name, ours in MEASURED.items()}


def exact_match(model: Path, scratch: Path) -> float:
    """Share of test.jsonl of the quickstart that a model answers exactly."""
    rows = [f"data.{name}={ROOT}/quickstart/test.jsonl" for name in ("train", "eval")]
    wanted = f"model.name={model}", "train.max_steps=1", "train.learning_rate=1e-12", "eval.exact_match=244"
    return meshtune_run(scratch / "asked", *wanted, "eval.max_new_tokens=16", *rows)[0]["exact_match"]


def compared(name: str, model: Path, files: dict[str, Path], seeds: int, steps: int) -> dict[str, Any]:
    """Each kind of training, seed by seed: what was measured before and after."""
    result: dict[str, Any] = {}
    for seed, kind in product(range(seeds), (*KINDS, "trl")):
        with TemporaryDirectory() as folder:
            scratch = Path(folder)
            if kind == "trl":
                found = {"after": trl_run(model, files, seed, steps, scratch)}
                tuned = scratch / "model"
            else:
                first, *_, last = meshtune_run(
                    scratch / "run", f"model.name={model}",
                    *(f"data.{key}={file}" for key, file in files.items()),
                    *KINDS[kind], f"train.learning_rate={RATE[kind]}", f"train.max_steps={steps}",
                    f"train.global_batch_size={PAIRS}", f"layout=mb{PAIRS}-ga1", "data.packing=false",
                    f"train.seed={seed}", "data.seq_len=512", "data.overlong=drop",
                )  # fmt: skip
                found = {
                    at: {ours: row[theirs] for theirs, ours in MEASURED.items()}
                    for at, row in (("before", first), ("after", last))
                }
                tuned = scratch / "run" / "model"
            if name == "quickstart" and kind in ("dpo", "trl"):
                found["after"]["exact_match"] = exact_match(tuned, scratch)
        result.setdefault(kind, []).append(found)
        print(f"{name}, {kind}, seed {seed}: {found}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["quickstart", "gsm8k"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    if options.only != "gsm8k":
        files = {name: ROOT / "quickstart" / f"pairs-{split}.jsonl"
                 for name, split in (("train", "train"), ("eval", "test"))}  # fmt: skip
        model = ROOT / "runs" / "quickstart" / "model"
        found["quickstart"] = compared("quickstart", model, files, options.seeds, options.steps)
    with TemporaryDirectory() as scratch:
        if options.only != "quickstart":
            folder = Path(scratch)
            lines = (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
            tested = (options.data / "test.jsonl").read_text(encoding="utf-8").splitlines()[:HELD_OUT]
            first = len(lines) * 2 // 3
            rows = [json.loads(line) for line in lines[:first]]
            make_base(folder / "untrained", rows)
            learned = write(folder / "first.jsonl", rows)
            meshtune_run(
                folder / "base", f"model.name={folder / 'untrained'}", f"data.train={learned}",
                "data.columns={prompt: question, completion: answer}", "data.eval_split=100",
                "train.learning_rate=1e-3", "train.max_steps=600",
            )  # fmt: skip
            files = {
                "train": write(folder / "pairs.jsonl", pairs_of(lines[first:])),
                "eval": write(folder / "held.jsonl", pairs_of(tested)),
            }
            base = folder / "base" / "model"
            found["gsm8k"] = compared("gsm8k", base, files, options.seeds, options.steps)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
