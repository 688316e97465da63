"""A table as plain texts, which the terminal and a page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from meshtune.report.draw.page import text

LEAST = 24  # characters of a column of words, where its texts are as long
GAP = 2  # spaces between columns

Column = Sequence[str]  # its head, then a text for each row


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
        """The table for a terminal, in parts below each other where it is narrow (`narrowed`)."""
        notes = [Text(note, style="dim") for note in self.notes]
        return Group(Text(self.title, style="bold"), Fitted(self), *notes, Text())

    def table(self) -> Table:
        """Rows and heads alone; texts of words wrap."""
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
        return table

    def narrowed(self, width: int) -> list[Listing]:
        """Tables of at most `width` characters, where that can be: texts of the last column of words go below
        those of the one before, and numbers without room into a table of their own, beside the words.
        """
        columns = [*zip(self.heads, *self.rows, strict=True)]
        words = [place for place, head in enumerate(self.heads) if head in self.words]
        room = [
            min(LEAST, longest(column)) if place in words else longest(column)
            for place, column in enumerate(columns)
        ]
        if sum(room) + GAP * (len(room) - 1) <= width:
            return [self]
        if len(words) > 1:
            *_, upper, lower = words
            columns[upper] = tuple(map("\n".join, zip(columns[upper], columns[lower], strict=True)))
            kept = [column for place, column in enumerate(columns) if place != lower]
            names = (*(self.heads[place] for place in words[:-2]), columns[upper][0])
            return replace(self, heads=heads_of(kept), rows=rows_of(kept), words=names).narrowed(width)
        parts: list[list[int]] = [[]]
        left = most = width - sum(room[place] + GAP for place in words)
        for place in range(len(columns)):
            if place in words:
                continue
            if room[place] > left and parts[-1]:
                parts.append([])
                left = most
            parts[-1].append(place)
            left -= room[place] + GAP
        tables = ([columns[place] for place in (*words, *part)] for part in parts)
        return [replace(self, heads=heads_of(some), rows=rows_of(some)) for some in tables]

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


@dataclass(frozen=True)
class Fitted:
    """The rows of a listing in tables that the terminal has room for."""

    listing: Listing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self.listing.narrowed(options.max_width):
            yield part.table()


def longest(column: Column) -> int:
    """Characters of the longest line of a column."""
    return max(len(line) for cell in column for line in cell.split("\n"))


def heads_of(columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(column[0] for column in columns)


def rows_of(columns: Sequence[Column]) -> tuple[tuple[str, ...], ...]:
    return tuple(zip(*(column[1:] for column in columns), strict=True))
