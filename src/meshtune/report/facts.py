"""Facts in the terminal: versions, devices, and what a model family supports."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def capability_table(rows: Iterable[tuple[str, bool, str]], *, title: str | None = None) -> Table:
    """Table with a line "feature, yes or no, reason" for each of rows: (feature, supported, reason)."""
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
    """Table with a line "name, value" for each fact, values by str().

    A value that is a mapping gives a line "name.key, value" for each of its keys; only one level is opened.
    """
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
