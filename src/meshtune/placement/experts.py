"""Expert parallelism: the ranks that split the experts of a mixture, and the layouts that a model refuses.

a stage's ranks in the order of the world  =  [replicas, expert_shards, ep]      (layout.Layout)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshtune.layout import Layout, expert_sizes, one_of
from meshtune.placement.families import see

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns, Number
    from meshtune.placement.rules import Traits


def searched_sizes(traits: Traits) -> list[int]:
    """Sizes of ep that a search tries: those that divide a model's experts, [1] where they can't be split."""
    experts = 0 if traits.apart else traits.experts
    return [size for size in range(1, experts + 1) if experts % size == 0] or [1]


def expert_rules(
    traits: Traits,
) -> Iterator[tuple[str, Callable[[Columns], Number], Callable[[Layout], str]]]:
    """Yield the parts of each `rules.Rule` on experts that are split over ranks."""
    why = traits.apart or ("has no experts" if not traits.experts else "")
    if why:
        page = f" {see('experts')}" if traits.apart else ""
        yield (
            f"{traits.name} {why}, so no ep",
            lambda layouts: layouts.ep > 1,
            lambda layout: f"ep={layout.ep}: {traits.name} {why}; leave ep out.{page}",
        )
        return
    yield (
        f"ep does not divide the {traits.experts} experts",
        lambda layouts: traits.experts % layouts.ep != 0,
        lambda layout: (
            f"ep={layout.ep} does not divide the {traits.experts} experts of {traits.name}; "
            f"{one_of('ep', [n for n in expert_sizes(layout) if traits.experts % n == 0])}."
        ),
    )
