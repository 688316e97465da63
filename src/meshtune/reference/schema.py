"""JSON schema (draft 2020-12) of a config file, for editors: `schema.json` in this package.

Pydantic writes it from the settings tree. Added here: what validators in Python accept (layouts, sources),
and the dotted form of each key (`train.max_steps: 5`). It knows one value at a time: values
that contradict each other are refused only by `config.load`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.config import Config
from meshtune.layout import AUTO, CHOICES, TOKENS, Layout

SCHEMA_FILE = Path(__file__).with_name("schema.json")
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"  # first line of a file that a command writes
LAYOUT_FIELDS = {  # sentence, and unit of a number
    "dp_replicate": ("Replicas of data parallelism.", "ranks"),
    "dp_shard": ("Data-parallel ranks that ZeRO shards over, with those of cp.", "ranks"),
    "zero": ("Stage: 1 shards optimizer state, 2 gradients too, 3 parameters too.", ""),
    "cp": ("Ranks that share a sequence (context parallel).", "ranks"),
    "cp_method": ("Context parallelism by all-gathered keys and values, or by all-to-all over heads.", ""),
    "tp": ("Ranks that share each matrix (tensor parallel).", "ranks"),
    "sp": ("Sequence parallelism over the tensor-parallel ranks.", ""),
    "sp_regather": ("Gather the inputs of sequence parallelism again in the backward.", ""),
    "ep": ("Ranks that split a block's experts, out of those of dp, zero, cp, and tp with sp.", "ranks"),
    "pp": ("Pipeline ranks.", "ranks"),
    "schedule": ("Pipeline schedule.", ""),
    "virtual_stages": ("Pipeline stages of each rank.", "stages"),
    "micro_batch_size": ("Sequences in one forward of a rank.", "sequences"),
    "gradient_accumulation_steps": ("Micro-batches summed in one optimizer step.", "micro-batches"),
    "recompute": ("Activations computed again in the backward instead of saved.", ""),
    "recompute_blocks": ("Blocks of each pipeline stage that do, from its first on; null: all.", "blocks"),
}

CHOSEN = ("micro_batch_size", "gradient_accumulation_steps")  # where they are left out (PartialLayout)


def schema() -> dict[str, Any]:
    """The JSON schema of a config file."""
    tree = Config.model_json_schema(mode="validation")
    sections = tree.pop("$defs")
    for part in (tree, *sections.values()):
        part.pop("title", None)
        for setting in part["properties"].values():
            tidy(setting)
    for name in ("train", "eval"):
        source = {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/SourceConfig"}]}
        sections["DataConfig"]["properties"][name] |= {
            "anyOf": [*source["anyOf"], {"type": "array", "items": source}, {"type": "null"}]
        }
        for key in ("type", "items"):
            sections["DataConfig"]["properties"][name].pop(key)
    sections["Layout"] = layout_mapping()
    tree["properties"]["layout"]["anyOf"] = [
        {"const": AUTO},
        {"type": "string", "pattern": layout_pattern()},
        {"$ref": "#/$defs/Layout"},
    ]
    dotted = {setting.key: {"$ref": setting.pointer} for setting in settings(tree | {"$defs": sections})}
    tree.pop("required")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "meshtune config",
        **tree,
        "properties": {**dotted, **tree["properties"]},
        "anyOf": [{"required": ["model"]}, {"required": ["model.name"]}],
        "$defs": sections,
    }


def tidy(setting: dict[str, Any]) -> None:
    """Remove pydantic's titles, and the default of a section, which the section's own settings have."""
    setting.pop("title", None)
    if "$ref" in setting:
        setting.pop("default", None)


def layout_mapping() -> dict[str, Any]:
    """The mapping form of a layout: each field has its value, or auto."""
    properties: dict[str, Any] = {}
    for field in fields(Layout):
        value: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 10**7 - 1}
        if field.name == "zero":
            value = {"enum": [0, 1, 2, 3]}
        elif isinstance(field.default, bool):
            value = {"type": "boolean"}
        elif field.name in CHOICES:
            value = {"enum": list(CHOICES[field.name])}
        sentence, unit = LAYOUT_FIELDS[field.name]
        properties[field.name] = {
            "anyOf": [value, {"const": AUTO}, *[{"type": "null"}] * (field.default is None)],
            "default": AUTO if field.name in CHOSEN else field.default,
            "description": sentence,
        } | ({"unit": unit} if unit else {})
    return {"type": "object", "additionalProperties": False, "properties": properties}


def layout_pattern() -> str:
    """Regular expression of a layout string: tokens in any order, joined by a hyphen."""
    token = "|".join(token.pattern for token in TOKENS)
    return f"^({token})(-({token}))*$"


class Setting(NamedTuple):
    """One setting, or section of settings, of a schema."""

    key: str  # dotted
    pointer: str  # JSON pointer to its schema
    schema: dict[str, Any]

    @property
    def section(self) -> str | None:
        """Name in $defs of the section that it is or may be; None for a plain value."""
        forms = (self.schema, *self.schema.get("anyOf", ()))
        return next((form["$ref"].rpartition("/")[2] for form in forms if "$ref" in form), None)


def settings(tree: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield every setting of a schema, a section before its settings."""

    def walk(section: Mapping[str, Any], prefix: str, pointer: str) -> Iterator[Setting]:
        for name, form in section["properties"].items():
            if "." in name:  # the dotted form of a setting that has its place
                continue
            setting = Setting(prefix + name, f"{pointer}/properties/{name}", form)
            yield setting
            if setting.section:
                inner = tree["$defs"][setting.section]
                yield from walk(inner, f"{setting.key}.", f"#/$defs/{setting.section}")

    yield from walk(tree, "", "#")


def as_json() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
