"""The planner's step time of this engine beside the dry run's, part by part: neither may drift away alone."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import cases

from meshtune.dryrun.costs import Costs
from meshtune.dryrun.kernels import COMMUNICATION, KernelTable, kernel_table
from meshtune.dryrun.ranks import distinct_ranks, pipeline_copies, trace_ranks
from meshtune.dryrun.streams import simulate
from meshtune.layout import Layout
from meshtune.meter.trace import WITHOUT_GRADIENTS
from meshtune.model.trace import census
from meshtune.placement.columns import Columns
from meshtune.plan.seconds.step import PARTS, Seconds, StepTime
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.train.preference import PreferenceSpec

sys.path.append(str(Path(__file__).parents[3] / "validation"))
import reserved
import step_time

SHAPE = reserved.Shape(layers=4, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=128256)  # as Llama-3.2 1B
SEQ_LEN = 4096
# shares by which the planner's may differ
BLOCKS, HEAD_AND_COPIES, UPDATE, DATA, TENSOR, STEP = 0.04, 0.03, 0.01, 0.15, 0.05, 0.03


@pytest.mark.parametrize(
    "text",
    cases(
        ["dp8-mb1-ga2", "zero3x8-mb1-ga1", "zero3x8-mb1-ga1-full", "zero1x8-mb1-ga2", "tp4-sp-mb1-ga1"], ci=1
    ),
)
def test_the_planner_and_the_dry_run_agree(text: str) -> None:
    layout = Layout.parse(text)
    planned, parts, simulated, totals = both_ways(layout, SHAPE)
    blocks = sum(seconds for name, seconds in parts.items() if name not in ("copies", "head"))
    in_blocks = sum(row.seconds for row in totals.totals() if row.place == "blocks")
    assert blocks == pytest.approx(in_blocks, rel=BLOCKS)
    assert parts["copies"] + parts["head"] == pytest.approx(
        simulated.compute - in_blocks, rel=HEAD_AND_COPIES
    )
    tolerances = {"optimizer": UPDATE, "data": DATA, "tensor": TENSOR, "total": STEP}
    for part, tolerance in tolerances.items():
        assert getattr(planned, part) == pytest.approx(getattr(simulated, part), rel=tolerance), part


@pytest.mark.parametrize(
    "text", cases(["pp4-1f1b-mb1-ga8"])
)  # validation/step_time.py has the other schedules
def test_a_pipelines_step_takes_as_long_in_both(text: str) -> None:
    """Its head is as long as four blocks here, so that the last rank is the slowest."""
    layout = Layout.parse(text)
    planned, _, simulated, _ = both_ways(layout, replace(SHAPE, layers=8))
    assert planned.total == pytest.approx(simulated.total, rel=STEP)


@pytest.mark.ci
def test_the_forward_without_gradients_of_kto_is_the_planned_one() -> None:
    layout = Layout.parse("dp8-mb1-ga6")  # three of the micro-batches are traced
    _, parts, _, table = both_ways(layout, SHAPE, preference=PreferenceSpec("kto"))
    rows = [row for row in table.rows if row.phase == WITHOUT_GRADIENTS and row.place != COMMUNICATION]
    work = Work.of(census(reserved.config_of(SHAPE, SEQ_LEN)))
    sft, kto = (
        Workload("llama", replace(work, mismatched=passes), None, SEQ_LEN, layout.global_batch_size)  # type: ignore[arg-type]
        for passes in (0.0, 1.0)
    )
    planned = (kto.flops_per_token - sft.flops_per_token) * kto.tokens / layout.world
    assert sum(row.flops for row in rows) == pytest.approx(planned, rel=0.001)
    assert sum(row.seconds for row in rows) == pytest.approx(parts["mismatched"], rel=BLOCKS)


def both_ways(
    layout: Layout, shape: reserved.Shape, **options: PreferenceSpec
) -> tuple[Seconds, dict[str, float], Seconds, KernelTable]:
    """(Planned parts of a step, its planned compute by kind, its simulated parts, kernels of rank 0).

    options: of ModelSpec, "preference" of kto.
    """
    numbers = census(reserved.config_of(shape, SEQ_LEN))
    ranks, copies = (find(numbers, layout, SEQ_LEN) for find in (distinct_ranks, pipeline_copies))
    traces = trace_ranks(partial(reserved.ours, shape, layout, SEQ_LEN, **options), [*ranks], layout.world)
    work = replace(Work.of(numbers), mismatched=float(bool(options)))
    workload = Workload("llama", work, None, SEQ_LEN, layout.global_batch_size)  # type: ignore[arg-type]
    costs = Costs.of(workload, step_time.cluster("h100-sxm", layout.world))
    columns = Columns.of([layout])
    time = StepTime(workload.work, columns, costs.machine, SEQ_LEN)
    planned, parts = time.seconds, time.compute_parts
    return (
        Seconds(**{part: float(np.ravel(getattr(planned, part))[0]) for part in PARTS}),
        {name: float(np.ravel(value)[0]) for name, value in parts.items()},
        simulate(traces, layout, costs, copies=copies).parts,
        kernel_table(traces[0], costs),
    )
