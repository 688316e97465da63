"""Bars and their legends for a terminal: of colours where it has enough of them, else of letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.colours import COLOURS, MEMORY_PARTS
from meshtune.report.draw.table import WIDEST

LETTERS = {name: name[0].upper() for name in (*MEMORY_PARTS, *PARTS)}
LETTERS |= {"gathered weights": "w", "context": "X", "overhead": "V"}
FREE = "·"
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
    """Names of segments (keys of COLOURS) with their colours or letters, in lines that are filled."""

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
class Marked:
    """A segment's name next to its colour or letter."""

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(Legend.mark(self.name, console), " ", self.name, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(width := 2 + len(self.name), width)
