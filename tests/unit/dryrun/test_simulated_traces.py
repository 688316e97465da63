"""Streams of real steps that were traced: passes as the schedules order them, and sums that agree."""

from copy import copy
from dataclasses import replace
from functools import partial

import pytest
from cases import cases
from made_traces import cluster, job_of
from transformers import LlamaConfig

from meshtune.dryrun.costs import Costs, runs
from meshtune.dryrun.kernels import COMMUNICATION, kernel_table
from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.streams import COMPUTE, cut, is_message, simulate
from meshtune.dryrun.world import trace_rank
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.model.trace import census
from meshtune.placement.schedules import orders
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.report.dryrun.panels import passes

MODEL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip


def traced(layout: str, **options: object) -> list[RankTrace]:
    """Traces of every pipeline rank of a tiny Llama on the path of GPUs, in bf16; a block for each stage."""
    model = copy(MODEL)
    model.num_hidden_layers = max(4, Layout.parse(layout).stages)
    work = job_of(model, layout, (50, 40, 30), 128, kernels="cuda", precision="bf16", **options)
    ranks = range(0, work.layout.world, work.layout.world // work.layout.pp)
    return trace_ranks(partial(trace_rank, work), ranks, work.layout.world)


def costs(layout: Layout) -> Costs:
    """Costs of the tiny Llama on H100s."""
    work = Work.of(census(MODEL))
    return Costs.of(Workload("tiny", work, None, 128, layout.global_batch_size), cluster(layout.world))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    cases([
        "tp2-sp-mb1-ga1", "zero2x2-cp2-mb1-ga2", "dp2-zero3x2-mb1-ga2",
        "pp2-1f1b-mb1-ga4", "pp2-gpipe-mb1-ga4", "zero3x2-pp2-interleaved1f1b-v2-mb1-ga4-full",
        "pp2-loopedbfs-v2-mb1-ga4", "zero1x2-pp2-zb-v2-mb1-ga4", "pp2-zbv-mb1-ga4", "pp2-dualpipev-mb1-ga5",
    ], ci=1),
)  # fmt: skip
def test_a_real_step_on_streams(layout: str) -> None:
    parsed = Layout.parse(layout)
    traces = traced(layout)
    of_trace = replace(parsed, gradient_accumulation_steps=traces[0].micro_batches)  # some are left out
    for trace, order in zip(traces, orders(of_trace), strict=True):
        step = trace.steps[1]
        found = cut(step, order)
        assert list(found.passes) == [tuple(each) for each in order]
        kept = [*found.before, *found.after, *(n for numbers in found.passes.values() for n in numbers)]
        messages = [n for n, each in enumerate(step.operations) if is_message(each)]
        assert sorted(kept) == [
            n for n, each in enumerate(step.operations) if runs(each) and n not in messages
        ]
    run = simulate(traces, parsed, costs(parsed))
    assert run.parts.total == pytest.approx(run.seconds)
    for rank, trace, order in zip(run.ranks, traces, orders(parsed), strict=True):
        assert rank.parts.total == pytest.approx(run.seconds)
        assert [(each.kind, each.stage, each.micro_batch) for each in passes(rank)] == order
        if trace.of > trace.micro_batches:
            continue
        table = kernel_table(trace, costs(parsed))
        computed = sum(each.seconds for each in table.rows if each.place != COMMUNICATION)
        on_compute = [each for each in rank.intervals if each.stream == COMPUTE]
        assert len(on_compute) <= sum(each.launches for each in table.rows)
        assert sum(each.end - each.begin for each in on_compute) >= computed * (1 - 1e-9)


@pytest.mark.all
def test_every_backward_of_a_pipeline_gathers_a_block_ahead() -> None:
    """By itself FSDP2 gathers ahead in the first backward alone, where several forwards wait for theirs."""
    layout = Layout.parse("zero3x2-pp2-gpipe-mb1-ga4")
    for trace, order in zip(traced(str(layout)), orders(layout), strict=True):
        step = trace.steps[1]
        for each, numbers in cut(step, order).passes.items():
            if each[0] != "B":
                continue
            found = [step.operations[number] for number in numbers]
            ops = [one.collective.op if one.collective else "" for one in found]
            gathers = [at for at, op in enumerate(ops) if op == "all_gather"]
            assert len(gathers) == MODEL.num_hidden_layers // layout.pp == 2
            assert gathers[1] < [one.name for one in found].index("aten.mm.default")
