"""Repeat the plans that README and docs show, and compare: `python scripts/plan_outputs.py [--write]`.

A block of a page that begins with `$ meshtune plan …` is a command and parts of its answer, in order; `…`
stands for what is left out, and line breaks don't count. A comment `<!-- meshtune plan … : PART -->` below a
sentence says what a command prints, which the sentence quotes. The table of docs/which-gpu.md is compared
too; --write rewrites it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtune.rundir import write_text_atomically

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```\n\$ (meshtune plan (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"<!-- (meshtune plan .*?) : (.*?) -->")
TABLE = ROOT / "docs" / "which-gpu.md"
PART = re.compile(r"(<!-- begin[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b",
          "gemma-3-27b", "qwen3-32b", "llama-3.1-70b", "mistral-large-123b", "llama-3.1-405b")  # fmt: skip
CLUSTERS = ("1 x rtx-4090", "1 x l40s", "1 x a100-80", "1 x h200", "8 x h100-sxm", "16 x h100-sxm")


def answer(command: str) -> str:
    """Run a command and return stdout, then stderr, in 100 columns and without the hub."""
    words = command.replace("\\\n", " ").split()[1:]
    environment = os.environ | {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-m", "meshtune", *words]
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


def table() -> str:
    """Return the longest sequences by model and cluster as Markdown: all weights trained / LoRA / QLoRA."""
    found = {}
    for cluster in CLUSTERS:
        gpus, _, kind = cluster.partition(" x ")
        printed = answer(f"meshtune plan max cluster.gpu={kind} cluster.gpus={gpus} --json")
        models = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])["models"]
        found[cluster] = {row["model"]: (row["full"], row["lora"], row["qlora"]) for row in models}
    lines = [f"| model | {' | '.join(CLUSTERS)} |", f"| --- |{' ---: |' * len(CLUSTERS)}"]
    for model in MODELS:
        lengths = [found[cluster].get(model, (None,) * 3) for cluster in CLUSTERS]
        cells = [" / ".join(f"{tokens:,}" if tokens else "–" for tokens in each) for each in lengths]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    written = TABLE.read_text(encoding="utf-8")
    current = PART.sub(lambda part: part[1] + "\n" + table() + "\n" + part[2], written)
    if "--write" in sys.argv:
        write_text_atomically(TABLE, current)
        written = current
    wrong = [] if written == current else ["docs/which-gpu.md: its table is old; --write rewrites it"]
    for page in PAGES:
        found = differences(page.read_text(encoding="utf-8"))
        wrong += [f"{page.relative_to(ROOT)}: {sentence}" for sentence in found]
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
