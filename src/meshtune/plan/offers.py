"""Clusters compared: the plan, the hours and the price of each, and which one serves the goal.

    --gpus 16,32,8xmi300x ──> sizes ──> clusters ──> a Plan each ──> Offer ──> compare ──> chosen, ties

Offers whose step times or prices differ by less than their error bar (accuracy.py) are ties, and those with
equal peaks where memory is compared. Of these the one with the fewest GPUs is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtune.errors import NothingFits, UserError
from meshtune.plan import fits
from meshtune.plan.cluster import Cluster
from meshtune.plan.cost import NO_BOUNDS, UNPLANNED, Bounds, RunCost, RunLength, money
from meshtune.plan.fits import Lighter
from meshtune.plan.hardware import GIGA
from meshtune.plan.search import Choice, Plan, search
from meshtune.units import duration, significant

DIFFERENCES = {  # goal -> clause on how much more another cluster takes
    "speed": "a step takes {} time there",
    "cost": "a token costs {} there",
    "gpus": "a step takes {} time there",
    "memory": "a GPU needs {} memory there",
}
GOALS = tuple(DIFFERENCES)
SLOW_NETWORK = 10 * GIGA  # bytes/s per GPU: of workstations and of machines for inference


@dataclass(frozen=True)
class Offer:
    """One cluster: its plan, the best layout by the goal and the run under it."""

    plan: Plan
    choice: Choice | None  # None: nothing fits
    run: RunCost | None  # None: nothing fits
    misses: tuple[str, ...] = ()  # those of Bounds' fields that the run exceeds
    tie: bool = False  # True: as good as another one, within their error bar

    @property
    def title(self) -> str:
        return self.plan.cluster.title

    @property
    def error(self) -> float:
        """Error bar of its times, as a share."""
        return (self.choice and self.choice.accuracy.time) or 0.0


def offer_of(
    plan: Plan, goal: str = "speed", length: RunLength = UNPLANNED, bounds: Bounds = NO_BOUNDS
) -> Offer:
    """The best layout of a plan by the goal, of those within the bounds if there are any.

    goal: memory: the lowest peak; others: the shortest step.
    """
    if not len(plan):
        return Offer(plan, None, None)
    places = plan.by_memory() if goal == "memory" else range(len(plan))
    allowed = bounds.step_seconds(plan.cluster, length)
    within = (place for place in places if plan.seconds.total[place] <= allowed)
    choice = plan.choice(next(within, int(plan.seconds.total.argmin())))
    run = RunCost.of(choice, length)
    return Offer(plan, choice, run, bounds.exceeded(run))


def compare(
    offers: Sequence[Offer], goal: str = "speed", bounds: Bounds = NO_BOUNDS, lighter: Lighter = dict
) -> list[Offer]:
    """The offers that fit and are within the bounds, the chosen one first, and then as the goal ranks them;
    ties are marked.

    speed: the shortest step; cost: the lowest price, or without prices the fewest GPU-hours; gpus: the fewest
    GPUs, of these the shortest step; memory: the lowest peak. Raises NothingFits where no offer is within the
    bounds, and as `fits.empty_plan_error` (which uses `lighter`) where no layout of any cluster fits.
    """
    fitting = [offer for offer in offers if offer.choice]
    fitting = [offer for offer in fitting if offer.plan.cluster.timed] or fitting
    if not fitting:
        raise fits.empty_plan_error(max((offer.plan for offer in offers), key=_memory), lighter)
    within = [offer for offer in fitting if not offer.misses]
    if not within:
        raise NothingFits(_nearest_miss(fitting, bounds))
    fewest = min(offer.plan.cluster.gpus for offer in within)
    rivals = [offer for offer in within if goal != "gpus" or offer.plan.cluster.gpus == fewest]
    best = min(rivals, key=lambda offer: _value(offer, goal))
    ties = [offer for offer in rivals if _is_tie(offer, best, goal)]
    chosen = min(
        ties,
        key=lambda offer: (offer.plan.cluster.gpus, not offer.plan.cluster.gpu.measured, _value(offer, goal)),
    )
    rest = sorted((offer for offer in within if offer is not chosen), key=lambda offer: _rank(offer, goal))
    tied = {id(offer) for offer in ties} if len(ties) > 1 else set()
    return [replace(offer, tie=id(offer) in tied) for offer in (chosen, *rest)]


def _memory(plan: Plan) -> float:
    return plan.cluster.gpus * plan.cluster.memory


def _rank(offer: Offer, goal: str) -> tuple[float, float]:
    return (offer.plan.cluster.gpus if goal == "gpus" else 0, _value(offer, goal))


def _value(offer: Offer, goal: str) -> float:
    """The number that the goal makes small; of the goal gpus, among clusters of the same size."""
    assert offer.choice and offer.run
    if goal == "memory":
        return offer.choice.memory.peak
    if goal != "cost":
        return offer.choice.seconds.total
    per_token = offer.run.cost_per_million_tokens
    return per_token if per_token is not None else 1 / offer.choice.tokens_per_second_per_gpu


def _is_tie(offer: Offer, best: Offer, goal: str) -> bool:
    """True if the offer is as good as the best within the larger error bar of both, or exactly in memory."""
    error = 0 if goal == "memory" else max(offer.error, best.error)
    return _value(offer, goal) <= _value(best, goal) * (1 + error)


def _nearest_miss(offers: Sequence[Offer], bounds: Bounds) -> list[str]:
    """Sentences on the offer that exceeds the bounds by the smallest factor, and on what would do."""
    offer = min(offers, key=lambda offer: bounds.factor(offer.run))
    run, factor = offer.run, bounds.factor(offer.run)
    assert offer.choice and run and run.seconds and run.steps
    paid = "" if run.cost is None else f" and a cost of {money(run.cost, run.currency)}"
    excess = f"{factor - 1:.0%} too much" if factor < 2 else f"{significant(factor, 3)} times the limit"
    sentences = [
        f"No cluster that was tried {bounds.wanted(run.currency)}.",
        f"The nearest is {offer.title} with {offer.choice.layout}: {duration(run.seconds)}{paid}, {excess}.",
    ]
    remedies = [bounds.remedy(run)]
    if offer.misses == ("by",) and (larger := _larger(offer, bounds)):
        remedies.insert(0, larger)
    if steps := math.floor(run.steps / factor):
        remedies.append(f"train.max_steps={steps}")
    return [*sentences, f"What would do: {'; '.join(remedies)}."]


def _larger(offer: Offer, bounds: Bounds) -> str:
    """The offer's cluster a few times larger, as an option, if that is within the bounds; "" if not.

    Speed grows about as the cluster: the two smallest of MORE_GPUS that could do are tried.
    """
    plan, run, factor = offer.plan, offer.run, bounds.factor(offer.run)
    assert run
    length = RunLength(run.steps, run.tokens)
    for times in [more for more in fits.MORE_GPUS if more > 0.95 * factor][:2]:
        try:
            cluster = plan.cluster.of_size(plan.cluster.gpus * times)
            larger = offer_of(search(plan.workload, cluster, fixed=plan.fixed), "speed", length, bounds)
        except UserError:  # the batch has no layout there
            continue
        if larger.run and larger.run.seconds and not larger.misses:
            return f"--gpus {cluster.gpus}x{cluster.gpu.name} ({duration(larger.run.seconds)})"
    return ""


def in_order(offers: Sequence[Offer], ranked: Sequence[Offer]) -> tuple[Offer, ...]:
    """All offers: of one kind as they are; of several those of `ranked` first, then what misses a bound or
    does not fit. ranked: as `compare` returns them.
    """
    places = {id(offer.plan): place for place, offer in enumerate(ranked)}
    marked = [ranked[places[id(offer.plan)]] if id(offer.plan) in places else offer for offer in offers]
    if len({offer.plan.cluster.gpu.name for offer in offers}) > 1:
        marked.sort(key=lambda offer: (places.get(id(offer.plan), len(ranked)), offer.choice is None))
    return tuple(marked)


def check_bounds(clusters: Sequence[Cluster], goal: str, bounds: Bounds) -> None:
    """Raise UserError where times or prices are compared that a kind does not have."""
    untimed = {cluster.gpu.name for cluster in clusters if not cluster.timed}
    if untimed and bounds != NO_BOUNDS:
        raise UserError(
            f"--by and --budget need times, and nobody has measured the speed of {', '.join(untimed)}; leave "
            "them out, or name a GPU kind."
        )
    lacking = list(dict.fromkeys(cluster.gpu.name for cluster in clusters if cluster.price is None))
    several = len({cluster.gpu.name for cluster in clusters}) > 1
    if lacking and (bounds.budget is not None or (goal == "cost" and several)):
        option = "--budget" if bounds.budget is not None else "--goal cost over several GPU kinds"
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


def remarks(offers: Sequence[Offer], chosen: Offer, goal: str, bounds: Bounds) -> list[str]:
    """Sentences on ties, on a chosen kind that was not measured, on bounds that are near, on prices that are
    missing and on machines whose usual network is slow.
    """
    sentences = []
    if ties := [offer for offer in offers if offer.tie and offer is not chosen]:
        error = max(offer.error for offer in (chosen, *ties))
        near = f"the predictions differ by less than their error, {error:.0%}"
        if goal == "memory":
            near = "their peaks are equal"
        sentences.append(
            f"{chosen.title} ties with {', '.join(offer.title for offer in ties)}: {near}. Of ties the "
            "fewest GPUs are chosen, of as many GPUs a measured kind."
        )
    gpu = chosen.plan.cluster.gpu
    measured = [offer for offer in offers if offer.choice and offer.plan.cluster.gpu.measured]
    if not gpu.measured and measured:
        best = min(measured, key=lambda offer: (bool(offer.misses), *_rank(offer, goal)))
        more = _value(best, goal) / _value(chosen, goal) - 1
        difference = f"{abs(more):.0%} {'more' if more >= 0 else 'less'}"
        sentences.append(
            f"{gpu.name} is first by the efficiencies of {gpu.as_of}: its own were not measured. The best "
            f"measured kind is {best.title}: {DIFFERENCES[goal].format(difference)}."
        )
    assert chosen.run is not None
    sentences += [
        f"The run may exceed --{option}: it leaves {1 - factor:.0%}, less than the error of prediction, "
        f"{chosen.error:.0%}."
        for option, factor in bounds.factors(chosen.run).items()
        if 1 / (1 + chosen.error) < factor <= 1
    ]
    clusters = [offer.plan.cluster for offer in offers]
    lacking = list(dict.fromkeys(cluster.gpu.name for cluster in clusters if cluster.price is None))
    if lacking and any(cluster.price for cluster in clusters):
        sentences.append(f"cluster.price_per_gpu_hour has no price of {', '.join(lacking)}.")
    return [*sentences, *dict.fromkeys(filter(None, map(slow_network, clusters)))]
