"""The planner's search: every layout is considered, what is found is what is predicted, and the sentences are
true of the numbers.
"""

import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import cases
from golden import refuses, says
from known import known
from made_plans import answered, load, machines, workload
from own_kind import OWN_KIND
from shapes import of_shape

from meshtune.api.plan import largest as largest_of
from meshtune.api.plan import plan as plan_of
from meshtune.errors import NothingFits, UserError
from meshtune.layout import (
    SCHEDULES,
    V_SCHEDULES,
    VIRTUAL_SCHEDULES,
    ZERO_BUBBLE,
    Layout,
    PartialLayout,
)
from meshtune.placement.columns import Columns, layout_at, rows
from meshtune.placement.rules import Traits, refusals
from meshtune.plan import advice, candidates
from meshtune.plan.answer import compare, largest, offer_of
from meshtune.plan.candidates import divisors
from meshtune.plan.changes import OTHER_OPTIMIZER, Refused, empty_plan_error, remedies
from meshtune.plan.cluster import Cluster, cluster_of, gpus_here
from meshtune.plan.cost import RunCost, RunLength
from meshtune.plan.hardware import catalogue
from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES
from meshtune.plan.models import by_size
from meshtune.plan.phrases import largest_category, spent
from meshtune.plan.search import PEAK_TIE, SAFE_COST, Choice, Plan, explained, search
from meshtune.plan.seconds.step import TIE, Seconds
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

EVERYTHING = -1e6  # a memory_margin that lets every layout fit


def little(size: int, **traits: Any) -> Workload:
    """Four blocks, four heads, two of keys."""
    shape = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "vocabulary": 1000}
    own = Traits("little", 4, 4, 2, 1000, cuts=((512, "features of the MLP"),))
    return Workload("little", of_shape(**shape), replace(own, **traits), 512, size)


WORKLOADS = {
    "0.6b on 1": (workload("qwen3-0.6b", 64, 2048), machines(1)),
    "0.6b on 2 cards": (workload("qwen3-0.6b", 12, 2048), machines(2, "rtx-4090")),
    "3b with LoRA-like batch on 4": (workload("llama-3.2-3b", 6), machines(4, "a100-40")),
    "8b on 8": (workload("llama-3.1-8b", 64), machines(8)),
    "8b, long": (workload("llama-3.1-8b", 8, 65536, mean_document_tokens=2000.0), machines(16)),
    "8b, compiled where it can be": (workload("llama-3.1-8b", 128, compile="auto"), machines(32)),
    "14b in fp32": (workload("qwen3-14b", 96, precision="fp32"), machines(24)),
    "32b on cards": (workload("qwen3-32b", 60), machines(60, "a100-80", gpus_per_node=6)),
    "70b on 64": (workload("llama-3.1-70b", 256), machines(64)),
    "70b, one sequence": (workload("llama-3.1-70b", 1, 131072), machines(128)),
}


@cache
def found(name: str) -> Plan:
    return search(*WORKLOADS[name])


IN_TEST = ["0.6b on 2 cards", "8b, compiled where it can be", "8b, long", "70b, one sequence"]


@pytest.fixture(params=cases(WORKLOADS, test=IN_TEST, ci=WORKLOADS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return found(request.param)


def some(plan: Plan) -> list[int]:
    """Places all over the ranking."""
    return sorted({0, *np.linspace(0, len(plan) - 1, 40).astype(int).tolist()})


# what is found #


def test_every_layout_fills_the_cluster_makes_the_batch_and_runs_and_fits(plan: Plan) -> None:
    assert len(plan) > 0
    assert (plan.columns.world == plan.cluster.gpus).all()
    assert (plan.columns.global_batch_size == plan.workload.global_batch_size).all()
    assert (plan.memory.peak <= plan.cluster.usable_memory).all()
    for place in some(plan):
        choice = plan.choice(place)
        assert choice.fits
        assert choice.layout.world == plan.cluster.gpus
        assert choice.layout.global_batch_size == plan.workload.global_batch_size
        assert plan.workload.refusals(choice.layout) == []
        assert Layout.parse(str(choice.layout)) == choice.layout
    every = [layout_at(plan.columns, place) for place in range(min(len(plan), 400))]
    assert len(set(every)) == len(every), "no layout twice"


def even(plan: Plan) -> Plan:
    """The plan without the layouts that rank last for their degrees, which are no smaller than the others."""
    assert not plan.uneven[: int((~plan.uneven).sum())].any(), "all of them are last"
    keep = ~plan.uneven
    return replace(
        plan,
        columns=rows(plan.columns, keep),
        seconds=rows(plan.seconds, keep),
        memory=rows(plan.memory, keep),
    )


def test_the_quickest_come_first_and_of_those_alike_the_smallest(plan: Plan) -> None:
    plan = even(plan)
    total, held = plan.seconds.total, plan.memory.peak
    assert (np.diff(total[1:]) >= 0).all()
    quickest = total.min()
    if plan.safe[0]:
        quickest = total[plan.safe].min()
        assert quickest <= total.min() * (1 + SAFE_COST)
    else:
        assert not (plan.safe & (total <= quickest * (1 + SAFE_COST))).any()
    assert total[0] <= quickest * math.exp(TIE)
    ties = np.flatnonzero((plan.safe == plan.safe[0]) & (total < total[0]))
    assert (held[0] <= held[ties]).all(), "slower and before, so smaller"


def test_a_layout_in_a_column_is_predicted_as_it_is_alone(plan: Plan) -> None:
    for place in some(plan)[::5]:
        ours, alone = plan.choice(place), explained(plan.workload, plan.cluster, plan.choice(place).layout)
        for part in fields(Seconds):
            want = getattr(alone.seconds, part.name)
            assert getattr(ours.seconds, part.name) == pytest.approx(want, rel=1e-9, abs=1e-12)
        for part in CATEGORIES:
            assert getattr(ours.memory, part) == pytest.approx(getattr(alone.memory, part), rel=1e-9)
        assert ours.tokens_per_second_per_gpu == pytest.approx(alone.tokens_per_second_per_gpu)
        tokens = ours.tokens_per_second_per_gpu * ours.seconds.total * ours.layout.world
        assert tokens == pytest.approx(plan.workload.tokens)
        assert 0 < ours.mfu < 1


def test_what_is_rejected_adds_up_to_what_was_considered(plan: Plan) -> None:
    """A layout that does not fit counts once, by its largest part; a refused one, once for every reason."""
    large = [each for each in plan.rejected if each.reason.startswith("needs more than")]
    refused = [each for each in plan.rejected if each not in large]
    out = plan.considered - len(plan) - sum(each.count for each in large)
    assert max((each.count for each in refused), default=0) <= out <= sum(each.count for each in refused)
    reasons = [each.reason for each in plan.rejected]
    assert len(set(reasons)) == len(reasons)
    for each in large:
        example = explained(plan.workload, plan.cluster, Layout.parse(each.example))
        assert not example.fits
        assert each.reason.endswith(CATEGORY_NAMES[largest_category(example.memory)])
    for each in plan.rejected:
        layout = Layout.parse(each.example)
        assert layout.world == plan.cluster.gpus
        assert layout.global_batch_size == plan.workload.global_batch_size
        if each in refused and "has the same bubble" not in each.reason:
            assert plan.workload.refusals(layout), f"{each.reason} ({layout}): a run would take it"


def by_hand(w: Workload, cluster: Cluster) -> Iterator[Layout]:
    """Every layout of the cluster, one by one, without what is left out for a reason: tp without sp,
    attention recomputed alone, more stages than blocks, one schedule for another, ZeRO-1 and -2 over
    context ranks beside replicas.
    """
    gpus = cluster.gpus
    axes = (
        (tp, cp, pp, gpus // (tp * cp * pp))
        for tp in divisors(gpus)
        for cp in divisors(gpus // tp)
        for pp in divisors(gpus // (tp * cp))
        if pp <= w.traits.blocks
    )
    for tp, cp, pp, data in axes:
        for shards in divisors(data):
            over_context = () if cp == 1 else (1, 2, 3) if data == 1 else (3,)
            for zero in (1, 2, 3) if shards > 1 else (0, *over_context):
                for method in ("allgather", "ulysses") if cp > 1 else ("allgather",):
                    for schedule, virtual in pipelines(pp, w.traits.blocks):
                        each = w.global_batch_size // data if w.global_batch_size % data == 0 else 0
                        for micro in divisors(each) if each else ():
                            for recompute in ("none", "selective", "full"):
                                yield Layout(
                                    dp_replicate=data // shards, dp_shard=shards, zero=zero, cp=cp,
                                    cp_method=method, tp=tp, sp=tp > 1, pp=pp, schedule=schedule,
                                    virtual_stages=virtual, micro_batch_size=micro,
                                    gradient_accumulation_steps=each // micro, recompute=recompute,
                                )  # fmt: skip


def pipelines(pp: int, blocks: int) -> Iterator[tuple[str, int]]:
    for schedule in SCHEDULES if pp > 1 else ("1f1b",):
        for virtual in (1, 2, 4, 8) if schedule in VIRTUAL_SCHEDULES else (1,):
            # one stage a rank makes interleaved 1F1B and looped BFS what 1F1B and GPipe are
            least = 2 if schedule in ("interleaved1f1b", "loopedbfs") else 1
            if least <= virtual <= max(blocks // pp, least):
                yield schedule, virtual


def outdone(w: Workload, layout: Layout) -> bool:
    """Whether there is a schedule that waits as long and keeps less."""
    better = {"gpipe": "1f1b", "loopedbfs": "interleaved1f1b"}.get(layout.schedule)
    return layout.pp > 1 and better is not None and not refusals(w.traits, replace(layout, schedule=better))


@pytest.mark.parametrize(
    ("gpus", "size", "node"), cases([(1, 6, 8), (2, 4, 8), (4, 8, 2), (6, 6, 6), (8, 4, 4)], test=3, ci=2)
)
def test_nothing_that_runs_is_missed(gpus: int, size: int, node: int) -> None:
    w, cluster = little(size), machines(gpus, gpus_per_node=node)
    plan = search(w, replace(cluster, memory_margin=EVERYTHING))
    every = list(by_hand(w, cluster))
    runs = {str(x) for x in every if not w.refusals(x) and not outdone(w, x)}
    assert plan.considered == len(every)
    assert {str(layout_at(plan.columns, place)) for place in range(len(plan))} == runs


def test_gpipe_is_there_where_1f1b_cannot_run() -> None:
    plan = search(little(2), machines(4), fixed=PartialLayout.parse({"pp": 4, "schedule": "auto"}).given)
    assert {plan.choice(place).layout.schedule for place in range(len(plan))} >= {"gpipe"}


@pytest.mark.ci
def test_hundreds_of_gpus_are_searched_whole() -> None:
    plan = search(workload("llama-3.1-70b", 1024), machines(512))
    assert plan.considered > 40_000
    assert len(plan) > 1000


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_front_of_speed_and_memory_is_beaten_by_nothing(name: str) -> None:
    plan = even(found(name))
    front = plan.pareto()
    for place in front:
        quicker = plan.seconds.total < plan.seconds.total[place]
        smaller = plan.memory.peak < plan.memory.peak[place]
        assert not (quicker & smaller).any()
    assert plan.memory.peak[front[-1]] == plan.memory.peak.min()
    assert plan.seconds.total[front[0]] == plan.seconds.total.min()


# how an engineer would judge it #


def spread(layout: Layout) -> Iterator[Layout]:
    """Layouts with fewer ranks to a sequence, as many more data ranks, and as much less accumulation."""
    inner = layout.tp * layout.cp
    for tp in divisors(layout.tp):
        for cp in divisors(layout.cp):
            more, rest = divmod(layout.gradient_accumulation_steps, inner // (tp * cp))
            if rest or tp * cp == inner:
                continue
            freed = inner // (tp * cp)
            for zero in (0, 1, 2, 3):
                for sharded in (layout.dp_shard * freed, layout.data_ranks * freed):
                    data = layout.data_ranks * freed
                    yield replace(
                        layout, tp=tp, sp=layout.sp and tp > 1, cp=cp,
                        cp_method=layout.cp_method if cp > 1 else "allgather",
                        dp_replicate=data // sharded if zero else data, dp_shard=sharded if zero else 1,
                        zero=zero, gradient_accumulation_steps=more,
                    )  # fmt: skip


@pytest.mark.parametrize(
    "model", cases(["qwen3-0.6b", "llama-3.1-8b", "llama-3.2-3b", "qwen3-32b", "llama-3.1-70b"], ci=2)
)
@pytest.mark.parametrize("gpus", [2, 8, 32])
def test_no_winner_accumulates_where_more_data_ranks_could_do_it_as_quickly(model: str, gpus: int) -> None:
    for size, seq_len in ((gpus, 4096), (8 * gpus, 2048), (64, 32768)):
        w, cluster = workload(model, size, seq_len), machines(gpus)
        plan = search(w, cluster)
        if not len(plan):
            continue
        best = plan.choice(0)
        if best.layout.pp > 1 or best.layout.gradient_accumulation_steps == 1:
            continue
        for other in spread(best.layout):
            there = explained(w, cluster, other)
            quicker = there.seconds.total < best.seconds.total * math.exp(-TIE)
            assert w.refusals(other) or not there.fits or not quicker, f"{other} instead of {best.layout}"


def test_attention_costs_by_the_lengths_of_documents() -> None:
    def speed(documents: float | None) -> float:
        w = workload("llama-3.1-8b", 16, 65536, mean_document_tokens=documents)
        return search(w, machines(16)).choice(0).tokens_per_second_per_gpu

    assert speed(1000) > 1.2 * speed(16000) > 1.2 * speed(None)
    assert speed(65536) == speed(None), "none: each sequence is one document"
    layout = Layout.parse("zero3x8-mb1-ga8")
    long, short = (
        explained(workload("llama-3.1-8b", 64, mean_document_tokens=n), machines(8), layout)
        for n in (None, 500)
    )
    assert short.memory.peak == long.memory.peak, "documents cost time, not memory"


@pytest.mark.parametrize(
    ("part", "inside", "beyond"),
    [
        ("tensor", "dp2-tp8-sp-mb1-ga8", "tp16-sp-mb1-ga16"),
        ("context", "dp2-cp8-mb1-ga8", "cp16-mb1-ga16"),
        ("context", "dp4-cp2-tp2-sp-mb1-ga4", "cp2-tp8-sp-mb1-ga16"),
        ("context", "dp2-ulysses8-mb1-ga8", "ulysses16-mb1-ga16"),
    ],
)
def test_what_leaves_the_node_pays_the_network(part: str, inside: str, beyond: str) -> None:
    w = workload("llama-3.1-70b", 16, 16384)

    def seconds(text: str, **machine: Any) -> float:
        return getattr(explained(w, machines(16, **machine), Layout.parse(text)).seconds, part)

    wide = seconds(beyond, gpus_per_node=16)
    assert seconds(beyond) > 1.05 * wide, "the same layout, all inside one node"
    assert seconds(beyond, network=5) > 3 * wide
    assert seconds(inside, network=5) == pytest.approx(seconds(inside, gpus_per_node=16), rel=1e-9)


# partial layouts #


def given(value: str | Mapping[str, Any]) -> dict[str, Any]:
    return PartialLayout.parse(value).given


ALL_AUTO = {"dp_replicate": "auto", "dp_shard": "auto", "cp": "auto", "tp": "auto", "pp": "auto"}


@pytest.mark.parametrize(
    "value",
    [
        "zero3x8", "dp8", "dp2-zero3x4", "tp2-sp-dp4-full", "pp2-dp4", "zero1x4-pp2-zb", "cp2-zero2x4-mb1",
        "ulysses4-dp2", "pp8-interleaved1f1b-v2", "pp8-gpipe", "pp2-zero1x4-loopedbfs-v2", "zero2x8-ga2",
        {"tp": "auto", "dp_replicate": "auto"},
        {"tp": "auto", "sp": True, "dp_replicate": "auto"},
        {"tp": "auto", "sp": False, "dp_shard": "auto"},
        {"pp": "auto", "schedule": "zb", "dp_shard": "auto"},
        {"pp": 4, "schedule": "auto", "dp_shard": "auto"},
        {"pp": 4, "schedule": "auto", "virtual_stages": 2, "dp_shard": "auto"},
        {"pp": "auto", "virtual_stages": 2, "dp_shard": "auto"},
        {"dp_shard": 8, "zero": "auto"},
        {"dp_shard": "auto", "zero": 3},
        {"dp_replicate": 2, "dp_shard": "auto"},
        {"dp_replicate": "auto", "dp_shard": 4, "zero": 2},
        {"cp": 2, "cp_method": "auto", "dp_shard": "auto"},
        ALL_AUTO | {"recompute": "attention"},
        ALL_AUTO | {"recompute": "auto", "micro_batch_size": 2},
        ALL_AUTO | {"recompute": "auto", "recompute_blocks": 3},
        ALL_AUTO | {"recompute": "selective", "recompute_blocks": "auto"},
        ALL_AUTO | {"gradient_accumulation_steps": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_fixed_is_kept(value: str | dict[str, Any]) -> None:
    fixed = given(value)
    plan = search(workload("llama-3.2-1b", 64, 2048), machines(8), fixed=fixed)
    assert len(plan) > 0, plan.rejected
    for choice in plan.best(len(plan)):
        assert choice.layout.world == 8
        for name, want in fixed.items():
            own = getattr(choice.layout, name)
            apart = {"sp": choice.layout.tp, "schedule": choice.layout.pp, "virtual_stages": choice.layout.pp}
            if apart.get(name) == 1 and isinstance(value, dict):
                continue  # says nothing where its axis has one rank
            if name == "virtual_stages" and choice.layout.schedule in V_SCHEDULES:
                continue
            assert own == want, f"{name} of {choice.layout}"


def test_the_choice_is_the_best_of_all_that_keep_what_is_fixed() -> None:
    w, cluster = workload("llama-3.1-8b", 64), machines(8)
    free = search(w, cluster)
    part = search(
        w, cluster, fixed=given({"tp": 2, "sp": True} | {"dp_shard": "auto", "dp_replicate": "auto"})
    )
    kept = (
        (free.columns.tp == 2)
        & (free.columns.cp == 1)
        & (free.columns.pp == 1)
        & (free.columns.recompute == 0)
        & (free.columns.sp_regather == 0)
    )
    places = np.flatnonzero(kept)
    assert part.choice(0).layout in [layout_at(free.columns, int(place)) for place in places]
    assert part.choice(0).seconds.total <= free.seconds.total[places].min() * math.exp(TIE)
    assert len(part) == kept.sum()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("w", "cluster", "mode"),
    [
        (workload("llama-3.1-70b", 64, 8192), machines(64), "full"),
        (workload("llama-3.1-8b", 64, 21504), machines(64), "selective"),
    ],
    ids=["70b", "8b"],
)
def test_no_more_blocks_recompute_than_the_memory_asks_for(w: Workload, cluster: Cluster, mode: str) -> None:
    plan, all_or_none = search(w, cluster), search(w, cluster, fixed={"recompute_blocks": None})
    some_blocks = [choice for choice in plan.best(len(plan)) if choice.layout.recompute_blocks]
    assert len(some_blocks) == len(plan) - len(all_or_none) == plan.considered - all_or_none.considered
    assert plan.choice(0).layout.recompute == mode and plan.choice(0).layout.recompute_blocks
    for choice in some_blocks[::4]:
        layout = choice.layout
        less = {"recompute_blocks": layout.recompute_blocks - 1}
        if layout.recompute_blocks == 1:
            less = {"recompute": "none", "recompute_blocks": None}
        fewer = replace(layout, **less)
        every = explained(w, cluster, replace(layout, recompute_blocks=None))
        assert (
            choice.fits and every.fits and w.refusals(layout) == [] and not explained(w, cluster, fewer).fits
        )
        assert choice.seconds.total < every.seconds.total * math.exp(-TIE)
    assert plan.choice(0).seconds.total < all_or_none.choice(0).seconds.total * math.exp(-TIE)
    assert "recompute_blocks" not in given({"recompute": "full", "recompute_blocks": "auto"})
    assert search(w, cluster, fixed=given("auto")).considered == plan.considered


def test_a_stage_with_one_block_is_not_bisected() -> None:
    layouts = Columns.of([Layout.parse(f"pp{pp}-1f1b-mb1-ga8-linear") for pp in (2, 4)])

    def peak(some: Columns) -> np.ndarray:  # less for the mode itself, however few its blocks are
        return np.where(some.recomputation("block"), 1.0, 2.0)

    def seconds(some: Columns) -> np.ndarray:
        return 1 + np.minimum(some.recompute_blocks, 4 / some.pp)

    fewer = candidates.with_fewest_blocks(
        layouts, seconds(layouts), peak(layouts), np.float64(4), 1.5, total=seconds, peak=peak, gain=TIE
    )
    assert [str(layout_at(fewer, n)) for n in range(len(fewer.pp))] == ["pp2-1f1b-mb1-ga8-linear1"]


@pytest.mark.ci
def test_no_layout_that_is_not_bisected_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "model.name=llama-3.1-70b", "method=qlora", "lora.r=32", "data.seq_len=4096",
        "train.global_batch_size=32", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    ]  # fmt: skip
    for dropout in ("lora.dropout=0.05", "lora.dropout=0"):
        config = load(*words, dropout)
        best = plan_of(config).choice
        with monkeypatch.context() as patched:
            patched.setattr(candidates, "MOST", 10**6)
            assert best.seconds.total <= plan_of(config).choice.seconds.total * math.exp(TIE)


@pytest.mark.ci
def test_a_full_plan_names_the_fastest_smaller_layout_and_states_in_host_memory() -> None:
    near = load(  # a chosen layout that needs 4 % more than leaves room
        "model.name=llama-3.1-70b", "method=qlora", "data.seq_len=4096", "train.global_batch_size=64",
        "train.optimizer=adamw-8bit", "train.offload=optimizer", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    )  # fmt: skip
    full = search(workload("llama-3.1-70b", 64, compile="auto", optimizer="adamw-bf16"), machines(16))
    for answer in (plan_of(near), answered(full)):
        plan, best, [safer] = answer.plan, answer.choice, answer.safer
        room = advice.NEAR * plan.cluster.memory / (1 + best.accuracy.memory)
        assert safer.choice.memory.peak <= room < best.memory.peak
        fastest = plan.seconds.total[plan.memory.peak <= room].min()
        assert safer.choice.seconds.total <= fastest * math.exp(TIE)
    assert re.match(
        r"optimizer states in the host.s memory \(train.offload=optimizer layout=\S+\): \S+ more tokens per "
        r"second, \S+ GiB instead of \S+ GiB and \S+ GiB of host memory a rank\.$", answer.faster[0],
    )  # fmt: skip


@pytest.mark.all
def test_inputs_are_gathered_again_only_where_they_do_not_fit_otherwise() -> None:
    w, cluster = workload("llama-3.1-70b", 256, 8192), machines(64)
    plan = search(w, cluster)
    with_it = [choice for choice in plan.best(len(plan)) if choice.layout.sp_regather]
    assert with_it
    for choice in with_it:
        plain = explained(w, cluster, replace(choice.layout, sp_regather=False))
        assert not plain.fits
        # as long where the weights' collectives take longer than all that runs beside them
        assert plain.seconds.total < choice.seconds.total * (1 + 1e-9)
        assert choice.layout.schedule not in ZERO_BUBBLE
    fixed = search(w, cluster, fixed=given(ALL_AUTO | {"sp_regather": True}))
    assert len(fixed) > len(with_it)
    assert fixed.columns.sp_regather.all()
    without = search(w, cluster, fixed=given(ALL_AUTO | {"sp_regather": False}))
    assert without.considered < plan.considered and not without.columns.sp_regather.any()


@pytest.mark.parametrize(
    ("value", "gpus", "size"),
    [
        ({"dp_replicate": "auto"}, 8, 12),
        (ALL_AUTO | {"micro_batch_size": 3}, 8, 64),
        (ALL_AUTO | {"micro_batch_size": 4, "gradient_accumulation_steps": 4}, 8, 65),
        ({"dp_replicate": "auto", "micro_batch_size": 4}, 8, 8),
        ("dp8-mb3", 8, 64),
        ("zero3x8-ga5", 8, 64),
    ],
    ids=str,
)
def test_a_batch_that_no_layout_makes_is_refused_with_one_that_some_does(
    value: str | dict[str, Any], gpus: int, size: int
) -> None:
    fixed, w = given(value), workload("llama-3.2-1b", size, 2048)
    with refuses(UserError) as refused:
        search(w, machines(gpus), fixed=fixed)
    remedy = re.search(r"train.global_batch_size=(\d+)", str(refused.value))
    assert remedy, str(refused.value)
    assert search(w.of_batch(int(remedy[1])), machines(gpus), fixed=fixed).considered > 0


@pytest.mark.parametrize(
    "value",
    ["dp2-mb1", {"tp": 3, "dp_replicate": "auto"}, "zero3x4-tp4-sp"],
    ids=str,
)
def test_a_layout_that_does_not_fill_the_cluster_is_refused_with_what_it_fills(
    value: str | dict[str, Any],
) -> None:
    with refuses(UserError):
        search(workload("llama-3.2-1b", 48, 2048), machines(8), fixed=given(value))


@pytest.mark.parametrize(
    "value",
    [
        {"tp": "two"},
        {"tp": "auto", "cp": 0},
        {"dp_shard": 4, "zero": 0},
        {"tp": 1, "sp": True},
        {"tp": "auto", "recompute": "some"},
    ],
    ids=str,
)
def test_an_impossible_part_is_refused_before_anything_is_searched(value: dict[str, Any]) -> None:
    with refuses(UserError):
        PartialLayout.parse(value)


# sorting and limits #


@pytest.fixture(scope="module")
def sizes() -> dict[int, Plan]:
    w = workload("llama-3.1-8b", 64)
    return {gpus: search(w, machines(gpus)) for gpus in (1, 2, 4, 8, 16)}


def test_each_column_chooses_what_it_says(sizes: dict[int, Plan]) -> None:
    fitting = {gpus: plan for gpus, plan in sizes.items() if len(plan)}
    assert 1 not in fitting and 16 in fitting
    quickest = {gpus: plan.choice(0).seconds.total for gpus, plan in fitting.items()}

    def chosen(sort: str) -> tuple[int, Choice]:
        best = compare([offer_of(plan, sort) for plan in sizes.values()], sort)[0]
        assert best.choice
        return best.plan.cluster.gpus, best.choice

    gpus, choice = chosen("speed")
    assert quickest[gpus] == min(quickest.values()) and choice == fitting[gpus].choice(0)
    gpus, choice = chosen("cost")
    assert gpus == min(quickest, key=lambda n: n * quickest[n]) and choice == fitting[gpus].choice(0)
    gpus, choice = chosen("gpus")
    assert gpus == min(fitting) == choice.layout.world
    gpus, choice = chosen("memory")
    lowest = min(plan.memory.peak.min() for plan in fitting.values())
    assert choice.memory.peak <= lowest + PEAK_TIE * choice.cluster.memory


@pytest.mark.ci
def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    w, cluster = workload("llama-3.2-1b", 8), machines(2, "rtx-4090")
    length, choice = largest(w, cluster, "seq_len")
    assert choice.fits
    assert choice == explained(replace(w, seq_len=length), cluster, choice.layout)
    assert not len(search(replace(w, seq_len=length + 64), cluster))


@pytest.mark.ci
def test_the_largest_batch_fits_at_once_and_the_next_does_not() -> None:
    w, cluster = workload("llama-3.1-8b", 128), machines(8)
    size, choice = largest(w, cluster, "batch")
    once = {"gradient_accumulation_steps": 1}
    assert choice.fits and choice.layout.gradient_accumulation_steps == 1
    assert choice.layout.micro_batch_size * choice.layout.data_ranks == size
    assert not len(search(w.of_batch(size + cluster.gpus), cluster, fixed=once))


@pytest.mark.all
def test_the_largest_model_fits_and_no_larger_one() -> None:
    cluster = ["cluster.gpu=h100-sxm", "cluster.gpus=1"]
    name, choice = largest_of(load(*cluster), "model")
    assert choice.fits
    larger_ones = by_size()[: by_size().index(name)]
    for other in larger_ones[-8:]:
        assert not len(search(known(other), machines(1))), other
    with refuses(UserError):
        largest(known("qwen3-0.6b"), machines(1), "speed")


# nothing fits #


REMEDY = re.compile(r"((?:cluster|data|train)\.\w+)=([\w.-]+) layout=(\S+) \(([^)]+)\)")


def changed(w: Workload, cluster: Cluster, key: str, value: str) -> tuple[Workload, Cluster]:
    match key:
        case "cluster.gpus":
            return w, cluster.of_size(int(value))
        case "data.seq_len":
            return replace(w, seq_len=int(value)), cluster
        case "train.precision":
            return replace(w, precision=value), cluster
        case "train.optimizer":
            return replace(w, optimizer=value), cluster
        case "train.mlp_tile":
            return replace(w, mlp_tile=int(value)), cluster
        case "train.offload":
            return replace(w, offload=value), cluster
        case "cluster.gpu":
            return w, machines(cluster.gpus, value)
    raise AssertionError(f"a remedy of another kind: {key}={value}")


@pytest.mark.parametrize(
    ("w", "cluster"),
    cases(
        [
            (workload("llama-3.1-70b", 64), machines(8)),
            (workload("llama-3.1-8b", 8, precision="fp32"), machines(1)),
            (workload("qwen3-4b", 1, 262144), machines(3, "rtx-4090")),
            (workload("llama-3.1-405b", 512), machines(8, "l4")),
        ],
        ci=4,
    ),
    ids=["70b on 8", "8b in fp32", "3 of 4 cards", "hopeless"],
)
def test_when_nothing_fits_the_nearest_is_named_and_the_remedies_fit(w: Workload, cluster: Cluster) -> None:
    plan = search(w, cluster)
    assert not len(plan)
    error = empty_plan_error(plan)
    assert isinstance(error, NothingFits) and error.exit_code == 3
    assert w.model in error.problems[0] and cluster.gpu.name in error.problems[0]
    named = re.search(r"The layout that needs least is (\S+): ", str(error))
    assert named
    nearest = explained(w, cluster, Layout.parse(named[1]))
    assert not nearest.fits and not w.refusals(nearest.layout)
    assert nearest.memory.peak == min(each.memory.peak for each in plan.nearest(8))
    assert len(plan.near.tp) == len(plan.nearest(9)) == 8
    remedies = REMEDY.findall(str(error))
    assert remedies or "None of the changes that were tried would fit" in str(error)
    for key, value, layout, _ in remedies:
        other, where = changed(w, cluster, key, value)
        choice = explained(other, where, Layout.parse(layout))
        assert choice.fits and not other.refusals(choice.layout), f"{key}={value} layout={layout}"
        assert len(search(other, where))


@pytest.mark.ci
def test_where_only_what_is_fixed_does_not_fit_a_free_layout_is_named() -> None:
    w, cluster = workload("llama-3.1-8b", 64), machines(8)
    plan = search(w, cluster, fixed=given("dp8"))
    assert not len(plan)
    named = re.search(r"What would fit: layout=(\S+) ", str(empty_plan_error(plan)))
    assert named and explained(w, cluster, Layout.parse(named[1])).fits


def test_an_optimizer_with_less_state_is_a_remedy_with_a_caution() -> None:
    plan = search(workload("llama-3.1-8b", 8, precision="fp32"), machines(1))
    found = [one for one in remedies(plan.workload, plan.cluster) if one.change.kind == "optimizer"]
    assert [one.setting.split()[0] for one in found] == ["train.optimizer=adafactor"]
    assert 0.9 < 8 * 8.03e9 / (plan.nearest(1)[0].memory.optimizer - found[0].choice.memory.optimizer) < 1.1
    assert OTHER_OPTIMIZER in str(empty_plan_error(plan))


def test_a_model_that_no_layout_takes_is_refused_with_the_reasons() -> None:
    plan = search(little(8, attention="it computes its attention inside the model"), machines(4))
    assert not len(plan) and not len(plan.near.tp)
    error = empty_plan_error(plan)
    assert isinstance(error, Refused) and error.exit_code == 2
    says(error)


def test_fixed_fields_that_no_layout_takes_are_refused_with_what_to_write() -> None:
    w, cluster = workload("llama-3.1-8b", 64), machines(8)
    plan = search(w, cluster, fixed=given("zero3x8-full32"))
    assert not len(plan) and not len(plan.near.tp)
    (sentence,) = empty_plan_error(plan).problems
    says(sentence)


# sentences #


def check(each: advice.Alternative, best: Choice, plan: Plan) -> None:
    said, choice = each.sentence, each.choice
    if said.startswith(("is the chosen layout (", "is part of the chosen layout (")):
        assert choice == best and str(best.layout) in said
    elif said.startswith("does not fit"):
        assert choice and choice.memory.peak > plan.cluster.usable_memory
        assert str(choice.layout) in said
    elif said.startswith(("is not possible", "are not possible")):
        assert choice is None
    else:
        assert choice and choice.fits and str(choice.layout) in said
        more = choice.seconds.total / best.seconds.total - 1
        pattern = r"takes ([\d.]+)% \(.*? a step\) longer than the chosen layout: (.*)\.$"
        if longer := re.search(pattern, said):
            assert more * 100 == pytest.approx(float(longer[1]), abs=0.51)
            extra = {
                part.name: getattr(choice.seconds, part.name) - getattr(best.seconds, part.name)
                for part in fields(Seconds)
            }
            order = sorted(extra, key=lambda name: -extra[name])
            said_parts = re.split(r"; (?![^(]*\))", longer[2])  # not inside brackets
            named = [part.split(" more ", 1)[1] for part in said_parts if " more " in part]
            assert 1 <= len(named) <= advice.NAMED
            rests = [sum(extra[name] for name in order[count + 1 :]) for count in range(len(named))]
            assert all(rest > extra[name] for rest, name in zip(rests[:-1], order, strict=False))
            assert rests[-1] <= extra[order[len(named) - 1]] or len(named) == advice.NAMED
            if len(said_parts) > len(named):
                assert said_parts[-1].startswith("all else takes ")
                assert said_parts[-1].endswith("more" if rests[-1] > 0 else "less")
            else:  # what is not named would be printed as zero, in the unit of the whole
                assert abs(rests[-1]) <= 0.05 * sum(extra.values())
            for name, what in zip(order, named, strict=False):
                if name == "compute":
                    check_cause(what, choice, best, plan.workload)
                else:
                    assert what == f"for {spent(name, choice.layout)}"
        elif less := re.search(r"takes (\d+)% less time than the chosen layout", said):
            assert -more * 100 == pytest.approx(int(less[1]), abs=0.51)
        else:
            assert "is as fast" in said and abs(more) < TIE


def check_cause(said: str, other: Choice, best: Choice, w: Workload) -> None:
    """Check that the named cause of extra compute is a part whose time is longer."""
    longer_parts, parts = (advice.compute_parts(w, choice) for choice in (other, best))
    more = {kind: longer_parts[kind] - parts[kind] for kind in parts}
    total = other.seconds.compute - best.seconds.compute
    assert sum(more.values()) == pytest.approx(total)
    named = [kind for kind, name in advice.COMPUTE.items() if re.search(rf"\b{name}[:,]", said)]
    assert named and max(more, key=lambda kind: more[kind]) in named
    if "under context parallelism" in said:
        assert other.layout.cp > best.layout.cp == 1


NODES = {cluster.gpus: cluster.node for _, cluster in WORKLOADS.values()}
KINDS = {
    "plain data parallel": lambda x: x.zero == 0 and x.tp == x.cp == x.pp == 1,
    "ZeRO-1 over all GPUs": lambda x: x.zero == 1 and x.dp_shard == x.world,
    "ZeRO-2 over all GPUs": lambda x: x.zero == 2 and x.dp_shard == x.world,
    "ZeRO-3 over all GPUs": lambda x: x.zero == 3 and x.dp_shard == x.world,
    "HSDP with ZeRO-3 shards inside a node": lambda x: (
        x.zero == 3 and x.dp_replicate > 1 == x.tp == x.cp == x.pp and x.dp_shard <= NODES[x.world]
    ),
    "tensor parallel over the whole node": lambda x: (
        x.tp == min(x.world, NODES[x.world]) and x.cp == x.pp == 1
    ),
    "pipeline parallel without cp": lambda x: x.pp > 1 and x.cp == 1,
    "context parallel without tp or pp": lambda x: x.cp > 1 and x.tp == x.pp == 1,
}


@pytest.mark.parametrize("sort", ["speed", "memory"])
def test_what_is_said_of_the_alternatives_is_true(plan: Plan, sort: str) -> None:
    best = offer_of(plan, sort).choice
    assert best
    found = advice.alternatives(plan, best)
    names = [re.split(", | and ", each.name) for each in found]
    assert [name for several in names for name in several] == (list(KINDS) if plan.cluster.gpus > 1 else [])
    assert len({each.sentence for each in found}) == len(found), "no reason twice"
    quickest = plan.best(1500)
    for each, several in zip(found, names, strict=True):
        check(each, best, plan)
        for name in several:
            if each.choice:
                assert KINDS[name](each.choice.layout), f"{name}: {each.choice.layout}"
            fitting = [c for c in quickest if KINDS[name](c.layout)]
            if "does not fit" in each.sentence or "not possible" in each.sentence:
                assert not fitting, f"{name} {each.sentence}"


@pytest.mark.ci
def test_alternatives_to_a_fixed_layout_may_be_quicker() -> None:
    w, cluster = workload("llama-3.1-8b", 64), machines(8)
    plan = search(w, cluster, fixed=given("pp8"))
    for each in advice.alternatives(plan):
        check(each, plan.choice(0), plan)
    assert any("less time" in each.sentence for each in advice.alternatives(plan))


def test_the_steps_multiply_to_the_cluster_and_the_batch(plan: Plan) -> None:
    choice = plan.choice(0)
    said = "\n".join(advice.reasoning(plan, choice))
    gpus = re.search(r"GPUs: (\d+) = (\d+) tp x (\d+) cp x (\d+) pp x (\d+) data rank", said)
    assert gpus and math.prod(map(int, gpus.groups()[1:])) == int(gpus[1]) == plan.cluster.gpus
    batch = re.search(r"Accumulation: (\d+) / \((\d+) x (\d+)\) = (\d+) micro", said)
    assert batch and int(batch[1]) == plan.workload.global_batch_size
    assert int(batch[2]) * int(batch[3]) * int(batch[4]) == int(batch[1])


def test_what_to_change_first_was_predicted(plan: Plan) -> None:
    best = plan.choice(0)
    for said in answered(plan).changes:
        if gain := re.search(r"\(train\.(\w+)=(\S+?)(?: layout=(\S+))?\): ([\d.]+)% more tokens", said):
            setting, value = gain[1], gain[2]
            if setting == "global_batch_size":
                w = plan.workload.of_batch(int(value))
            else:
                w = replace(plan.workload, **{setting: {"true": True}.get(value, value)})
            other = explained(w, plan.cluster, Layout.parse(gain[3]) if gain[3] else best.layout)
            more = other.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
            assert more * 100 == pytest.approx(float(gain[4]), abs=0.051)
        else:
            assert "more tokens" not in said
        if less := re.search(r"^less memory \(layout=(\S+)\)", said):
            other = explained(plan.workload, plan.cluster, Layout.parse(less[1]))
            assert other.fits and other.memory.peak < best.memory.peak


def test_a_whole_run_is_steps_times_a_step_at_the_price_of_its_hours() -> None:
    choice = search(workload("llama-3.1-8b", 64), machines(8, price_per_gpu_hour=2.5)).choice(0)
    length = RunLength(100, 100 * 64 * 4096)
    run = RunCost.of(choice, length)
    assert run.seconds == 100 * choice.seconds.total
    assert run.gpu_hours == pytest.approx(run.seconds * 8 / 3600)
    assert run.cost == pytest.approx(2.5 * run.gpu_hours)
    assert run.cost_per_million_tokens == pytest.approx(run.cost / (run.tokens / 1e6))
    assert " per million tokens)." in run.sentence()
    free = RunCost.of(search(workload("llama-3.1-8b", 64), machines(8)).choice(0), length)
    assert free.cost is free.cost_per_million_tokens is None and "cost" not in free.sentence()
    endless = RunCost.of(choice, RunLength(None, None))
    assert endless.seconds is endless.cost is None and endless.sentence().startswith("Training costs 0.")


# the cluster #


def test_a_kind_is_taken_in_its_usual_machine_and_what_is_said_goes_before() -> None:
    usual, kind = machines(64), catalogue()["h100-sxm"]
    assert (usual.node, usual.nodes, usual.memory, usual.link) == (kind.node, 8, kind.memory, kind.link)
    own = machines(
        64, gpus_per_node=4, memory_gib=60, link=100, network=12.5, network_share=0.5, price_per_gpu_hour=3
    )
    assert (own.node, own.nodes, own.memory) == (4, 16, 60 * 2**30)
    assert (own.link, own.network, own.network_share, own.price) == (100e9, 12.5e9, 0.5, 3)


def test_machines_that_are_not_full_are_refused_with_the_nearest() -> None:
    with refuses(UserError):
        machines(12)
    assert machines(12, gpus_per_node=6).nodes == 2
    assert machines(6).nodes == 1, "a part of one machine"


@pytest.mark.parametrize("name", ["h100", "h100-smx"])
def test_an_unknown_kind_gets_its_nearest(name: str) -> None:
    with refuses(UserError):
        machines(8, name)


def test_a_file_describes_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN_KIND)
    cluster = machines(8, "own", hardware=str(tmp_path / "own.toml"))
    assert (cluster.node, cluster.memory, cluster.gpu.bf16) == (4, 64 * 2**30, 400e12)
    assert len(search(workload("llama-3.2-1b", 8), cluster))
    for text in (OWN_KIND.replace("bandwidth = 2000\n", ""), "["):
        (tmp_path / "own.toml").write_text(text)
        with refuses(UserError):
            machines(8, "own", hardware=str(tmp_path / "own.toml"))
    with refuses(UserError):
        machines(8, "own", hardware=str(tmp_path / "none.toml"))


def test_measured_efficiencies_go_before_the_catalogues() -> None:
    slow = machines(8, efficiency={"matmul": 0.1})
    layout = Layout.parse("zero3x8-mb1-ga8")
    w = workload("llama-3.1-8b", 64)
    assert explained(w, slow, layout).seconds.compute > 2 * explained(w, machines(8), layout).seconds.compute
    with refuses(UserError):
        machines(8, efficiency={"matmull": 0.1})


def seen(name: str, *gib: float) -> list[tuple[str, float]]:
    return [(name, each * 2**30) for each in gib]


def test_the_gpus_of_this_machine_are_the_cluster_where_none_is_named() -> None:
    cluster = cluster_of(ClusterConfig(), seen=lambda: seen("NVIDIA H100 80GB HBM3", 79.1, 70, 79.1, 79.1))
    assert (cluster.gpu.name, cluster.gpus, cluster.node) == ("h100-sxm", 4, 4)
    assert cluster.memory == 70 * 2**30, "the smallest"
    more = cluster_of(ClusterConfig(gpus=8), seen=lambda: seen("NVIDIA H100 80GB HBM3", *[79.1] * 4))
    assert (more.gpus, more.nodes) == (8, 2), "machines such as this one"
    with refuses(UserError):
        cluster_of(ClusterConfig(), seen=lambda: seen("GT 710", 2))
    named = cluster_of(ClusterConfig(gpu="l4"), seen=lambda: seen("GT 710", 2))
    assert named.gpu.name == "l4"


def test_without_a_gpu_ranks_share_this_processors_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * 2**30))
    named = (cluster_of(ClusterConfig(gpu="cpu", gpus=n)) for n in (1, 4))
    one, four = (cluster_of(ClusterConfig(gpus=n), seen=list) for n in (1, 4))
    assert (one, four) == (*named,)
    assert one.gpu.name == four.gpu.name == "cpu"
    assert (one.memory, four.memory, four.node) == (64 * 2**30, 16 * 2**30, 4)
    assert one.of_size(4) == four, "plan --gpus 4"


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1)]
)
def test_gpus_that_are_hidden_are_not_seen(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = "NVIDIA L4, 23034\nNVIDIA L4, 23034\n"
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: SimpleNamespace(stdout=out))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == [("NVIDIA L4", 23034 * 2.0**20)] * count


def test_a_machine_without_the_drivers_tool_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **others: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpus_here() == []


@pytest.mark.parametrize("number", [1, 2, 12, 97, 100, 720_720])
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


def test_divisors_of_a_very_large_batch_end() -> None:
    assert len(divisors(10**12)) == 13 * 13
    assert len(divisors(963_761_198_400)) == 6720
    assert divisors(999_999_999_989) == [1, 999_999_999_989], "a prime"
