"""Clusters compared: sizes and kinds, sorting, kinds that were not measured, a deadline and a budget."""

import io
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from golden import refuses, says
from made_plans import load, workload
from made_plans import machines as machines_of
from rich.console import Console

from meshtune.errors import NothingFits, UserError
from meshtune.plan.accuracy import accuracy
from meshtune.plan.answer import (
    Offer,
    ask,
    check_bounds,
    compare,
    in_order,
    offer_of,
    remarks,
    slow_network,
)
from meshtune.plan.cluster import Cluster, Size, cluster_of, clusters_of, sizes_of
from meshtune.plan.cost import NO_BOUNDS, Bounds, RunLength, bounds_of, seconds_of
from meshtune.plan.hardware import catalogue
from meshtune.plan.search import Plan, search
from meshtune.report.plan.numbers import of_capacity
from meshtune.report.plan.tables import clusters_table
from meshtune.sections import ClusterConfig
from meshtune.units import GIB, number, significant

ERROR = accuracy("meshtune", "h100-sxm", "nodes").time or 0.0
SEQUENCES, TOKENS = 64, 4096
LENGTH = RunLength(1000, 1000 * SEQUENCES * TOKENS)
PRICES = {"h100-sxm": 2.5, "mi300x": 1.0, "a100-80": 1.5, "currency": "EUR"}


def machines(gpus: int, gpu: str = "h100-sxm", **settings: Any) -> Cluster:
    return machines_of(gpus, gpu, **{"price_per_gpu_hour": PRICES, **settings})


@cache
def plan(gpus: int, gpu: str = "h100-sxm") -> Plan:
    return search(workload(), machines(gpus, gpu))


def offers(*plans: Plan, sort: str = "speed", bounds: Bounds = NO_BOUNDS) -> list[Offer]:
    return [offer_of(plan, sort, LENGTH, bounds) for plan in plans]


def chosen_of(*plans: Plan, sort: str = "speed", bounds: Bounds = NO_BOUNDS) -> Offer:
    return compare(offers(*plans, sort=sort, bounds=bounds), sort, bounds)[0]


# sizes #


def test_sizes_are_numbers_alone_or_with_a_kind() -> None:
    h100 = load("cluster.gpu=H100 SXM", "cluster.gpus=8")
    assert sizes_of("32,16,16", h100) == [Size(16), Size(32)]
    assert sizes_of(8, h100) == [Size(8)] and sizes_of((), h100) == []
    mixed = ["8xh100-sxm, 8 x mi300x", "16xa100-80,16", 2]
    assert sizes_of(mixed, h100) == [
        Size(2), Size(8), Size(16), Size(8, "mi300x"), Size(16, "a100-80")
    ]  # fmt: skip


def test_all_wrong_sizes_are_named_at_once() -> None:
    with refuses(UserError) as refused:
        sizes_of("8x,16xh100,2xfoo,0,1000001,many,8xmi300x", load("cluster.gpu=h100-sxm"))
    assert len(refused.value.problems) == 6


def test_kinds_come_in_their_usual_machines_and_settings_describe_the_configs_kind() -> None:
    read = load(
        "cluster.gpu=h100-sxm", "cluster.memory_gib=70", "cluster.network=25", "cluster.memory_margin=0.2",
        "cluster.price_per_gpu_hour=2.5",
    )  # fmt: skip
    sizes = sizes_of("8,12,16xa100-80,2xrtx-4090", read)
    (h100, a100, rtx), problems, notes = clusters_of(sizes, read)
    assert (h100.gpu.name, h100.memory, h100.network, h100.price) == ("h100-sxm", 70 * 2**30, 25e9, 2.5)
    kinds = catalogue()
    assert (a100.gpus, a100.memory, a100.network, a100.price) == (
        16, kinds["a100-80"].memory, kinds["a100-80"].network, None
    )  # fmt: skip
    assert (rtx.node, rtx.margin, a100.margin) == (kinds["rtx-4090"].node, 0.2, 0.2)
    says(problems)
    says(notes)


def test_a_kind_can_be_named_without_one_in_the_config() -> None:
    read = load("cluster.network=10", "cluster.price_per_gpu_hour=2")
    (one,), _, notes = clusters_of(sizes_of("8xmi300x", read), read)
    assert (one.gpu.name, one.network, one.price) == ("mi300x", 10e9, 2) and notes == []
    two, _, _ = clusters_of(sizes_of("8xmi300x,8xh200", read), read)
    assert [cluster.price for cluster in two] == [None, None], "a number is the price of one kind"


# sorting, and kinds that were not measured #


def test_clusters_are_sorted_by_the_column_and_the_first_is_chosen() -> None:
    every = offers(plan(8), plan(16), plan(32), sort="cost")
    ranked = compare(every, "cost")
    costs = [offer.run.cost for offer in ranked if offer.run and offer.run.cost]
    assert costs == sorted(costs) and len(costs) == 3
    assert [offer.plan.cluster.gpus for offer in compare(offers(plan(8), plan(16)))] == [16, 8]
    assert [offer.plan.cluster.gpus for offer in compare(every, "gpus")] == [8, 16, 32]
    for sort, gpus, rule in (
        ("cost", ranked[0].plan.cluster.gpus, "the lowest cost"),
        ("gpus", 8, "the fewest"),
    ):
        sentence, *_ = remarks(every, compare(every, sort)[0], sort, Bounds(by=9))
        assert sentence.startswith(f"{gpus} x h100-sxm is chosen for {rule}")
        assert " among the clusters that end the run within 9.0 s; --sort" in sentence
    equal = compare(offers(plan(16), plan(8), sort="memory"), "memory")
    peaks = [offer.choice.memory.peak for offer in equal if offer.choice]
    assert peaks == sorted(peaks)


def twin(of: Plan, *, seconds: float) -> Plan:
    """A plan of the same cluster with GPUs of another name that were not measured, a step `seconds` times as
    long.
    """
    cluster = replace(of.cluster, gpu=replace(of.cluster.gpu, name="twin", measured=False, as_of="h100-sxm"))
    parts = {name: value * seconds for name, value in vars(of.seconds).items()}
    return replace(of, cluster=cluster, seconds=replace(of.seconds, **parts))


def test_a_kind_that_was_not_measured_is_first_only_with_a_sentence() -> None:
    every = offers(plan(8), twin(plan(8), seconds=0.5))
    ranked = compare(every)
    assert ranked[0].title == "8 x twin (not measured)"
    _, sentence = remarks(in_order(every, ranked), ranked[0], "speed", NO_BOUNDS)
    says(sentence)
    assert len(remarks(every, compare(every[:1])[0], "speed", NO_BOUNDS)) == 1, "the rule"
    shown = text(clusters_table(in_order(every, ranked), ranked[0]), 160)
    assert shown.count("8 x twin (not measured)") == 1


def test_every_kind_without_a_matmul_rate_is_marked_in_its_rows() -> None:
    for name, gpu in catalogue().items():
        title = machines(2, name, gpus_per_node=2).title
        assert title == f"2 x {name}" + " (not measured)" * (not gpu.measured)


# bounds #


def test_times_are_read_and_refused() -> None:
    for word, seconds in (("48h", 172_800), ("2d12h", 216_000), ("90min", 5400), ("1.5 h", 5400)):
        assert seconds_of(word) == seconds
    for wrong in ("48", "0h", "h", "2 weeks", "-1h", "1h30", ""):
        with refuses(UserError):
            seconds_of(wrong)


def test_a_deadline_takes_the_cheapest_cluster_that_keeps_it() -> None:
    hours = {gpus: 1000 * plan(gpus).choice(0).seconds.total for gpus in (8, 16, 32)}
    bounds = Bounds(by=(hours[8] + hours[16]) / 2)
    every = offers(plan(8), plan(16), plan(32), sort="cost", bounds=bounds)
    assert [offer.misses for offer in every] == [("by",), (), ()]
    ranked = compare(every, "cost", bounds)
    costs = {offer.plan.cluster.gpus: offer.run.cost for offer in every[1:] if offer.run and offer.run.cost}
    assert [offer.plan.cluster.gpus for offer in ranked] == sorted(costs, key=lambda gpus: costs[gpus])
    assert [offer.plan.cluster.gpus for offer in in_order(every, ranked)] == [8, 16, 32]


@pytest.mark.all
def test_a_budget_takes_the_fastest_cluster_that_keeps_it() -> None:
    found = offers(plan(16), plan(64), plan(128))
    costs = {offer.plan.cluster.gpus: offer.run.cost or 0 for offer in found if offer.run}
    budget = sorted(costs.values())[1] * 1.0001
    bounds = Bounds(budget=budget)
    chosen = chosen_of(plan(16), plan(64), plan(128), bounds=bounds)
    assert chosen.plan.cluster.gpus == max(gpus for gpus, cost in costs.items() if cost <= budget)
    assert costs[chosen.plan.cluster.gpus] > 0.99 * budget
    near = f"The run may exceed --budget: it leaves 0%, less than the error of prediction, {ERROR:.0%}."
    assert remarks([chosen], chosen, "speed", bounds) == [near]


def test_the_lowest_memory_is_that_of_layouts_that_keep_the_deadline() -> None:
    found = plan(8)
    bounds = Bounds(by=1.1 * 1000 * found.seconds.total.min())
    choice = offer_of(found, "memory", LENGTH, bounds).choice
    free = offer_of(found, "memory", LENGTH).choice
    allowed = found.seconds.total * 1000 <= bounds.by
    assert choice and free and choice.memory.peak > free.memory.peak
    assert choice.memory.peak == found.memory.peak[allowed].min()


def test_a_limit_that_is_missed_by_far_is_said_as_a_factor() -> None:
    bounds = Bounds(budget=1.0)
    every = offers(plan(8), bounds=bounds)
    with pytest.raises(NothingFits) as refused:
        compare(every, "speed", bounds)
    assert every[0].run and every[0].run.cost
    assert f", {significant(every[0].run.cost, 3)} times the limit." in refused.value.problems[1]


def test_the_nearest_miss_has_its_numbers_and_what_would_do() -> None:
    run = offers(plan(16))[0].run
    assert run and run.seconds and run.cost and run.steps
    bounds = Bounds(by=run.seconds / 2, budget=run.cost / 4)
    every = offers(plan(8), plan(16), bounds=bounds)
    with pytest.raises(NothingFits) as refused:
        compare(every, "speed", bounds)
    wanted, nearest, remedy = list(refused.value.problems)
    says(wanted)
    best = min(every, key=lambda offer: max(bounds.shares(offer.run).values()))
    assert best.choice and best.run
    factor = max(bounds.shares(best.run).values())
    assert (
        f"{best.title} with {best.choice.layout}: " in nearest
        and f", {significant(factor, 3)} times the limit." in nearest
    )
    says(nearest)
    says(remedy)
    steps = int(remedy.split("train.max_steps=")[1].split(",")[0])
    assert not offer_of(best.plan, "speed", RunLength(steps, steps), bounds).misses
    assert offer_of(best.plan, "speed", RunLength(steps + 1, 1), bounds).misses


def test_bounds_are_above_zero() -> None:
    assert bounds_of("2h", 5) == bounds_of(timedelta(hours=2), 5.0) == Bounds(7200, 5)
    assert bounds_of(None, None) == Bounds()
    with pytest.raises(UserError) as refused:
        bounds_of("soon", -1)
    assert len(refused.value.problems) == 2
    for by, budget in ((timedelta(0), None), (timedelta(-1), None), (None, 0), (None, float("nan"))):
        with refuses(UserError):
            bounds_of(by, budget)


def test_prices_are_asked_for_where_they_are_compared() -> None:
    clusters = [machines(8), machines(8, "h200"), machines(8, "l40s")]
    for sort, bounds in (("cost", NO_BOUNDS), ("speed", Bounds(budget=9))):
        with refuses(UserError):
            check_bounds(clusters, sort, bounds)
    check_bounds(clusters, "speed", Bounds(by=3))
    check_bounds([machines(8, price_per_gpu_hour=None)], "cost", NO_BOUNDS)
    without = offers(plan(8), replace(plan(8), cluster=machines(8, "h200")))
    says(remarks(without, without[0], "speed", NO_BOUNDS)[-1])


def test_a_slower_processor_is_compared_and_not_chosen() -> None:
    ranked = compare(offers(search(workload(), machines(2, "cpu", memory_gib=400)), plan(8)))
    assert [offer.title for offer in ranked] == ["8 x h100-sxm", "2 x cpu (not measured)"]
    assert ranked[1].run and ranked[1].run.seconds is None
    with refuses(UserError):
        check_bounds([offer.plan.cluster for offer in ranked], "speed", Bounds(by=9))


# the answer #


@pytest.mark.ci
def test_an_answer_has_every_cluster_with_its_run_as_values() -> None:
    read = load(
        "cluster.gpu=h100-sxm", "train.max_steps=1000", "data.seq_len=4096",
        "cluster.price_per_gpu_hour={h100-sxm: 2.5, a100-80: 1.5, currency: EUR}",
    )  # fmt: skip
    sizes = sizes_of("1,8,12,16xa100-80", read)
    answer = ask(read, workload(), sizes=sizes, sort="cost", bounds=Bounds(budget=10_000))
    found = answer.as_dict(2)
    assert found["budget"] == 10_000 and found["by"] is None and len(found["left_out"]) == 1
    facts = [(each["gpus"], each["gpu"], each["chosen"]) for each in found["clusters"]]
    assert sorted(facts) == [(1, "h100-sxm", False), (8, "h100-sxm", True), (16, "a100-80", False)]
    first, *_, last = found["clusters"]
    assert last["best"] is last["run"] is None, "8 B do not fit one GPU"
    assert first["run"] | {"notes": []} == found["run"]
    assert first["run"]["cost"] == pytest.approx(1000 * first["best"]["step_seconds"] * 8 * 2.5 / 3600)
    for layout in found["layouts"]:
        assert layout["run"]["seconds"] == pytest.approx(1000 * layout["step_seconds"])
    assert (found["cluster"]["currency"], found["cluster"]["measured"]) == ("EUR", True)


def test_bounds_and_budgets_need_the_length_of_the_run() -> None:
    read = load("cluster.gpu=h100-sxm", "cluster.gpus=8")
    for bounds in (Bounds(by=3600), Bounds(budget=10)):
        with refuses(UserError):
            ask(read, workload(), bounds=bounds)
    with refuses(UserError):
        ask(read, workload(), sort="fun")


def test_prices_that_have_none_of_the_kind_are_named() -> None:
    words = ["cluster.gpu=h100-sxm", "cluster.gpus=8", "train.max_steps=9"]
    said = "cluster.price_per_gpu_hour has no price of h100-sxm."
    for prices, sentences in (("{a100-80: 2}", [said]), ("{a100-80: 2, h100-sxm: 3}", []), ("2", [])):
        answer = ask(load(*words, f"cluster.price_per_gpu_hour={prices}"), workload())
        assert answer.comparison == sentences


@pytest.mark.ci
def test_a_budget_tries_smaller_clusters_too() -> None:
    read = load(
        "cluster.gpu=h100-sxm", "cluster.gpus=16", "train.max_steps=9", "cluster.price_per_gpu_hour=2"
    )
    every = ask(read, workload(), bounds=Bounds(budget=1e6)).offers
    assert [offer.plan.cluster.gpus for offer in every] == [1, 2, 4, 8, 16]
    assert len(ask(read, workload(), bounds=Bounds(by=1e6)).offers) == 1


# the table #


def text(renderable: Any, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return file.getvalue()


def test_the_table_has_hours_and_prices_of_each_cluster_and_marks() -> None:
    bounds = Bounds(by=1000 * plan(16).choice(0).seconds.total)
    plans = [plan(1), plan(8), plan(16), plan(16, "a100-80")]
    every = offers(*plans, sort="cost", bounds=bounds)
    ranked = compare(every, "cost", bounds)
    lines = text(clusters_table(in_order(every, ranked), ranked[0]), 160).splitlines()
    assert lines[1].split()[:3] == ["GPUs", "best", "layout"] and "EUR" in lines[1]
    rows = [line.split() for line in lines[2:6]]
    run = ranked[0].run
    assert run and run.seconds and run.gpu_hours
    assert rows[0][:4] == ["→", "16", "x", "h100-sxm"] and number(run.seconds / 3600) in rows[0]
    assert number(run.gpu_hours) in rows[0] and f"{run.cost:,.2f}" in rows[0]
    assert {row[0] for row in rows[1:3]} == {"×"} and rows[3][-2:] == ["nothing", "fits"]
    assert lines[6] == "→ chosen · × misses --by or --budget"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_table_fits_its_terminal(width: int) -> None:
    every = offers(plan(8), plan(16), plan(16, "a100-80"))
    ranked = compare(every)
    lines = text(clusters_table(in_order(every, ranked), ranked[0]), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("EUR" in line for line in lines[:3])
    assert any("step" in line for line in lines[:2])
    assert any("hours" in line for line in lines[:2]) == (width >= 80)


def test_machines_on_a_slow_usual_network_are_named() -> None:
    """RTX 4090 come in workstations of four on 10 Gb/s Ethernet, where a renter's machine may have eight."""
    says(slow_network(machines(8, "rtx-4090")))
    settings = ClusterConfig(gpu="rtx-4090", gpus=8, gpus_per_node=8)
    for cluster in (machines(4, "rtx-4090"), machines(16), cluster_of(settings), machines(4, "cpu")):
        assert slow_network(cluster) == ""


def test_clusters_have_a_column_of_peaks() -> None:
    every = offers(plan(8), plan(16), sort="memory")
    chosen = compare(every, "memory")[0]
    lines = text(clusters_table(every, chosen), 160).splitlines()
    assert chosen.choice and of_capacity(chosen.choice) in next(line for line in lines if line[0] == "→")
    narrow = text(clusters_table(every, chosen), 60).splitlines()
    assert "GiB" in narrow[0] and f"{chosen.choice.memory.peak / GIB:.1f}" in " ".join(narrow)
