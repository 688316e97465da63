"""Measured runs written by hand, whose steps are the planner's with changed constants."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from known import known
from shapes import of_shape

from meshtune.layout import Layout
from meshtune.meter.parts import PARTS
from meshtune.plan.calibration import Planned, Runs
from meshtune.plan.cluster import Cluster
from meshtune.plan.step_parts import MeasuredRun
from meshtune.plan.workload import Workload
from meshtune.rundir import Row

LAYOUTS = [f"{axis}-mb{mb}-ga{ga}{mode}" for axis, mb, ga, mode in product(
    ("dp1", "dp2", "zero3x2", "tp2", "dp4", "zero2x4", "tp2-dp2"), (1, 4), (1, 2), ("", "-full")
)]  # fmt: skip


def rows(layout: str, parts: dict[str, float], **facts: object) -> list[Row]:
    run = {"kind": "run", "layout": layout, "device": "a cpu", "cores": 2, "host": "here", "nodes": 1} | facts
    step = {"kind": "time", "step": 9, "seconds": sum(parts.values()), "parts": parts}
    return [run, {**step, "seconds": 99.0, "warm_up": True}, step]


def made(cluster: Cluster, factors: dict[str, float], names: list[str] = LAYOUTS) -> list[Planned]:
    """Runs whose steps are the planner's with changed constants."""
    return [*_made(cluster, factors, names)]


def _made(cluster: Cluster, factors: dict[str, float], names: list[str]) -> Iterator[Planned]:
    work = of_shape(layers=8, hidden=512, ffn=1408, heads=8, kv_heads=8, vocabulary=8192)
    traits = known("llama-3.2-1b").traits
    for name in names:
        layout = Layout.parse(name)
        workload = Workload("small", work, traits, 128, layout.global_batch_size, precision="fp32")
        zeros = dict.fromkeys(PARTS, 0.0) | {"forward": 1.0}
        run = Planned.of(MeasuredRun.of(name, rows(name, zeros)), workload, cluster)
        parts = {part: float(value[0]) for part, value in Runs([run]).parts(factors).items()}
        yield replace(run, measured=MeasuredRun.of(name, rows(name, parts)))
