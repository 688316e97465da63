"""Layouts beside each other: `meshtune plan compare A,B`.

A  zero3x64-mb1-ga4
B  zero2x64-mb1-ga4
                      A         B       B - A
tokens/s/GPU      7,375     7,424         +49
W weights       479 MiB  15.4 GiB  +14.9 GiB*
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.plan.bars import Column, Fitted, Name
from meshtune.report.plan.numbers import (
    common_error,
    memory_parts,
    nonzero,
    number,
    seconds,
    speed_unit,
    time_parts,
)
from meshtune.units import counted, human

if TYPE_CHECKING:
    from meshtune.plan.search import Choice

NOTABLE = 0.01  # share of the first layout's speed, peak or step from which a difference is marked
NOTE = f"* at least {NOTABLE:.0%} of A's speed, peak or step"


class Row(NamedTuple):
    """One quantity of every layout."""

    name: RenderableType
    values: Sequence[float]  # one per layout
    form: Callable[[float], str]  # of a value, and of a difference without its sign
    notable: float  # difference that is marked; 0: none is


def side_by_side(choices: Sequence[Choice]) -> RenderableType:
    """Table of speed, memory by category and time by part, with one column for each layout; of memory
    alone where predicted times mean nothing.

    Behind the other layouts stand their differences from the first. choices: 2 to 26 layouts.
    """
    letters = string.ascii_uppercase[: len(choices)]
    sizes = {choice.layout.world for choice in choices}
    names = [
        Text.assemble(
            (letter, "bold"),
            f"  {choice.layout}",
            f"  on {counted(choice.layout.world, 'GPU')}" if len(sizes) > 1 else "",
            ("" if choice.fits else "  does not fit", "red"),
        )
        for letter, choice in zip(letters, choices, strict=True)
    ]
    timed = all(choice.cluster.timed for choice in choices)
    rows = [*(_speed(choices) if timed else ()), *_memory(choices), *(_time(choices) if timed else ())]
    columns = {"name": Column("", [row.name for row in rows], justify="left")}
    for place, letter in enumerate(letters):
        columns[letter] = Column(letter, [row.form(row.values[place]) for row in rows])
        if place:
            title = f"{letter} - A"
            columns[title] = Column(title, [difference(row, place) for row in rows])
    return Group(
        *names, Text(), Fitted(columns, (tuple(columns), ("name", *letters))), Text(NOTE, style="dim")
    )


def difference(row: Row, place: int) -> Text:
    """A layout's value less the first one's; with a mark if it is notable, "" if it prints as nothing."""
    more = row.values[place] - row.values[0]
    if row.form(row.values[place]) == row.form(row.values[0]):
        return Text("")
    mark = bool(row.notable) and abs(more) >= row.notable
    text = f"{'+' if more > 0 else '-'}{row.form(abs(more))}{'*' if mark else ' '}"
    return Text(text, style="bold" if mark else "dim")


def _speed(choices: Sequence[Choice]) -> Iterator[Row]:
    """Rows of speed and MFU; of the speed, a difference is marked."""
    speeds = [choice.tokens_per_second_per_gpu for choice in choices]
    yield Row(Text(speed_unit(choices), style="bold"), speeds, number, NOTABLE * speeds[0])
    yield Row(Text("MFU", style="bold"), [choice.mfu for choice in choices], "{:.1%}".format, 0.0)


def _memory(choices: Sequence[Choice]) -> Iterator[Row]:
    """Rows of the peak and of its categories that any layout has."""
    peaks, parts = [choice.memory.peak for choice in choices], [memory_parts(choice) for choice in choices]
    peak = Text.assemble(("peak memory", "bold"), (f" {common_error(choices, 'memory')}", "dim"))
    yield Row(peak, peaks, human, NOTABLE * peaks[0])
    for name in nonzero(MEMORY_PARTS, parts):
        yield Row(Name(name), [part[name] for part in parts], human, NOTABLE * peaks[0])


def _time(choices: Sequence[Choice]) -> Iterator[Row]:
    """Rows of the step and of its parts that any layout has."""
    steps, parts = [choice.seconds.total for choice in choices], [time_parts(choice) for choice in choices]
    step = Text.assemble(("step", "bold"), (f" {common_error(choices, 'time')}", "dim"))
    yield Row(step, steps, seconds, NOTABLE * steps[0])
    for name in nonzero(PARTS, parts):
        yield Row(Name(name), [part[name] for part in parts], seconds, NOTABLE * steps[0])
