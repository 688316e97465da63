"""What a whole run costs: hours, GPU-hours, money."""

from __future__ import annotations

from dataclasses import dataclass

from meshtune.plan.search import Choice
from meshtune.units import duration


@dataclass(frozen=True)
class Run:
    """What a whole run costs. price: of a GPU-hour, in whatever money."""

    steps: int
    seconds: float
    gpu_hours: float
    cost: float | None

    @classmethod
    def of(cls, choice: Choice, steps: int) -> Run:
        seconds = steps * choice.seconds.total
        hours = seconds * choice.layout.world / 3600
        price = choice.cluster.price
        return cls(steps, seconds, hours, None if price is None else hours * price)

    def sentence(self) -> str:
        """In words."""
        cost = "" if self.cost is None else f", {self.cost:,.2f} at the price given"
        return f"{self.steps} steps take {duration(self.seconds)}: {self.gpu_hours:,.1f} GPU-hours{cost}."
