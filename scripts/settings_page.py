"""Pages that the settings tree gives: docs/settings.md, and the JSON schema that editors read.

python scripts/settings_page.py        writes both
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtune.reference.schema import SCHEMA_FILE, Setting, as_json, schema, settings
from meshtune.rundir import write_text_atomically

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
SINCE = ROOT / "tests" / "data" / "settings.txt"  # settings below the version that they came in
UNITS = {  # of numbers; "": a number without one
    "steps": "train.max_steps train.lr_decay_steps train.warmup_steps train.max_nonfinite_steps eval.every "
    "checkpoint.every log.every log.gradient_noise_scale",
    "epochs": "train.num_epochs data.train.weight data.eval.weight",
    "tokens": "train.global_batch_tokens train.total_tokens data.seq_len data.mean_document_tokens "
    "eval.max_new_tokens",
    "sequences": "train.global_batch_size layout.micro_batch_size",
    "micro-batches": "layout.gradient_accumulation_steps",
    "documents": "data.eval_split",
    "rows": "data.max_samples",
    "prompts": "eval.samples eval.exact_match",
    "evaluations": "eval.early_stopping",
    "checkpoints": "checkpoint.keep",
    "GPUs": "cluster.gpus cluster.gpus_per_node",
    "GiB": "cluster.memory_gib cluster.memory_budget_gib",
    "GB/s": "cluster.link cluster.network",
    "ranks": "layout.dp_replicate layout.dp_shard layout.cp layout.tp layout.pp",
    "stages": "layout.virtual_stages",
    "blocks": "layout.recompute_blocks",
    "": "train.learning_rate train.min_lr_ratio train.warmup_ratio train.weight_decay train.max_grad_norm "
    "train.adam_eps train.label_smoothing train.neftune_alpha train.seed lora.r lora.alpha lora.dropout "
    "layout.zero cluster.gpu cluster.memory_margin cluster.network_share cluster.price_per_gpu_hour",
}
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "array": "list",
    "object": "mapping",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LARGEST = 10**6  # an upper bound beyond it only keeps arithmetic finite
INTRODUCTION = """# All settings

<!-- Written by `python scripts/settings_page.py`. -->

A config file has these settings, as sections (`train: {max_steps: 100}`) or as dotted keys
(`train.max_steps: 100`); on the command line each is `train.max_steps=100`. A setting that is left out has
its default. `meshtune config` prints a commented file to start from, `meshtune schema` the JSON schema with
which an editor completes and checks one.
"""


def page() -> str:
    """Text of docs/settings.md. Raises SystemExit for a number whose unit is not in UNITS."""
    tree = schema()
    since, units = versions(), {key: unit for unit, keys in UNITS.items() for key in keys.split()}
    every = [*settings(tree)]
    numbers = [setting.key for setting in every if is_number(setting.schema)]
    if missing := [key for key in numbers if key not in units]:
        raise SystemExit(f"Add the unit of {', '.join(missing)} to UNITS in scripts/settings_page.py.")
    if gone := units.keys() - numbers:
        raise SystemExit(
            f"{', '.join(sorted(gone))} of UNITS in scripts/settings_page.py is no number setting."
        )
    parts = [INTRODUCTION]
    plain = [setting for setting in every if "." not in setting.key and not is_section(setting)]
    parts.append(table("Top level", "", plain, units, since))
    for section in every:
        inner = [setting for setting in every if setting.key.rpartition(".")[0] == section.key]
        if inner and section.key != "data.eval":  # its settings are those of data.train
            described = tree["$defs"][section.section].get("description") or section.schema["description"]
            heading = section.key if section.key != "data.train" else "data.train and data.eval"
            parts.append(table(heading, described.partition("\n\n")[0], inner, units, since))
    return "\n".join(parts)


def table(
    heading: str, introduction: str, rows: list[Setting], units: Mapping[str, str], since: Mapping[str, str]
) -> str:
    """A heading, a sentence, and the table of one section's settings."""
    lines = [f"## {heading}", "", *([" ".join(introduction.split()), ""] if introduction else [])]
    lines += [
        "| setting | type or choices | default | unit | meaning | since |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key, _, form in rows:
        cells = (
            f"`{key}`",
            " or ".join(forms(form)),
            default_of(form),
            units.get(key, ""),
            form["description"],
            since.get(key) or since[key.partition(".")[0]],  # fields of a layout have that of `layout`
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def default_of(form: Mapping[str, Any]) -> str:
    if "default" not in form:
        return "required"
    text = json.dumps(form["default"], ensure_ascii=False)
    bare = isinstance(form["default"], str) and form["default"].strip()
    return f"`{form['default'] if bare else text}`"


def is_section(setting: Setting) -> bool:
    return "$ref" in setting.schema


def is_number(form: Mapping[str, Any]) -> bool:
    kinds = [form, *form.get("anyOf", ())]
    choices = [choice for kind in kinds for choice in kind.get("enum", ())]
    return int in map(type, choices) or any(kind.get("type") in ("integer", "number") for kind in kinds)


def forms(form: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a value may be, as short texts: `cosine`, whole number ≥ 1, list of text."""
    if "anyOf" in form:
        for kind in form["anyOf"]:
            yield from forms(kind)
    elif "enum" in form:
        yield " ".join(f"`{choice}`" for choice in form["enum"])
    elif "const" in form:
        yield f"`{form['const']}`"
    elif "$ref" in form:
        yield "mapping"
    elif form["type"] == "array" and "items" in form:
        yield f"list of {' or '.join(forms(form['items']))}"
    elif form["type"] == "array":
        yield "[" + ", ".join(" or ".join(forms(item)) for item in form["prefixItems"]) + "]"
    elif form["type"] == "object" and form["additionalProperties"] is True:
        yield "mapping"
    elif form["type"] == "object":
        kinds = [*forms(form["additionalProperties"])]
        yield f"mapping to {kinds[0]}" if len(kinds) == 1 else "mapping"
    else:
        limits = [
            f"{sign} {form[bound]:g}"
            for bound, sign in BOUNDS.items()
            if bound in form and not ("max" in bound.lower() and form[bound] > LARGEST)
        ]
        yield " ".join([TYPES[form["type"]], " and ".join(limits)]).strip()


def versions() -> dict[str, str]:
    """Version in which each setting came, from the lines below it in tests/data/settings.txt."""
    found, version = {}, ""
    for line in SINCE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            version = line.removeprefix("# ")
        else:
            found[line] = version
    return found


def stale() -> list[str]:
    """Names of the written files that differ from what the settings tree gives."""
    made = {PAGE: page(), SCHEMA_FILE: as_json()}
    return [
        str(file.relative_to(ROOT))
        for file, text in made.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    write_text_atomically(PAGE, page())
    write_text_atomically(SCHEMA_FILE, as_json())
