"""A plan in the terminal: which layouts, how fast, and what fills a GPU's memory and a step's time.

    1  zero2x8-mb1-ga8         8,668  3.78 s  42.3%  WWWWGGGGOOAAAAA···  65.1 / 79.1 GiB  CCCCCCCCCD
    2  zero2x4-tp2-sp-mb2-ga8  8,483  3.86 s  41.4%  WWWWGGGGOOAAA·····  56.3 / 79.1 GiB  CCCCCCCCCTD

Bars are of colours where the terminal has enough of them, else of letters. Where it is narrow they shrink;
when they are as short as they may be, a column is left out, so that nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshtune.plan.memory import CATEGORIES, EVENTS, RANKS
from meshtune.plan.seconds import PARTS
from meshtune.report.plots import DARK, LIGHT
from meshtune.units import GIB, human

if TYPE_CHECKING:
    from meshtune.plan.search import Choice

# what holds memory, what takes time: one colour for each name, in every picture
MEMORY = {
    "weights": LIGHT["main"],
    "gradients": LIGHT["other"],
    "optimizer": "#009e73",
    "activations": "#7a6fb0",
    "logits": "#cc79a7",
    "communication": DARK["other"],
    "overhead": "#8b929b",
}
TIME = {
    "compute": DARK["main"],
    "tensor": LIGHT["other"],
    "context": "#cc79a7",
    "pipeline": "#7a6fb0",
    "data": DARK["other"],
    "optimizer": "#009e73",
    "bubble": "#b9bfc7",
    "host": "#6b727b",
}
COLOURS = MEMORY | TIME
LETTERS = {name: name[0].upper() for name in COLOURS} | {"context": "X", "overhead": "V"}
FREE = "·"
NAMES = max(map(len, COLOURS)) + 2  # columns of the terminal, with the mark
NARROWEST, WIDEST = 8, 26  # bars, in columns of the terminal
GAP = 2  # between columns of a table
EIGHTHS = " ▏▎▍▌▋▊▉█"

WHAT = {  # of a rank's memory
    "weights": "parameters, as they are kept and computed with",
    "gradients": "with their sum over micro-batches and ranks",
    "optimizer": "moments, and master weights kept beside the weights",
    "activations": "kept for the backward, and at work in one block",
    "logits": "of the tokens that the loss looks at together",
    "communication": "gathered parameters, messages on their way",
    "overhead": "context, communicators, gaps of the allocator",
}
WHY = {  # of a step's time
    "compute": "products, attention and what is elementwise",
    "tensor": "messages of tp that computing does not hide",
    "context": "messages of cp",
    "pipeline": "hidden states to the next stage",
    "data": "messages about weights and gradients, not hidden",
    "optimizer": "the update",
    "bubble": "waiting for other stages",
    "host": "waiting for launches",
}


# bars #


@dataclass(frozen=True)
class Bar:
    """Segments in a row; what is as long as `scale` fills the width. "" is blank, dots go on to `until`."""

    segments: Mapping[str, float]
    scale: float
    width: int = WIDEST
    until: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        draw = blocks if colourful(console) else letters
        text = draw(self.owners(8 if colourful(console) else 1))
        dots = round(self.until / self.scale * self.width) - len(text)
        text.append(free(options) * dots, style="dim")
        yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def owners(self, steps: int) -> list[str]:
        """Whose each step, `steps` to a column, is. Sums are rounded, so that no error adds up."""
        ends = [round(end / self.scale * self.width * steps) for end in accumulate(self.segments.values())]
        return [
            name
            for name, (start, end) in zip(self.segments, pairwise([0, *ends]), strict=True)
            for _ in range(start, end)
        ]


def blocks(owners: Sequence[str]) -> Text:
    """Eighths of columns as block characters: where two segments meet, one is ink and the other paper."""
    text = Text(no_wrap=True)
    for start in range(0, len(owners), 8):
        cell = [*owners[start : start + 8], *[""] * 8][:8]
        first = cell[0]
        ink = next((place for place, name in enumerate(cell) if name != first), 8)
        others = [name for name in cell[ink:] if name or first]
        other = max(others, key=others.count, default="")
        if first:
            paper = f" on {COLOURS[other]}" if other else ""
            text.append(EIGHTHS[ink], style=COLOURS[first] + paper)
        else:  # the terminal's own colour is the ink
            text.append(EIGHTHS[ink] if other else " ", style=f"{COLOURS[other]} reverse" if other else "")
    return text


def letters(owners: Sequence[str]) -> Text:
    return Text("".join(LETTERS.get(name, " ") for name in owners), no_wrap=True)


def colourful(console: Console) -> bool:
    """Whether the terminal has a colour for each name, and block characters."""
    return (
        console.color_system in ("256", "truecolor")
        and not console.no_color
        and not console.options.ascii_only
    )


def free(options: ConsoleOptions) -> str:
    return "." if options.ascii_only else FREE


@dataclass(frozen=True)
class Legend:
    """Names with their colours or letters, as many a line as fit."""

    title: str
    names: Sequence[str]
    dots: str = ""  # what they stand for, if there are any

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


# columns that fit #


@dataclass(frozen=True)
class Column:
    """A table's column. bars: (segments, scale, until) of cells that are bars instead of text."""

    title: str
    cells: Sequence[RenderableType] = ()
    bars: Sequence[tuple[Mapping[str, float], float, float]] = ()
    justify: str = "right"
    style: str = ""

    @property
    def width(self) -> int:
        """Of what can't shrink."""
        if self.bars:
            return 0
        texts = [*self.title.splitlines(), *(len_of(cell) * " " for cell in self.cells)]
        return max(map(len, texts), default=0)


def len_of(cell: RenderableType) -> int:
    if isinstance(cell, Name):
        return NAMES
    return Text(cell).cell_len if isinstance(cell, str) else getattr(cell, "cell_len", 0)


@dataclass(frozen=True)
class Fitted:
    """A table of the first of these choices of columns that fits the terminal."""

    columns: Mapping[str, Column]
    choices: Sequence[Sequence[str]]
    below: Callable[[Sequence[str]], Iterator[RenderableType]] = field(default=lambda names: iter(()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, bar = self.chosen(options.max_width)
        table = Table(box=None, padding=(0, GAP // 2), pad_edge=False, header_style="dim")
        found = [self.columns[name] for name in names]
        table.show_header = any(column.title for column in found)
        for column in found:
            table.add_column(column.title, justify=column.justify, style=column.style, no_wrap=True)  # pyright: ignore[reportArgumentType]
        if names == self.choices[-1]:
            for column in table.columns:
                column.no_wrap, column.overflow = False, "fold"  # nothing is left to leave out
        cells = [
            [Bar(segments, scale, bar, until) for segments, scale, until in column.bars] or column.cells
            for column in found
        ]
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        yield table
        yield from self.below(names)

    def chosen(self, width: int) -> tuple[Sequence[str], int]:
        """(names of the columns, how wide their bars are)."""
        names, bar = self.choices[-1], NARROWEST
        for names in self.choices:
            found = [self.columns[name] for name in names]
            bars = sum(bool(column.bars) for column in found)
            spare = width - sum(column.width for column in found) - GAP * (len(found) - 1)
            bar = min(WIDEST, spare // max(1, bars))
            if spare >= NARROWEST * bars:
                break
        return names, max(bar, NARROWEST)


# what is shown #


def layouts_table(choices: Sequence[Choice]) -> RenderableType:
    """Layouts as they are given, best first: speed, and what fills memory and step. Red: does not fit."""
    room = max((max(c.cluster.memory, c.memory.peak) for c in choices), default=1)
    longest = max((c.seconds.total for c in choices), default=1)
    columns = {
        "rank": Column("", [f"{place}" for place in range(1, len(choices) + 1)], style="dim"),
        "layout": Column(
            "layout",
            [Text(str(c.layout), style="" if place else "bold") for place, c in enumerate(choices)],
            justify="left",
        ),
        "speed": Column("tokens/s\n/GPU", [number(c.tokens_per_second_per_gpu) for c in choices]),
        "step": Column("step", [seconds(c.seconds.total) for c in choices]),
        "mfu": Column("MFU", [f"{c.mfu:.1%}" for c in choices]),
        "bar": Column(
            "memory",
            bars=[(held(c), room, c.cluster.memory) for c in choices],
            justify="left",
        ),
        "memory": Column("", [of_capacity(c) for c in choices]),
        "peak": Column("GiB", [in_red(c, f"{c.memory.peak / GIB:.1f}") for c in choices]),
        "time": Column("time", bars=[(spent(c), longest, 0) for c in choices], justify="left"),
    }

    def legends(names: Sequence[str]) -> Iterator[RenderableType]:
        yield Text()
        if "bar" in names:
            yield Legend("memory", in_any(CATEGORIES, map(held, choices)), dots="free")
        if "time" in names:
            yield Legend("time", in_any(PARTS, map(spent, choices)))

    start = ("rank", "layout", "speed", "step")
    return Fitted(
        columns,
        (
            (*start, "mfu", "bar", "memory", "time"),
            (*start, "mfu", "bar", "memory"),
            (*start, "mfu", "bar", "peak"),
            (*start, "bar", "peak"),
            ("rank", "layout", "speed", "bar", "peak"),  # a step's time says the same as its tokens/s
            (*start, "peak"),
            ("layout", "speed", "peak"),
            ("layout", "speed" if all(c.fits for c in choices) else "peak"),
        ),
        legends,
    )


def explanation(choice: Choice) -> RenderableType:
    """One layout's memory by category and time by part, and where and when its memory is fullest."""
    c, m, total = choice, choice.memory, choice.seconds.total
    rank = f"{RANKS[int(m.rank)]} pipeline rank" if c.layout.pp > 1 else ""
    where = f", on the {rank.replace('middle', 'fullest middle')}" if rank else ", on every rank"
    gpus = f"{c.layout.world} × {c.cluster.gpu.name}"
    speed = number(c.tokens_per_second_per_gpu)
    return Group(
        Text.assemble((str(c.layout), "bold"), (f"  on {gpus}", "dim")),
        Text(f"{speed} tokens/s/GPU · {seconds(total)} a step · MFU {c.mfu:.1%}"),
        Text(),
        Text.assemble(("Memory  ", "bold"), of_capacity(c), f" at the peak: {moment_of(c)}{where}"),
        *too_full(c),
        shares(held(c), WHAT, human, "peak"),
        Text(),
        Text.assemble(("Time  ", "bold"), f"{seconds(total)} a step, by what a rank waits for"),
        shares(spent(c), WHY, seconds, "step"),
    )


def shares(
    parts: Mapping[str, float], said: Mapping[str, str], form: Callable[[float], str], of: str
) -> Fitted:
    """Parts under each other, each beginning where the last one ended, and their sum."""
    total = sum(parts.values())
    before = [0.0, *accumulate(parts.values())]
    bars = [
        ({"": start, name: size}, total, 0.0)
        for start, (name, size) in zip(before, parts.items(), strict=False)
    ]
    whole = [Text(of, style="bold"), Text(f"{form(total):>10}", style="bold"), Text(f"{1:.1%}", style="bold")]
    dim = ["" if size else "dim" for size in parts.values()]
    columns = {
        "name": Column("", [*map(Name, parts), whole[0]], justify="left"),
        "size": Column("", [*map(Text, map(form, parts.values()), dim), whole[1]]),
        "share": Column("", [*map(Text, (f"{size / total:.1%}" for size in parts.values()), dim), whole[2]]),
        "bar": Column("", bars=[*bars, (parts, total, 0.0)], justify="left"),
        "said": Column("", [*(said[name] for name in parts), ""], justify="left", style="dim"),
    }
    return Fitted(
        columns,
        (
            ("name", "size", "share", "bar", "said"),
            ("name", "size", "share", "bar"),
            ("name", "size", "share"),
        ),
    )


def sizes_table(best: Mapping[int, Choice | None], *, steps: int | None = None) -> RenderableType:
    """The best layout of each number of GPUs, and what more of them bring. steps: of the run, if known."""
    sizes = sorted(best)
    first = next(((gpus, c) for gpus in sizes if (c := best[gpus])), None)

    def of_each(form: Callable[[int, Choice], str]) -> list[str]:
        return [form(gpus, c) if (c := best[gpus]) else "" for gpus in sizes]

    def gain(gpus: int, c: Choice) -> float:
        assert first is not None
        each = c.tokens_per_second_per_gpu / first[1].tokens_per_second_per_gpu
        return each * gpus / first[0]

    columns = {
        "gpus": Column("GPUs", [f"{gpus:,}" for gpus in sizes]),
        "layout": Column(
            "best layout",
            [
                Text(str(c.layout)) if (c := best[gpus]) else Text("nothing fits", style="dim")
                for gpus in sizes
            ],
            justify="left",
        ),
        "speed": Column("tokens/s\n/GPU", of_each(lambda _, c: number(c.tokens_per_second_per_gpu))),
        "step": Column("step", of_each(lambda _, c: seconds(c.seconds.total))),
        "hours": Column(
            "GPU-hours",
            of_each(lambda gpus, c: number((steps or 0) * c.seconds.total * gpus / 3600)),
        ),
        "gain": Column("speed-up", of_each(lambda gpus, c: f"{gain(gpus, c):.2f} ×")),
        "efficiency": Column(
            "efficiency",
            of_each(lambda gpus, c: f"{gain(gpus, c) * first[0] / gpus:.1%}" if first else ""),
        ),
    }
    hours = ("hours",) if steps else ()
    start = ("gpus", "layout", "speed")
    return Fitted(
        columns,
        (
            (*start, "step", *hours, "gain", "efficiency"),
            (*start, "step", *hours, "efficiency"),
            (*start, *hours, "efficiency"),
            (*start, "efficiency"),
            start,
        ),
    )


# a choice's numbers #


def held(choice: Choice) -> dict[str, float]:
    """Bytes by category."""
    return {name: float(getattr(choice.memory, name)) for name in CATEGORIES}


def spent(choice: Choice) -> dict[str, float]:
    """Seconds by part."""
    return {name: float(getattr(choice.seconds, name)) for name in PARTS}


def in_any(names: Sequence[str], found: Iterator[Mapping[str, float]]) -> list[str]:
    """The names that are not nothing everywhere."""
    seen = {name for each in found for name, value in each.items() if value > 0}
    return [name for name in names if name in seen]


def of_capacity(choice: Choice) -> Text:
    m, capacity = choice.memory, choice.cluster.memory
    return in_red(choice, f"{m.peak / GIB:.1f} / {capacity / GIB:.1f} GiB")


def in_red(choice: Choice, text: str) -> Text:
    return Text(text, style="" if choice.fits else "red")


def moment_of(choice: Choice) -> str:
    return EVENTS[int(choice.memory.event)]


def too_full(choice: Choice) -> Iterator[Text]:
    """A sentence where it does not fit."""
    over = choice.memory.peak - choice.cluster.memory
    if over > 0:
        yield Text(f"does not fit: {human(over)} more than a GPU has", style="red")
    elif not choice.fits:
        yield Text(f"does not fit: {human(-over)} to spare is too little to count on", style="red")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Three or four digits: `seconds(0.0123) == "12.3 ms"`."""
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"
