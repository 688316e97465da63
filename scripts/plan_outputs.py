"""Repeat the plans that README and docs show, and compare: `python scripts/plan_outputs.py [--write]`.

A block of a page that begins with `$ meshtune plan …` is a command and parts of its answer, in order; `…`
stands for what is left out, and line breaks don't count. A comment `<!-- meshtune plan … : PART -->`, or of
`meshtune sweep`, below a sentence says what a command prints, which the sentence quotes. The tables of
docs/which-gpu.md, docs/fit.md and docs/experts.md are compared too; --write rewrites them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshtune.rundir import write_text_atomically

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```\n\$ (meshtune plan (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"<!-- (meshtune (?:plan|sweep) .*?) : (.*?) -->")
PART = re.compile(r"(<!-- begin[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b",
          "gemma-3-27b", "qwen3-32b", "llama-3.1-70b", "mistral-large-123b", "llama-3.1-405b")  # fmt: skip
FITTED = (
    "model.name=llama-3.1-8b data.seq_len=4096 cluster.gpu=h100-sxm cluster.gpus=1 train.global_batch_size=4"
)
EARLY = "train.step_in_backward=true train.max_grad_norm=0"
SAVINGS = {  # layout and settings -> what they change in the numbers
    "mb4-ga1": "", "mb4-ga1-selective": "none", "mb4-ga1-full": "none",
    f"mb4-ga1-full {EARLY}": "no clipping", "mb4-ga1-full train.offload=optimizer": "none",
    f"mb4-ga1-full {EARLY} train.offload=optimizer": "no clipping",
    "mb4-ga1-full train.optimizer=adamw-bf16": "moments in 16 bits",
    "mb4-ga1-full train.optimizer=adamw-8bit": "moments in 8 bits",
    "mb4-ga1-full train.precision=bf16-pure": "weights and moments in 16 bits",
    "mb4-ga1-full train.precision=bf16-pure train.optimizer=adamw-8bit": "weights in 16, moments in 8 bits",
    "mb4-ga1 train.precision=fp8": "matmuls in 8 bits",
    "mb4-ga1 method=lora": "adapters only", "mb4-ga1 method=qlora": "adapters only, base in 4 bits",
    "mb4-ga1-full method=qlora": "adapters only, base in 4 bits",
    "mb4-ga1-offload method=qlora": "adapters only, base in 4 bits",
}  # fmt: skip
MIXTURES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "GPT-OSS-20B"}
SPLIT = [
    [f"zero3x8{ep}-{batch}-full" for ep in ("", "-ep2", "-ep4", "-ep8")] for batch in ("mb1-ga8", "mb4-ga2")
]
CLUSTERS = ("1 x rtx-4090", "1 x l40s", "1 x a100-80", "1 x h200", "8 x h100-sxm", "16 x h100-sxm")


def answer(command: str) -> str:
    """Run a command and return stdout, then stderr, in 100 columns and without the hub."""
    words = command.replace("\\\n", " ").split()[1:]
    environment = os.environ | {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-m", "meshtune", *words]
    with TemporaryDirectory() as out:
        run += ["--out", out] if words[0] == "sweep" else []  # a folder with results would repeat nothing
        done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def differences(page: str, repeat: Callable[[str], str] = answer) -> Iterator[str]:
    """Yield a sentence for each command of a page that does not answer as shown."""
    for command, shown in [*BLOCK.findall(page), *QUOTED.findall(page)]:
        printed, place = " ".join(repeat(command).split()), 0
        for piece in (" ".join(part.split()) for part in shown.split("…")):
            place = printed.find(piece, place)
            if place < 0:
                yield f"{command}\n  doesn't print, or not in this order: {piece}"
                break
            place += len(piece)


def parsed(command: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    printed = answer(f"{command} --json")
    return json.loads(printed[printed.index("{") : printed.rindex("}") + 1])


def savings() -> str:
    """Return what each saves and costs as Markdown, by `meshtune plan explain`."""
    lines = [
        "| layout and settings | GPU | host | tokens/s | change of results |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row, changed in SAVINGS.items():
        found = parsed(f"meshtune plan explain {row} {FITTED}")
        memory = found["memory"]
        gib = [memory["peak"] / 2**30, memory.get("host", 0.0) / 2**30]
        sizes = " | ".join(f"{size:.1f} GiB" if size else "" for size in gib)
        words = " ".join(f"`{word}`" for word in row.split())
        lines.append(f"| {words} | {sizes} | {found['tokens_per_second_per_gpu']:,.0f} | {changed} |")
    return "\n".join(lines) + "\n"


def mixtures() -> str:
    """Return memory and speed by layout on 8 H100 as Markdown, for each mixture of experts."""
    given = "data.seq_len=4096 train.global_batch_size=64 cluster.gpu=h100-sxm cluster.gpus=8"
    lines = [f"| layout | {' | | '.join(MIXTURES.values())} | |", f"| --- |{' ---: |' * 2 * len(MIXTURES)}"]
    for layouts in SPLIT:
        command = f"meshtune plan compare {','.join(layouts)} {given}"
        found = [parsed(f"{command} model.name={model}")["layouts"] for model in MIXTURES]
        for rows in zip(*found, strict=True):
            cells = (
                f"{row['memory']['peak'] / 2**30:.1f} GiB | {row['tokens_per_second_per_gpu']:,.0f} tokens/s"
                for row in rows
            )
            lines.append(f"| `{rows[0]['layout']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """Return the longest sequences by model and cluster as Markdown: all weights trained / LoRA / QLoRA."""
    found = {}
    for cluster in CLUSTERS:
        gpus, _, kind = cluster.partition(" x ")
        models = parsed(f"meshtune plan max cluster.gpu={kind} cluster.gpus={gpus}")["models"]
        found[cluster] = {row["model"]: (row["full"], row["lora"], row["qlora"]) for row in models}
    lines = [f"| model | {' | '.join(CLUSTERS)} |", f"| --- |{' ---: |' * len(CLUSTERS)}"]
    for model in MODELS:
        lengths = [found[cluster].get(model, (None,) * 3) for cluster in CLUSTERS]
        cells = [" / ".join(f"{tokens:,}" if tokens else "–" for tokens in each) for each in lengths]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    wrong = []
    for name, made in {"which-gpu.md": table(), "fit.md": savings(), "experts.md": mixtures()}.items():
        page = ROOT / "docs" / name
        written = page.read_text(encoding="utf-8")
        current = PART.sub(lambda part, made=made: f"{part[1]}\n{made}\n{part[2]}", written)
        if "--write" in sys.argv:
            write_text_atomically(page, current)
        elif written != current:
            wrong.append(f"docs/{name}: its table is old; --write rewrites it")
    for page in PAGES:
        found = differences(page.read_text(encoding="utf-8"))
        wrong += [f"{page.relative_to(ROOT)}: {sentence}" for sentence in found]
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
