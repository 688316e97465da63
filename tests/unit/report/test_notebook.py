"""A plan, a choice, a dry run, a sweep and a run in a notebook: part of a page, table, pictures."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from hand_traces import simulation_of, time_of, trace_of

from meshtune.api.plan import plan
from meshtune.api.sweep import sweep
from meshtune.api.train import Result
from meshtune.errors import UserError
from meshtune.report.draw.part import MOST
from meshtune.rundir import RunDir


@pytest.fixture
def values(tmp_path: Path, run: RunDir) -> dict[str, Any]:
    settings = {"model": {"name": "llama-3.2-1b"}, "cluster": {"gpu": "h100-sxm", "gpus": 2}}
    answer = plan(settings | {"layout": "zero3x2"})
    experiments = {"run": "bench", "base": settings, "axes": {"layout": ["dp2", "zero3x2"]}}
    return {
        "plan": answer,
        "choice": answer.choice,
        "dry run": simulation_of("dp2-mb1-ga1", trace_of(), times=[time_of(0)] * 2),
        "sweep": sweep(experiments, simulate="planner", out=tmp_path / "sweep"),
        "run": Result.read(run.path),
    }


def test_a_cell_shows_a_small_part_of_the_page_without_scripts_and_addresses(values: dict[str, Any]) -> None:
    for name, value in values.items():
        part = value._repr_html_()
        assert len(part.encode()) <= MOST and part.count("<svg") >= 1, name
        assert not any(word in part for word in ("<script", "src=", "@import")), name
        assert len(repr(value)) < 400 and "\n" not in repr(value), name
    assert repr(values["plan"].chosen) == f"<Offer {values['choice'].summary_line}>"
    assert repr(values["dry run"]).endswith(" A step takes 2.0 s.>")


def test_a_table_has_numbers_in_bytes_and_seconds(values: dict[str, Any]) -> None:
    tables = {name: value.table for name, value in values.items()}
    plan, timeline = tables["plan"], tables["dry run"]
    assert plan["layout"][0] == tables["choice"]["layout"][0] == str(values["plan"].choice.layout)
    assert plan["memory.peak"][0] == values["plan"].choice.memory.peak
    assert {*timeline["step"]} == {1, 2} and timeline["activations"].max() > 0
    assert {*timeline["step_seconds"]} == {2.0}
    assert [*tables["sweep"]["layout"].str.slice(0, 5)] == ["dp2-m", "zero3"]
    assert {*tables["run"]["kind"]} == {"train"} and tables["run"]["step"].is_monotonic_increasing


def test_a_table_without_pandas_says_how_to_install_it(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(UserError, match="pip install pandas"):
        _ = values["plan"].table


def test_plot_returns_the_pictures_and_writes_them(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "choice.svg"
    picture = values["choice"].plot(file)
    assert picture._repr_svg_() == file.read_text() and "<Picture " in repr(picture)
    values["choice"].plot(narrow := tmp_path / "narrow.svg", width="84mm")
    assert 'width="84.0000mm"' in narrow.read_text()
    values["choice"].plot(page := tmp_path / "choice.html")
    assert "<script" in page.read_text()
    with pytest.raises(UserError, match=r"\.gif"):
        values["choice"].plot(tmp_path / "choice.gif")


def test_a_run_without_steps_and_a_folder_without_a_run(empty: RunDir) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        Result.read(empty.path / "nothing")
    empty.metrics_file.touch()
    begun = Result.read(empty.path)
    assert "Nothing has been measured yet" in begun._repr_html_() and begun.table.empty
    with pytest.raises(UserError, match="nothing to draw"):
        begun.plot()
