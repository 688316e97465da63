"""A commented config to start from, by method and model; the settings' own sentences are its comments.

Batch per GPU, recomputation and the parallel layout are left to the planner (`layout: auto`).
"""

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.objectives import LEARNING_RATES
from meshtune.reference.schema import EDITOR_LINE, schema, settings
from meshtune.yaml_tree import merge, nested

SIZES = {
    "0.6b": "Qwen/Qwen3-0.6B",
    "1.7b": "Qwen/Qwen3-1.7B",
    "4b": "Qwen/Qwen3-4B",
    "8b": "Qwen/Qwen3-8B",
    "14b": "Qwen/Qwen3-14B",
    "32b": "Qwen/Qwen3-32B",
    "70b": "meta-llama/Llama-3.3-70B-Instruct",
}
LORA = "lora.r lora.alpha lora.target_modules"
SHOWN = (
    "model.name method {lora} data.train data.eval_split data.seq_len data.packing data.train_on "
    "train.global_batch_size train.num_epochs train.learning_rate train.lr_scheduler train.warmup_ratio "
    "train.precision eval.every eval.samples eval.keep_best layout checkpoint.every checkpoint.keep log.to "
    "output"
)
VALUES = {  # of settings that a starter changes, or whose default is to choose
    "data.train": "train.jsonl",
    "data.eval_split": 0.02,
    "train.global_batch_size": 32,
    "train.num_epochs": 3,
    "eval.every": "0.5 epoch",
    "eval.samples": 3,
    "eval.keep_best": True,
    "checkpoint.every": "0.5 epoch",
}
COLUMN, WIDTH = 40, 118  # where comments begin, and lines end


def starter(method: str, model: str, file: str) -> str:
    """Text of a config.

    method: full, lora or qlora. model: hub id or folder. file: name of the config in the header's commands.
    """
    output = f"runs/{model.rstrip('/').rpartition('/')[2].lower()}-{method}"
    chosen = VALUES | {"model.name": model, "method": method, "output": output}
    chosen["train.learning_rate"] = LEARNING_RATES[method]
    config = merge({"model": {"name": model}}, {"method": method})
    for key, value in chosen.items():
        config = merge(config, nested(key.split("."), value))
    resolved = Config.model_validate(config).model_dump(mode="json")
    lines, opened = header(method, model, shlex.quote(file)), ""
    sentences = {setting.key: setting.schema for setting in settings(schema())}
    for key in SHOWN.format(lora=LORA if method != "full" else "").split():
        section, _, name = key.rpartition(".")
        if section and section != opened:
            lines.append(f"{section}:")
        opened = section
        value = chosen[key] if key in chosen else at(resolved, key)
        written = yaml.safe_dump([value], default_flow_style=True, width=WIDTH).strip()[1:-1]
        lines += commented(f"{'  ' if section else ''}{name}: {written}", sentence(sentences[key]))
    return "\n".join(lines) + "\n"


def header(method: str, model: str, file: str) -> list[str]:
    kinds = {
        "full": "all weights of",
        "lora": "LoRA adapters for",
        "qlora": "LoRA adapters next to 4-bit weights of",
    }
    return [
        EDITOR_LINE,
        f"# Train {kinds[method]} {model}.",
        "#",
        "# 1. Put rows into train.jsonl, one JSON object a line, or change data.train. Two of the forms:",
        '#      {"prompt": "2 + 2?", "completion": "4"}',
        '#      {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
        "# 2. See what training would see: lengths, labelled parts, rows cut or dropped.",
        f"#      meshtune data {file}",
        "# 3. See memory and speed on GPUs that you may rent; it needs none.",
        f"#      meshtune plan {file} cluster.gpu=h100-sxm cluster.gpus=8",
        "# 4. Train. The same command resumes a run that was stopped.",
        f"#      meshtune train {file}",
        "",
    ]


def at(tree: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


def sentence(form: dict[str, Any]) -> str:
    """The setting's sentence, with its choices if it has few."""
    text, choices = form["description"], [str(choice) for choice in form.get("enum", ())]
    named = all(choice in text for choice in choices)
    return text if named or len(choices) > 7 else f"{text} ({', '.join(choices)})"


def commented(line: str, comment: str) -> Iterator[str]:
    """Yield `line` with `comment` next to it, in the lines that it needs."""
    first, *others = textwrap.wrap(comment, WIDTH - COLUMN - 2)
    yield f"{line:<{COLUMN - 1}} # {first}"
    yield from (f"{'':<{COLUMN - 1}} # {other}" for other in others)
