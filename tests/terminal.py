"""A terminal of any width, with colours or without."""

from typing import Any

from rich.console import Console


def printed(what: Any, width: int = 100, colours: str | None = None) -> str:
    """Return what a terminal shows. width: in columns. colours: such as "truecolor"; None: none."""
    console = Console(width=width, color_system=colours, force_terminal=bool(colours), legacy_windows=False)
    with console.capture() as capture:
        console.print(what, crop=False)
    return capture.get()
