"""Calibration without a probe's file: from the catalogue's kind of the runs' GPU, on several machines too."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden import refuses
from transformers import LlamaConfig

from meshtune.api.calibrate import calibrate
from meshtune.api.choose import prediction
from meshtune.api.plan import cluster_of_run, workload_of_run
from meshtune.config import load
from meshtune.errors import UserError
from meshtune.meter.parts import PARTS
from meshtune.plan.calibration import Planned
from meshtune.plan.cluster import cluster_of
from meshtune.plan.step_parts import MeasuredRun, predicted_parts
from meshtune.rundir import RunDir
from meshtune.sections import ClusterConfig

TRUTH = {"matmul": 0.8, "network_share": 0.5}  # factors of the constants that the runs were on
ONE = ["mb1-ga1-full", "mb2-ga1-full", "mb4-ga1-full", "mb2-ga1"]
TWO = [
    "zero3x16-mb1-ga1", "zero3x16-mb1-ga1-full", "zero2x16-mb1-ga1", "zero2x16-mb1-ga1-full",
    "dp16-mb1-ga1-full", "dp16-mb1-ga1", "dp2-zero3x8-mb1-ga1-full", "zero3x16-mb2-ga1-full",
]  # fmt: skip
FACTS = {
    "kind": "run", "device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "cores": 26, "torch": "2.13",
}  # fmt: skip

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Function(layout, nodes, **facts) -> folder of a run whose step is the planner's with TRUTH."""

    def folder(layout: str, nodes: int, **facts: Any) -> Path:
        words = ["model.name=llama-3.2-1b", "data.seq_len=2048", f"layout={layout}"]
        path = tmp_path / "runs" / layout
        path.mkdir(parents=True)
        config = load(None, words)
        (path / "config.yaml").write_text(config.to_yaml())
        row = FACTS | {"layout": layout, "nodes": nodes, "host": "one"} | facts
        step = {"kind": "time", "step": 9, "seconds": 1.0, "parts": dict.fromkeys(PARTS, 1 / len(PARTS))}
        run = MeasuredRun.of(layout, [row, step])
        if row["device_type"] == "cuda":
            planned = Planned.of(run, workload_of_run(config, run), cluster_of_run(config, run))
            changed = {name: getattr(planned.machine, name) * factor for name, factor in TRUTH.items()}
            parts = predicted_parts(planned.workload, run.layout, replace(planned.machine, **changed))
            step |= {"seconds": sum(parts.values()), "parts": parts}
        RunDir(path).metrics_file.write_text("".join(json.dumps(each) + "\n" for each in (row, step)))
        return path

    return folder


@pytest.mark.ci
def test_a_run_is_predicted_with_the_attention_that_it_ran(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    config = load(None, [f"model.name={tmp_path}", f"data.cache={tmp_path}", "data.seq_len=2048"])
    step = {"kind": "time", "step": 9, "seconds": 1.0, "parts": dict.fromkeys(PARTS, 0.1)}
    kernels, plans = [], []
    for fact in ({}, {"flash_attention": None}, {"flash_attention": 3}, {"flash_attention": 4}):
        run = MeasuredRun.of("a run", [FACTS | {"layout": "mb1-ga1"} | fact, step])
        workload, gpu = workload_of_run(config, run), cluster_of_run(config, run).gpu
        kernels.append(workload.attention_kernel(gpu))
        gpus, width = [(str(run.facts["device"]), 8e10)], config.data.seq_len
        plans.append(prediction(config, run.layout, gpus, None, width, workload.flash))
    assert kernels == ["flash-2", "flash-2", "flash-3", "flash-4"]
    assert plans[0] == plans[1] != plans[2] == plans[3], "4 on Hopper is assumed to be as fast as 3"


@pytest.mark.all
def test_runs_on_several_machines_tell_the_network_and_start_from_the_catalogue(
    make: Make, tmp_path: Path
) -> None:
    runs, file = [*(make(one, 1) for one in ONE), *(make(two, 2) for two in TWO)], tmp_path / "new.toml"
    found = calibrate(runs, out=file)
    for name, factor in TRUTH.items():
        assert found["fitted"][name]["factor"] == pytest.approx(factor, rel=0.05), name
    tables = tomllib.loads(file.read_text())
    network = tables["cluster"]["network_share"]
    assert network == found["fitted"]["network_share"]["after"] == pytest.approx(0.35, rel=0.05)
    assert (tables["cluster"]["gpus_per_node"], tables["kind"]["network"]) == (8, 50)
    there = cluster_of(ClusterConfig(hardware=str(file), gpu="this-h100-sxm", gpus=16))
    assert (there.gpu.efficiency["matmul"], there.node) == (found["fitted"]["matmul"]["after"], 8)


@pytest.mark.ci
def test_runs_on_one_machine_leave_the_network_and_processors_need_a_file(make: Make, tmp_path: Path) -> None:
    found = calibrate([make(one, 1) for one in ONE], out=tmp_path / "new.toml")
    assert found["left"]["network_share"] == "each run is on one machine"
    processor = make("mb8-ga1", 1, device="A CPU", device_type="cpu")
    with refuses(UserError):
        calibrate([processor], out=tmp_path / "other.toml")
