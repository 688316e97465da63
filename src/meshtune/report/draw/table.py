"""A table: columns of cells, drawn by a terminal of any width, a page, and Markdown.

    Column.priority 0    always there
           1, 2, …       added in this order while a line has room for all of it; others are left out

Where not even the required columns fit, words wrap, then texts of the last column of words go below those of
the one before, and numbers without room into a table of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from meshtune.report.draw.page import notes, text
from meshtune.units import printable

if TYPE_CHECKING:
    from meshtune.report.draw.bars import Legend

LEAST = 24  # terminal columns down to which words wrap, where they are as long
NARROWEST, WIDEST = 8, 26  # terminal columns of a bar
GAP = 2  # terminal columns between columns
WORD = re.compile(r"\S+\s*|\s+")
PART = re.compile(r"[^/-]*[/-]+|[^/-]+")  # of a layout's name or a path
BEST = "green"  # style of a cell that is better than the others of its row


class Segments(NamedTuple):
    """The lengths that a bar shows, however wide it is drawn."""

    parts: Mapping[str, float]  # name -> length; the name "" is drawn blank
    scale: float  # length that fills the width
    until: float = 0.0  # length up to which dots follow the segments


class Name(NamedTuple):
    """A segment's name, which the terminal draws with its colour or letter in front."""

    name: str


class Markup(NamedTuple):
    """A cell of a page only, as HTML, which the caller escapes."""

    html: str
    kind: str = ""  # its class


Cell = str | Text | Name | Segments | Markup


@dataclass(frozen=True)
class Column:
    """One column; all columns of a table have the same number of cells."""

    head: str
    cells: Sequence[Cell] = ()
    words: bool = False  # begins at the left and wraps; others are numbers
    heading: bool = False  # names of the rows, at the left
    wraps: bool = False  # texts that wrap, but have a table of their own where they have no room
    priority: int = 0
    replaces: Column | None = None  # that it is drawn in place of
    style: str = ""
    more: Sequence[str] = ()  # a line below each cell, on a page
    code: bool = False  # names, which a page draws as code
    name: str = ""  # of the column on a page, "": its head in one line

    @property
    def bars(self) -> bool:
        """True if its cells are bars, which shrink down to NARROWEST and stand in the terminal only."""
        return any(isinstance(cell, Segments) for cell in self.cells)

    @property
    def width(self) -> int:
        """Terminal columns of its longest line, of bars the fewest."""
        return NARROWEST if self.bars else max(map(_length, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """Terminal columns that it needs."""
        return min(LEAST, self.width) if self.words or self.wraps else self.width

    @property
    def left(self) -> bool:
        """True if its cells begin at the left in the terminal."""
        return self.words or self.heading or self.wraps or self.bars

    def texts(self) -> list[str]:
        """Its cells as plain texts; "" for a bar."""
        return [_plain(cell) for cell in self.cells]


@dataclass(frozen=True)
class Table:
    """A title, columns, and sentences below them."""

    title: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    totals: int = 0  # how many rows at the end are sums, in bold
    chosen: int | None = None  # row that a page marks
    legends: Mapping[str, Legend] = field(default_factory=dict)  # by head of a column, where that is drawn
    kind: str = "numbers listing"  # classes of a page's table
    above: str = ""  # HTML between the title and a page's table
    tall: bool = False  # whether a page scrolls it below its heads

    @classmethod
    def of_rows(
        cls,
        title: str,
        heads: Sequence[str],
        rows: Iterable[Sequence[str | Markup]],
        words: Sequence[str] = (),
        notes: Sequence[str] = (),
        *,
        totals: int = 0,
    ) -> Table:
        """A table of texts, row by row. words: heads of the columns of words."""
        cells = [*zip(*rows, strict=True)] or [()] * len(heads)
        columns = (Column(head, column, head in words) for head, column in zip(heads, cells, strict=True))
        return cls(title, tuple(columns), tuple(notes), totals)

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.head for column in self.columns)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Its rows as plain texts."""
        return tuple(zip(*(column.texts() for column in self.columns), strict=True))

    # Terminal #

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        for part in (parts := self.fitted(options.max_width)):
            yield part._drawn(options.max_width)
        drawn = {column.head for part in parts for column in part.columns}
        yield from (legend for head, legend in self.legends.items() if head in drawn)
        yield from (Text(note, style="dim") for note in self.notes)
        if self.title:
            yield Text()

    def fitted(self, width: int) -> list[Table]:
        """Tables of at most `width` terminal columns, where that can be."""
        chosen = [column for column in self.columns if not column.priority]
        for optional in sorted((c for c in self.columns if c.priority), key=lambda column: column.priority):
            some = [c for c in self.columns if c is optional or (c in chosen and c is not optional.replaces)]
            if _room(column.width for column in some) <= width:
                chosen = some
        return replace(self, columns=tuple(chosen))._narrowed(width)

    def _narrowed(self, width: int) -> list[Table]:
        columns = [*self.columns]
        if _room(column.least for column in columns) <= width:
            return [self]
        words = [place for place, column in enumerate(columns) if column.words]
        if len(words) > 1:
            *_, upper, lower = words
            pairs = zip(columns[upper].texts(), columns[lower].texts(), strict=True)
            head = "\n".join((columns[upper].head, columns[lower].head))
            columns[upper] = Column(head, [*map("\n".join, pairs)], words=True)
            del columns[lower]
            return replace(self, columns=tuple(columns))._narrowed(width)
        parts: list[list[Column]] = [[]]
        fixed = [column for column in columns if column.words or column.heading]
        left = most = width - sum(column.least + GAP for column in fixed)
        for column in columns:
            if column in fixed:
                continue
            if column.least > left and parts[-1]:
                parts.append([])
                left = most
            parts[-1].append(column)
            left -= column.least + GAP
        return [replace(self, columns=(*fixed, *part)) for part in parts]

    def _drawn(self, width: int) -> RichTable:
        """Its heads and rows, without title and notes; all bars are equally wide, as wide as fits."""
        bars = [column for column in self.columns if column.bars]
        spare = width - _room(column.width for column in self.columns) + NARROWEST * len(bars)
        bar = min(WIDEST, max(NARROWEST, spare // max(1, len(bars))))
        table = RichTable(box=None, padding=(0, GAP // 2), pad_edge=False, header_style="dim")
        table.show_header = any(self.heads)
        for column in self.columns:
            wraps, head = column.words or column.wraps, column.head
            table.add_column(
                Wrapped(Text(head)) if column.wraps else head,
                justify="left" if column.left else "right", style=column.style, no_wrap=not wraps,
            )  # fmt: skip
        for number, row in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            total = number >= len(self.columns[0].cells) - self.totals
            table.add_row(*map(_rendered, row, self.columns, [bar] * len(row)), style="bold" if total else "")
        return table

    # Page #

    def html(self, kind: str = "") -> str:
        """The table as a section of a page, without bars; "" without rows. kind: its classes."""
        columns = [column for column in self.columns if not column.bars and not column.replaces]
        if not columns[0].cells:
            return ""
        heads = "".join(f"<th{_class(column)}>{text(_name(column))}</th>" for column in columns)
        heads = f"<thead><tr>{heads}</tr></thead>" if any(self.heads) else ""
        title = f"<h2>{text(self.title)}</h2>" if self.title else ""
        rows = "".join(
            f"<tr{self._class(number)}>{''.join(_cell(column, number) for column in columns)}</tr>"
            for number in range(len(columns[0].cells))
        )
        classes = f"facts {kind or self.kind}" if heads else "facts"
        return (
            f"<section>{title}{self.above}<div class='wide{' tall' * self.tall}'><table class='{classes}'>"
            f"{heads}<tbody>{rows}</tbody></table></div>{notes(self.notes)}</section>"
        )

    def _class(self, number: int) -> str:
        if number == self.chosen:
            return " class=chosen"
        return " class=total" if number >= len(self.columns[0].cells) - self.totals else ""

    # Markdown #

    def markdown(self) -> str:
        """The table as Markdown, its notes below it."""
        rules = tuple("---" if column.words else "---:" for column in self.columns)
        notes = "".join(f"\n{note}" for note in self.notes)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.heads, rules, *self.rows)) + notes


@dataclass(frozen=True)
class Wrapped:
    """Words whose lines end behind a space or, within a long name, behind a hyphen or slash."""

    words: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.words.split("\n", allow_blank=True):
            yield from _lines(line, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = _length(self.words)
        return Measurement(min(LEAST, longest), longest)


def _lines(line: Text, width: int) -> Iterator[Text]:
    """Yield lines of at most `width` terminal columns, cut between words; PART and then any place cuts a word
    that is longer.
    """
    start = end = 0
    for word in WORD.findall(line.plain):
        for piece in PART.findall(word) if len(word.rstrip()) > width else [word]:
            if line[start : end + len(piece.rstrip())].cell_len > width and end > start:
                yield line[start:end]
                start = end
            end += len(piece)
            while end - start > width and len(piece.rstrip()) > width:
                yield line[start : start + width]
                start += width
    yield line[start:]


def _rendered(cell: Cell, column: Column, bar: int) -> RenderableType:
    from meshtune.report.draw.bars import Bar, Marked  # which import the planner's names of parts

    if isinstance(cell, Segments):
        return Bar(*cell[:2], width=bar, until=cell.until)
    if isinstance(cell, Name):
        return Marked(cell.name)
    line = cell if isinstance(cell, Text) else Text(_plain(cell))
    return Wrapped(line) if column.words or column.wraps else line


def _plain(cell: Cell) -> str:
    if isinstance(cell, Segments):
        return ""
    if isinstance(cell, Name | Markup):
        return cell[0]
    return cell.plain if isinstance(cell, Text) else cell


def _length(cell: Cell) -> int:
    """Terminal columns of the longest line of a cell."""
    mark = 2 if isinstance(cell, Name) else 0
    return mark + max(Text(line).cell_len for line in _plain(cell).split("\n"))


def _room(widths: Iterable[int]) -> int:
    sizes = [*widths]
    return sum(sizes) + GAP * (len(sizes) - 1)


def _name(column: Column) -> str:
    """A column's name in one line: "tokens/s/GPU", "GPU-hours", "step ±5%"."""
    return column.name or re.sub(r"\n(?=/)|(?<=-)\n", "", column.head).replace("\n", " ").strip()


def _class(column: Column, cell: Cell = "") -> str:
    """The attribute of a head, or of a cell of its column; "" where it has no class."""
    best = "best" if getattr(cell, "style", "") == BEST else ""
    kind = "layout" if column.code else "left" if column.words or column.heading else best
    kind = " ".join(filter(None, (kind, cell.kind if isinstance(cell, Markup) else "")))
    return f" class='{kind}'" if kind else ""


def _cell(column: Column, number: int) -> str:
    cell = column.cells[number]
    content = cell.html if isinstance(cell, Markup) else text(_plain(cell)).replace("\n", "<br>")
    if column.heading:
        return f"<th>{content}</th>"
    content = f"<code>{content}</code>" if column.code and content else content
    if column.more and column.more[number]:
        content += f"<div class='why'>{text(column.more[number])}</div>"
    name = f" data-name='{text(_name(column))}'" if column.head and not column.words else ""
    return f"<td{_class(column, cell)}{name}>{content}</td>"


def facts(rows: Mapping[str, Any], title: str = "", form: Callable[[Any], str] = str) -> Table:
    """A table of names and values, those of an inner mapping as `name.inner`, without those that are None.

    form: writes a value that isn't a Text.
    """
    names, values = [*zip(*_leaves(rows), strict=True)] or [(), ()]
    cells = [value if isinstance(value, Text) else printable(form(value)) for value in values]
    return Table(title, (Column("", names, heading=True, style="dim"), Column("", cells, words=True)))


def _leaves(rows: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in rows.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
