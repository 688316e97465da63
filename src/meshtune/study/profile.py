"""Traces of real steps: time for Perfetto, memory for PyTorch's memory_viz; files of each rank.

rank-<n>.json     torch.profiler's trace of a step: https://ui.perfetto.dev
rank-<n>.pickle   allocations of a step (CUDA's allocator), or on a CPU of two steps, as the dry run writes
                  them from what was watched: https://pytorch.org/memory_viz
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meshtune.data.batch import Batch
from meshtune.dryrun.snapshot import write_snapshot
from meshtune.dryrun.world import record
from meshtune.meter.trace import StepTrace
from meshtune.train.model import RankModel
from meshtune.train.step import Counts

PROFILED_RANKS = 8  # the first ones, which have files
ENTRIES = 200_000  # of the allocator's history


def write_profile(folder: Path, model: RankModel, batch: Batch, max_grad_norm: float) -> None:
    """Make further steps with one batch, and write this rank's traces; every rank calls it."""
    world = model.parallel.world
    named = folder / f"rank-{world.rank}.json"
    if writes := world.rank < PROFILED_RANKS:
        folder.mkdir(parents=True, exist_ok=True)
    cuda = world.device.type == "cuda"
    if cuda and writes:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES)  # private; documented for users
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) if writes else nullcontext() as found:
        model.passes.step(
            model.passes.localise(batch), Counts(batch.units, tokens=batch.tokens), lambda _: nullcontext(),
            learning_rate=0.0, max_grad_norm=max_grad_norm,
        )  # fmt: skip
        world.synchronize()
    if found is not None:
        found.export_chrome_trace(str(named))
    if cuda and writes:
        torch.cuda.memory._dump_snapshot(str(named.with_suffix(".pickle")))
        torch.cuda.memory._record_memory_history(enabled=None)
    if not cuda:
        steps = [StepTrace(1), StepTrace(2)]
        record(
            model, model.passes.localise(batch), steps,
            units=batch.units, mismatched=batch.mismatched, max_grad_norm=max_grad_norm,
        )  # fmt: skip
        if writes:
            write_snapshot(named.with_suffix(".pickle"), steps)
