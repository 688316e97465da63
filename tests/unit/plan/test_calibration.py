"""Constants come back from runs that the planner made with others; errors are of runs that were left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden import refuses
from made_runs import LAYOUTS, made, rows
from own_machine import OWN_MACHINE

from meshtune.errors import UserError
from meshtune.meter.parts import PARTS
from meshtune.plan import calibration
from meshtune.plan.calibration import calibrated
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.step_parts import MeasuredRun
from meshtune.sections import ClusterConfig

TRUTH = {"matmul": 0.6, "memory": 0.8, "update_memory": 2.0, "link_share": 0.5}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A made-up processor that was probed."""
    file = tmp_path / "my-cluster.toml"
    file.write_text(OWN_MACHINE)
    return cluster_of(ClusterConfig(hardware=str(file), gpu="this-cpu"))


@pytest.mark.ci
def test_changed_constants_are_recovered(cluster: Cluster) -> None:
    runs = made(cluster, TRUTH)
    found = calibrated(runs, {})
    assert {name: found.factors[name] for name in ("matmul", "memory", "update_memory")} == pytest.approx(
        {name: TRUTH[name] for name in ("matmul", "memory", "update_memory")}, rel=0.03
    )
    before, after = found.scores["all"]
    assert after.mean < 0.02 < before.mean
    steps = {run.run: run for run in found.left_out}
    assert steps.keys() == {run.measured.name for run in runs}
    assert {name: run.measured for name, run in steps.items()} == {
        run.measured.name: run.measured.seconds for run in runs
    }
    assert after.mean == pytest.approx(np.mean([abs(run.after / run.measured - 1) for run in found.left_out]))
    assert after.spearman is not None
    assert after.spearman > 0.99
    assert set(found.runs_of["update_memory"]) <= set(LAYOUTS)


@pytest.mark.ci
def test_constants_that_no_run_determines_stay_and_are_named(cluster: Cluster) -> None:
    found = calibrated(made(cluster, {"matmul": 0.5}, [name for name in LAYOUTS if "dp1" in name]), {})
    assert found.left["link_share"] == "no run determines it"
    assert not {"link_share", "link_latency"} & found.factors.keys()
    assert len(found.factors) <= 8 // calibration.RUNS_EACH, "8 runs"


@pytest.mark.ci
def test_the_error_is_of_runs_that_were_not_fitted(cluster: Cluster) -> None:
    """Runs held out from another machine's constants stay wrong, however well the others fit."""
    names = [name for name in LAYOUTS if "dp1" in name or "dp2-" in name]
    fitted, others = made(cluster, {"matmul": 0.5}, names), made(cluster, {"matmul": 0.25}, names)
    found = calibrated([*fitted, *others], {}, [False] * len(names) + [True] * len(names))
    assert found.factors["matmul"] == pytest.approx(0.5, rel=0.02)
    before, after = found.scores["all"]
    assert after.runs == len(names)
    assert 0.2 < after.mean < before.mean
    assert [run.name for run in found.fitted_on] == names
    inside: list[np.ndarray] = []

    def spied(labels: np.ndarray, predict: Callable[..., np.ndarray]) -> np.ndarray:
        def watched(one: np.ndarray, other: np.ndarray) -> np.ndarray:
            inside.append(one & other)
            return predict(one, other)

        return calibration_left_out(labels, watched)

    calibration_left_out, calibration.left_out = calibration.left_out, spied
    try:
        calibrated(fitted, {})
    finally:
        calibration.left_out = calibration_left_out
    assert len(inside) == calibration.FOLDS
    assert not any(mask.any() for mask in inside)


def test_shares_stay_below_their_peak(cluster: Cluster) -> None:
    runs = made(cluster, {"matmul": 2.0}, LAYOUTS[:8])
    found = calibrated(runs, {"matmul": 0.8}, [*[False] * 7, True])
    assert found.factors["matmul"] * 0.8 <= 1.0
    assert "matmul" in found.at_bound


def test_runs_that_can_not_be_fitted_are_refused(cluster: Cluster) -> None:
    runs = made(cluster, {}, LAYOUTS[:4])
    other = replace(runs[0].measured, facts=runs[0].measured.facts | {"cores": 8, "host": "there"})
    with refuses(UserError):
        calibrated([*runs, replace(runs[0], measured=other)], {})
    with refuses(UserError):
        calibrated(runs[:2], {})
    step = dict.fromkeys(PARTS, 1.0)
    run, warm_up, _ = rows("dp1-mb1", step)
    for given in ([], [run], [run, warm_up]):
        with refuses(UserError):
            MeasuredRun.of("a", given)
