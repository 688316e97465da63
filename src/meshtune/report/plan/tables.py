"""Layouts in the terminal: how fast each is, and what fills a GPU's memory and a step's time.

1  zero2x8-mb1-ga8         8,668  3.78 s  42.3%  WWWWGGGGOOAAAAA···  65.1 / 79.1 GiB  CCCCCCCCCD
2  zero2x4-tp2-sp-mb2-ga8  8,483  3.86 s  41.4%  WWWWGGGGOOAAA·····  56.3 / 79.1 GiB  CCCCCCCCCTD
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from meshtune.plan.memory.stages import RANKS
from meshtune.plan.memory.tensors import EVENTS
from meshtune.plan.phrases import spent
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.report.plan.bars import Column, Fitted, Legend, Name
from meshtune.report.plan.clusters import cost_columns
from meshtune.report.plan.numbers import (
    common_error,
    memory_parts,
    nonzero,
    number,
    of_capacity,
    plus_minus,
    seconds,
    speed_head,
    time_parts,
)
from meshtune.units import GIB, human

if TYPE_CHECKING:
    from meshtune.plan.cost import RunCost
    from meshtune.plan.search import Choice

NO_TIMES = "No times: nobody has measured how fast a processor computes. Memory is predicted as on a GPU."
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


def layouts_table(choices: Sequence[Choice], runs: Sequence[RunCost] = ()) -> RenderableType:
    """Table of layouts in the order given, with speed, memory and time; peaks that do not fit are red.

    Where predicted times mean nothing, memory alone. A narrow terminal gets fewer columns, and names that are
    cut; speed, step and MFU always stay. runs: of the layouts, for columns of hours and price; none: no such
    columns.
    """
    room = max((max(c.cluster.memory, c.memory.peak) for c in choices), default=1)
    longest = max((c.seconds.total for c in choices), default=1)
    time_error, memory_error = common_error(choices, "time"), common_error(choices, "memory")
    columns = {
        "rank": Column("", [f"{place}" for place in range(1, len(choices) + 1)], style="dim"),
        "layout": Column(
            "layout",
            [Text(str(c.layout), style="" if place else "bold") for place, c in enumerate(choices)],
            justify="left",
            cut=True,
        ),
        "speed": Column(speed_head(choices), [number(c.tokens_per_second_per_gpu) for c in choices]),
        "step": Column(f"step\n{time_error}", [seconds(c.seconds.total) for c in choices]),
        "mfu": Column("MFU", [f"{c.mfu:.1%}" for c in choices]),
        **cost_columns(runs),
        "bar": Column(
            "memory",
            bars=[(memory_parts(c), room, c.cluster.memory) for c in choices],
            justify="left",
        ),
        "memory": Column(memory_error, [red_unless_fits(c, of_capacity(c)) for c in choices]),
        "peak": Column(
            f"GiB\n{memory_error}", [red_unless_fits(c, f"{c.memory.peak / GIB:.1f}") for c in choices]
        ),
        "time": Column("time", bars=[(time_parts(c), longest, 0) for c in choices], justify="left"),
    }

    def legends(names: Sequence[str]) -> Iterator[RenderableType]:
        yield Text()
        if "bar" in names:
            yield Legend("memory", nonzero(MEMORY_PARTS, map(memory_parts, choices)), dots="free")
        if "time" in names:
            yield Legend("time", nonzero(PARTS, map(time_parts, choices)))

    if not all(choice.cluster.timed for choice in choices):
        start = ("rank", "layout")
        return Fitted(columns, ((*start, "bar", "memory"), (*start, "peak"), ("layout", "peak")), legends)
    start = ("rank", "layout", "speed", "step", "mfu")
    costs = [name for name in ("hours", "cost") if name in columns] or [*{"million"} & columns.keys()]
    return Fitted(
        columns,
        (
            (*start, *costs, "bar", "memory", "time"),
            (*start, *costs, "bar", "memory"),
            (*start, *costs, "bar", "peak"),
            (*start, *costs, "peak"),
            (*start, "bar", "memory", "time"),
            (*start, "bar", "memory"),
            (*start, "bar", "peak"),
            (*start, "peak"),
            start[1:],
        ),
        legends,
    )


def explanation(choice: Choice) -> RenderableType:
    """One layout's memory by category and time by part, and the event and rank of its memory peak.

    Where predicted times mean nothing, memory alone.
    """
    memory, total = choice.memory, choice.seconds.total
    rank = f"{RANKS[int(memory.rank)]} pipeline rank" if choice.layout.pp > 1 else ""
    where = f", on the {rank.replace('middle', 'fullest middle')}" if rank else ", on every rank"
    event = EVENTS[int(memory.event)]
    peak = red_unless_fits(choice, of_capacity(choice))
    runner = "" if choice.tool is MESHTUNE else f", run by {choice.tool.title}"
    speed = f"{number(choice.tokens_per_second_per_gpu)} {choice.cluster.speed_unit}"
    accuracy = choice.accuracy
    time_error, memory_error = (
        f" {plus_minus(share)}".rstrip() for share in (accuracy.time, accuracy.memory)
    )
    time_meaning = {part: spent(part, choice.layout) for part in PARTS}
    step = Text.assemble(
        f"{speed} · {seconds(total)} a step", (time_error, "dim"), f" · MFU {choice.mfu:.1%}"
    )
    speeds: list[RenderableType] = [step, Text()]
    times: list[RenderableType] = [
        Text(),
        Text.assemble(("Time  ", "bold"), f"{seconds(total)} a step, by what a rank waits for"),
        shares(time_parts(choice), time_meaning, seconds, "step"),
    ]
    timed = choice.cluster.timed
    return Group(
        Text.assemble((str(choice.layout), "bold"), (f"  on {choice.cluster.title}{runner}", "dim")),
        *(speeds if timed else []),
        Text.assemble(("Memory  ", "bold"), peak, (memory_error, "dim"), f" at the peak: {event}{where}"),
        *does_not_fit_sentence(choice),
        shares(memory_parts(choice), MEMORY_MEANING, human, "peak"),
        *(times if timed else [Text(NO_TIMES, style="dim")]),
    )


def shares(
    parts: Mapping[str, float], meanings: Mapping[str, str], form: Callable[[float], str], total_name: str
) -> Fitted:
    """Table of parts with size, share of the sum and a bar, which begins where the one above ended.

    parts: name -> size, the sum above 0. meanings: name -> phrase, for each part. form: formats a size.
    total_name: name of the last row, the sum.
    """
    total = sum(parts.values())
    starts = [0.0, *accumulate(parts.values())]
    bars = [
        ({"": start, name: size}, total, 0.0)
        for start, (name, size) in zip(starts, parts.items(), strict=False)
    ]
    whole = [Text(text, style="bold") for text in (total_name, f"{form(total):>10}", f"{1:.1%}")]
    dim = ["" if size else "dim" for size in parts.values()]
    columns = {
        "name": Column("", [*map(Name, parts), whole[0]], justify="left"),
        "size": Column("", [*map(Text, map(form, parts.values()), dim), whole[1]]),
        "share": Column("", [*map(Text, (f"{size / total:.1%}" for size in parts.values()), dim), whole[2]]),
        "bar": Column("", bars=[*bars, (parts, total, 0.0)], justify="left"),
        "meaning": Column("", [*(meanings[name] for name in parts), ""], justify="left", style="dim"),
    }
    return Fitted(
        columns,
        (
            ("name", "size", "share", "bar", "meaning"),
            ("name", "size", "share", "bar"),
            ("name", "size", "share"),
        ),
    )


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
