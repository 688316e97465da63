"""Make what is to be damaged: tiny models with tokenizers, rows, and run folders, the same at each making.

models/llama, gpt2, qwen3 (with a chat template), shards (two files with an index)
rows.jsonl, chats.jsonl
runs/stopped   checkpoints of steps 1 to 3, killed before its model was written
runs/done      a finished run                      runs/lora   one with an adapter
.cache         of the folder as a home: the pages' JavaScript, which takes seconds to make
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tiny import make_rows, make_tokenizer, write_rows

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
SHORT = [
    "data.train=rows.jsonl", "data.cache=cache", "data.seq_len=64", "train.global_batch_size=2",
    "train.precision=fp32", "log.to=[jsonl]",
]  # fmt: skip


def make(folder: Path) -> None:
    """Write everything to `folder`, which is made; the run folders by the command line."""
    import torch
    from transformers import GPT2Config, LlamaConfig, Qwen3Config
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    folder.mkdir(parents=True)
    os.environ["HOME"] = str(folder)
    rows = make_rows(24)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "chats.jsonl", [{"messages": turns(row)} for row in rows])
    tokenizer = make_tokenizer([f"{row['prompt']}\n{row['completion']}" for row in rows], 280)
    configs = {
        "llama": LlamaConfig(**LLAMA),
        "shards": LlamaConfig(**LLAMA),
        "qwen3": Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True),
        "gpt2": GPT2Config(**SMALL, n_positions=256, n_embd=32, n_layer=2, n_head=4),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(
            folder / "models" / name, **({"max_shard_size": "40KB"} if name == "shards" else {})
        )
        if name == "qwen3":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            tokenizer.chat_template = TEMPLATE
        if name != "gpt2":
            tokenizer.chat_template = TEMPLATE if name == "qwen3" else None
        tokenizer.save_pretrained(folder / "models" / name)
    for run, model, steps in (("stopped", "llama", 3), ("done", "llama", 1), ("lora", "qwen3", 1)):
        method = "lora" if run == "lora" else "full"
        words = [f"model.name=models/{model}", f"output=runs/{run}", f"train.max_steps={steps}"]
        _train(folder, *words, f"method={method}", "checkpoint.every=1")
    _stop(folder / "runs" / "stopped")
    shutil.rmtree(folder / "cache")


def turns(row: dict[str, str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


def _train(folder: Path, *settings: str) -> None:
    from meshtune import cli

    os.chdir(folder)
    sys.argv = ["meshtune", "train", *SHORT, *settings]
    with contextlib.suppress(SystemExit):  # the run folder is missing if it was not exit code 0
        cli.main()


def _stop(run: Path) -> None:
    """Take back what a run does after its last checkpoint: as if it had been killed there."""
    shutil.rmtree(run / "model")
    (run / "report.html").unlink()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:  # seconds differ from machine to machine, and bytes are flipped at fixed places
        row |= {key: 1.0 for key in row if "second" in key}
    write_rows(run / "metrics.jsonl", [row for row in rows if row["kind"] != "end"])


def copy(source: Path, target: Path) -> None:
    """Copy everything; run folders then name the paths of the copy."""
    shutil.copytree(source, target, symlinks=True)
    for config in target.glob("runs/*/config.yaml"):
        config.write_text(config.read_text().replace(str(source), str(target)))
