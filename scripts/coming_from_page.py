"""Write the tables of docs/coming-from.md: `python scripts/coming_from_page.py`."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshtune.rundir import write_text_atomically
from meshtune.tools.table import KINDS, Entry, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming-from.md"
LISTED = ROOT / "tests" / "data" / "trainer_keys.json"
TOOLS = {  # order of the page -> the classes or files that have the keys
    "axolotl": "its schema and its plugins' arguments",
    "llama_factory": "its model, data, training, finetuning, generating and evaluation arguments; the others "
    "are [transformers'](#transformers)",
    "trl": "`SFTConfig`, `DPOConfig`, `KTOConfig`, `ORPOConfig`, `CPOConfig`, `RewardConfig`, `ModelConfig` "
    "and `ScriptArguments`; the others are [transformers'](#transformers)",
    "transformers": "`TrainingArguments` and `Seq2SeqTrainingArguments`",
    "torchtune": "its recipes' YAML files",
}
MARKER = "<!-- What follows is written by `python scripts/coming_from_page.py`. -->"


def page() -> str:
    """Text of the page: what stands before MARKER, then the tables."""
    written = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    return "\n".join([written + MARKER, "", *(line for tool in TOOLS for line in section(tool))])


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
    for kind, title in zip(
        KINDS, ("not supported", "left out, training is the same", "not needed"), strict=True
    ):
        reasons: dict[str, list[str]] = {}
        for key, entry in known.own.items():
            if entry.kind == kind:
                reasons.setdefault(sentence(entry), []).append(key)
        if reasons:
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
    return PAGE.read_text(encoding="utf-8") != page()


if __name__ == "__main__":
    write_text_atomically(PAGE, page())
