"""A planned step in the parts that a run measures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known import known
from own_machine import OWN_MACHINE
from shapes import of_shape

from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.plan.cluster import cluster_of
from meshtune.plan.hardware import catalogue
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.step import step
from meshtune.plan.step_parts import parts_of_layouts, predicted_parts
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

WORK = of_shape(layers=8, hidden=512, ffn=1408, heads=8, kv_heads=8, vocabulary=8192)
WORKLOAD = Workload("small", WORK, known("llama-3.2-1b").traits, 128, 4, precision="fp32")


@pytest.fixture
def processor(tmp_path: Path) -> Machine:
    """A processor that was probed, with the host's work of a GPU's step."""
    file = tmp_path / "my-cluster.toml"
    file.write_text(OWN_MACHINE)
    return Machine.of(cluster_of(ClusterConfig(hardware=str(file), gpu="this-cpu")).gpu, "meshtune")


@pytest.mark.parametrize("text", ["mb2-ga2", "mb2-ga2-full", "mb2-ga2-full4"])
def test_launches_are_in_the_passes_that_they_hold_up(processor: Machine, text: str) -> None:
    layout, more = Layout.parse(text), replace(processor, launch=3 * processor.launch)
    before, after = (predicted_parts(WORKLOAD, layout, machine) for machine in (processor, more))
    added = {name: after[name] - before[name] for name in before}
    forward = 2 * WORK.blocks * 2 * processor.launch * processor.block_launches
    recomputed = {"mb2-ga2": 0.0, "mb2-ga2-full": 1.0, "mb2-ga2-full4": 0.5}[text]
    assert added == pytest.approx(
        dict.fromkeys(before, 0.0)
        | {"forward": forward, "backward": 2 * forward, "recomputation": recomputed * forward},
        abs=1e-12,
    )


def test_the_rest_is_the_host_s_work_of_a_step() -> None:
    machine = replace(Machine.of(catalogue()["h100-sxm"], "meshtune"), host_step=0.25)
    names = ("mb4-ga1", "pp2-1f1b-mb1-ga4-full", "zero3x2-mb2-ga1")
    layouts = Columns.of([Layout.parse(name) for name in names])
    parts = parts_of_layouts(WORKLOAD, layouts, machine)
    assert list(np.asarray(parts["rest"])) == pytest.approx([0.25] * 3, abs=1e-3)
    total = step(WORK, layouts, machine, WORKLOAD.seq_len).total
    assert list(np.sum(np.broadcast_arrays(*parts.values()), axis=0)) == pytest.approx(
        list(np.asarray(total))
    )
