"""Clusters compared: the plan, the hours and the price of each, sorted by a column.

--gpus 16,32,8xmi300x ──> sizes ──> clusters ──> a Plan each ──> Offer ──> compare ──> the first is chosen
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshtune.errors import NothingFits, UserError
from meshtune.plan.changes import Lighter, empty_plan_error
from meshtune.plan.cluster import Cluster
from meshtune.plan.cost import NO_BOUNDS, UNPLANNED, Bounds, RunCost, RunLength, money
from meshtune.plan.hardware import GIGA
from meshtune.plan.search import Choice, Plan
from meshtune.units import duration, significant

SORTS = {  # column of --sort -> clause on how much more another cluster takes
    "speed": "a step takes {} time there",
    "cost": "a token costs {} there",
    "gpus": "a step takes {} time there",
    "memory": "a GPU needs {} memory there",
}
SLOW_NETWORK = 10 * GIGA  # bytes/s per GPU: of workstations and of machines for inference


@dataclass(frozen=True)
class Offer:
    """One cluster: its plan, the best layout by the column and the run under it."""

    plan: Plan
    choice: Choice | None  # None: nothing fits
    run: RunCost | None  # None: nothing fits
    misses: tuple[str, ...] = ()  # fields of Bounds that the run exceeds

    @property
    def title(self) -> str:
        return self.plan.cluster.title

    @property
    def error(self) -> float:
        """Error bar of its times, as a share."""
        return (self.choice and self.choice.accuracy.time) or 0.0


def offer_of(
    plan: Plan, sort: str = "speed", length: RunLength = UNPLANNED, bounds: Bounds = NO_BOUNDS
) -> Offer:
    """The best layout of a plan by the column, of those within the bounds if there are any.

    sort: memory: the lowest peak; others: the shortest step.
    """
    if not len(plan):
        return Offer(plan, None, None)
    places = plan.by_memory() if sort == "memory" else range(len(plan))
    allowed = bounds.step_seconds(plan.cluster, length)
    within = (place for place in places if plan.seconds.total[place] <= allowed)
    choice = plan.choice(next(within, int(plan.seconds.total.argmin())))
    run = RunCost.of(choice, length)
    misses = (name for name, share in bounds.shares(run).items() if share > 1)
    return Offer(plan, choice, run, tuple(misses))


def compare(
    offers: Sequence[Offer], sort: str = "speed", bounds: Bounds = NO_BOUNDS, lighter: Lighter = dict
) -> list[Offer]:
    """The offers that fit and are within the bounds, sorted by a column of SORTS; the first one is chosen.

    Raises NothingFits where no offer is within the bounds, and as `empty_plan_error` (which uses
    `lighter`) where no layout of any cluster fits.
    """
    fitting = [offer for offer in offers if offer.choice]
    fitting = [offer for offer in fitting if offer.plan.cluster.timed] or fitting
    if not fitting:
        raise empty_plan_error(max((offer.plan for offer in offers), key=_memory), lighter)
    within = [offer for offer in fitting if not offer.misses]
    if not within:
        raise NothingFits(_nearest_miss(fitting, bounds))
    return sorted(within, key=lambda offer: _rank(offer, sort))


def _memory(plan: Plan) -> float:
    return plan.cluster.gpus * plan.cluster.memory


def _rank(offer: Offer, sort: str) -> tuple[float, float, float]:
    gpus = offer.plan.cluster.gpus
    return (gpus if sort == "gpus" else 0, _value(offer, sort), gpus)


def _value(offer: Offer, sort: str) -> float:
    """Value in the column that clusters are sorted by; of `gpus`, among clusters of the same size."""
    assert offer.choice and offer.run
    if sort == "memory":
        return offer.choice.memory.peak
    if sort != "cost":
        return offer.choice.seconds.total
    per_token = offer.run.cost_per_million_tokens
    return per_token if per_token is not None else 1 / offer.choice.tokens_per_second_per_gpu


def _nearest_miss(offers: Sequence[Offer], bounds: Bounds) -> list[str]:
    """Sentences on the offer that exceeds the bounds by the smallest factor, and on what can be changed."""
    factors = [max(bounds.shares(offer.run).values(), default=0) if offer.run else 0 for offer in offers]
    factor, offer = min(zip(factors, offers, strict=True), key=lambda pair: pair[0])
    run = offer.run
    assert offer.choice and run and run.seconds and run.steps
    paid = "" if run.cost is None else f" and a cost of {money(run.cost, run.currency)}"
    excess = f"{factor - 1:.0%} too much" if factor < 2 else f"{significant(factor, 3)} times the limit"
    fewer = f"set train.max_steps={steps}, " if (steps := math.floor(run.steps / factor)) else ""
    return [
        f"No cluster that was tried {bounds.clause(run.currency)}.",
        f"The nearest is {offer.title} with {offer.choice.layout}: {duration(run.seconds)}{paid}, {excess}.",
        f"Raise --by or --budget, {fewer}or compare other clusters with --gpus.",
    ]


def in_order(offers: Sequence[Offer], ranked: Sequence[Offer]) -> tuple[Offer, ...]:
    """All offers: of one kind as they are; of several those of `ranked` first, then what misses a bound or
    does not fit. ranked: as `compare` returns them.
    """
    places = {id(offer.plan): place for place, offer in enumerate(ranked)}
    marked = [ranked[places[id(offer.plan)]] if id(offer.plan) in places else offer for offer in offers]
    if len({offer.plan.cluster.gpu.name for offer in offers}) > 1:
        marked.sort(key=lambda offer: (places.get(id(offer.plan), len(ranked)), offer.choice is None))
    return tuple(marked)


def check_bounds(clusters: Sequence[Cluster], sort: str, bounds: Bounds) -> None:
    """Raise UserError where times or prices are compared that a kind does not have."""
    untimed = {cluster.gpu.name for cluster in clusters if not cluster.timed}
    if untimed and bounds != NO_BOUNDS:
        raise UserError(
            f"--by and --budget need times, and nobody has measured the speed of {', '.join(untimed)}; leave "
            "them out, or name a GPU kind."
        )
    lacking = list(dict.fromkeys(cluster.gpu.name for cluster in clusters if cluster.price is None))
    several = len({cluster.gpu.name for cluster in clusters}) > 1
    if lacking and (bounds.budget is not None or (sort == "cost" and several)):
        option = "--budget" if bounds.budget is not None else "--sort cost over several GPU kinds"
        prices = ", ".join(f"{kind}: …" for kind in lacking)
        raise UserError(
            f"{option} needs the price of a GPU-hour of {', '.join(lacking)}: set "
            f"cluster.price_per_gpu_hour={{{prices}}}, or name a file of prices."
        )


def slow_network(cluster: Cluster) -> str:
    """A sentence if the cluster is several machines of the kind's usual size, on its usual network, and that
    is slow; else "".
    """
    usual = (cluster.node, cluster.network) == (cluster.gpu.node, cluster.gpu.network)
    if cluster.nodes == 1 or not usual or not cluster.timed or cluster.network >= SLOW_NETWORK:
        return ""
    return (
        f"{cluster.title} are taken for {cluster.nodes} machines of {cluster.node} with "
        f"{cluster.network / GIGA:.2g} GB/s per GPU between them; set cluster.gpus_per_node and "
        "cluster.network if yours differ."
    )


def remarks(offers: Sequence[Offer], chosen: Offer, sort: str, bounds: Bounds) -> list[str]:
    """Sentences on a chosen kind that was not measured, on bounds that are near, on prices that are missing
    and on machines whose usual network is slow.
    """
    sentences = []
    gpu = chosen.plan.cluster.gpu
    measured = [offer for offer in offers if offer.choice and offer.plan.cluster.gpu.measured]
    if not gpu.measured and measured:
        best = min(measured, key=lambda offer: (bool(offer.misses), *_rank(offer, sort)))
        more = _value(best, sort) / _value(chosen, sort) - 1
        difference = f"{abs(more):.0%} {'more' if more >= 0 else 'less'}"
        sentences.append(
            f"{gpu.name} is first by the efficiencies of {gpu.as_of}: its own were not measured. The best "
            f"measured kind is {best.title}: {SORTS[sort].format(difference)}."
        )
    assert chosen.run is not None
    sentences += [
        f"The run may exceed --{option}: it leaves {1 - share:.0%}, less than the error of prediction, "
        f"{chosen.error:.0%}."
        for option, share in bounds.shares(chosen.run).items()
        if 1 / (1 + chosen.error) < share <= 1
    ]
    clusters = [offer.plan.cluster for offer in offers]
    lacking = list(dict.fromkeys(cluster.gpu.name for cluster in clusters if cluster.price is None))
    if lacking and any(cluster.price for cluster in clusters):
        sentences.append(f"cluster.price_per_gpu_hour has no price of {', '.join(lacking)}.")
    return [*sentences, *dict.fromkeys(filter(None, map(slow_network, clusters)))]
