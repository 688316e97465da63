"""Ranks that a dry run traces: which, in processes of their own, and what ends these."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from golden import refuses
from made_traces import job_of
from transformers import LlamaConfig, XGLMConfig

from meshtune.dryrun.ranks import Tell, distinct_ranks, pipeline_copies, ranks_to_trace, trace_ranks
from meshtune.dryrun.recorder import refuse_unlike
from meshtune.dryrun.world import trace_rank
from meshtune.errors import RankFailed, UserError
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace, StepTrace, Storage
from meshtune.model.trace import census
from meshtune.placement.census import Census
from meshtune.train import model


@pytest.fixture(scope="module")
def blocks() -> Census:
    """Ten small blocks."""
    return census(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=10,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("zero3x64-tp8-sp-mb1-ga1", [0]),
        ("zero3x2-pp2-1f1b-mb1-ga4", [0, 2]),
        ("zero3x2-tp2-pp3-1f1b-mb1-ga4", [0, 4, 8]),
        ("pp4-1f1b-mb1-ga8", [0, 1, 3]),  # 2, 3, 3 and 2 blocks
        ("pp5-1f1b-mb1-ga8", [0, 1, 4]),  # 2 each
        ("zero1x2-pp4-interleaved1f1b-v2-mb1-ga8", [0, 2, 6]),
    ],
)
def test_one_rank_of_each_kind_of_pipeline_rank(blocks: Census, layout: str, ranks: list[int]) -> None:
    assert [*distinct_ranks(blocks, Layout.parse(layout), 128)] == ranks


@pytest.mark.ci
def test_ranks_in_the_middle_stand_for_those_with_as_many_blocks(blocks: Census) -> None:
    layout = Layout.parse("pp7-1f1b-mb1-ga8")  # 1, 1, 1, 2, 2, 2 and 1 blocks
    assert pipeline_copies(blocks, layout, 128) == {0: 0, 1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 6}
    assert distinct_ranks(blocks, layout, 128) == {
        0: "the first pipeline rank (block 0)",
        1: "those in the middle with 1 block (block 1)",
        3: "those in the middle with 2 blocks (blocks 3-4)",
        6: "the last one (block 9)",
    }


def test_the_middle_rank_is_the_fullest(blocks: Census) -> None:
    layout = Layout.parse("pp4-zbv-mb1-ga8")  # rank 0 has the ends; the middle is stages 1 + 6 or 2 + 5
    assert [*distinct_ranks(blocks, layout, 128)] in ([0, 1, 3], [0, 2, 3])


def test_a_rank_asked_for_comes_beside_the_others_or_is_refused(blocks: Census) -> None:
    layout = Layout.parse("zero3x2-tp2-pp2-1f1b-mb1-ga4")
    distinct = distinct_ranks(blocks, layout, 128)
    traced = ranks_to_trace(distinct, layout, [3, 4])
    assert traced == {
        0: "the first pipeline rank (blocks 0-4)",
        3: "itself, pp 0, dp_shard 1, tp 1",
        4: "the last one (blocks 5-9)",
    }
    with refuses(UserError) as error:
        ranks_to_trace(distinct, layout, [8, -1])
    assert len(error.value.problems) == 2


def large(rank: int, _: Tell) -> RankTrace:
    """A trace of more bytes than a pipe holds."""
    storages = [Storage(number, "weights", "m", "", "") for number in range(50_000)]
    return RankTrace(rank, {}, (), [StepTrace(1, storages=storages)], 1, 1)


@pytest.mark.ci
def test_traces_come_back_whole_and_in_order() -> None:
    lines: list[str] = []
    traces = trace_ranks(large, [6, 0, 3], 8, tell=lines.append)
    assert [trace.rank for trace in traces] == [6, 0, 3]
    assert traces[1].steps[0].storages[-1].bytes == 49_999
    assert sorted(lines) == [f"rank {rank} of 8 traced" for rank in (0, 3, 6)]


def slow(rank: int, tell: Tell) -> RankTrace:
    tell("step 1 of 2, backward")
    time.sleep(1)
    return large(rank, tell)


def test_a_long_trace_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtune.dryrun.ranks.BEAT", 0.3)
    lines: list[str] = []
    trace_ranks(slow, [6], 8, tell=lines.append)
    assert lines[-2].startswith("rank 6: step 1 of 2, backward · 0 of 1 rank traced, ")


@pytest.mark.all
def test_spawned_processes_trace_as_forked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with GPUs spawn them: neither CUDA nor autograd's threads survive a fork."""
    shape = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    job = job_of(shape, "zero3x2-mb1-ga2")
    traces = {}
    for method in ("fork", "spawn"):
        monkeypatch.setattr("meshtune.dryrun.ranks.start_method", lambda method=method: method)
        (traces[method],) = trace_ranks(partial(trace_rank, job), [0], 2)
    forked, spawned = traces["fork"], traces["spawn"]
    assert [step.peaks for step in spawned.steps] == [step.peaks for step in forked.steps]
    assert [len(step.operations) for step in spawned.steps] == [len(step.operations) for step in forked.steps]


def crash(rank: int, tell: Tell) -> RankTrace:
    """Do what the rank's number says."""
    if rank == 0:
        raise RuntimeError("no such kernel")
    if rank == 1:
        os.abort()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        raise UserError("Use another layout.")
    if rank == 4:
        os._exit(0)
    if rank == 5:
        raise MemoryError
    time.sleep(600)
    return large(rank, tell)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rank", "error", "words"),
    [
        (0, RankFailed, "rank 0 of 8 failed:.*RuntimeError: no such kernel"),
        (1, RankFailed, "trace of rank 1 was killed by SIGABRT.*Fatal Python error: Aborted.*in crash"),
        (2, RankFailed, "trace of rank 2 was killed by SIGKILL; the kernel .* memory runs out"),
        (3, UserError, "^Use another layout.$"),
        (4, RankFailed, "trace of rank 4 ended with exit code 0"),
        (5, RankFailed, "rank 5 of 8 failed:.*MemoryError"),
    ],
)
def test_a_crash_ends_all_with_its_rank_and_cause(
    rank: int, error: type[Exception], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        trace_ranks(crash, [7, rank], 8)
    assert capfd.readouterr() == ("", "")


def test_a_hang_is_named_with_its_line() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 7 hangs: it used no CPU for 0.40 s.*in crash"):
        trace_ranks(crash, [7], 8, silence=0.4)


def mixed(rank: int, tell: Tell) -> RankTrace:
    """Trace an XGLM in bf16 whose table of positions is left in fp32."""
    config = XGLMConfig(vocab_size=64, d_model=32, num_layers=1, attention_heads=2, ffn_dim=32)
    model.cast_position_tables = lambda *_: None
    return trace_rank(job_of(config, "mb1-ga1", (16,), attention="eager"), rank)


def test_a_matmul_of_unlike_dtypes_is_refused_as_by_real_kernels() -> None:
    left, right = (torch.empty(2, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    refuse_unlike("lm_head", [left, left])
    with refuses(UserError):
        refuse_unlike("lm_head", [left, right])


@pytest.mark.ci
def test_a_model_with_such_a_matmul_is_refused() -> None:
    with refuses(UserError):
        trace_ranks(mixed, [0], 1)
