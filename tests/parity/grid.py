"""The grid: 14 layouts that cover every technique and every pair of axes, each trained once for all tests.

    grid(layout, precision) ──> the run ──┬── equal to one rank's: losses, norms, tensors, evaluation
                                          ├── the exported folder is that of one rank
                                          ├── its rows are of the same global batches
                                          ├── its checkpoint continues in another layout
                                          └── in fp32: its memory and messages are the dry run's, its peak
                                              the planner's, the parts of each step its time

Under pytest-xdist all workers share the runs: the first that asks for one trains it, the others wait for it.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

from filelock import FileLock
from layouts import Trained, trained, whole

from meshtune import config
from meshtune.api.dryrun import subject_of
from meshtune.api.resolve import inputs_of
from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.world import trace_rank
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.rundir import RunDir

ONE = "mb4-ga4"
SINGLE = ["zero3x2", "tp2-sp", "ulysses2", "pp2-zbv"]  # two ranks and one technique: these are in make test
GRID = [
    "zero3x2-tp2-sp-selective", "cp2-pp2-zbv", "zero1x2-ulysses2-linear2", "tp4-sp", "cp2-tp2-linear",
    "cp2-tp2-sp-regather", "dp2-pp2-gpipe-full", "tp2-sp-pp2-loopedbfs-v2", "ulysses2-pp2-zb-v2",
    "zero3x2-cp2-selective2", "zero3x1-cp2", "tp2-pp2-dualpipev-mb2-ga8",
    "dp2-pp2-interleaved1f1b-v2-mb2-ga4-attention",
    "zero3x2-tp2-sp-pp2-1f1b-full", "dp2-zero2x2-pp2-1f1b-selective",
]  # fmt: skip
Grid = Callable[[str, str], Trained]
Traced = Callable[[str], dict[int, RankTrace]]


def values(layout: Layout) -> dict[str, str]:
    """Value of each axis on which a layout differs from one rank: {"data": "zero3", "tensor": "tp+sp", …}."""
    chosen = {
        "data": f"zero{layout.zero}" if layout.zero else "dp" if layout.dp_replicate > 1 else "",
        "hybrid": "dp of zero" if layout.zero and layout.dp_replicate > 1 else "",
        "context": layout.cp_method if layout.cp > 1 else "",
        "tensor": "tp" + "+sp" * layout.sp + "+regather" * layout.sp_regather if layout.tp > 1 else "",
        "pipeline": layout.schedule if layout.pp > 1 else "",
        "recompute": layout.recompute if layout.recompute != "none" else "",
    }
    return {axis: value for axis, value in chosen.items() if value}


def pairs() -> set[tuple[str, str]]:
    """Pairs of axes that some layout of the grid has together."""
    return {pair for name in GRID for pair in combinations(sorted(values(whole(name))), 2)}


def shared(folder: Path) -> Grid:
    """Function(layout, precision) -> the run, trained in `folder` by whoever asks first."""

    def cell(layout: str, precision: str) -> Trained:
        run = folder / f"{layout}-{precision}"
        with FileLock(f"{run}.lock"):
            if not (done := run.with_suffix(".done")).exists():
                trained(folder / "data", run, layout, precision, watched=2 * (precision == "fp32"))
                done.touch()
        return Trained.read(run)

    return cell


def dry_runs(grid: Grid) -> Traced:
    """Function(layout) -> rank -> its dry run with the second batch of the grid's run in fp32."""

    def traced(layout: str) -> dict[int, RankTrace]:
        run = RunDir(grid(layout, "fp32").folder)
        file = run.path.with_suffix(".traces")
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_bytes(pickle.dumps(dry_run(run)))
        return pickle.loads(file.read_bytes())

    return traced


def dry_run(run: RunDir) -> dict[int, RankTrace]:
    """Trace one rank of each kind with the second batch of a run, in the layout that it had."""
    chosen, layout = config.load(run.config_file), Layout.parse(run.rows("run")[0]["layout"])
    with subject_of(chosen, lambda _: None, device="cpu") as subject:
        job = subject.job_of_data(layout, inputs_of(chosen), number=2)
        ranks = [*subject.ranks(layout)]
    job = replace(job, every_micro_batch=True)
    return dict(zip(ranks, trace_ranks(partial(trace_rank, job), ranks, layout.world), strict=True))
