"""Clusters in the terminal: the best layout of each, its speed, and hours and price of the run.

   GPUs          best layout         tokens/s/GPU  hours  GPU-hours  USD  USD/M tokens  speed-up  efficiency
→  8 x h100-sxm  zero3x8-mb1-ga32           7,547   19.3        154  386        0.0920    1.00 ×      100.0%
   8 x h200      …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from meshtune.plan.cost import money
from meshtune.report.plan.bars import Column, Fitted
from meshtune.report.plan.numbers import common_error, number, of_capacity, plus_minus, seconds, speed_head

if TYPE_CHECKING:
    from meshtune.plan.answer import Offer
    from meshtune.plan.cost import RunCost
    from meshtune.plan.search import Choice

MARKS = {"→": "chosen", "×": "misses --by or --budget"}


def clusters_table(offers: Sequence[Offer], chosen: Offer, *, memory: bool = False) -> RenderableType:
    """Table of the best layout of each cluster, in the order given.

    "speed-up" compares tokens/s of whole clusters with the first that has a layout, "efficiency" tokens/s/GPU
    with the smallest cluster of the same kind. Hours and prices have a column where they are known.
    memory: whether peaks have one, as they have beside processors, whose times mean nothing.
    """
    marks = [mark(offer, chosen) for offer in offers]
    choices = [offer.choice for offer in offers]
    several = len({offer.plan.cluster.gpu.name for offer in offers}) > 1
    named = several or not chosen.plan.cluster.gpu.measured

    def texts(form: Callable[[Offer, Choice, RunCost], str], *, timed: bool = True) -> list[str]:
        """form(offer, its layout, its run) for each, "" where nothing fits and, if `timed`, where predicted
        times mean nothing.
        """
        return [
            form(offer, offer.choice, offer.run)
            if offer.choice and offer.run and (offer.plan.cluster.timed or not timed)
            else ""
            for offer in offers
        ]

    columns = {
        "mark": Column("", marks),
        "gpus": Column(
            "GPUs",
            [offer.title if named else f"{offer.plan.cluster.gpus:,}" for offer in offers],
            justify="left" if named else "right",
        ),
        "layout": Column(
            "best layout",
            [Text(str(c.layout)) if c else Text("nothing fits", style="dim") for c in choices],
            justify="left",
            cut=True,
        ),
        "speed": Column(
            speed_head(choices), texts(lambda _, choice, run: number(choice.tokens_per_second_per_gpu))
        ),
        "step": Column(
            f"step\n{common_error(choices, 'time')}",
            texts(lambda _, choice, run: seconds(choice.seconds.total)),
        ),
        "memory": Column("memory", texts(lambda _, choice, run: of_capacity(choice), timed=False)),
        **cost_columns([offer.run for offer in offers]),
        "gain": Column("speed-up", texts(lambda offer, *_: f"{speed(offer) / speed(_first(offers)):.2f} ×")),
        "efficiency": Column("efficiency", texts(lambda offer, *_: f"{efficiency(offer, offers):.1%}")),
    }
    costs = [name for name in ("hours", "gpu_hours", "cost", "million") if name in columns]
    start = ("mark", "gpus", "layout")
    used = [f"{sign} {meaning}" for sign, meaning in MARKS.items() if sign in marks]
    cheap = [name for name in costs if name != "gpu_hours"]
    timed = [offer.plan.cluster.timed for offer in offers]
    predicted = ("speed", "step", "memory") if memory or not all(timed) else ("speed", "step")
    return Fitted(
        columns,
        (
            (*start, *predicted, *costs, "gain", "efficiency"),
            (*start, *predicted, *costs, "efficiency"),
            (*start, *predicted, *costs),
            (*start, *predicted, *cheap),
            (*start, *predicted[1:], *cheap),
            (*start, *predicted[1:], *cheap[-1:]),
        )
        if any(timed)
        else ((*start, "memory"),),
        lambda _: iter([Text(" · ".join(used), style="dim")]),
    )


def cost_columns(runs: Sequence[RunCost | None]) -> dict[str, Column]:
    """Columns hours, gpu_hours, cost and million: each where a run has it; a currency is in the head."""
    currency = next((run.currency for run in runs if run and run.currency), "")
    errors = {run.error for run in runs if run}
    error = plus_minus(errors.pop()) if len(errors) == 1 else ""
    columns = {
        "hours": (f"hours\n{error}", [run and run.seconds and run.seconds / 3600 for run in runs], number),
        "gpu_hours": ("GPU-\nhours", [run and run.gpu_hours for run in runs], number),
        "cost": (currency or "cost", [run and run.cost for run in runs], money),
        "million": (
            f"{currency or 'cost'}/M\ntokens", [run and run.cost_per_million_tokens for run in runs], money,
        ),
    }  # fmt: skip
    return {
        name: Column(head, ["" if value is None else form(value) for value in values])
        for name, (head, values, form) in columns.items()
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


def _first(offers: Sequence[Offer]) -> Offer:
    return next(offer for offer in offers if offer.choice and offer.plan.cluster.timed)
