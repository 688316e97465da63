"""Bytes that the allocator holds beyond the tensors, against replays of dry runs and by hand."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known import known

from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.plan.accounting import stack_accounting
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.tensors import gather_pool, stream_bytes
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.search import stages_of
from meshtune.units import GIB

sys.path.append(str(Path(__file__).parents[3] / "validation"))
import memory_reserved
from memory_rows import workload_of

PAGE = memory_reserved.PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (llama\S+|qwen3-32b) (\S+) \| [\d.]+ \| ([\d.]+) \|", PAGE, re.M)
OTHERS = ("llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "gemma-2-27b", "olmo-2-32b")
LIMIT = 0.03
EIGHT_B = known("llama-3.1-8b")


def reserved(model: str, layout: str) -> float:
    """GiB that the planner predicts at 8192 tokens, without context and communicators."""
    workload, columns = known(model), Columns.of([Layout.parse(layout)])
    accounting = replace(stack_accounting("meshtune", "bf16"), context=0.0, communicator=0.0)
    stages = stages_of(workload, columns)
    events = Liveness(Step(workload.work, columns, accounting, 8192, stages)).timeline()
    return max(float(np.max(sum(parts.values()))) for parts in events.values()) / GIB


def test_the_page_has_all_its_rows_within_the_limit() -> None:
    differences = re.findall(r"^\| \S+ (\S+) \|.*\| ([+-][\d.]+)% \|$", PAGE, re.M)
    assert len(differences) == 17 and len(ROWS) == 13
    assert all(abs(float(off)) <= 100 * LIMIT for _, off in differences)


@pytest.mark.parametrize(("model", "layout", "simulated"), [row[:3] for row in ROWS])
def test_reserved_bytes_are_those_of_the_replay(model: str, layout: str, simulated: str) -> None:
    assert reserved(model, layout) == pytest.approx(float(simulated), rel=LIMIT)


@pytest.mark.ci
@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", *(pytest.param(model, marks=pytest.mark.all) for model in OTHERS)]
)
def test_the_page_is_of_these_formulas(model: str) -> None:
    jobs = {name: job for name, job in memory_reserved.cases() if name.startswith(model)}
    rows = re.findall(rf"^\| ({model} \S+) \|.*\| ([\d.]+) \| \S+ \|$", PAGE, re.M)
    assert {name for name, _ in rows} == jobs.keys()
    for name, planned in rows:
        found = memory_reserved.predict(workload_of(jobs[name]), jobs[name].layout) / GIB
        assert found == pytest.approx(float(planned), rel=1e-3), name  # else it is to be written again


def test_streams_hold_two_gathers_and_all_shards_of_gradients() -> None:
    columns = Columns.of([Layout.parse("zero3x8-mb1-ga1"), Layout.parse("zero3x8-mb1-ga2")])
    accounting, stages = stack_accounting("meshtune", "bf16"), Stages.even(32, columns)
    step = Step(EIGHT_B.work, columns, accounting, 8192, stages)
    gather, reduce = stream_bytes(step)
    table = 128256 * 4096
    assert gather[0] == pytest.approx(2 * table * 2 + table / 8 * 2, rel=1e-3)  # and the cast shard
    of_all = step.elements.total.trained_shard[0] * 4
    assert reduce[0] == pytest.approx([of_all[0], of_all[1] + table / 8 * 4], rel=1e-3)


def test_a_last_block_in_the_lower_place_takes_a_third_one_with_its_norm() -> None:
    """Blocks that have no room where the root's buffer lay: the second has the lower place, in front of the
    third's. So every even number of blocks ends there, but if the last one is no larger.
    """
    columns = Columns.of([Layout.parse("zero3x8-mb1-ga1")])
    stages = [replace(Stages.even(blocks, columns), has_head=1.0) for blocks in (126, 127)]
    root, embedding, block = (500.0, 508.0), (500.0, 508.0), (760.0, 772.0)
    sizes = [
        float(np.max(gather_pool(root, embedding, block, stage, last_norm=norm)))
        for stage in stages
        for norm in (1.0, 0.0)
    ]
    assert sizes == [12 + 3 * 760 + 1, 508 + 500 + 760, 508 + 500 + 760, 508 + 500 + 760]


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "trainer-fsdp2", "deepspeed"])
def test_other_stacks_have_a_share_alone(stack: str) -> None:
    assert stack_accounting(stack, "bf16").own_streams == 0
