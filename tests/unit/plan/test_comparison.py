"""A run that the planner made with one constant changed names that constant and its factor."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from golden import refuses, says
from made_runs import made, rows
from own_machine import OWN_MACHINE

from meshtune.api.compare import STARTED_UNPLANNED, STARTED_UNTIMED, UNTIMED, cluster_of_run, compared
from meshtune.api.plan import workload_of_run
from meshtune.commands.plan import runs_of
from meshtune.config import load
from meshtune.errors import UserError
from meshtune.meter.parts import PARTS
from meshtune.plan.calibration import Planned, Runs, parts_off
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.step_parts import MeasuredRun
from meshtune.report.study import compared_tables
from meshtune.rundir import RunDir
from meshtune.sections import ClusterConfig

Written = Callable[..., Path]
LAYOUT = "dp2-mb2-ga2"


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """The file of a made-up processor that was probed."""
    file = tmp_path / "my-cluster.toml"
    file.write_text(OWN_MACHINE)
    return file


@pytest.fixture
def cluster(probe: Path) -> Cluster:
    return cluster_of(ClusterConfig(hardware=str(probe), gpu="this-cpu"))


@pytest.fixture
def written(tmp_path: Path, probe: Path) -> Written:
    """Function(name, factors, probed) that writes the folder of a run whose steps are the planner's with
    some constants times a factor; probed: its config names the probe's file.
    """

    def write(name: str, factors: dict[str, float], *, probed: bool = True) -> Path:
        folder = RunDir(tmp_path / name).create()
        words = ["model.name=typical-llama-100M", "data.seq_len=128", "train.precision=fp32",
                 "train.global_batch_size=8", f"layout={LAYOUT}", "train.device=cpu"]  # fmt: skip
        config = load(None, [*words, f"cluster={probe}"])
        folder.config_file.write_text((config if probed else load(None, words)).to_yaml())
        run = MeasuredRun.of(name, rows(LAYOUT, dict.fromkeys(PARTS, 1.0), device_type="cpu"))
        planned = Planned.of(run, workload_of_run(config, run), cluster_of_run(config, run))
        parts = {part: float(value[0]) for part, value in Runs([planned]).parts(factors).items()}
        facts = {"predicted": {"memory": {"weights": 80, "overhead": 20, "peak": 100, "event": "loss"}}}
        first, *steps = rows(LAYOUT, parts, device_type="cpu", **facts)
        phases = {"forward": {"peak": 100, "weights": 90, "activations": 10}}
        lower = {"forward": {"peak": 99, "weights": 90, "activations": 9}}
        memory = [{"kind": "memory", "step": n, "rank": 0, "phases": (phases, lower)[n > 2]} for n in (2, 3)]
        lines = [first, *memory, *steps]
        folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in lines))
        return folder.path

    return write


@pytest.mark.parametrize(
    ("layout", "constant", "factor"),
    [("dp1-mb4-ga2", "matmul", 0.5), ("dp1-mb4-ga2", "memory", 0.7), ("dp1-mb1-ga1", "update_memory", 0.3),
     ("dp2-mb1-ga1", "link_share", 0.2), ("dp1-mb1-ga1", "launch", 4.0)],
)  # fmt: skip
def test_the_constant_that_was_changed_is_named_with_its_factor(
    cluster: Cluster, layout: str, constant: str, factor: float
) -> None:
    [run] = made(cluster, {constant: factor}, [layout])
    off = parts_off(run)
    errors = [abs(group.measured - group.predicted) for group in off]
    assert errors == sorted(errors, reverse=True)
    first = off[0].explanations[0]
    assert (first.constant, first.factor) == (constant, pytest.approx(factor, rel=0.005))
    assert first.left < 0.005 * run.measured.seconds


def test_a_run_as_planned_needs_no_other_constant(cluster: Cluster) -> None:
    assert parts_off(made(cluster, {}, ["dp2-mb4-ga1"])[0]) == []


def test_parts_that_no_constant_explains_are_named(cluster: Cluster) -> None:
    [run] = made(cluster, {}, ["dp1-mb4-ga2"])
    parts = dict(run.measured.parts) | {"loading": run.measured.seconds}
    late = replace(run.measured, parts=parts, seconds=2 * run.measured.seconds)
    [off] = parts_off(replace(run, measured=late))
    assert (off.parts, off.explanations, off.predicted) == (["loading"], [], 0.0)


@pytest.mark.ci
def test_a_run_stands_beside_its_prediction_at_the_start_and_todays(written: Written, probe: Path) -> None:
    folder = written("slow", {"matmul": 0.5})
    [document] = compared([folder])
    assert document["layout"] == LAYOUT
    assert document["measured"]["step_seconds"] == pytest.approx(sum(document["measured"]["parts"].values()))
    assert document["measured"]["memory"] == {"weights": 90, "activations": 10, "peak": 100}
    assert document["at_start"] == {
        "step_seconds": None,
        "parts": None,
        "memory": {"weights": 80, "peak": 80},
    }
    assert document["missing"] == {"at_start": STARTED_UNTIMED}
    assert document["today"]["parts"].keys() == set(PARTS)
    assert document["today"]["memory"]["peak"] == sum(
        size for name, size in document["today"]["memory"].items() if name != "peak"
    )
    named = document["off"][0]["explanations"][0]
    assert (named["constant"], named["factor"]) == ("matmul", pytest.approx(0.5, rel=0.005))
    time, memory, constants = compared_tables(document)
    assert time.rows[-1][0] == "step"
    assert float(time.rows[-1][-1].rstrip("%")) < 0
    assert "means, scaled to add up" in time.notes[0]
    assert memory.rows[-1][:4] == ("memory", "100 B", "80 B", "-20.0%")
    assert constants.rows[0][2] == "matmul"
    assert f"meshtune calibrate {folder} … --cluster {probe}" in constants.notes[-1]


def test_a_processor_that_nobody_probed_gets_its_plan_from_a_file(written: Written, probe: Path) -> None:
    folder = written("unprobed", {"memory": 0.6}, probed=False)
    [document] = compared([folder])
    assert document["missing"]["today"] == UNTIMED
    assert document["off"] is None
    assert document["today"]["memory"]["peak"] > 0
    assert len([*compared_tables(document)]) == 2
    [document] = compared([folder], [f"cluster={probe}"])
    assert document["off"][0]["explanations"][0]["constant"] == "memory"


def test_a_run_that_can_not_be_planned_says_why(
    written: Written, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("without runs"))  # whose names are near
    folder = RunDir(written("gone", {}))
    folder.config_file.unlink()
    first, *others = folder.rows()
    del first["predicted"]
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in [first, *others]))
    [document] = compared([folder.path])
    assert document["missing"]["at_start"] == STARTED_UNPLANNED
    says(document["missing"]["today"])
    assert document["today"] is document["off"] is None
    with refuses(UserError):
        compared([folder.path], ["train.lr=1"])


def test_runs_and_layouts_are_told_apart(written: Written, tmp_path: Path) -> None:
    run = str(written("one", {}))
    assert runs_of([run, run]) == [run, run]
    assert runs_of(["zero3x8-mb1-ga8", "dp8"]) == []
    with refuses(UserError):
        runs_of([run, "dp8"])
    with refuses(UserError):
        runs_of([str(tmp_path)])
