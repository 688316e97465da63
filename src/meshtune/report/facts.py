"""Facts in the terminal: versions, devices, and what a model family supports."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def capability_table(rows: Iterable[tuple[str, bool, str]], *, title: str | None = None) -> Table:
    """Features of a model family; each row is (feature, supported, reason)."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for feature, supported, reason in rows:
        table.add_row(
            feature, Text("yes", style="green") if supported else Text("no", style="yellow"), reason
        )
    return table


def facts_table(facts: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Named facts, one a line (versions, devices); a nested mapping's keys are joined by dots."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for inner, leaf in value.items():
                table.add_row(f"{name}.{inner}", Text(str(leaf)))
        else:
            table.add_row(name, Text(str(value)))
    return table
