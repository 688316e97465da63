"""Options and output that several commands share."""

import json
from typing import Annotated, Any

import typer

from meshtune.commands.complete import complete_settings
from meshtune.errors import UserError

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="a config file, section.key=value, or both",
        autocompletion=complete_settings,
    ),
]
TargetWords = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET [KEY=VALUE]...",
        help="a run folder, a model folder or a config file",
        autocompletion=complete_settings,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, all else on stderr")]


def split(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """(The word without "=", a config file or target, or None; the key=value words, in their order).

    Raises UserError for two words without "=".
    """
    words = settings or []
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(
            f"Several config files are named: {', '.join(files)}; name one, and change it by "
            "section.key=value."
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def show(facts: Any, renderable: Any, *, as_json: bool) -> None:
    """Print one result on stdout: `facts` as JSON if as_json, else rich's `renderable`, the same as text."""
    if as_json:
        show_json(facts)
    else:
        from rich.console import Console

        Console().print(renderable)


def show_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
