"""Write docs/families.md from the results of families.py."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from meshtune.placement.families import KINDS

Found = Mapping[str, Any]  # of a family, as families.py writes it
LINK = re.compile(r" ?See docs/families\.md#([\w-]+)\.")
COLUMNS = ("one rank", "zero3x2", "tp2-sp", "pp2-1f1b", "cp2")

TOP = """\
# Families

Which of {count} model types of transformers {transformers} train with meshtune, and under what: all that it maps to a
causal language model, and some more that also see or hear, whose language part is trained on text. `make families`
wrote this page with torch {torch}; `meshtune env --model X` answers for one model.

Each is a random model of a few small blocks, its norms and biases perturbed, its windows shorter than the documents.
It trains three fp32 steps of four sequences, packed and unpacked, through settings, refusals, build and loop, and is
compared with the unsharded Hugging Face model, its attention and experts eager, which trains on a document at a time
with `torch.optim.AdamW`: losses, gradient norms and every parameter's first gradient, all within 1e-5. What differs by more
is repeated in fp64 on both sides and must agree within 1e-9. Layouts run packed, or unpacked where packing is refused.

- ✓ right; *unpacked*: with `data.packing=false` only
- ✗ refused, with the kind of reason; the sentences are below
- **WRONG** and **traceback**: faults of ours

{summary}

"""  # noqa: E501


def page(results: Iterable[Found]) -> str:
    """Return the text of the page."""
    results = sorted(results, key=lambda found: found["family"])
    versions = {
        name: " and ".join(sorted({each[name] for each in results if name in each}))
        for name in ("torch", "transformers")
    }
    rows = {found["family"]: cells(found) for found in results}
    text = TOP.format(count=len(results), summary=summary(rows), **versions)
    text += "| model_type | " + " | ".join(COLUMNS) + " |\n| --- |" + " :-: |" * len(COLUMNS) + "\n"
    text += "".join(f"| {family} | {' | '.join(row)} |\n" for family, row in rows.items())
    return (
        text
        + "\n# Kinds of reasons\n"
        + "".join(section(kind, results) for kind in KINDS)
        + untested(results)
    )


def cells(found: Found) -> list[str]:
    """Return a family's cells of COLUMNS."""
    if "untestable" in found:
        return ["not tested", *[""] * (len(COLUMNS) - 1)]
    runs = found["runs"]
    packed, unpacked = runs["one packed"], runs.get("one unpacked", {"outcome": "none"})
    first = cell(packed)
    if packed["outcome"] == "refused":
        first = "✓ unpacked" if unpacked["outcome"] == "right" else cell(unpacked)
    elif unpacked["outcome"] != "right":
        first = f"{first} packed, {cell(unpacked)} unpacked"
    row = [first]
    for column in COLUMNS[1:]:
        way = next((way for way in runs if way.startswith(f"{column} ")), None)
        row.append(cell(runs[way]) if way else first if first.startswith("✗") else "")
    return row


def cell(run: Found) -> str:
    """Return one way's outcome."""
    if run["outcome"] == "right":
        return "✓"
    if run["outcome"] == "refused":
        return "✗ " + ", ".join(f"[{kind}](#{kind})" for kind in kinds(run))
    if run["outcome"] == "WRONG":
        return f"**WRONG** {max(run['loss'], run['norm'], run['gradient']):.0e}"
    return "not tested" if run["outcome"] == "untestable" else "**traceback**"


def kinds(run: Found) -> list[str]:
    """Return the kinds that the sentences of a refusal name; "?" for a sentence that names none."""
    named = [kind for sentence in run["sentences"] for kind in LINK.findall(sentence) or ["?"]]
    return list(dict.fromkeys(named))


def outcome(text: str) -> str:
    """Return the word of the summary for a cell."""
    for sign, name in (("**WRONG**", "wrong"), ("**traceback**", "traceback"), ("not tested", "not tested"),
                       ("unpacked", "right without packing"), ("✓", "right"), ("✗", "refused")):  # fmt: skip
        if sign in text:
            return name
    return "not tested"


def summary(rows: Mapping[str, list[str]]) -> str:
    """Return the table of counts."""
    names = ["right", "right without packing", "refused", "not tested", "wrong", "traceback"]
    lines = ["| of " + str(len(rows)) + " | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for index, column in enumerate(COLUMNS):
        count = Counter(outcome(row[index]) for row in rows.values())
        lines.append(f"| {column} | " + " | ".join(str(count[name]) for name in names) + " |")
    return "\n".join(lines)


def section(kind: str, results: Iterable[Found]) -> str:
    """Return a kind's section: what it means, how many families it refuses something, and each sentence."""
    sentences: dict[str, set[str]] = defaultdict(set)
    for found in results:
        for run in found["runs"].values():
            for sentence in run.get("sentences", ()):
                if kind in LINK.findall(sentence):
                    sentences[general(sentence, found)].add(found["family"])
    families = {family for some in sentences.values() for family in some}
    lines = "".join(
        f"- {sentence} — {', '.join(sorted(some))}\n" for sentence, some in sorted(sentences.items())
    )
    return f"\n## {kind}\n\n{KINDS[kind]} Families: {len(families)}.\n\n{lines}"


def general(sentence: str, found: Found) -> str:
    """Return a sentence without its link, the model's name and the paths of the folder."""
    sentence = LINK.sub("", sentence).replace(found.get("class", "?"), "the model")
    sentence = re.sub(r"\S*/model\b", "the model", sentence)
    return f"The{sentence[3:]}" if sentence.startswith("the ") else sentence


def untested(results: Iterable[Found]) -> str:
    """Return the section of what could not be tried."""
    why: dict[str, list[str]] = defaultdict(list)
    for found in results:
        if "untestable" in found:
            why[found["untestable"]].append(found["family"])
    lines = [f"- {', '.join(families)}: {reason}" for reason, families in why.items()]
    lines += [
        f"- {found['family']}: {run['why']}"
        for found in results
        for run in {run.get("why"): run for run in found["runs"].values()}.values()
        if run["outcome"] == "untestable"
    ]
    return "\n# Not tested\n\n" + "\n".join(lines) + "\n" if lines else ""
