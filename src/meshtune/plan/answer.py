"""One answer to `meshtune plan`: a config in, the best layouts with their reasons out.

--gpus 16,32,8xmi300x ──> clusters ──> a Plan each ──> Offer ──> compare, the first is chosen ──> Answer
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from meshtune.config import Config
from meshtune.errors import NothingFits, UserError, argument
from meshtune.notebook import Notebook
from meshtune.plan import advice
from meshtune.plan.advice import Alternative
from meshtune.plan.changes import Count, Lighter, Outcome, empty_plan_error, other_batches, silent
from meshtune.plan.cluster import Cluster, Size, cluster_for, clusters_of
from meshtune.plan.cost import NO_BOUNDS, UNPLANNED, Bounds, RunCost, RunLength, run_length, unknown
from meshtune.plan.facts import cluster_facts, model_facts, workload_facts
from meshtune.plan.hardware import GIGA
from meshtune.plan.phrases import unmeasured
from meshtune.plan.search import Choice, Plan, best_fitting, peaks, search
from meshtune.plan.workload import Workload
from meshtune.units import duration, money, significant

KIND = ("zero", "tp", "cp", "cp_method", "ep", "pp", "schedule")  # fields of layouts that are one kind
KIN = 0.01  # share of the step by which layouts of a kind take longer than its best and are counted with it


@dataclass(frozen=True, repr=False)
class Answer(Notebook):
    """The clusters that were asked about, and the layout chosen from their plans."""

    workload: Workload
    offers: tuple[Offer, ...]  # of one kind by size; of several the chosen one first, as sorted
    chosen: Offer
    sort: str = "speed"  # one of SORTS
    bounds: Bounds = NO_BOUNDS
    length: RunLength = UNPLANNED
    left_out: tuple[str, ...] = ()  # sentences on cluster sizes that are impossible
    unused: tuple[str, ...] = ()  # sentences on settings that a cluster does not use
    undropped: Workload | None = None  # with adapters without dropout; None: they have none
    # What `batches` has searched, which later pictures show again.
    _batches: dict[tuple[int, int], Choice | None] = field(default_factory=dict, compare=False)

    @property
    def summary_line(self) -> str:
        plan = self.plan
        return f"{self.workload.model}: {len(plan):,} of {plan.considered:,} layouts fit; {self.choice!r}"

    @property
    def plan(self) -> Plan:
        """The plan of the chosen cluster."""
        return self.chosen.plan

    @property
    def choice(self) -> Choice:
        """The best layout of the chosen cluster, by the column that is sorted by."""
        assert self.chosen.choice is not None
        return self.chosen.choice

    @property
    def run(self) -> RunCost:
        """The whole run under the chosen layout."""
        return RunCost.of(self.choice, self.length)

    @cached_property
    def comparison(self) -> list[str]:
        """Sentences on the clusters compared: the rule, kinds not measured, near bounds, prices."""
        return [*remarks(self.offers, self.chosen, self.sort, self.bounds), *self.unused]

    def best(self, most: int) -> list[Choice]:
        """The chosen layout, then the others by step time, sorted by memory by peak: `most` in all."""
        places = self.plan.by_memory() if self.sort == "memory" else range(len(self.plan))
        ranked = (self.plan.choice(place) for place in islice(places, most))
        others = [choice for choice in ranked if choice.layout != self.choice.layout]
        return [self.choice, *others][:most]

    @cached_property
    def verdict(self) -> list[str]:
        return advice.verdict(self.plan, self.choice)

    @cached_property
    def reasoning(self) -> list[str]:
        return advice.reasoning(self.plan, self.choice)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        return advice.alternatives(self.plan, self.choice)

    @cached_property
    def faster(self) -> list[str]:
        """Sentences on what is faster with updates as exact."""
        return advice.faster(self.plan, self.choice, self.undropped) if self._of_speed else []

    @property
    def _of_speed(self) -> bool:
        """Whether faster plans are named: not sorted by memory, as they need more, or without known times."""
        return self.sort != "memory" and self.plan.cluster.timed

    @cached_property
    def safer(self) -> list[Outcome]:
        """The fastest layout with memory to spare, where the chosen one has little."""
        return advice.safer(self.plan, self.choice)

    @property
    def changes(self) -> list[str]:
        """Sentences on what to change first."""
        lighter = [*self.safer, *advice.lighter(self.plan, self.choice)]
        ranked = sorted(lighter, key=lambda outcome: -outcome.speed)
        less_memory = dict.fromkeys(outcome.sentence() for outcome in ranked)
        rounded = advice.faster_in_8_bits(self.plan, self.choice) if self._of_speed else []
        return [*self.faster, *rounded, *advice.cautions(self.plan, self.choice), *less_memory]

    def kinds(self, most: int) -> list[tuple[Choice, int]]:
        """(The best layout, how many others take at most KIN longer) of each combination of KIND's fields.

        `most` in all, best first, the chosen one in front; sorted by memory each layout stands for itself.
        """
        if self.sort == "memory":
            return [(choice, 0) for choice in self.best(most)]
        columns, total = self.plan.columns, self.plan.seconds.total
        kinds = np.stack([getattr(columns, name) for name in KIND], axis=1)
        _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        near = np.bincount(kind.ravel(), total <= (1 + KIN) * total[first][kind.ravel()])
        places = np.argsort(first)[:most]
        return [(self.plan.choice(int(first[place])), int(near[place]) - 1) for place in places]

    @cached_property
    def batch_advice(self) -> list[str]:
        """Sentences on the fastest layouts of other global batches; none sorted by memory."""
        return [] if self.sort == "memory" else advice.batch_sentences(self.plan)

    @property
    def by_size(self) -> dict[int, Plan]:
        """The plans of the chosen GPU kind, by number of GPUs."""
        kind = self.plan.cluster.gpu.name
        plans = [offer.plan for offer in self.offers if offer.plan.cluster.gpu.name == kind]
        return {plan.cluster.gpus: plan for plan in sorted(plans, key=lambda plan: plan.cluster.gpus)}

    def batches(self, count: Count = silent) -> dict[tuple[int, int], Choice | None]:
        """The best layout by (global batch size, GPUs), around the workload's batch; None: none fits.

        count: called with the number of each search.
        """
        batch, found = self.workload.global_batch_size, self._batches
        batches = sorted({batch, *other_batches(batch).values()})
        clusters = sorted({*self.by_size, *cluster_sizes(self.plan.cluster)[-4:]})
        points = [(size, gpus) for gpus in clusters for size in batches]
        for size, gpus in (point for point in points if point not in found):
            count(f"searching layouts: {len(found) + 1} of {len(points)}")
            cluster = self.plan.cluster.of_size(gpus)
            found[size, gpus] = best_fitting(self.workload.of_batch(size), cluster)
        return found

    def as_dict(self, most: int = 10) -> dict[str, Any]:
        """The document that `plan --json` prints, with `most` layouts; bytes and seconds."""
        plan, workload = self.plan, self.choice.decided(self.workload)
        document: dict[str, Any] = {
            "model": model_facts(self.workload),
            "cluster": cluster_facts(plan.cluster),
            "workload": workload_facts(workload),
            "tool": self.workload.tool.name,
            "stack": workload.stack,
            "goal": self.sort,
            "sort": self.sort,
            "by": self.bounds.by,
            "budget": self.bounds.budget,
            "considered": plan.considered,
            "fitting": len(plan),
            "clusters": [offer_facts(offer) | {"chosen": offer.plan is self.plan} for offer in self.offers],
            "comparison": self.comparison,
            "layouts": [
                choice.as_dict() | {"run": vars(RunCost.of(choice, self.length))}
                for choice in self.best(most)
            ],
            "pareto": [str(plan.choice(place).layout) for place in plan.pareto()],
            "rejected": [rejected._asdict() for rejected in plan.rejected],
            "verdict": self.verdict,
            "reasoning": self.reasoning,
            "alternatives": [
                {
                    "name": alternative.name,
                    "sentence": alternative.sentence,
                    "layout": alternative.choice and str(alternative.choice.layout),
                }
                for alternative in self.alternatives
            ],
            "changes": self.changes,
            "batches": self.batch_advice,
            "run": vars(self.run) | {"notes": list(self.length.notes)},
            "notes": [
                *self.workload.tool.refused,
                *self.workload.notes,
                *filter(None, [unmeasured(plan.cluster), *self.choice.notes]),
            ],
        }
        if self.left_out:
            document["left_out"] = list(self.left_out)
        return document


def ask(
    config: Config,
    workload: Workload,
    *,
    sizes: Sequence[Size] = (),
    sort: str = "speed",
    bounds: Bounds = NO_BOUNDS,
    lighter: Lighter = dict,
    count: Count = silent,
) -> Answer:
    """Plan the workload on the config's cluster, or on clusters of these sizes; choose the first by a column.

    sizes: empty: the config's; sorted by cost or gpus, and with a budget, all `cluster_sizes` up to it.
    Those that are impossible are left out (`Answer.left_out`). sort, lighter, count: as in `compare`. Raises
    UserError for bad settings and if every size is impossible, and as `compare`.
    """
    if sort not in SORTS:
        raise UserError(f"--sort {sort}: there is no such column; write {', '.join(SORTS)}.")
    length = run_length(config)
    if bounds != NO_BOUNDS and length.steps is None:
        raise UserError(unknown(length.missing))
    if not sizes:
        cluster = cluster_for(config)
        smaller = sort in ("cost", "gpus") or bounds.budget is not None
        sizes = [Size(gpus) for gpus in (cluster_sizes(cluster) if smaller else [cluster.gpus])]
    clusters, problems, unused = clusters_of(sizes, config)
    check_bounds(clusters, sort, bounds)
    if config.cluster_config.price_per_gpu_hour and not any(cluster.price for cluster in clusters):
        kinds = ", ".join(dict.fromkeys(cluster.gpu.name for cluster in clusters))
        unused.append(f"cluster.price_per_gpu_hour has no price of {kinds}.")
    offers = []
    for cluster in clusters:
        try:
            plan = search(workload, cluster, fixed=config.partial_layout.given)
            offers.append(offer_of(plan, sort, length, bounds))
        except UserError as error:
            problems += error.problems
    if not offers:
        raise UserError(problems)
    ranked = compare(offers, sort, bounds, lighter, count)
    return Answer(
        workload, in_order(offers, ranked), ranked[0], sort, bounds, length, tuple(problems), tuple(unused)
    )


def cluster_sizes(cluster: Cluster) -> list[int]:
    """Cluster sizes up to the cluster's own, in GPUs: halves of a node, and doublings of nodes."""
    inside = [cluster.node // 2**power for power in range(8) if cluster.node % 2**power == 0]
    across = [cluster.node * 2**power for power in range(1, 16)]
    return sorted({*(gpus for gpus in (*inside, *across) if gpus < cluster.gpus), cluster.gpus})


def offer_facts(offer: Offer) -> dict[str, Any]:
    """An entry of `clusters` of the JSON document, without `chosen`."""
    cluster = offer.plan.cluster
    return {
        "gpu": cluster.gpu.name,
        "gpus": cluster.gpus,
        "measured": cluster.gpu.measured,
        "price_per_gpu_hour": cluster.price,
        "best": offer.choice and offer.choice.as_dict(),
        "run": offer.run and vars(offer.run),
        "misses": list(offer.misses),
        "tie": False,  # kept for readers of older documents
    }


# the largest that fits #


def largest(
    workload: Workload, cluster: Cluster, what: str, lighter: Lighter = dict, count: Count = silent
) -> tuple[Any, Choice]:
    """(value, best layout) of the largest `what` that fits; no field of the layout is fixed.

    what: "seq_len", in tokens, a multiple of 64 from 256 on; "batch", in sequences of a global batch
    without accumulation. Raises NothingFits (for "batch" Refused, if no layout can run) if not even the
    smallest fits, UserError for another `what`. lighter, count: as in `compare`.
    """
    if what == "seq_len":
        longest = _largest_number(
            lambda tokens: best_fitting(replace(workload, seq_len=tokens), cluster), 256, 2**24, step=64
        )
        if longest is None:
            shortest = replace(workload, seq_len=256)

            def others() -> dict[str, Callable[[], Workload]]:
                return {
                    name: lambda make=make: replace(make(), seq_len=256) for name, make in lighter().items()
                }

            raise empty_plan_error(search(shortest, cluster), others, count)
        return longest
    if what == "batch":
        at_once = {"gradient_accumulation_steps": 1}
        most = _largest_number(
            lambda size: best_fitting(workload.of_batch(size), cluster, at_once), 1, 2**23,
            step=cluster.gpus, passed_over=cluster.gpus,
        )  # fmt: skip
        if most is None:
            raise empty_plan_error(search(workload, cluster), lighter, count)
        return most
    raise UserError(
        f"plan max {what}: the largest of it can't be searched for. Write plan max seq_len, plan max batch "
        "or plan max model."
    )


LENGTHS = tuple(2**power for power in range(9, 18))  # tokens: 512 to 131,072
# Fields of the layouts that need least memory: small micro-batches, or one, whose gradients are not summed.
SMALLEST = ({"micro_batch_size": 1}, {"gradient_accumulation_steps": 1})


def longest_sequence(workload: Workload, cluster: Cluster) -> int | None:
    """The longest of LENGTHS that fits, or all the model's positions if they do; None: not even the first."""
    most = workload.positions or LENGTHS[-1]
    lengths = [*(length for length in LENGTHS if length < most), most]

    def fits(length: int, **fields: Any) -> bool:
        try:
            fixed = {"recompute": "full", **fields}
            _, memory, _, _ = peaks(replace(workload, seq_len=length), cluster, fixed)
        except UserError:  # no layout makes the global batch
            return False
        return bool(np.any(memory.peak <= cluster.usable_memory))

    # Most of the layouts have pipelines, and few need one.
    pipelines = ({"pp": 1}, {}) if cluster.gpus > 1 else ({"pp": 1},)
    fields = [smallest | pipeline for pipeline in pipelines for smallest in SMALLEST]
    fitting = bisect(lengths, False, key=lambda length: not any(fits(length, **each) for each in fields))
    return lengths[fitting - 1] if fitting else None


def _largest_number(
    best: Callable[[int], Choice | None], first: int, last: int, *, step: int, passed_over: int = 0
) -> tuple[int, Choice] | None:
    """(number, its layout) of the largest number that fits; None: none does.

    It is found by doubling from `first` to `last` at most, then by bisection among multiples of `step`, which
    are taken to fit up to some number. best: returns the best layout, if one fits. passed_over: numbers up to
    this one that don't fit don't end the doubling: a batch smaller than the cluster may need layouts that fit
    less well.
    """
    largest, number = None, first
    while number <= last:
        if choice := best(number):
            largest = number, choice
        elif largest or number > passed_over:
            break
        number *= 2
    low = largest[0] if largest else 0
    high = 2 * low
    while high - low > step and (middle := (low + high) // 2 // step * step) > low:
        if choice := best(middle):
            low, largest = middle, (middle, choice)
        else:
            high = middle
    return largest


# Clusters compared #


SORTS = {  # column of --sort -> (what the first has, clause on how much more another cluster takes)
    "speed": ("the shortest step", "a step takes {} time there"),
    "cost": ("the lowest cost of a token", "a token costs {} there"),
    "gpus": ("the fewest GPUs, then the shortest step", "a step takes {} time there"),
    "memory": ("the lowest peak memory", "a GPU needs {} memory there"),
}
SLOW_NETWORK = 10 * GIGA  # bytes/s per GPU: of workstations and of machines for inference


@dataclass(frozen=True, repr=False)
class Offer:
    """One cluster: its plan, the best layout by the column and the run under it."""

    plan: Plan
    choice: Choice | None  # None: nothing fits
    run: RunCost | None  # None: nothing fits
    misses: tuple[str, ...] = ()  # fields of Bounds that the run exceeds

    def __repr__(self) -> str:
        line = self.choice.summary_line if self.choice else f"{self.title}: nothing fits"
        return f"<Offer {line}>"

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
    longest = bounds.run_seconds(plan.cluster, length)
    runs = (length.steps or 0) * plan.seconds.total
    if length.reference and math.isfinite(longest):
        runs = runs + length.reference * plan.reference
    within = (place for place in places if runs[place] <= longest)
    choice = plan.choice(next(within, int(plan.seconds.total.argmin())))
    run = RunCost.of(choice, length)
    misses = (name for name, share in bounds.shares(run).items() if share > 1)
    return Offer(plan, choice, run, tuple(misses))


def compare(
    offers: Sequence[Offer], sort: str = "speed", bounds: Bounds = NO_BOUNDS, lighter: Lighter = dict,
    count: Count = silent,
) -> list[Offer]:  # fmt: skip
    """The offers that fit and are within the bounds, sorted by a column of SORTS; the first one is chosen.

    Raises NothingFits where no offer is within the bounds, and as `empty_plan_error` (which uses
    `lighter` and `count`) where no layout of any cluster fits.
    """
    fitting = [offer for offer in offers if offer.choice]
    if not fitting:
        raise empty_plan_error(max((offer.plan for offer in offers), key=_memory), lighter, count)
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
    before = run.reference_seconds or 0.0  # as long in a shorter run
    share = (run.seconds / factor - before) / (run.seconds - before)
    steps = math.floor(run.steps * share + 1e-9)
    fewer = f"set train.max_steps={steps}, " if steps > 0 else ""
    given = " or ".join(f"--{name}" for name, most in vars(bounds).items() if most is not None)
    return [
        f"No cluster that was tried {bounds.clause(run.currency)}.",
        f"The nearest is {offer.title} with {offer.choice.layout}: {duration(run.seconds)}{paid}, {excess}.",
        f"Raise {given}, {fewer}or compare other clusters with --gpus.",
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
            f"--by and --budget need times, and nobody has measured the speed of {', '.join(untimed)}: leave "
            "them out, name a GPU kind, or measure this machine with `meshtune probe`."
        )
    lacking = list(dict.fromkeys(cluster.gpu.name for cluster in clusters if cluster.price is None))
    several = len({cluster.gpu.name for cluster in clusters}) > 1
    if lacking and (bounds.budget is not None or (sort == "cost" and several)):
        option = "--budget" if bounds.budget is not None else "--sort cost over several GPU kinds"
        prices = argument("cluster.price_per_gpu_hour", dict.fromkeys(lacking, "…"))
        raise UserError(
            f"{option} needs the price of a GPU-hour of {', '.join(lacking)}: set {prices}, or name a "
            "file of prices."
        )


def slow_network(cluster: Cluster) -> str:
    """A sentence if the cluster is several machines of the kind's usual size, on its usual network, and that
    is slow; else "".
    """
    usual = (cluster.node, cluster.network) == (cluster.gpu.node, cluster.gpu.network)
    if cluster.nodes == 1 or not usual or cluster.network >= SLOW_NETWORK:
        return ""
    return (
        f"{cluster.title} are taken for {cluster.nodes} machines of {cluster.node} with "
        f"{cluster.network / GIGA:.2g} GB/s per GPU between them; set cluster.gpus_per_node and "
        "cluster.network if yours differ."
    )


def remarks(offers: Sequence[Offer], chosen: Offer, sort: str, bounds: Bounds) -> list[str]:
    """Sentences on why one of several clusters is chosen, on a chosen kind that was not measured, on bounds
    that are near, on prices that are missing and on machines whose usual network is slow.
    """
    sentences = []
    if sum(offer.choice is not None for offer in offers) > 1:
        limits = bounds.clause(chosen.plan.cluster.currency, several=True)
        unpriced = sort == "cost" and chosen.plan.cluster.price is None
        rule = "the least GPU time of a token" if unpriced else SORTS[sort][0]
        rule += f" among the clusters that {limits}" * bool(limits)
        sentences.append(f"{chosen.title} is chosen for {rule}; --sort has other rules.")
    gpu = chosen.plan.cluster.gpu
    measured = [offer for offer in offers if offer.choice and offer.plan.cluster.gpu.measured]
    if not gpu.measured and measured:
        best = min(measured, key=lambda offer: (bool(offer.misses), *_rank(offer, sort)))
        more = _value(best, sort) / _value(chosen, sort) - 1
        difference = f"{abs(more):.0%} {'more' if more >= 0 else 'less'}"
        sentences.append(
            f"{gpu.name} is first by the efficiencies of {gpu.as_of}: its own were not measured. The best "
            f"measured kind is {best.title}: {SORTS[sort][1].format(difference)}."
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
