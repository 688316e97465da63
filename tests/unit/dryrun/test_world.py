"""The dry run of a rank against the same steps on real CPU ranks: bytes by category, and messages."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from transformers import LlamaConfig

from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.world import Job, batch_of, record, trace_rank
from meshtune.layout import Layout
from meshtune.meter.trace import (
    BACKWARD,
    FORWARD,
    GATHERED,
    OPTIMIZER,
    RECOMPUTATION,
    UPDATE,
    WEIGHTS,
    StepTrace,
)
from meshtune.parallel.mesh import join
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model

SRC = Path(__file__).parents[3] / "src" / "meshtune"
MODEL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip


def job(layout: str, **options: Any) -> Job:
    return Job(
        spec=ModelSpec(source=MODEL, init="random", **options),
        optimizer=OptimizerSpec(),
        layout=Layout.parse(layout),
        seq_len=128,
        documents=(50, 40, 30),
    )


def summary(steps: list[StepTrace]) -> list[tuple[dict[str, Any], Counter[Any]]]:
    """(Peaks by phase and category, messages) of each step."""
    return [
        (
            {phase: (size, +Counter(parts)) for phase, (size, parts) in step.peaks.items()},
            Counter((each.op, each.axis, each.bytes) for each in step.collectives()),
        )
        for step in steps
    ]


def really(work: Job) -> list[tuple[dict[str, Any], Counter[Any]]]:
    """Summary of the same steps on this rank, with real tensors and real ranks."""
    world = join(work.layout, torch.device("cpu"))
    model = rank_model(work.spec, world, optimizer=work.optimizer, tokens_per_sequence=work.seq_len)
    batch, steps = batch_of(work, world), [StepTrace(1), StepTrace(2)]
    record(work, model, model.passes.localise(batch), steps, label_tokens=batch.label_tokens)
    return summary(steps)


@pytest.mark.parametrize(
    "layout",
    [
        "zero3x2-mb2-ga2-full",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2-sp-mb2-ga2", "pp2-1f1b-mb1-ga4")),
    ],
)
def test_fake_steps_have_the_bytes_and_messages_of_real_ones(layout: str) -> None:
    work = job(layout)
    ranks = work.layout.world
    simulated = trace_ranks(partial(trace_rank, work), range(ranks), ranks)
    for number, expected in enumerate(run_ranks(ranks, really, work)):
        assert summary(simulated[number].steps) == expected
    steps = simulated[0].steps
    again = {RECOMPUTATION} if work.layout.recompute == "full" else set()
    assert {operation.phase for operation in steps[1].operations} == {FORWARD, BACKWARD, UPDATE, *again}
    assert steps[0].peak()[0] < steps[1].peak()[0], "the first has no optimizer state yet"
    assert max(size for size, _ in steps[1].peaks.values()) == steps[1].peak()[0]
    states = {storage.state for storage in steps[1].storages if storage.category == OPTIMIZER}
    assert {"exp_avg", "exp_avg_sq"} <= states
    if not work.layout.zero:
        return
    gathered = {each.module for each in steps[1].storages if each.category == GATHERED}
    assert {f"model.layers.{block}" for block in range(4)} < gathered, "by FSDP2's hooks, in no operation"
    weight = next(each for each in steps[1].storages if each.name == "lm_head.weight" and not each.state)
    assert (weight.category, weight.shape, weight.dtype) == (WEIGHTS, (256, 64), "float32")
    assert list(steps[1].host_reads) == [line for line in steps[1].host_reads if line.startswith("meshtune/")]


def test_neither_training_nor_parallelism_knows_that_it_is_simulated() -> None:
    for folder in ("train", "parallel", "attention", "optim", "model"):
        for file in (SRC / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8").lower()
            assert "fake" not in text.replace("register_fake", ""), file


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mb1-ga5", "pp2-1f1b-mb1-ga7", "pp2-gpipe-mb1-ga8"])
def test_micro_batches_that_are_left_out_are_counted(layout: str) -> None:
    work = job(layout)
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
            counts.append((peaks, step.peak()[0], flops, messages))
    assert counts[:2] == counts[2:]
