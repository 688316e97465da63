"""The memory that a plan leaves free: 4 % on measured kinds, 10 % on others, or as set; and a budget."""

from dataclasses import replace
from pathlib import Path

import pytest
from golden import refuses, says
from made_plans import machines, workload
from own_kind import OWN_KIND

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.plan import advice
from meshtune.plan.answer import largest
from meshtune.plan.changes import remedies
from meshtune.plan.cluster import Cluster, cluster_here, with_memory_budget
from meshtune.plan.facts import cluster_facts
from meshtune.plan.hardware import catalogue
from meshtune.plan.search import explained, search
from meshtune.plan.workload import Workload
from meshtune.units import GIB

UNMEASURED = next(name for name, gpu in catalogue().items() if not gpu.measured and name != "cpu")


def remedies_of(w: Workload, cluster: Cluster) -> list[str]:
    return [outcome.remedy for outcome in remedies(w, cluster)]


def test_offloading_is_a_remedy_where_nothing_else_fits_and_nowhere_else() -> None:
    w = workload("llama-3.2-1b", 4, 131072)
    assert all(choice.memory.host == 0 for choice in search(w, machines(1)).best(1000))
    nothing = next(each for each in remedies(w, machines(1, memory_gib=42)) if each.change.kind == "offload")
    assert nothing.choice.layout == Layout.parse("mb1-ga4-offload")
    says(nothing.remedy)
    says(nothing.choice.in_host_memory)
    small = replace(nothing.choice.cluster, ram=7 * GIB)  # this machine, with less than the 7.5 that it needs
    says(replace(nothing.choice, cluster=small).in_host_memory)
    full = explained(w, machines(1), Layout.parse("mb1-ga4-full")).memory
    moved = 15 * 2**29  # of 16 blocks, [131072, 2048] in bf16
    assert nothing.choice.memory.host == moved
    assert full.peak - moved < nothing.choice.memory.peak < full.peak


def test_states_in_host_memory_are_a_remedy_unless_they_are_there() -> None:
    w, cluster = workload("llama-3.2-1b", 4, 1024), machines(1, memory_gib=14)
    states = next(each for each in remedies(w, cluster) if each.change.kind == "states")
    says(states.remedy)
    assert states.choice.memory.host == 12 * w.work.parameters  # masters and two moments in fp32
    there = replace(w, offload="optimizer")
    assert all(each.change.kind != "states" for each in remedies(there, cluster))


@pytest.mark.parametrize(("gpu", "margin"), [("h100-sxm", 0.04), ("a100-80", 0.04), (UNMEASURED, 0.1)])
def test_kinds_without_a_measured_matmul_rate_keep_more_memory_free(gpu: str, margin: float) -> None:
    cluster = machines(gpu=gpu)
    assert cluster.margin == margin
    plan = search(workload(), cluster)
    assert plan.memory.peak.max() <= cluster.memory * (1 - margin)
    assert f"leaves {margin:.0%} of it free (cluster.memory_margin" in " ".join(
        advice.reasoning(plan, plan.choice(0))
    )


@pytest.mark.ci
def test_a_margin_that_is_set_holds_in_every_question() -> None:
    cluster = machines(memory_margin=0.5)
    w, half = workload(), cluster.memory / 2
    assert cluster_facts(cluster)["usable_memory"] == half
    plan = search(w, cluster)
    assert 0.8 * half < plan.memory.peak.max() <= half
    for alternative in advice.alternatives(plan):
        if alternative.sentence.startswith("does not fit"):
            assert alternative.choice and alternative.choice.memory.peak > half
    tight = next(choice for choice in search(w, machines()).best(200) if choice.memory.peak > half)
    assert not explained(w, cluster, tight.layout).fits
    assert largest(w, cluster, "batch")[1].memory.peak <= half
    for remedy in remedies_of(workload("llama-3.2-3b", 8), machines(gpus=1, memory_margin=0.5)):
        layout = remedy.split("layout=")[1].split(" ")[0]
        assert Layout.parse(layout)
        gib = float(remedy.rsplit("(", 1)[1].split(" ")[0])
        assert gib <= max(gpu.memory for gpu in catalogue().values()) / 2**31


def test_another_kind_of_gpu_has_its_own_margin_in_a_remedy() -> None:
    for remedy in remedies_of(workload("llama-3.2-3b", 8), machines(1, "rtx-4090")):
        if remedy.startswith("cluster.gpu="):
            kind, need = catalogue()[remedy[12:].split(" ")[0]], float(remedy.rsplit("(", 1)[1].split(" ")[0])
            assert need * 2**30 <= kind.memory * (0.96 if kind.measured else 0.9) * 1.01


def test_a_run_leaves_the_margin_of_its_settings_free() -> None:
    """`layout: auto` of a run plans with `cluster_here`, on GPUs and on a processor."""
    config = Config.model_validate({"model": {"name": "any"}, "cluster": {"memory_margin": 0.3}})
    assert cluster_here(config, 8, [("NVIDIA H100 80GB HBM3", 79e9)] * 8).margin == 0.3
    assert cluster_here(config, 2, []).margin == 0.3
    usual = Config.model_validate({"model": {"name": "any"}})
    assert cluster_here(usual, 8, [("NVIDIA H100 80GB HBM3", 79e9)] * 8).margin == 0.04


def test_a_kind_of_ones_own_is_measured_if_it_has_a_matmul_rate(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN_KIND)
    assert machines(gpu="own", hardware=str(file)).margin == 0.1
    assert machines(gpu="own", hardware=str(file), efficiency={"matmul": 0.7}).margin == 0.04
    file.write_text(f"{OWN_KIND}efficiency = {{matmul = 0.7}}\n")
    assert machines(gpu="own", hardware=str(file)).margin == 0.04


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_a_margin_is_a_share_below_one(margin: float) -> None:
    from meshtune.config import load

    with refuses(UserError):
        load(None, ["model.name=any", f"cluster.memory_margin={margin}"])


@pytest.mark.ci
def test_a_budget_bounds_every_answer() -> None:
    budget = 50 * GIB
    cluster = machines(memory_budget_gib=50)
    assert cluster.usable_memory == budget and cluster.memory > budget
    plan = search(workload(), cluster)
    assert len(plan) and plan.memory.peak.max() <= budget
    assert search(workload(), machines()).memory.peak.max() > budget
    says(advice.reasoning(plan, plan.choice(0))[1])
    assert largest(workload(), cluster, "batch")[1].memory.peak <= budget
    assert cluster_facts(cluster)["memory_budget"] == cluster_facts(cluster)["usable_memory"] == budget


def test_a_budget_beyond_what_the_margin_leaves_is_named() -> None:
    cluster = machines(memory_budget_gib=78)
    assert cluster.usable_memory == machines().usable_memory
    plan = search(workload(), cluster)
    says(advice.reasoning(plan, plan.choice(0))[1])


@pytest.mark.ci
def test_where_only_the_budget_is_in_the_way_going_without_is_offered_first() -> None:
    remedy = remedies_of(workload(), machines(memory_budget_gib=15))[0]
    assert remedy.startswith("cluster.memory_budget_gib=null layout=")
    unbounded = remedies_of(workload("llama-3.2-3b", 8), machines(1, "rtx-4090"))
    assert not any("budget" in remedy for remedy in unbounded)


def test_a_run_keeps_the_budget_of_its_settings() -> None:
    config = Config.model_validate({"model": {"name": "any"}, "cluster": {"memory_budget_gib": 30}})
    assert cluster_here(config, 8, [("NVIDIA H100 80GB HBM3", 79e9)] * 8).usable_memory == 30 * GIB
    assert cluster_here(config, 2, []).memory_budget == 30 * GIB


@pytest.mark.parametrize(
    ("budget", "gib"),
    [("70GiB", 70), ("70", 70), (70, 70), (12.5, 12.5), ("75 GB", 75e9 / GIB), ("1t", 1e12 / GIB)],
)
def test_a_budget_is_a_size(budget: str | float, gib: float, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"name": "any"}, "cluster": {"gpus": 8}})
    changed = with_memory_budget(config, budget).cluster_config
    assert changed.memory_budget_gib == pytest.approx(gib) and changed.gpus == 8
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus: 16\n")
    named = Config.model_validate({"model": {"name": "any"}, "cluster": str(file)})
    assert with_memory_budget(named, budget).cluster_config.gpus == 16


@pytest.mark.parametrize("budget", ["lots", "", "-3GiB", "0", "70 apples", "GiB"])
def test_a_budget_that_is_no_size_is_refused(budget: str) -> None:
    config = Config.model_validate({"model": {"name": "any"}})
    with refuses(UserError):
        with_memory_budget(config, budget)
