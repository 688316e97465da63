"""Migrated settings as YAML: a comment beside each says which key it is from; the other keys follow."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.tools.job import Note
from meshtune.tools.migrate import Migrated
from meshtune.units import printable

WIDTH = 110
SHOWN = 60  # characters of a value in a comment


def text_of(result: Migrated, source: str) -> str:
    """Write the whole file. source: name of the file that it was made from."""
    job, tree = result.job, result.tree
    gpus = f"{job.gpus} GPU{'s' * (job.gpus > 1)}"
    head = (
        f"Made by `meshtune migrate` from {source}, a configuration of {job.table.name}, for {gpus} "
        "(--gpus). `layout: auto` lets the planner choose instead. Comments name the key that a setting is "
        "from; a setting that is commented out would have no effect, for the reason above it."
    )
    lines = [*comment(head), ""]
    if not tree.get("data", {}).get("train"):
        lines += [*comment("The file names no rows: add data.train.")]
    for name in Config.model_fields:
        if isinstance(tree.get(name), Mapping):
            lines.append(f"{name}:")
            for key, value in tree[name].items():
                lines += setting(key, value, origin(result, f"{name}.{key}"), "  ")
        elif name in tree:
            lines += setting(name, tree[name], origin(result, name), "")
        lines += idle(result, name)
    lines += [
        *notes("No counterpart:", result.unsupported),
        *notes("Left out; what is trained is the same without:", result.left_out),
        *notes("Not needed:", result.ignored),
        *(["", *comment(f"Off, and not here anyway: {', '.join(result.off)}")] if result.off else []),
    ]
    return "\n".join(lines) + "\n"


def origin(result: Migrated, name: str) -> str:
    if any(override.partition("=")[0].startswith(name) for override in result.job.overrides):
        return "the command line"
    return result.origins.get(name, "")


def idle(result: Migrated, section: str) -> Iterator[str]:
    """Yield the settings of a section that would have no effect, as comments."""
    rows = {name: row for name, row in result.idle.items() if name.partition(".")[0] == section}
    lead = "  # " if section in result.tree else "#   "
    if rows and section not in result.tree:
        yield f"# {section}:"
    for reason in dict.fromkeys(row.reason for row in rows.values()):  # `# #`: uncommented it is a comment
        yield from (f"{lead}{line}" for line in comment(f"No effect: {reason}."))
        for name, row in rows.items():
            if row.reason == reason:
                lines = setting(name.rpartition(".")[2], row.value, row.origin, "")
                yield from (f"{lead}{line}" for line in lines)


def setting(key: str, value: Any, said: str, indent: str) -> Iterator[str]:
    """Yield the lines of one setting; a list of sources has a line for each."""
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and any(isinstance(each, Mapping) for each in value)
    ):
        yield from setting(key, None, said, indent)
        yield from (f"{indent}  - {flow(each)}" for each in value)
        return
    line = f"{indent}{key}:" if value is None else f"{indent}{key}: {flow(value)}"
    said = "" if said == key else " ".join(printable(said).split())
    if said and len(line) + len(said) + 4 > WIDTH:
        yield from (f"{indent}{above}" for above in comment(said))
        said = ""
    yield f"{line}  # {said}" if said else line


def flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    return json.dumps(value) if "\n" in text else text  # JSON is YAML, and has no line breaks


def notes(title: str, keys: Sequence[Note]) -> Iterator[str]:
    """Yield comments that give the keys without a setting, those of one reason together."""
    by_reason: dict[str, list[Note]] = {}
    for note in keys:
        by_reason.setdefault(note.reason, []).append(note)
    if by_reason:
        yield from ("", f"# {title}")
    for reason, group in by_reason.items():
        yield from comment(f"{', '.join(shown(note) for note in group)}", "- ")
        yield from comment(f"{reason}.", "    ")


def shown(note: Note) -> str:
    value = flow(note.value)
    return f"{note.key}: {value if len(value) <= SHOWN else value[: SHOWN - 1] + '…'}"


def comment(text: str, lead: str = "") -> list[str]:
    """Text as comment lines; the first begins with `lead`, the others are indented as far."""
    wrapped = textwrap.wrap(printable(text), WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    return [f"# {lead if not number else ' ' * len(lead)}{line}" for number, line in enumerate(wrapped)]
