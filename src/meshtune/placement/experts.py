"""Expert parallelism: the ranks that split the experts of a mixture, and the layouts that a model refuses.

a stage's ranks in the order of the world  =  [replicas, expert_shards, ep]      (layout.Layout)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtune.layout import Layout, expert_sizes, one_of
from meshtune.placement.families import see

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns, Number
    from meshtune.placement.rules import Traits

    Parts = tuple[str, Callable[[Columns], Number], Callable[[Layout], str]]  # of a rules.Rule


@dataclass(frozen=True)
class RouterTraits:
    """The facts of a mixture's routers that decide how their loads can be balanced."""

    unbiased: (
        str | None
    )  # path of a router without a buffer for a bias that chooses experts; None: all have one
    scored: bool  # all return logits
    coefficient: float  # router_aux_loss_coef of config.json, or 0
    pools: bool  # config.json asks for transformers' loss, of all layers and the whole batch


@dataclass(frozen=True, kw_only=True)
class BalanceSpec:
    """How the load of experts is balanced, as plain values."""

    kind: str = "config"  # or loss, bias, none
    aux_loss: float | None = None  # weight of kind loss; None: config.json's router_aux_loss_coef, or 0.001
    z_loss: float = 0.0  # weight
    bias_rate: float = 0.001  # of kind bias

    def weight(self, routing: RouterTraits | None) -> tuple[float, bool]:
        """(Weight of the load-balancing loss, whether it is transformers' pooled one)."""
        if routing and self.kind == "loss":
            return (routing.coefficient or 0.001) if self.aux_loss is None else self.aux_loss, False
        pooled = routing is not None and routing.pools and self.kind == "config"
        return (routing.coefficient, True) if routing and pooled else (0.0, False)


def searched_sizes(traits: Traits) -> list[int]:
    """Sizes of ep that a search tries: those that divide a model's experts, [1] where they can't be split."""
    experts = 0 if traits.apart else traits.experts
    return [size for size in range(1, experts + 1) if experts % size == 0] or [1]


def splittable(traits: Traits) -> bool:
    """Whether several ranks can split the experts of a model."""
    return len(searched_sizes(traits)) > 1


def expert_rules(traits: Traits, *, in_backward: bool) -> Iterator[Parts]:
    """Yield the parts of each `rules.Rule` on experts that are split over ranks, and on their updates.

    in_backward: these are in the backward.
    """
    if traits.experts and in_backward:
        yield (
            "train.step_in_backward saves nothing in experts whose gradients tp sums",
            lambda layouts: layouts.tp > 1,
            lambda layout: (
                f"train.step_in_backward = true with {layout}: gradients of experts are summed over tp once "
                "the backward has ended, and nothing would be saved; leave tp or train.step_in_backward out."
            ),
        )
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


def balance_rules(name: str, routing: RouterTraits | None, balance: BalanceSpec) -> Iterator[Parts]:
    """Yield the parts of each `rules.Rule` on balancing the loads of experts. name: of the model."""
    weight, pools = balance.weight(routing)
    given = "experts.z_loss"
    if balance.kind in ("loss", "bias") or pools:
        given = f"experts.balance={balance.kind}"

    def everywhere(layouts: Columns) -> Number:
        return layouts.world > 0

    def always(why: str, remedy: str) -> Parts:
        return f"{given}: {why}", everywhere, lambda _: f"{given}: {why}; {remedy}."

    if routing is None:
        if balance.kind in ("loss", "bias") or balance.z_loss:
            yield always(
                f"transformers names no routers of experts in {name}", "leave the section experts out"
            )
        return
    if pools and weight:
        yield (
            "transformers' load-balancing loss, which config.json asks for, is of the whole batch at once",
            lambda layouts: (layouts.gradient_accumulation_steps > 1) | (layouts.pp > 1),
            lambda layout: (
                "config.json asks for the load-balancing loss of transformers (output_router_logits), a "
                f"product over the whole batch, and layout {layout} computes a step in "
                + (f"{layout.gradient_accumulation_steps} micro-batches" if layout.pp == 1 else "a pipeline")
                + "; set experts.balance=loss, the same in every layout, or none, or use a layout of ga1 "
                "without pp."
            ),
        )
    if balance.kind == "bias" and routing.unbiased:
        why = f"{routing.unbiased} of {name} has no buffer for a bias that chooses experts"
        yield always(why, "set experts.balance=loss")
    if balance.z_loss and not routing.scored:
        why = f"experts.z_loss: the routers of {name} return no logits"
        yield why, everywhere, lambda _: f"{why}; leave it out."
