"""The dry run of ranks against the same steps on real CPU ranks: bytes by category, and collectives."""

import math
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from transformers import MixtralConfig

from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.world import trace_rank
from meshtune.layout import RECOMPUTE, SCHEDULES
from meshtune.meter.trace import BACKWARD, FORWARD, GATHERED, OPTIMIZER, RECOMPUTATION, UPDATE, WEIGHTS
from meshtune.model.capabilities import traits
from meshtune.model.load import on_meta
from meshtune.optimizers import OPTIMIZERS
from meshtune.placement.rules import refusals
from meshtune.train.model import ModelSpec

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "meshtune"
sys.path.append(str(ROOT / "validation"))

from dryrun_cases import GRID, KTO, MODELS, SIZES, Case  # noqa: E402
from dryrun_grid import compare, differences, real, summary, traces  # noqa: E402

SLOW = (  # of the grid, what the runs of tests/parity/test_grid_rows.py do not have
    "zero2x2-mb2-ga2, DoRA",
    "tp2-sp-mb24-ga1-full, three chunks of the loss, label smoothing",
    "cp2-tp2-sp-mb1-ga1, Mistral, window of 16",
    "pp2-zbv-mb1-ga4, tied embeddings",
    "zero3x2-mb2-ga2-selective, Gemma 2",
    "zero3x2-mb2-ga2-offload",
    "pp2-gpipe-mb1-ga4-offload",
    "zero3x2-mb2-ga2-offload, states in host memory",
    "dp2-mb2-ga1, updates in the backward, states in host memory",
    "zero3x2-mb2-ga2-full, QLoRA",
    "tp2-sp-pp2-1f1b-mb1-ga4, KTO",
    "dp2-mb2-ga1, KTO, another reference",
    "zero3x2-mb2-ga1, KTO, another reference",
    "tp2-sp-mb2-ga2-linear",
    "tp2-sp-mb2-ga2-full, MLPs in tiles",
    "dp2-ep2-mb2-ga2, DeepSeek-V3, tokens spread evenly",
    "dp2-ep2-mb2-ga2, DeepSeek-V3, one rank with all tokens",
    "zero3x2-ep2-mb2-ga2-full, DeepSeek-V3, one rank with all tokens",
    "zero3x2-ep2-mb2-ga1-selective, DeepSeek-V3, tokens spread evenly",
)


def test_the_grid_has_every_technique_and_no_layout_that_training_refuses() -> None:
    jobs = {case.name: case.job() for case in GRID}
    layouts = [job.layout for job in jobs.values()]
    assert len(jobs) == len(GRID) and sum(2 <= layout.world <= 8 for layout in layouts) >= 36
    assert max(layout.world for layout in layouts) == 8
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {layout.recompute for layout in layouts} == set(RECOMPUTE)
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {job.optimizer.name for job in jobs.values()} == set(OPTIMIZERS)
    assert {job.spec.precision for job in jobs.values()} == {"fp32", "bf16", "bf16-pure"}
    models = {name: traits(on_meta(config)) for name, config in MODELS.items()}
    for case in GRID:
        found = refusals(models[case.model], jobs[case.name].layout, optimizer=case.optimizer)
        assert not found, (case.name, found)


@pytest.mark.parametrize("name", cases(SLOW))
def test_a_case_of_the_grid_is_equal(name: str) -> None:
    case = next(case for case in GRID if case.name == name)
    assert compare(case).differences == ()


@pytest.mark.all  # in CI a layout of the grid (tests/parity/test_grid_rows.py)
@pytest.mark.parametrize("layout", ["zero3x3-mb1-ga1-full"])  # shards of different sizes
def test_fake_steps_have_the_bytes_and_messages_of_real_ones(layout: str) -> None:
    work = Case(layout=layout).job()
    simulated = traces(work)
    assert [*differences(real(work), [summary(trace.steps) for trace in simulated])] == []
    steps = simulated[0].steps
    phases = {operation.phase for operation in steps[1].operations}
    assert phases == {FORWARD, BACKWARD, UPDATE, RECOMPUTATION}
    assert steps[0].peak()[0] < steps[1].peak()[0], "the first has no optimizer state yet"
    assert max(size for size, _ in steps[1].peaks.values()) == steps[1].peak()[0]
    states = {storage.state for storage in steps[1].storages if storage.category == OPTIMIZER}
    assert {"exp_avg", "exp_avg_sq"} <= states
    gathered = {each.module for each in steps[1].storages if each.category == GATHERED}
    assert {f"model.layers.{block}" for block in range(4)} < gathered, "by FSDP2's hooks, in no operation"
    weight = next(each for each in steps[1].storages if each.name == "lm_head.weight" and not each.state)
    shard = (-(-512 // work.layout.dp_shard), 64)
    assert (weight.category, weight.shape, weight.dtype) == (WEIGHTS, shard, "float32")
    assert list(steps[1].host_reads) == [line for line in steps[1].host_reads if line.startswith("meshtune/")]


@pytest.mark.ci
@pytest.mark.parametrize(("recompute", "exchanges"), [("", 4), ("-full", 6)])  # there and back, twice again
def test_experts_on_several_ranks_exchange_rows_by_the_formula(recompute: str, exchanges: int) -> None:
    """Counts of rows are exchanged once, and the host reads sizes once, however often a block runs."""
    experts, k = 4, 2
    spec = ModelSpec(
        source=MixtralConfig(**SIZES, num_local_experts=experts, num_experts_per_tok=k), init="random"
    )
    work = replace(Case(layout=f"zero3x4-ep2-mb2-ga2{recompute}").job(), spec=spec)
    (trace,) = trace_ranks(partial(trace_rank, work), [1], work.layout.world)
    passes = SIZES["num_hidden_layers"] * work.layout.gradient_accumulation_steps
    messages = [each.collective for each in trace.steps[1].operations if each.collective]
    assert Counter(each.bytes for each in messages if each.axis == "ep") == {
        work.layout.micro_batch_size * work.seq_len * k * SIZES["hidden_size"] * 2: exchanges * passes,
        experts * 8: passes,
    }
    rows = work.layout.micro_batch_size * work.seq_len * k  # received as sent, since tokens are spread evenly
    flops = sum(each.flops for each in trace.steps[1].operations if "grouped_mm" in each.name)
    once = 2 * rows * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert flops == (exchanges // 2 + 1) * once * passes  # of a backward twice
    reads = trace.steps[1].host_reads
    assert sum(number for line, number in reads.items() if "/experts/" in line) == passes


@pytest.mark.all
def test_ranks_with_experts_own_each_element_once() -> None:
    owned = Counter[str]()
    for trace in traces(Case(layout="zero3x4-ep2-mb1-ga1", model="deepseek").job()):
        for each in trace.steps[1].storages:
            if each.category == WEIGHTS and each.name and not each.state:
                owned[each.name] += math.prod(each.shape)
    whole = on_meta(MODELS["deepseek"]).named_parameters()
    assert owned == {name: parameter.numel() for name, parameter in whole}


def test_neither_training_nor_parallelism_knows_that_it_is_simulated() -> None:
    for folder in ("train", "parallel", "attention", "optim", "model"):
        for file in (SRC / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8").lower()
            assert "fake" not in text.replace("register_fake", ""), file


@pytest.mark.parametrize(
    ("layout", "options"),
    cases(
        [
            ("mb1-ga5", {}),
            ("pp2-1f1b-mb1-ga7", {}),
            ("pp2-gpipe-mb1-ga8-offload", {}),
            ("pp2-1f1b-mb1-ga7", KTO),
        ]
    ),
)
def test_micro_batches_that_are_left_out_are_counted(layout: str, options: dict[str, Any]) -> None:
    work = Case(layout=layout, options=options).job()
    counts = []
    for every in (False, True):
        traced = replace(work, every_micro_batch=every)
        (trace,) = trace_ranks(partial(trace_rank, traced), [0], work.layout.world)
        assert (trace.micro_batches < trace.of) != every
        for step in trace.steps:
            messages = Counter[Any]()
            for each in step.operations:
                if each.collective is not None:
                    messages[each.collective] += trace.times(each)
            flops = sum(each.flops * trace.times(each) for each in step.operations)
            peaks = {phase: (size, +Counter(parts)) for phase, (size, parts) in step.peaks.items()}
            counts.append((peaks, step.peak()[0], step.host_bytes, flops, messages))
    assert counts[:2] == counts[2:]
