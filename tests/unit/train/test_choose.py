"""The layout that a run lets the planner choose, and what it is told of its global batch and memory."""

from typing import Any

import pytest
from golden import refuses, says
from known import known

from meshtune.api import choose
from meshtune.config import Config
from meshtune.errors import NothingFits
from meshtune.plan.workload import Workload


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: GPUs and settings of the cluster -> the layout of an 8B model with 64 sequences."""
    shape = known("llama-3.1-8b")
    workload = Workload("llama-3.1-8b", shape.work, shape.traits, 8192, 64)
    monkeypatch.setattr(choose, "numbers_of", lambda config, **_: None)
    monkeypatch.setattr(choose, "workload_of", lambda config, numbers: workload)
    monkeypatch.setattr(choose, "lighter_workloads", lambda config, numbers: {})

    def layout(gpus: int, kind: str = "NVIDIA H100 80GB HBM3", **cluster: Any) -> Any:
        monkeypatch.setattr(choose, "gpus_of", lambda device: [(kind, 79.1 * 2**30)] * gpus if kind else [])
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 2**40}))
        config = Config.model_validate({"model": {"name": "any"}, "cluster": cluster})
        return choose.planned_layout(config, gpus)

    return layout


def test_a_batch_that_the_gpus_cannot_share_is_answered_with_the_nearest(
    chosen: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = chosen(7)
    assert layout.world == 7 and layout.cp == 7
    said = capsys.readouterr().err.splitlines()
    says(said[0])
    says(said[1])
    assert len(said) == 2
    chosen(8)
    assert capsys.readouterr().err == ""


def test_nothing_is_said_on_the_speed_of_a_processor(chosen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(7, kind="").world == 7
    assert capsys.readouterr().err == ""


@pytest.mark.ci
def test_a_run_keeps_margin_and_budget(chosen: Any) -> None:
    usual = chosen(8)
    assert str(chosen(8, memory_margin=0.5)) != str(usual) != str(chosen(8, memory_budget_gib=40))
    with refuses(NothingFits):
        chosen(8, memory_margin=0.9)
