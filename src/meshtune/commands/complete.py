"""Completion of settings and layouts in a shell, only from the tree of settings: it imports no torch.

bash cuts words at "=": `layout=dp2-` arrives as the words "layout", "=", "dp2-", and the last one is
completed; other shells pass the whole word.
"""

import json
import re
from typing import Any

import typer

Word = tuple[str, str]  # (a word, its sentence), as typer's completion takes them


def complete_settings(context: typer.Context, incomplete: str) -> list[Word]:
    """Settings, or values of the one that is written; [], for the shell's file names, in the first place,
    where `plan` also has its sub-commands.
    """
    before = [
        str(word) for words in context.params.values() if isinstance(words, list | tuple) for word in words
    ]
    options = settings()
    if before[-1:] == ["="]:
        return values(before[-2], incomplete, options.get(before[-2], {})) if len(before) > 1 else []
    if before and before[-1] in options:  # bash, right behind "="
        return values(before[-1], incomplete, options[before[-1]])
    key, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{key}={word}", text) for word, text in values(key, value, options.get(key, {}))]
    if not incomplete:
        sections = dict.fromkeys(re.sub(r"(?<=\.).*", "", key) for key in options)
        return [(word, "") for word in sections] if before else []
    names: list[str] = []
    if not before:
        names = [name for name in getattr(context.command, "subcommands", ()) if name.startswith(incomplete)]
    keys = [key for key in options if key.startswith(incomplete)]
    if len(keys) == 1 and not names:  # two words at least, after whose common part the shell writes no space
        words = values(keys[0], "", options[keys[0]]) or [(_yaml(options[keys[0]].get("default")), "")]
        return [(f"{keys[0]}={word}", text) for word, text in [("", ""), *words]]
    written = [(f"{key}=", options[key].get("description", "")) for key in keys]
    return [*((name, "") for name in names), *written]


def settings() -> dict[str, dict[str, Any]]:
    """The JSON schema of each setting by its dotted key; sections are left out."""
    from meshtune.reference import schema

    every = schema.settings(schema.schema())
    return {setting.key: setting.schema for setting in every if "$ref" not in setting.schema}


def values(key: str, start: str, option: dict[str, Any]) -> list[Word]:
    """Values of a setting that begin with `start`; [] where any text or number may stand.

    option: its JSON schema.
    """
    if key == "layout":
        return [(word, "") for word in layouts(start)]
    kinds = [option, *option.get("anyOf", ())]
    choices = [value for kind in kinds for value in (*kind.get("enum", ()), kind.get("const"))]
    choices += [True, False] if any(kind.get("type") == "boolean" for kind in kinds) else []
    words = (_yaml(value) for value in choices if value is not None)
    return [(word, "the default" if word == _yaml(option.get("default")) else "") for word in words
            if word.startswith(start)]  # fmt: skip


def layouts(start: str) -> list[str]:
    """Layout strings that begin with `start` and have one more token; a size is left to write."""
    from meshtune.layout import AUTO, TOKENS

    *written, tail = start.split("-")
    if any(re.fullmatch(token.pattern, tail) for token in TOKENS):
        written, tail = [*written, tail], ""
    spare = [token for token in TOKENS if not any(re.fullmatch(token.pattern, word) for word in written)]
    words = [word for token in spare for word in beginnings(token.pattern)]
    words = [word for word in words if word.startswith(tail)]
    whole = [AUTO] if not written and AUTO.startswith(tail) else []
    return whole + ["-".join([*written, word]) for word in words]


def complete_layout(incomplete: str) -> list[str]:
    """Layout strings of an option that takes several, separated by commas: the last one is completed."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in layouts(last)]


def beginnings(pattern: str) -> list[str]:
    """Texts that a layout token's pattern matches, up to its last number: zero1x, zero2x, zero3x."""
    text = re.sub(r"\(\\d[+*]\)", "", pattern)
    if not (group := re.search(r"\(([^)]*)\)", text)):
        return [text]
    choices = list(group[1].strip("[]")) if group[1].startswith("[") else group[1].split("|")
    return [text[: group.start()] + choice + text[group.end() :] for choice in choices if choice != "none"]


def _yaml(value: Any) -> str:
    """A value as it is written behind "="."""
    return value if isinstance(value, str) else json.dumps(value)
