"""Sentences of one answer agree with its other parts, and options without use are refused."""

import pytest
from golden import says
from made_plans import answered, machines, workload

from meshtune.config import Config, load
from meshtune.layout import PartialLayout
from meshtune.plan import advice
from meshtune.plan.accuracy import accuracy
from meshtune.plan.cluster import Cluster
from meshtune.plan.explanation import explain
from meshtune.plan.search import Plan, search
from meshtune.plan.workload import Workload
from meshtune.tools.export import tool_for
from meshtune.units import duration


def planned(work: Workload, cluster: Cluster, layout: str) -> Plan:
    return search(work, cluster, fixed=PartialLayout.parse(layout).given)


def micro_batch(plan: Plan) -> str:
    return next(said for said in advice.reasoning(plan, plan.choice(0)) if said.startswith("Micro-batch"))


def test_a_larger_micro_batch_that_the_tool_refuses_is_not_called_faster() -> None:
    settings = ["model.name=m", "data.train=rows.jsonl", "train.max_steps=10"]
    megatron = tool_for("megatron", load(overrides=[*settings, "train.global_batch_size=64"]))
    said = micro_batch(planned(workload(seq_len=8192).run_by(megatron), machines(16), "zero1x8-tp2-sp"))
    says(said)


def test_a_larger_micro_batch_that_fits_is_compared_by_its_time() -> None:
    plan = planned(workload("llama-3.1-8b", 64, 1024), machines(8), "zero3x8-mb1-ga8")
    says(micro_batch(plan))


def test_a_larger_micro_batch_that_does_not_fit_is_named_with_what_it_needs() -> None:
    plan = planned(workload("llama-3.1-8b", 64, 4096), machines(8), "zero3x8-mb2-ga4")
    says(micro_batch(plan))


def test_the_batch_is_part_of_the_reason_where_it_excludes_degrees() -> None:
    """70B on 1000 GPUs: 1024 sequences leave dp, tp and pp without cp only degrees of 5."""
    plan = search(workload("llama-3.1-70b", 1024, 8192), machines(1000), fixed={"tp": 4, "cp": 25, "pp": 5})
    pipelines = next(one for one in advice.alternatives(plan) if one.name == "pipeline parallel without cp")
    says(pipelines.sentence)


def test_layouts_that_save_less_memory_than_they_cost_time_are_not_offered() -> None:
    plan = search(workload("llama-3.1-70b", 64, 2048), machines(16))
    best = plan.choice(0)
    slow = plan.choice(int(plan.memory.peak.argmin()))
    assert slow.memory.peak < 0.95 * best.memory.peak and slow.seconds.total > 2 * best.seconds.total
    assert str(slow.layout) not in " ".join(answered(plan).changes)


def test_ranks_of_processors_are_not_called_gpus() -> None:
    plan = planned(workload("llama-3.2-1b", 8, 1024), machines(2, "cpu", memory_gib=128), "zero3x2-mb1-ga4")
    says(advice.reasoning(plan, plan.choice(0)))


def test_a_stack_with_measured_times_alone_is_not_called_unmeasured() -> None:
    said = accuracy("megatron-core", "h100-sxm", "nodes").sentence("megatron-core", "h100-sxm")
    assert "nobody has published 5 peaks of megatron-core on h100-sxm" in said
    peaks_alone = accuracy("megatron-core", "h100-sxm", "nodes")._replace(time_rows=0, memory_rows=5)
    assert "nobody has published 5 step times of s on g on several machines" in peaks_alone.sentence("s", "g")


def test_a_short_part_of_a_long_time_has_no_minutes() -> None:
    assert [duration(seconds, like=89.0) for seconds in (0.4, 9.0, 59.6, 89.0)] == [
        "0 s", "9 s", "1 min 0 s", "1 min 29 s",
    ]  # fmt: skip


@pytest.mark.parametrize("gpus", [None, 8, 16])
def test_another_number_of_gpus_than_the_layouts_is_named(gpus: int | None) -> None:
    cluster = {"gpu": "h100-sxm"} | ({"gpus": gpus} if gpus else {})
    settings = {"model": {"name": "any"}, "cluster": cluster, "train": {"global_batch_size": 64}}
    found = explain(Config.model_validate(settings), workload("llama-3.1-8b", 64, 2048), "zero3x8-mb2-ga4")
    said = "zero3x8-mb2-ga4 has 8 ranks, but cluster.gpus is 16; the prediction is for 8."
    assert found.choice.cluster.gpus == 8
    assert found.against == ((said,) if gpus == 16 else ())
