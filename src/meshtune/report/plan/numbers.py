"""Numbers of one predicted layout by part, and as text, for terminal tables and charts alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.colours import MEMORY_PARTS
from meshtune.units import GIB, number

if TYPE_CHECKING:
    from meshtune.plan.search import Choice


def memory_parts(choice: Choice) -> dict[str, float]:
    """Category (MEMORY_PARTS) -> its bytes at the peak of the fullest rank."""
    return by_memory_part({name: float(getattr(choice.memory, name)) for name in CATEGORIES})


def by_memory_part(parts: Mapping[str, float]) -> dict[str, float]:
    """Bytes by MEMORY_PARTS. parts: bytes by CATEGORIES."""
    return {name: parts[category] for name, category in zip(MEMORY_PARTS, CATEGORIES, strict=True)}


def time_parts(choice: Choice) -> dict[str, float]:
    """Part of a step (PARTS) -> its seconds."""
    return {name: float(getattr(choice.seconds, name)) for name in PARTS}


def of_capacity(choice: Choice) -> str:
    """Peak and capacity of a GPU in GiB, as "65.1 / 79.1 GiB"."""
    return f"{choice.memory.peak / GIB:,.1f} / {choice.cluster.memory / GIB:.1f} GiB"


def nonzero(names: Sequence[str], parts: Iterable[Mapping[str, float]]) -> list[str]:
    """Those of `names`, in their order, whose value is above zero in any of `parts` (name -> value)."""
    positive = {name for values in parts for name, value in values.items() if value > 0}
    return [name for name in names if name in positive]


def speed_unit(choices: Iterable[Choice | None]) -> str:
    """Unit of the speed of layouts that may be of clusters of several sizes."""
    return max((choice.cluster.speed_unit for choice in choices if choice), key=len, default="tokens/s")


def speed_head(choices: Iterable[Choice | None]) -> str:
    """The unit of their speed as the head of a narrow column."""
    return speed_unit(choices).replace("/s/", "/s\n/")


def plus_minus(share: float | None) -> str:
    """An error bar as a suffix: `plus_minus(0.19) == "±19%"`; "" for None."""
    return "" if share is None else f"±{share:.0%}"


def common_error(choices: Iterable[Choice | None], quantity: str) -> str:
    """The error bar of layouts that share it, as a suffix; "" if they differ. quantity: time or memory."""
    errors = {getattr(choice.accuracy, quantity) for choice in choices if choice}
    return plus_minus(errors.pop()) if len(errors) == 1 else ""


def seconds(value: float) -> str:
    """Three or four digits: `seconds(0.0123) == "12.3 ms"`."""
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{number(value * 1000)} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"
