"""Numbers with a caution: times of a processor, and documents longer than their sequence."""

import json
from dataclasses import replace
from functools import partial

import pytest
from golden import refuses, says
from made_plans import answered, machines, workload
from terminal import printed

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.plan import advice
from meshtune.plan.changes import out_of_memory
from meshtune.plan.cost import RunLength
from meshtune.plan.explanation import Explanation, explain
from meshtune.plan.facts import workload_facts
from meshtune.plan.phrases import unmeasured
from meshtune.plan.search import Plan, explained, search
from meshtune.report.plan import documents
from meshtune.units import significant

small = partial(workload, "llama-3.1-8b", 16, 2048)


@pytest.fixture(scope="module")
def processor() -> Plan:
    return search(small(), machines(4, "cpu", memory_gib=100, price_per_gpu_hour=1.0))


def test_a_plan_for_a_processor_says_that_its_times_are_not_of_this_machine(processor: Plan) -> None:
    answer = answered(processor, length=RunLength(20, 20 * processor.workload.tokens))
    assert len(answer.alternatives) > 4 and answer.batch_advice
    document = documents.answer(answer, 10)
    json.dumps({**document.facts})
    text = " ".join(printed(document).split())
    says(unmeasured(processor.cluster))
    assert text.index(unmeasured(processor.cluster)) < text.index("layouts were ranked")
    times = ("tokens_per_second_per_gpu", "step_seconds", "mfu", "time")
    for layout in document.facts["layouts"]:
        assert layout["memory"]["peak"] > 0 and {layout[name] for name in times} == {None}
    run = document.facts["run"]
    assert run["steps"] == 20 and run["seconds"] is run["gpu_hours"] is run["cost"] is None
    assert text.count(unmeasured(processor.cluster)) == 1
    explanation = Explanation(processor.workload, processor.choice(0), ())
    assert {lever["speed"] for lever in explanation.as_dict()["levers"]} == {None}
    failed = explained(processor.workload, processor.cluster, processor.choice(0).layout)
    assert " time" not in " ".join(out_of_memory(failed, processor.workload))
    gpu = search(small(), machines())
    assert "not those of this machine" not in printed(documents.answer(answered(gpu), 10))


# documents #


def test_documents_are_no_longer_than_their_sequence() -> None:
    layout = Layout.parse("zero3x8-mb1-ga2")
    usual = explained(small(), machines(), layout)
    longer = explained(small(mean_document_tokens=100_000.0), machines(), layout)
    assert longer.mfu == usual.mfu < 0.7
    assert longer.seconds.total == usual.seconds.total
    shorter = explained(small(mean_document_tokens=500.0), machines(), layout)
    assert shorter.seconds.total < usual.seconds.total


def test_documents_that_are_cut_are_said_and_grow_with_the_sequence() -> None:
    w = small(mean_document_tokens=100_000.0)
    plan = search(w, machines())
    said = advice.reasoning(plan, plan.choice(0))[0]
    says(said)
    assert workload_facts(w)["mean_document_tokens"] == 2048
    assert replace(w, seq_len=8192).document_tokens == 8192
    assert replace(w, seq_len=2**18).document_tokens == 100_000
    assert "within documents" not in " ".join(advice.reasoning(search(small(), plan.cluster), plan.choice(0)))


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
        layout: [line for line in explain(config, small(), layout).against if "leaves it out" in line]
        for layout in ("pp8-gpipe-mb1-ga16", "pp8-1f1b-mb1-ga16", "pp8-loopedbfs-v2-mb1-ga16")
    }
    says(said["pp8-gpipe-mb1-ga16"])
    assert said["pp8-1f1b-mb1-ga16"] == []
    says(said["pp8-loopedbfs-v2-mb1-ga16"][0])
    cut = explain(config, small(mean_document_tokens=5000.0), "zero3x8")
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
    job = workload(seq_len=seq_len, mean_document_tokens=1e9)
    measured, at_peak = (search(job, machines(8, "h100-sxm", efficiency=each)) for each in ({}, shares))
    assert measured.choice(0).mfu < at_peak.choice(0).mfu < 1
