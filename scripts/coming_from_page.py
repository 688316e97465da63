"""Write docs/coming-from.md from the tables of other trainers' keys: `python scripts/coming_from_page.py`."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshtune.rundir import write_text_atomically
from meshtune.trainers.table import Entry, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming-from.md"
LISTED = ROOT / "tests" / "data" / "trainer_keys.json"
TOOLS = {  # order of the page -> the classes or files that have the keys
    "axolotl": "its schema and its plugins' arguments",
    "llama_factory": "its model, data, training, finetuning, generating and evaluation arguments; the others are "
    "[transformers'](#transformers)",
    "trl": "`SFTConfig`, `ModelConfig` and `ScriptArguments`; the others are [transformers'](#transformers)",
    "transformers": "`TrainingArguments` and `Seq2SeqTrainingArguments`",
    "torchtune": "its recipes' YAML files",
}
INTRODUCTION = """# Coming from another trainer

<!-- Written by `python scripts/coming_from_page.py` from src/meshtune/trainers/*.toml. -->

`meshtune migrate` reads a configuration of axolotl, LLaMA-Factory, TRL or torchtune (YAML or JSON), arguments of a
`transformers.Trainer` as JSON, or its `training_args.bin`, and writes ours:

```bash
meshtune migrate axolotl.yaml --gpus 8 --out run.yaml
meshtune data run.yaml        # what training sees: rows, labels in colour
meshtune train run.yaml
```

- A comment beside each setting names the key that it is from. Keys without a counterpart are listed below the settings, with the
  reason and what to do; so are keys that are not needed.
- Where the file leaves a key out and the tool's default is not ours, the tool's is written, and marked so.
- `--gpus` is the number of GPUs that the file is for, 1 unless it is given: it makes the layout and the global batch (micro-batch ×
  accumulation × data ranks). `layout: auto` lets the planner choose instead.
- Files that the configuration names (DeepSpeed's JSON, LLaMA-Factory's `dataset_info.json`) are read beside it, or in the working
  directory.
- What the file does not say is given on the command line: `meshtune migrate training_args.bin model.name=… data.train=…`.
- A `training_args.bin` is a pickle. It is read without being unpickled: nothing that it names is imported or called.
- Preference training and reinforcement learning are refused: meshtune trains on answers.

`--from` names the tool where its keys do not. A key pasted into a config of ours is answered from the same tables. `make test-migrate`
compares them with the newest versions of the tools.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(line for tool in TOOLS for line in section(tool))])


def section(tool: str) -> Iterator[str]:
    """Yield the lines of one tool: settings with its keys for them, then the keys without, by reason."""
    known, listed = table(tool), json.loads(LISTED.read_text(encoding="utf-8"))[tool]
    yield from (
        f"## {known.name}",
        "",
        f"Keys of {listed['distribution']} {listed['version']}: {TOOLS[tool]}.",
        "",
    )
    ours: dict[str, list[str]] = {}
    for key, entry in known.own.items():
        if entry.setting:
            ours.setdefault(entry.setting, []).append(key)
    yield from rows("setting", "its keys", ((f"`{name}`", keys) for name, keys in ours.items()))
    for title, ignored in (("not supported", False), ("not needed", True)):
        reasons: dict[str, list[str]] = {}
        for key, entry in known.own.items():
            if not entry.setting and entry.ignored == ignored:
                reasons.setdefault(sentence(entry), []).append(key)
        yield from rows(title, "keys", reasons.items())


def sentence(entry: Entry) -> str:
    refused = " A file with one is refused." if entry.refused else ""
    return f"{entry.reason[0].upper()}{entry.reason[1:]}.{refused}"


def rows(first: str, second: str, each: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    yield from (f"| {first} | {second} |", "| --- | --- |")
    yield from (f"| {left} | {', '.join(f'`{key}`' for key in keys)} |" for left, keys in each)
    yield ""


def stale() -> bool:
    """True if the written page is not what the tables give."""
    return not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()


if __name__ == "__main__":
    write_text_atomically(PAGE, page())
