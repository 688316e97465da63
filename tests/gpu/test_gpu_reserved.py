"""Bytes that torch's allocator really holds in a step on a GPU, against the dry run's replay: within 5 %.

ZeRO-3, whose streams hold the largest part of what is reserved and not in use, needs two GPUs.
"""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from meshtune import launch
from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.workspaces import Workspaces
from meshtune.dryrun.world import Job, batch_of, trace_rank
from meshtune.launch.allocator import NAME, NAMES
from meshtune.layout import Layout
from meshtune.plan.hardware import named
from meshtune.train.model import ModelSpec, OptimizerSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WITHIN = 0.05


def job(layout: str, **options: Any) -> Job:
    from transformers import LlamaConfig

    model = LlamaConfig(
        vocab_size=32768, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Job(
        spec=ModelSpec(source=model, init="random", kernels="cuda", **options),
        optimizer=OptimizerSpec(),
        layout=Layout.parse(layout),
        seq_len=4096,
        documents=(2000, 1500, 500),
    )


def really(work: Job) -> list[tuple[int, int]]:
    """(Active, reserved) bytes of rank 0 at the peak of each of two steps, for a process of its own."""
    return launch.run(on_rank, work, ranks=work.layout.world, device="cuda")


def on_rank(_: launch.Rank, work: Job) -> list[tuple[int, int]]:
    """(Active, reserved) bytes of this rank at the peak of each of two steps."""
    from meshtune.parallel.mesh import join
    from meshtune.train.model import rank_model
    from meshtune.train.step import Counts

    device = torch.device("cuda", torch.cuda.current_device())
    world = join(work.layout, device)
    model = rank_model(work.spec, world, optimizer=work.optimizer, tokens_per_sequence=work.seq_len)
    batch = batch_of(work, world)
    torch.cuda.empty_cache()  # what building the model has left
    peaks = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model.passes.step(
            [each.to(device) for each in model.passes.localise(batch)],
            Counts(batch.label_tokens),
            lambda _: nullcontext(),
            learning_rate=1e-4,
            max_grad_norm=1.0,
        )
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        peaks.append((stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]))
    return peaks


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize(
    "layout", ["mb2-selective", "mb4-ga2-full", "mb4-ga2-offload", "zero3x2-mb2-full", "zero3x2-mb2-ga2"]
)
def test_reserved_bytes_are_the_replays(
    layout: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = named(torch.cuda.get_device_name())
    if gpu is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in plan/hardware.toml")
    work = job(layout)
    ranks, gpus = work.layout.world, torch.cuda.device_count()
    if ranks > gpus:  # layouts have no ZeRO-3 of one rank
        pytest.skip(f"{layout} has {ranks} ranks, and there is {gpus} GPU")
    (trace,) = trace_ranks(partial(trace_rank, work), [0], ranks)
    replays = replay_steps(trace.steps, workspaces=Workspaces(gpu.architecture), expandable=expandable)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(NAME, f"expandable_segments:{expandable}")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        measured = process.submit(really, work).result()
    for replay, (active, reserved) in zip(replays, measured, strict=True):
        assert replay.active == pytest.approx(active, rel=WITHIN)
        assert replay.reserved == pytest.approx(reserved, rel=WITHIN)
