"""Step time by the planner's closed forms beside dry runs laid on streams, part by part.

    python validation/step_time.py [--only LAYOUT,…] [--out validation/step_time.md]

Llama-3.1 8B on H100s: both take the same seconds for a matmul, an attention kernel and a collective. The
planner adds up closed forms; the dry run has the operations that the training step really runs, on streams,
with every rank of the pipeline (dryrun/streams.py). The first row is torchtitan's own eager step, whose speed
is published.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import reserved
from measured import HERE

from meshtune.dryrun.costs import Costs
from meshtune.dryrun.ranks import distinct_ranks, pipeline_copies, trace_ranks
from meshtune.dryrun.streams import simulate
from meshtune.layout import Layout
from meshtune.model.trace import census
from meshtune.placement.columns import Columns
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import catalogue
from meshtune.plan.seconds.step import PARTS, Seconds, step
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload

SHAPE = reserved.Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
PUBLISHED = "titan-01"  # the row of validation/data that is eager and in bf16
PUBLISHED_GPU = "h100-96"  # 96 GB and 500 W, as the table's page says
KIND = "h100-sxm"
LAYOUTS = {  # layout -> tokens in a sequence
    "zero3x8-mb1-ga1": 8192, "zero3x8-mb2-ga1-full": 8192, "zero2x8-mb1-ga2": 4096, "dp8-mb1-ga2": 4096,
    "dp2-zero3x4-mb1-ga2": 4096, "zero3x4-cp2-mb1-ga1": 8192, "tp8-sp-mb1-ga1": 8192,
    "pp4-1f1b-mb1-ga8": 4096, "pp4-gpipe-mb1-ga8": 4096, "pp4-interleaved1f1b-v2-mb1-ga8": 4096,
    "pp4-zbv-mb1-ga8": 4096,
}  # fmt: skip
PAGE = HERE / "step_time.md"


@dataclass(frozen=True)
class Result:
    """One layout's step; seconds."""

    layout: str
    planned: Seconds
    simulated: Seconds


def cluster(kind: str, gpus: int) -> Cluster:
    """The usual machines of a kind."""
    gpu = catalogue()[kind]
    return Cluster(gpu, gpus, gpu.node, gpu.memory, gpu.link, gpu.network)


def workload(layout: Layout, seq_len: int) -> Workload:
    """Llama-3.1 8B with a layout's batch; its time depends on nothing else."""
    work = Work.of(census(reserved.config_of(SHAPE, seq_len)))
    return Workload("llama3.1-8b", work, None, seq_len, layout.global_batch_size)  # type: ignore[arg-type]


def result(text: str, seq_len: int) -> Result:
    """Predict a layout's step both ways."""
    layout = Layout.parse(text)
    numbers = census(reserved.config_of(SHAPE, seq_len))
    ranks, copies = (find(numbers, layout, seq_len) for find in (distinct_ranks, pipeline_copies))
    traces = trace_ranks(partial(reserved.ours, SHAPE, layout, seq_len), [*ranks], layout.world)
    costs = Costs.of(workload(layout, seq_len), cluster(KIND, layout.world))
    planned = step(workload(layout, seq_len).work, Columns.of([layout]), costs.machine, seq_len)
    return Result(
        text,
        Seconds(**{part: float(np.ravel(getattr(planned, part))[0]) for part in PARTS}),
        simulate(traces, layout, costs, copies=copies).parts,
    )


def published() -> tuple[float, float]:
    """(Published, simulated) tokens per second and GPU of torchtitan's eager step."""
    (row,) = (row for row in reserved.rows() if row["id"] == PUBLISHED)
    layout, seq_len = reserved.layout_of(row), int(row["seq_len"])
    traces = trace_ranks(partial(reserved.theirs, SHAPE, layout, seq_len), [0], layout.world)
    costs = Costs.of(workload(layout, seq_len), cluster(PUBLISHED_GPU, layout.world))
    seconds = simulate(traces, layout, costs).seconds
    return float(row["tokens_per_s_per_gpu"]), layout.global_batch_size * seq_len / seconds / layout.world


def page(results: Sequence[Result], speeds: tuple[float, float] | None) -> str:
    """The tables, as Markdown."""
    lines = [
        "# Step time: the planner beside the dry run",
        "",
        "Written by `python validation/step_time.py --out validation/step_time.md`; what it means is in "
        "[README.md](README.md#step-time-by-dry-run-2026-11-28). Llama-3.1 8B in bf16 on H100s, in "
        "milliseconds: the planner's first, then the dry run's.",
        "",
    ]
    if speeds:
        lines += [
            f"torchtitan's eager step ({PUBLISHED}): {speeds[0]:,.0f} tokens/s/GPU are published, "
            f"{speeds[1]:,.0f} simulated ({speeds[1] / speeds[0] - 1:+.1%}).",
            "",
        ]
    names = [
        part for part in PARTS if any(getattr(one, part) for r in results for one in (r.planned, r.simulated))
    ]
    lines += [
        f"| layout | step | difference | {' | '.join(names)} |",
        f"| --- | {' | '.join('---:' for _ in range(2 + len(names)))} |",
    ]
    for each in results:
        planned, simulated = each.planned.total, each.simulated.total
        cells = (
            f"{1000 * getattr(each.planned, name):,.0f} / {1000 * getattr(each.simulated, name):,.0f}"
            for name in names
        )
        lines.append(
            f"| `{each.layout}` | {1000 * planned:,.0f} / {1000 * simulated:,.0f} "
            f"| {simulated / planned - 1:+.1%} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = reserved.options_of(__doc__, "layouts; default: all, and the published row")
    results = []
    for layout in options.only or LAYOUTS:
        results.append(result(layout, LAYOUTS[layout]))
        print(f"{layout} done", file=sys.stderr, flush=True)
    reserved.show(page(results, None if options.only else published()), options.out)


if __name__ == "__main__":
    main()
