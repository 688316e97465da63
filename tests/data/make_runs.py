"""Make the run folders of this directory, which hold what commit 359a444 wrote.

    git checkout 359a444 && python tests/data/make_runs.py FOLDER

A tiny tied Llama, its rows, and three finished runs of 3 steps: one rank, zero3x2, and LoRA. Each is then
made 3 steps longer elsewhere; the losses of those steps, which a later version must repeat, are in
expected.json. Absolute paths are replaced by ROOT; the data cache, logs and reports are left out.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import make_rows, make_tokenizer, write_rows

ROOT = "{{ROOT}}"
RUNS = {
    "one-rank": ["layout=mb2-ga2"],
    "zero3x2": ["layout=zero3x2-mb1-ga2"],
    "lora": ["layout=mb2-ga2", "method=lora", "lora.r=2"],
}


def main(folder: str) -> None:
    made = Path(folder).absolute()
    work = Path(tempfile.mkdtemp())
    rows = make_rows(60)
    write_rows(work / "train.jsonl", rows)
    write_rows(work / "test.jsonl", make_rows(4, seed=1))
    texts = [f"{row['prompt']}\n{row['completion']}" for row in rows]
    make_tokenizer(texts, 270).save_pretrained(work / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=270, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(work / "model")
    expected = {}
    for name, words in RUNS.items():
        train(work, name, *words, "train.max_steps=3")
        copied = made / name
        shutil.copytree(
            work / name, copied, ignore=shutil.ignore_patterns("report.html", "logs", ".lock", "cache")
        )
        train(work, name, *words, "train.max_steps=6")
        metrics = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
        expected[name] = {row["step"]: row["loss"] for row in metrics if row["kind"] == "train"}
    for name in ("model", "train.jsonl", "test.jsonl"):
        source = work / name
        shutil.copytree(source, made / name) if source.is_dir() else shutil.copy(source, made / name)
    for file in made.rglob("*"):
        if file.suffix in (".yaml", ".json", ".jsonl", ".md"):
            file.write_text(file.read_text().replace(str(work), ROOT))
    (made / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.rmtree(work)


def train(work: Path, name: str, *words: str) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "meshtune", "train", f"model.name={work / 'model'}",
            f"data.train={work / 'train.jsonl'}", f"data.eval={work / 'test.jsonl'}",
            f"data.cache={work / 'cache'}", "data.seq_len=64", "train.global_batch_size=4",
            "train.precision=fp32", "train.learning_rate=1e-2", "train.lr_scheduler=constant",
            "train.warmup_ratio=0", "log.to=[jsonl]", "checkpoint.every=0", f"output={work / name}",
            *words,
        ],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
