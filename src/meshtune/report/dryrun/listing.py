"""A table as plain texts, which the terminal and a page show alike."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshtune.report.draw.page import text


@dataclass(frozen=True)
class Listing:
    """A title, heads, rows of texts, and sentences below them."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()  # heads of the columns of words, which begin at the left; others are numbers
    notes: tuple[str, ...] = ()
    totals: int = 0  # how many rows at the end are sums, in bold

    def rendered(self) -> RenderableType:
        """The table for a terminal; its texts of words wrap where it is narrow."""
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for head in self.heads:
            words = head in self.words
            table.add_column(
                head,
                justify="left" if words else "right",
                no_wrap=not words,
                overflow="fold" if words else "ellipsis",
            )
        for number, row in enumerate(self.rows):
            bold = number >= len(self.rows) - self.totals
            table.add_row(*map(Text, row), style="bold" if bold else "")
        notes = [Text(note, style="dim") for note in self.notes]
        return Group(Text(self.title, style="bold"), table, *notes, Text())

    def html(self) -> str:
        """The table as a section of a page."""

        def cell(kind: str, head: str, value: str) -> str:
            left = " class='left'" if head in self.words else ""
            return f"<{kind}{left}>{text(value)}</{kind}>"

        heads = "".join(cell("th", head, head) for head in self.heads)
        rows = "".join(
            f"<tr{' class=total' if number >= len(self.rows) - self.totals else ''}>"
            f"{''.join(cell('td', head, value) for head, value in zip(self.heads, row, strict=True))}</tr>"
            for number, row in enumerate(self.rows)
        )
        notes = "".join(f"<p class='note'>{text(note)}</p>" for note in self.notes)
        return (
            f"<section><h2>{text(self.title)}</h2><div class='wide'><table class='facts numbers listing'>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{notes}</section>"
        )
