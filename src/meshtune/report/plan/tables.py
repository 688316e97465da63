"""Layouts in the terminal: how fast each is, and what fills a GPU's memory and a step's time.

1  zero2x8-mb1-ga8         8,668  3.78 s  42.3%  WWWWGGGGOOAAAAA···  65.1 / 79.1 GiB  CCCCCCCCCD
2  zero2x4-tp2-sp-mb2-ga8  8,483  3.86 s  41.4%  WWWWGGGGOOAAA·····  56.3 / 79.1 GiB  CCCCCCCCCTD
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from meshtune.plan.memory.stages import RANKS
from meshtune.plan.memory.tensors import EVENTS
from meshtune.plan.phrases import of_objective, spent
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.bars import Legend
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.draw.table import Column, Name, Segments, Table
from meshtune.report.plan.numbers import (
    common_error,
    memory_parts,
    nonzero,
    number,
    of_capacity,
    plus_minus,
    seconds,
    speed_head,
    speed_unit,
    time_parts,
)
from meshtune.units import GIB, counted, human, money

if TYPE_CHECKING:
    from meshtune.plan.answer import Offer
    from meshtune.plan.cost import RunCost
    from meshtune.plan.search import Choice

MEMORY_MEANING = {  # parts of a rank's memory
    "weights": "parameters; under ZeRO the shard of their masters",
    "gathered weights": "whole parameters that ZeRO computes with",
    "gradients": "with their sum over micro-batches and ranks",
    "optimizer": "its state; without ZeRO also master weights, if the precision has them",
    "activations": "saved for the backward, and in use in one block",
    "logits": "of the tokens that the loss computes at once",
    "communication": "buffers of collectives and of pipeline messages",
    "temporary": "of the update",
    "overhead": "CUDA context, communicators, gaps of the allocator",
}


def layouts_table(choices: Sequence[Choice], runs: Sequence[RunCost] = (), why: Sequence[str] = ()) -> Table:
    """Table of layouts in the order given, with speed, memory and time; peaks that do not fit are red.

    Speed, step, MFU and peak always stay. runs: of the layouts, for columns of hours and price; none: no such
    columns. why: a sentence on each, for a page.
    """
    room = max((max(c.cluster.memory, c.memory.peak) for c in choices), default=1)
    longest = max((c.seconds.total for c in choices), default=1)
    time_error = common_error(choices, "time")
    names = [Text(str(c.layout), style="" if place else "bold") for place, c in enumerate(choices)]
    held = [Segments(memory_parts(c), room, c.cluster.memory) for c in choices]
    spent = [Segments(time_parts(c), longest) for c in choices]
    legends = {
        "memory": Legend("memory", nonzero(MEMORY_PARTS, map(memory_parts, choices)), dots="free"),
        "time": Legend("time", nonzero(PARTS, map(time_parts, choices))),
    }
    costs = cost_columns(runs)
    shown = [name for name in ("hours", "cost") if name in costs] or [*{"million"} & costs.keys()]
    columns = (
        Column("", [f"{place}" for place in range(1, len(choices) + 1)], style="dim", priority=1),
        Column("layout", names, words=True, more=why, code=True),
        Column(speed_head(choices), [number(c.tokens_per_second_per_gpu) for c in choices]),
        Column(f"step\n{time_error}", [seconds(c.seconds.total) for c in choices]),
        Column("MFU", [f"{c.mfu:.1%}" for c in choices]),
        *(replace(costs[name], priority=2) for name in shown),
        Column("memory", held, priority=3),
        *peak_columns(choices, "", priority=4),
        Column("time", spent, priority=5),
    )
    return Table("", columns, chosen=0, legends=legends, kind="numbers layouts")


def peak_columns(choices: Sequence[Choice | None], head: str, *, priority: int) -> tuple[Column, Column]:
    """Columns of the peak out of a GPU's memory, with `head`, and of the peak only where that is too wide."""
    error = common_error(choices, "memory")
    peaks = [red_unless_fits(c, f"{c.memory.peak / GIB:.1f}") if c else "" for c in choices]
    peak = Column(f"GiB\n{error}", peaks, name=f"peak GiB {error}".strip())
    of_gpu = [red_unless_fits(c, of_capacity(c)) if c else "" for c in choices]
    return Column(f"{head}{error}", of_gpu, priority=priority, replaces=peak), peak


def explanation(choice: Choice) -> RenderableType:
    """One layout's memory by category and time by part, and the event and rank of its memory peak."""
    memory, total = choice.memory, choice.seconds.total
    rank = f"{RANKS[int(memory.rank)]} pipeline rank" if choice.layout.pp > 1 else ""
    where = f", on the {rank.replace('middle', 'fullest middle')}" if rank else ", on every rank"
    event = EVENTS[int(memory.event)]
    peak = red_unless_fits(choice, of_capacity(choice))
    runner = "" if choice.tool is MESHTUNE else f", run by {choice.tool.title}"
    title = of_objective(choice.objective) + runner
    speed = f"{number(choice.tokens_per_second_per_gpu)} {choice.cluster.speed_unit}"
    accuracy = choice.accuracy
    time_error, memory_error = (
        f" {plus_minus(share)}".rstrip() for share in (accuracy.time, accuracy.memory)
    )
    time_meaning = {part: spent(part, choice.layout) for part in PARTS}
    step = f"{speed} · {seconds(total)} a step"
    return Group(
        Text.assemble((str(choice.layout), "bold"), (f"  on {choice.cluster.title}{title}", "dim")),
        Text.assemble(step, (time_error, "dim"), f" · MFU {choice.mfu:.1%}"),
        Text(),
        Text.assemble(("Memory  ", "bold"), peak, (memory_error, "dim"), f" at the peak: {event}{where}"),
        *does_not_fit_sentence(choice),
        shares(memory_parts(choice), MEMORY_MEANING, human, "peak"),
        Text.assemble(("\nTime  ", "bold"), f"{seconds(total)} a step, by what a rank waits for"),
        shares(time_parts(choice), time_meaning, seconds, "step"),
    )


def shares(
    parts: Mapping[str, float], meanings: Mapping[str, str], form: Callable[[float], str], total_name: str
) -> Table:
    """Table of parts with size, share of the sum and a bar, which begins where the one above ended.

    parts: name -> size, the sum above 0. meanings: name -> phrase, for each part. form: formats a size.
    total_name: name of the last row, the sum.
    """
    total = sum(parts.values())
    starts = [0.0, *accumulate(parts.values())]
    bars = [
        Segments({"": start, name: size}, total)
        for start, (name, size) in zip(starts, parts.items(), strict=False)
    ]
    dim = ["" if size else "dim" for size in parts.values()]
    columns = (
        Column("", [*map(Name, parts), total_name], words=True),
        Column("", [*map(Text, map(form, parts.values()), dim), f"{form(total):>10}"]),
        Column("", [*map(Text, (f"{size / total:.1%}" for size in parts.values()), dim), f"{1:.1%}"]),
        Column("", [*bars, Segments(parts, total)], priority=1),
        Column("", [*(meanings[name] for name in parts), ""], words=True, style="dim", priority=2),
    )
    return Table("", columns, totals=1)


def red_unless_fits(choice: Choice, text: str) -> Text:
    """The text, in red if the layout does not fit."""
    return Text(text, style="" if choice.fits else "red")


def does_not_fit_sentence(choice: Choice) -> Iterator[Text]:
    """Yield a sentence if the layout does not fit, else nothing.

    A layout that leaves less than the planner's margin free does not fit either.
    """
    over = choice.memory.peak - choice.cluster.memory
    if over > 0:
        yield Text(f"does not fit: {human(over)} more than a GPU has", style="red")
    elif not choice.fits:
        too_much = human(choice.memory.peak - choice.cluster.usable_memory)
        yield Text(f"does not fit: {too_much} more than the planner fills", style="red")


# Clusters #

#    GPUs          best layout        tokens/s/GPU   GiB  hours  GPU-hours  USD  speed-up  efficiency
# →  8 x h100-sxm  zero3x8-mb1-ga32          7,547  65.1   19.3        154  386    1.00 ×      100.0%
#    8 x h200      …


IN_WORDS = {"": "", "→": "recommended", "×": "beyond what was asked for"}
COSTS = {"million": 0, "hours": 2, "cost": 2, "gpu_hours": 4}  # column -> its priority
MARKS = {"→": "chosen", "×": "misses --by or --budget"}


def clusters_table(offers: Sequence[Offer], chosen: Offer) -> Table:
    """Table of the best layout of each cluster, in the order given.

    "speed-up" compares tokens/s of whole clusters with the first that has a layout, "efficiency" tokens/s/GPU
    with the smallest cluster of the same kind. Hours and prices have a column where they are known.
    """
    marks = [mark(offer, chosen) for offer in offers]
    choices = [offer.choice for offer in offers]
    several = len({offer.plan.cluster.gpu.name for offer in offers}) > 1
    named = several or not chosen.plan.cluster.gpu.measured

    def times(form: Callable[[Offer, Choice], str]) -> list[str]:
        """form(offer, its layout) for each; "" where nothing fits."""
        return [form(offer, offer.choice) if offer.choice else "" for offer in offers]

    first = next(offer for offer in offers if offer.choice)
    costs = cost_columns([offer.run for offer in offers])
    speeds = times(lambda _, choice: number(choice.tokens_per_second_per_gpu))
    steps = times(lambda _, choice: seconds(choice.seconds.total))
    gains = times(lambda offer, _: f"{speed(offer) / speed(first):.2f} ×")
    efficiencies = times(lambda offer, _: f"{efficiency(offer, offers):.1%}")
    names = [Text(str(c.layout)) if c else Text("nothing fits", style="dim") for c in choices]
    titles = [offer.title if named else f"{offer.plan.cluster.gpus:,}" for offer in offers]
    columns = (
        Column("", marks),
        Column("GPUs", titles, words=named),
        Column("best layout", names, words=True, more=[IN_WORDS[sign] for sign in marks], code=True),
        Column(speed_head(choices), speeds, priority=3),
        Column(f"step\n{common_error(choices, 'time')}", steps),
        *peak_columns(choices, "memory\n", priority=7),
        *(replace(column, priority=COSTS[name]) for name, column in costs.items()),
        Column("speed-up", gains, priority=6),
        Column("efficiency", efficiencies, priority=5),
    )
    used = [f"{sign} {meaning}" for sign, meaning in MARKS.items() if sign in marks]
    return Table("", columns, (" · ".join(used),), chosen=marks.index("→"), kind="numbers layouts")


def cost_columns(runs: Sequence[RunCost | None]) -> dict[str, Column]:
    """Columns hours, gpu_hours, cost and million: each where a run has it; a currency is in the head."""
    currency = next((run.currency for run in runs if run and run.currency), "")
    errors = {run.error for run in runs if run}
    error = plus_minus(errors.pop()) if len(errors) == 1 else ""
    heads = {
        "hours": (f"hours\n{error}", "hours", [run and run.seconds and run.seconds / 3600 for run in runs]),
        "gpu_hours": ("GPU-\nhours", "", [run and run.gpu_hours for run in runs]),
        "cost": (currency or "cost", "cost", [run and run.cost for run in runs]),
        "million": (
            f"{currency or 'cost'}/M\ntokens", "a million tokens",
            [run and run.cost_per_million_tokens for run in runs],
        ),
    }  # fmt: skip
    forms = {"cost": money, "million": money}
    return {
        key: Column(head, ["" if n is None else forms.get(key, number)(n) for n in values], name=name)
        for key, (head, name, values) in heads.items()
        if any(value is not None for value in values)
    }


def mark(offer: Offer, chosen: Offer) -> str:
    """Sign of MARKS of an offer; "" for an offer without a layout and one that is merely worse."""
    if offer.plan is chosen.plan:
        return "→"
    return "×" if offer.misses else ""


def speed(offer: Offer) -> float:
    """Tokens/s of the whole cluster under its best layout."""
    assert offer.choice is not None
    return offer.choice.tokens_per_second_per_gpu * offer.plan.cluster.gpus


def efficiency(offer: Offer, offers: Sequence[Offer]) -> float:
    """Tokens/s/GPU as a share of those of the smallest cluster of the same kind that has a layout."""
    kind = offer.plan.cluster.gpu.name
    same = [other for other in offers if other.choice and other.plan.cluster.gpu.name == kind]
    smallest = min(same, key=lambda other: other.plan.cluster.gpus)
    sizes = offer.plan.cluster.gpus / smallest.plan.cluster.gpus
    return speed(offer) / speed(smallest) / sizes


# Layouts next to each other #

# A  zero3x64-mb1-ga4
# B  zero2x64-mb1-ga4
#                       A         B       B - A
# tokens/s/GPU      7,375     7,424         +49
# W weights       479 MiB  15.4 GiB  +14.9 GiB*

NOTABLE = 0.01  # share of the first layout's speed, peak or step from which a difference is marked
NOTE = f"* at least {NOTABLE:.0%} of A's speed, peak or step"


class Row(NamedTuple):
    """One quantity of every layout."""

    name: Text | Name
    values: Sequence[float]  # one per layout
    form: Callable[[float], str]  # of a value, and of a difference without its sign
    notable: float  # difference that is marked; 0: none is


def side_by_side(choices: Sequence[Choice]) -> RenderableType:
    """Table of speed, memory by category and time by part, with one column for each layout.

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
    rows = [*_speed(choices), *_memory(choices), *_time(choices)]
    columns = [Column("", [row.name for row in rows], words=True)]
    for place, letter in enumerate(letters):
        columns.append(Column(letter, [row.form(row.values[place]) for row in rows]))
        if place:
            columns.append(Column(f"{letter} - A", [difference(row, place) for row in rows], priority=1))
    return Group(*names, Text(), Table("", tuple(columns), (NOTE,)))


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
    yield Row(Text("MFU, %", style="bold"), [100 * choice.mfu for choice in choices], "{:.1f}".format, 0.0)


def _memory(choices: Sequence[Choice]) -> Iterator[Row]:
    """Rows of the peak and of its categories that any layout has."""
    title = Text.assemble(("peak memory", "bold"), (f" {common_error(choices, 'memory')}", "dim"))
    return _parts(title, [c.memory.peak for c in choices], MEMORY_PARTS, [*map(memory_parts, choices)], human)


def _time(choices: Sequence[Choice]) -> Iterator[Row]:
    """Rows of the step and of its parts that any layout has."""
    title = Text.assemble(("step", "bold"), (f" {common_error(choices, 'time')}", "dim"))
    return _parts(title, [c.seconds.total for c in choices], PARTS, [*map(time_parts, choices)], seconds)


def _parts(
    title: Text,
    wholes: Sequence[float],
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    form: Callable[[float], str],
) -> Iterator[Row]:
    """Yield a row of wholes and one for each part that is not 0 in all layouts."""
    yield Row(title, wholes, form, NOTABLE * wholes[0])
    for name in nonzero(names, parts):
        yield Row(Name(name), [part[name] for part in parts], form, NOTABLE * wholes[0])
