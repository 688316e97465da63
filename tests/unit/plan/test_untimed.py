"""Numbers that would mean nothing: times of a processor, and documents longer than their sequence."""

import json
from dataclasses import replace
from typing import Any

import pytest
from golden import refuses, says
from rich.console import Console

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.plan import advice
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.changes import out_of_memory
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.cost import RunLength
from meshtune.plan.explanation import Explanation, explain
from meshtune.plan.facts import workload_facts
from meshtune.plan.models import models
from meshtune.plan.search import Plan, explained, search
from meshtune.plan.workload import Workload
from meshtune.report.plan import documents, tables
from meshtune.report.plan.panels import panels
from meshtune.sections import ClusterConfig
from meshtune.units import significant

TIMES = (
    "tokens/s",
    "step ",
    "MFU",
    " longer",
    "faster",
    "less time",
    "as fast",
    "speed differs",
    "GPU-hours",
)


def machines(gpus: int, gpu: str, **settings: Any) -> Cluster:
    return cluster_of(ClusterConfig(gpu=gpu, gpus=gpus, **settings))


def workload(size: int = 16, seq_len: int = 2048, **settings: Any) -> Workload:
    shape = models()["llama-3.1-8b"]
    return Workload("llama-3.1-8b", shape.work, shape.traits, seq_len, size, **settings)


def answered(plan: Plan) -> Answer:
    length = RunLength(20, 20 * plan.workload.tokens)
    offer = offer_of(plan, "speed", length)
    return Answer(plan.workload, (offer,), offer, length=length)


def printed(what: Any) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


@pytest.fixture(scope="module")
def processor() -> Plan:
    return search(workload(), machines(4, "cpu", memory_gib=100, price_per_gpu_hour=1.0))


@pytest.mark.ci
def test_no_times_of_a_processor_are_printed(processor: Plan) -> None:
    answer = answered(processor)
    assert len(answer.alternatives) > 4 and answer.batch_advice
    text = printed(documents.answer(answer, 10))
    assert not [word for word in TIMES if word in text.replace("a step", "")]
    assert tables.NO_TIMES in " ".join(text.split()) and "GiB" in text
    gpu = printed(documents.answer(answered(search(workload(), machines(8, "h100-sxm"))), 10))
    assert [word for word in TIMES if word in gpu.replace("a step", "")] != []


def test_an_explained_layout_on_a_processor_has_memory_alone(processor: Plan) -> None:
    w, choice = processor.workload, processor.choice(0)
    one = Explanation(w, choice, ())
    for document in (documents.explained([one]), documents.explained([one, one], in_one_table=True)):
        text = printed(document)
        assert "weights" in text and "GiB" in text
        assert not [
            word for word in ("tokens/s", "MFU", "optimizer's update", "tokens per second") if word in text
        ]
    assert one.levers and all(lever.freed > 0 for lever in one.levers)
    assert all(lever["speed"] is None for lever in one.as_dict()["levers"])


def test_the_document_of_a_processor_has_memory_and_null_for_times(processor: Plan) -> None:
    document = answered(processor).as_dict(3)
    json.dumps(document)
    for layout in document["layouts"]:
        assert layout["memory"]["peak"] > 0
        assert [layout[name] for name in ("tokens_per_second_per_gpu", "step_seconds", "mfu", "time")] == [
            None
        ] * 4
    assert document["run"]["steps"] == 20
    assert document["run"]["seconds"] is document["run"]["gpu_hours"] is document["run"]["cost"] is None


@pytest.mark.ci
def test_the_page_of_a_processor_draws_memory_alone(processor: Plan) -> None:
    answer = answered(processor)
    drawn = panels(answer, answer.best(3), {4: processor}, answer.batches())
    assert [panel.key for panel in drawn] == ["memory"]


def test_a_processor_out_of_memory_is_told_memory_alone(processor: Plan) -> None:
    failed = explained(processor.workload, processor.cluster, processor.choice(0).layout)
    assert " time" not in " ".join(out_of_memory(failed, processor.workload))


# documents #


def test_documents_are_no_longer_than_their_sequence() -> None:
    layout = Layout.parse("zero3x8-mb1-ga2")
    usual = explained(workload(), machines(8, "h100-sxm"), layout)
    longer = explained(workload(mean_document_tokens=100_000.0), machines(8, "h100-sxm"), layout)
    assert longer.mfu == usual.mfu < 0.7
    assert longer.seconds.total == usual.seconds.total
    shorter = explained(workload(mean_document_tokens=500.0), machines(8, "h100-sxm"), layout)
    assert shorter.seconds.total < usual.seconds.total


def test_documents_that_are_cut_are_said_and_grow_with_the_sequence() -> None:
    w = workload(mean_document_tokens=100_000.0)
    plan = search(w, machines(8, "h100-sxm"))
    said = advice.reasoning(plan, plan.choice(0))[0]
    says(said)
    assert workload_facts(w)["mean_document_tokens"] == 2048
    assert replace(w, seq_len=8192).document_tokens == 8192
    assert replace(w, seq_len=2**18).document_tokens == 100_000
    assert "within documents" not in " ".join(
        advice.reasoning(search(workload(), plan.cluster), plan.choice(0))
    )


# notation #


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (99.6, 2, "100"), (123.4, 2, "120"), (7.63, 2, "7.6"), (7.63e-5, 2, "0.000076"),
        (12345.0, 2, "12,000"), (0.996, 2, "1.0"), (0.0, 2, "0"), (78.0, 3, "78.0"), (999.96, 3, "1,000"),
    ],
)  # fmt: skip
def test_numbers_are_never_in_scientific_notation(number: float, digits: int, text: str) -> None:
    assert significant(number, digits) == text


def test_an_explained_layout_that_the_search_leaves_out_says_so() -> None:
    config = Config.model_validate(
        {
            "model": {"name": "any"},
            "cluster": {"gpu": "h100-sxm", "gpus": 8},
            "data": {"seq_len": 2048},
            "train": {"global_batch_size": 16},
        }
    )
    said = {
        layout: [line for line in explain(config, workload(), layout).against if "leaves it out" in line]
        for layout in ("pp8-gpipe-mb1-ga16", "pp8-1f1b-mb1-ga16", "pp8-loopedbfs-v2-mb1-ga16")
    }
    says(said["pp8-gpipe-mb1-ga16"])
    assert said["pp8-1f1b-mb1-ga16"] == []
    says(said["pp8-loopedbfs-v2-mb1-ga16"][0])
    cut = explain(config, workload(mean_document_tokens=5000.0), "zero3x8")
    says(cut.against)


# efficiencies #


def test_shares_of_a_peak_are_at_most_one() -> None:
    """An efficiency of 20 gave an MFU above 100 %."""
    with refuses(UserError):
        machines(8, "h100-sxm", efficiency={"matmul": 20.0, "memory": 0.0, "depth": 30.0, "tile": 1.0})
    assert machines(8, "h100-sxm", efficiency={"matmul": 1.0, "depth": 30.0}).gpu.efficiency["depth"] == 30


@pytest.mark.parametrize("seq_len", [512, 2048, 65536])
def test_no_mfu_is_above_one_hundred_percent_even_at_the_peak(seq_len: int) -> None:
    """Shares of 1 are used, as the MFU is above that of the measured shares; how far depends on the kernels'
    memory traffic and launches, which are other tests' matter.
    """
    shares = {"matmul": 1.0, "attention": 1.0, "memory": 1.0, "link_share": 1.0}
    job = workload(64, seq_len, mean_document_tokens=1e9)
    measured, at_peak = (search(job, machines(8, "h100-sxm", efficiency=each)) for each in ({}, shares))
    assert measured.choice(0).mfu < at_peak.choice(0).mfu < 1
