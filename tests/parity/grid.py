"""The grid: 14 layouts that cover every technique and every pair of axes, each trained once for all tests.

    grid(layout, precision) ──> the run ──┬── equal to one rank's: losses, norms, tensors, evaluation
                                          ├── the exported folder is that of one rank
                                          ├── its rows are of the same global batches
                                          └── its checkpoint continues in another layout

Under pytest-xdist all workers share the runs: the first that asks for one trains it, the others wait for it.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from filelock import FileLock
from layouts import Trained, trained, whole

from meshtune.layout import Layout

ONE = "mb4-ga4"
SINGLE = ["zero3x2", "tp2-sp", "ulysses2", "pp2-zbv"]  # two ranks and one technique: these are in make test
GRID = [
    "zero3x2-tp2-sp-selective", "cp2-pp2-zbv", "zero1x2-ulysses2-full2", "tp4-sp", "cp2-tp2-full",
    "cp2-tp2-sp-regather", "dp2-pp2-gpipe-full", "tp2-sp-pp2-loopedbfs-v2", "ulysses2-pp2-zb-v2",
    "zero3x2-cp2-selective2", "tp2-pp2-dualpipev-mb2-ga8", "dp2-pp2-interleaved1f1b-v2-mb2-ga4-attention",
    "zero3x2-tp2-sp-pp2-1f1b-full", "dp2-zero2x2-pp2-1f1b-selective",
]  # fmt: skip
Grid = Callable[[str, str], Trained]


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
            if not (run / "model").exists():
                trained(folder / "data", run, layout, precision)
        return Trained.read(run)

    return cell
