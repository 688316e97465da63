"""Time and cost of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtune.units import counted, duration

if TYPE_CHECKING:
    from meshtune.plan.search import Choice


@dataclass(frozen=True)
class RunCost:
    """Time and cost of a run of `steps` optimizer steps under one layout."""

    steps: int
    seconds: float  # of the whole run
    gpu_hours: float  # of all its GPUs
    cost: float | None  # in the currency of cluster.price_per_gpu_hour; None: no price was given

    @classmethod
    def of(cls, choice: Choice, steps: int) -> RunCost:
        seconds = steps * choice.seconds.total
        gpu_hours = seconds * choice.layout.world / 3600
        price = choice.cluster.price
        return cls(steps, seconds, gpu_hours, None if price is None else gpu_hours * price)

    def sentence(self) -> str:
        """The run's duration, its GPU-hours and, with a price, its cost."""
        takes = "takes" if self.steps == 1 else "take"
        sentence = (
            f"{counted(self.steps, 'step')} {takes} {duration(self.seconds)}: {self.gpu_hours:,.1f} GPU-hours"
        )
        if self.cost is None:
            return f"{sentence}."
        return f"{sentence}, which cost {self.cost:,.2f} in the currency of cluster.price_per_gpu_hour."
