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
    """Text of docs/settings.md."""
    tree, since = schema(), versions()
    every = [*settings(tree)]
    parts = [INTRODUCTION]
    values = [setting for setting in every if not is_section(setting)]
    plain = [setting for setting in values if "." not in setting.key]
    parts.append(table("Top level", "", plain, since))
    for section in every:
        inner = [setting for setting in values if setting.key.rpartition(".")[0] == section.key]
        if inner and section.key != "data.eval":  # its settings are those of data.train
            described = tree["$defs"][section.section].get("description") or section.schema["description"]
            heading = section.key if section.key != "data.train" else "data.train and data.eval"
            parts.append(table(heading, described.partition("\n\n")[0], inner, since))
    return "\n".join(parts)


def table(heading: str, introduction: str, rows: list[Setting], since: Mapping[str, str]) -> str:
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
            form.get("unit", ""),
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
