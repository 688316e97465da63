"""The planner on the experiments of a sweep: as one by one, in groups of thousands."""

from typing import Any

import pytest
from golden import says
from known import known

from meshtune.api.sweep import best_layouts, place_of
from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.plan.search import explained
from meshtune.plan.workload import Workload
from meshtune.study.judge import Here, Judged, judge
from meshtune.study.store import DOES_NOT_FIT, REFUSED, WAITING
from meshtune.study.sweep_file import read_sweep

BASE = {"model": {"name": "llama-3.1-8b"}, "data": {"seq_len": 4096}, "cluster": {"gpu": "h100-sxm"}}


def workload_of(config: Config) -> Workload:
    """The workload of a model of the catalogue, without its config.json."""
    model = known(config.model.name)
    return Workload(
        config.model.name, model.work, model.traits, config.data.seq_len, config.global_batch_size
    )


SIMULATED = Here(place_of("planner", elsewhere=False).cluster, workload_of)


def judged(document: dict[str, Any], run: str = "bench") -> list[Judged]:
    plan = read_sweep({"base": BASE, **document})
    return judge(plan.experiments(lambda tree, number: best_layouts(SIMULATED, tree, number)), run, SIMULATED)


def test_a_group_is_predicted_as_each_layout_is_alone() -> None:
    axes = {
        "model.name": ["llama-3.2-1b", "llama-3.1-8b"],
        "data.seq_len": [2048, 4096],
        "layout": [
            "zero3x8-mb1-ga8",
            "dp2-zero1x4-mb2-ga2-full",
            "tp4-sp-pp2-1f1b-mb1-ga16",
            "zero2x16-mb1-ga1",
        ],
    }
    found = judged({"axes": axes})
    assert len(found) == 16
    for one in found:
        assert one.layout and one.choice
        config = Config(**{**BASE, "model": {"name": one.figures["model"]},
                           "data": {"seq_len": one.figures["seq_len"]}})  # fmt: skip
        cluster = SIMULATED.cluster(config, one.layout.world)
        batch = one.layout.global_batch_size
        alone = explained(workload_of(config).of_batch(batch), cluster, one.layout)
        assert one.choice.seconds.total == pytest.approx(alone.seconds.total)
        assert one.choice.memory.peak == pytest.approx(alone.memory.peak)
        assert one.figures["predicted_mfu"] == pytest.approx(alone.mfu)
        assert one.figures["global_batch_size"] == batch and one.figures["gpus"] == one.layout.world
        assert one.status == (WAITING if alone.fits else DOES_NOT_FIT)


def test_what_can_t_run_has_a_sentence_and_the_facts_that_are_known() -> None:
    base = {**BASE, "train": {"global_batch_size": 64}}
    found = judged({
        "base": base,
        "axes": {
            "layout": ["tp3-mb1-ga64", "mb64-ga1", "zero3x7-mb1", "pp64-1f1b-mb1-ga64", "zero3x8-mb1-ga8"]
        },
        "experiments": [
            {"layout": "mb1-ga4", "train.global_batch_size": 8},
            {"layout": "mb1-ga1", "layout.zero": 3},
        ],
    })  # fmt: skip
    reasons = [
        (REFUSED, "tp=3 does not divide 32 attention heads"),
        (DOES_NOT_FIT, "too much: the planner fills at most"),
        (REFUSED, "64"),
        (REFUSED, "pp"),
        (WAITING, ""),
        (REFUSED, "= 4 sequences, but train.global_batch_size is 8; try mb1-ga8"),
        (REFUSED, "zero=3 with dp_shard=1"),
    ]
    for one, (status, reason) in zip(found, reasons, strict=True):
        assert (one.status, reason in (one.reason or "")) == (status, True), one
    assert all(one.figures["model"] == "llama-3.1-8b" for one in found[:6])


def test_an_open_layout_is_completed_by_the_planner_or_by_what_the_gpus_leave() -> None:
    base = {**BASE, "train": {"global_batch_size": 64}}
    (chosen,) = judged({"base": base, "axes": {"cluster.gpus": [8]}})
    assert chosen.status == WAITING and chosen.layout and chosen.layout.world == 8
    assert chosen.layout.global_batch_size == 64
    fields = {"layout": {"dp_replicate": "auto", "dp_shard": "auto", "tp": 2}, "cluster": {"gpus": 16}}
    axes = {"layout.zero": [0, 1], "layout.micro_batch_size": [2]}
    base |= {"layout": fields["layout"], "cluster": {"gpu": "h100-sxm", "gpus": 16}}
    plain, sharded = judged({"base": base, "axes": axes})
    assert plain.layout == Layout.parse("dp8-tp2-mb2-ga4") and sharded.layout == Layout.parse(
        "zero1x8-tp2-mb2-ga4"
    )


def test_an_open_ep_is_searched_where_a_sweep_fixes_the_batch() -> None:
    layout = {"dp_shard": "auto", "zero": 3, "recompute": "full", "ep": "auto"}
    base = {"model": {"name": "qwen3-30b-a3b"}, "layout": layout, "cluster": {"gpu": "h100-sxm", "gpus": 16}}
    (one,) = judged({"base": {**BASE, **base}, "axes": {"layout.micro_batch_size": [1]}})
    assert one.layout and one.layout.ep > 1 and one.layout.dp_shard == 16


def test_a_layout_of_another_size_than_the_cluster_is_refused() -> None:
    base = {**BASE, "cluster": {"gpu": "h100-sxm", "gpus": 16}}
    (one,) = judged({"base": base, "axes": {"layout": ["zero3x8-mb1-ga1"]}})
    says(one.reason)
    assert one.status == REFUSED


def test_the_best_layouts_become_experiments() -> None:
    base = {**BASE, "train": {"global_batch_size": 64}}
    axes = {"cluster.gpus": [1, 8, 16], "layout": {"best": 2}}
    none, *found = judged({"base": base, "axes": axes})
    says(none.reason)  # without remedies, whose search takes longer than all of a sweep
    assert none.status == DOES_NOT_FIT
    assert [one.figures["gpus"] for one in found] == [8, 8, 16, 16]
    assert found[0].choice and found[1].choice
    assert found[0].choice.seconds.total <= 1.03 * found[1].choice.seconds.total


def test_training_needs_rows_and_its_own_global_batch() -> None:
    base = {**BASE, "train": {"global_batch_size": 64}}
    document = {"base": base, "axes": {"layout": ["zero3x8-mb1-ga1"]}}
    assert judged(document)[0].status == WAITING  # bench: the layout's batch counts
    (lacking,) = judged(document, "train")
    says(lacking.reason)
    assert lacking.status == REFUSED
    document["base"] = {**base, "data": {"train": "rows.jsonl", "seq_len": 4096}}
    (other,) = judged(document, "train")
    says(other.reason)
