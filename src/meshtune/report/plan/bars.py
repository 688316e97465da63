"""Bars, legends and tables for a terminal of any width.

Bars are of colours where the terminal has enough of them, else of letters. Where it is narrow they shrink;
when they are as short as they may be, columns are left out, bars before numbers; then names are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.colours import COLOURS, MEMORY_PARTS

LETTERS = {name: name[0].upper() for name in (*MEMORY_PARTS, *PARTS)}
LETTERS |= {"gathered weights": "w", "context": "X", "overhead": "V"}
FREE = "·"
NAMES = max(map(len, LETTERS)) + 2  # terminal columns of a name with its mark
NARROWEST, WIDEST = 8, 26  # bars, in terminal columns
SHORTEST_NAME = 14  # terminal columns that are left of a layout's name
GAP = 2  # between columns of a table
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Bar:
    """Segments in a row, as blocks of colour or, on a terminal without colours, as letters."""

    segments: Mapping[str, float]  # name -> length; the name "" is drawn blank
    scale: float  # length that fills the width
    width: int = WIDEST  # columns of the terminal
    until: float = 0.0  # length up to which dots follow the segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        draw = blocks if colourful(console) else letters
        text = draw(self.cells(8 if colourful(console) else 1))
        dots = round(self.until / self.scale * self.width) - len(text)
        text.append(free(options) * dots, style="dim")
        yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def cells(self, steps: int) -> list[str]:
        """Segment name of each of the `steps` sub-cells per terminal column.

        Sums are rounded, not lengths, so that no error adds up.
        """
        ends = [round(end / self.scale * self.width * steps) for end in accumulate(self.segments.values())]
        return [
            name
            for name, (start, end) in zip(self.segments, pairwise([0, *ends]), strict=True)
            for _ in range(start, end)
        ]


def blocks(cells: Sequence[str]) -> Text:
    """Draw cells of an eighth of a terminal column each (segment names) as block characters.

    Where two segments meet in a column, one is the character's colour and the other its background.
    """
    text = Text(no_wrap=True)
    for start in range(0, len(cells), 8):
        column = [*cells[start : start + 8], *[""] * 8][:8]
        first = column[0]
        eighths = next((place for place, name in enumerate(column) if name != first), 8)
        others = [name for name in column[eighths:] if name or first]
        other = max(others, key=others.count, default="")
        if first:
            background = f" on {COLOURS[other]}" if other else ""
            text.append(EIGHTHS[eighths], style=COLOURS[first] + background)
        else:  # a blank first: the segment is the background, reversed
            character = EIGHTHS[eighths] if other else " "
            text.append(character, style=f"{COLOURS[other]} reverse" if other else "")
    return text


def letters(cells: Sequence[str]) -> Text:
    """Draw cells of one terminal column each (segment names) as one letter per cell."""
    return Text("".join(LETTERS.get(name, " ") for name in cells), no_wrap=True)


def colourful(console: Console) -> bool:
    """True if the terminal has a colour for each name, and block characters."""
    return (
        console.color_system in ("256", "truecolor")
        and not console.no_color
        and not console.options.ascii_only
    )


def free(options: ConsoleOptions) -> str:
    """Character for free memory."""
    return "." if options.ascii_only else FREE


@dataclass(frozen=True)
class Legend:
    """Names of segments (keys of COLOURS) with their colours or letters, as many in a line as fit."""

    title: str
    names: Sequence[str]
    dots: str = ""  # meaning of the dots; "" if there are none

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = start = Text(f"{self.title:<7}", style="dim", no_wrap=True)
        entries = [(self.mark(name, console), name) for name in self.names]
        if self.dots:
            entries.append((Text(free(options), style="dim"), self.dots))
        for mark, name in entries:
            if line.cell_len + len(name) + 4 > options.max_width and line is not start:
                yield line
                line = Text(" " * len(start.plain[:7]), no_wrap=True)
            line = Text.assemble(line, " ", mark, " ", (name, "dim"), " ", no_wrap=True)
        yield line

    @staticmethod
    def mark(name: str, console: Console) -> Text:
        return Text("█", style=COLOURS[name]) if colourful(console) else Text(LETTERS[name])


@dataclass(frozen=True)
class Name:
    """A segment's name beside its colour or letter."""

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(Legend.mark(self.name, console), " ", self.name, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(NAMES, NAMES)


# tables that fit #


@dataclass(frozen=True)
class Column:
    """A table's column, of texts or of bars; all columns of a table have the same number of rows."""

    title: str
    cells: Sequence[RenderableType] = ()
    bars: Sequence[tuple[Mapping[str, float], float, float]] = ()  # (segments, scale, until) instead of cells
    justify: JustifyMethod = "right"
    style: str = ""
    cut: bool = False  # its texts may be cut, to SHORTEST_NAME columns, in a table without bars

    @property
    def width(self) -> int:
        """Terminal columns of the longest cell; 0 for bars, because they can shrink."""
        if self.bars:
            return 0
        texts = [*self.title.splitlines(), *(len_of(cell) * " " for cell in self.cells)]
        return max(map(len, texts), default=0)

    @property
    def least(self) -> int:
        """Terminal columns that this one needs in a table without bars."""
        return min(self.width, SHORTEST_NAME) if self.cut else self.width


def shortened(cell: RenderableType, width: int) -> RenderableType:
    """A text cut in its middle to `width` terminal columns; its end names micro-batch and recomputation."""
    text = cell if isinstance(cell, Text) else Text(str(cell))
    if text.cell_len <= width:
        return cell
    tail = (width - 1) // 2
    return Text.assemble(text[: width - 1 - tail], "…", text[len(text) - tail :])


def len_of(cell: RenderableType) -> int:
    """Width of a cell in terminal columns."""
    if isinstance(cell, Name):
        return NAMES
    return Text(cell).cell_len if isinstance(cell, str) else getattr(cell, "cell_len", 0)


@dataclass(frozen=True)
class Fitted:
    """A table with the first choice of columns that fits the terminal.

    If none fits, the last choice is drawn and its texts are wrapped. All bars are equally wide: as wide as
    fits, from NARROWEST to WIDEST terminal columns.
    """

    columns: Mapping[str, Column]  # by name
    choices: Sequence[Sequence[str]]  # names of columns, left to right; widest choice first
    # names of the columns drawn -> legends, which are drawn below the table
    below: Callable[[Sequence[str]], Iterator[RenderableType]] = lambda names: iter(())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, bar, cut = self.chosen(options.max_width)
        table = Table(box=None, padding=(0, GAP // 2), pad_edge=False, header_style="dim")
        chosen = [self.columns[name] for name in names]
        table.show_header = any(column.title for column in chosen)
        for column in chosen:
            table.add_column(column.title, justify=column.justify, style=column.style, no_wrap=True)
        if names == self.choices[-1]:
            for column in table.columns:
                column.no_wrap, column.overflow = False, "fold"  # nothing is left to leave out
        cells = [
            [Bar(segments, scale, bar, until) for segments, scale, until in column.bars]
            or [shortened(cell, column.width - cut) if column.cut else cell for cell in column.cells]
            for column in chosen
        ]
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        yield table
        yield from self.below(names)

    def chosen(self, width: int) -> tuple[Sequence[str], int, int]:
        """The first choice that fits in `width` terminal columns, else the last; as (names of its columns,
        columns of a bar, columns by which a column that may be cut is cut).
        """
        names, bar, spare = self.choices[-1], NARROWEST, 0
        for names in self.choices:
            columns = [self.columns[name] for name in names]
            bars = sum(bool(column.bars) for column in columns)
            spare = width - sum(column.width for column in columns) - GAP * (len(columns) - 1)
            bar = min(WIDEST, spare // max(1, bars))
            cut = 0 if bars else sum(column.width - column.least for column in columns)
            if spare + cut >= NARROWEST * bars:
                break
        return names, max(bar, NARROWEST), max(0, -spare)
