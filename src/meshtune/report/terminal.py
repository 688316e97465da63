"""Pictures made of characters: the loss curve under a finished run, and the README's picture of a terminal.

5.60 ┤╮
     │╰─╮
     │  ╰──╮
0.06 ┤     ╰───────────
     └ 1 ────────── 300
"""

import io
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import Console, RenderableType
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

QUIET = TerminalTheme(  # the picture's colours; readable on a light page and on a dark one
    (24, 27, 32),
    (214, 218, 224),
    [(24, 27, 32), (240, 128, 96), (120, 200, 140), (230, 175, 80),
     (95, 170, 235), (200, 150, 220), (90, 200, 205), (214, 218, 224)],
    [(120, 128, 138), (240, 128, 96), (120, 200, 140), (230, 175, 80),
     (95, 170, 235), (200, 150, 220), (90, 200, 205), (255, 255, 255)],
)  # fmt: skip

# rich's own frame fetches its typeface from a server; this one takes what the reader's machine has.
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font: 600 17px system-ui, -apple-system, "Segoe UI", sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def curve(values: Sequence[float], *, steps: tuple[int, int], width: int = 64, height: int = 7) -> Text:
    """A line of box-drawing characters through `values`, `width` columns by `height` rows, with both axes.

    More values than columns are averaged column by column; fewer are spread out. `steps` are the x axis'
    ends.
    """
    if not values:
        return Text("no values yet", style="dim")
    columns = resampled(values, width)
    low, high = min(columns), max(columns)
    scale = (height - 1) / (high - low) if high > low else 0.0
    levels = [round((value - low) * scale) for value in columns]  # 0: the bottom row
    cells = [[" "] * width for _ in range(height)]
    previous = levels[0]
    for column, level in enumerate(levels):
        if level == previous:
            cells[level][column] = "─"
        else:
            upper, lower = max(level, previous), min(level, previous)
            for between in range(lower + 1, upper):
                cells[between][column] = "│"
            cells[previous][column] = "╮" if level < previous else "╯"
            cells[level][column] = "╰" if level < previous else "╭"
        previous = level
    ends = {0: f"{low:.3g}", height - 1: f"{high:.3g}"}
    margin = max(map(len, ends.values()))
    picture = Text()
    for row in reversed(range(height)):
        picture.append(f"{ends.get(row, ''):>{margin}} {'┤' if row in ends else '│'}", style="dim")
        picture.append("".join(cells[row]) + "\n", style="blue")
    first, last = f" {steps[0]} ", f" {steps[1]}"
    axis = "└" + first + "─" * (width - len(first) - len(last)) + last
    return picture.append(" " * (margin + 1) + axis, style="dim")


def resampled(values: Sequence[float], width: int) -> list[float]:
    """`width` values: means of equal slices of more, or the nearest earlier of fewer."""
    edges = [column * len(values) / width for column in range(width + 1)]
    slices = (values[int(start) : max(int(start) + 1, int(end))] for start, end in pairwise(edges))
    return [fmean(part) for part in slices]


def terminal_picture(*shown: RenderableType, title: str = "meshtune", width: int = 80) -> str:
    """What a terminal of `width` columns shows, as one SVG that needs nothing from elsewhere."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for one in shown:
        console.print(one)
    return console.export_svg(title=title, theme=QUIET, code_format=FRAME)


def prompt(command: str) -> Text:
    """A command as it is typed."""
    return Text.assemble(("$ ", Style(color="green", bold=True)), (command, Style(bold=True)))
