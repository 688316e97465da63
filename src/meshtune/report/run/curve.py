"""The loss curve under a finished run, made of characters.

5.60 ┤╮
     │╰─╮
     │  ╰──╮
0.06 ┤     ╰───────────
     └ 1 ────────── 300
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.text import Text


def curve(values: Sequence[float], *, steps: tuple[int, int], width: int = 64, height: int = 7) -> Text:
    """A line of box-drawing characters through `values`, with both axes; without values a sentence.

    values: in order, evenly spaced, finite. More values than columns are averaged column by column; fewer are
    spread out. steps: (first, last) step, written at the ends of the x axis. width, height: terminal columns
    and rows of the line, without the axes.
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
    """`width` numbers: means of equal slices of `values`; with fewer values, values are repeated."""
    edges = [column * len(values) / width for column in range(width + 1)]
    slices = (values[int(start) : max(int(start) + 1, int(end))] for start, end in pairwise(edges))
    return [fmean(part) for part in slices]
