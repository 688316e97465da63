import subprocess
import sys

import pytest

from meshtune.report.plots import (
    Line,
    matplotlib_figure,
    panels,
    plotly_figure,
    running_mean,
    thinned,
    write_figure,
)


def test_each_panel_shows_the_values_of_its_rows(run):
    found = {panel.key: panel for panel in panels(run.rows())}
    trained, held_out = found["loss"].lines
    assert (trained.steps, trained.values) == ((1, 2, 3, 4), (4.0, 2.0, 4 / 3, 1.0))
    assert (held_out.steps, held_out.values) == ((0, 2, 4), (5.0, 1.5, 2.0))
    assert found["memory"].lines[0].values[-1] == pytest.approx(4 / 1024)  # MiB to GiB


def test_what_was_not_measured_has_no_panel(run, train):
    assert "mfu" not in {panel.key for panel in panels(run.rows())}
    assert panels([]) == []
    assert {panel.key for panel in panels([train(1, mfu=0.4)])} >= {"mfu", "loss"}


def test_a_long_run_has_its_mean_in_front_of_the_raw_values(train):
    raw, mean = {panel.key: panel for panel in panels([train(step) for step in range(1, 101)])}["loss"].lines
    assert (raw.role, mean.role, mean.name) == ("raw", "main", "train, mean of 5")
    assert mean.values[49] == pytest.approx(sum(4 / step for step in range(48, 53)) / 5)


def test_running_mean_keeps_a_straight_line_straight_and_its_ends_in_place():
    line = [3.0 * step + 1 for step in range(400)]
    means = running_mean(line, 41)
    assert means[5:-5] == pytest.approx(line[5:-5])
    assert means[0] == pytest.approx(line[0], abs=3 * 41 / 8)


def test_running_mean_is_the_mean_of_its_window():
    values = [float(step % 5) for step in range(50)]
    assert running_mean(values, 5)[20] == sum(values[18:23]) / 5


def test_thinning_keeps_the_ends_and_every_spike():
    values = [0.0] * 10_000
    values[1234], values[7777] = 50.0, -50.0
    thin = thinned(Line("loss", "main", tuple(range(10_000)), tuple(values)), 200)
    assert len(thin.values) <= 202
    assert (thin.steps[0], thin.steps[-1]) == (0, 9_999)
    assert dict(zip(thin.steps, thin.values, strict=True))[1234] == 50.0
    assert min(thin.values) == -50.0
    assert list(thin.steps) == sorted(thin.steps)


def test_plotly_takes_every_figure(run, train):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for panel in panels([*run.rows(), train(5, mfu=0.5, mfu_6n=0.6)]):
        figure = graph_objects.Figure(plotly_figure(panel))  # refuses unknown properties
        assert len(figure.data) == len(panel.lines)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_written_as_files(run, tmp_path, suffix):
    few = [row for row in run.rows() if row["kind"] != "train"]  # two panels are drawn faster than seven
    file = write_figure(few, tmp_path / f"run.{suffix}", dark=suffix == "svg")
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_matplotlib_draws_each_panel_once(run):
    titles = [axes.get_title(loc="left") for axes in matplotlib_figure(run.rows()).axes]
    assert titles == [panel.title for panel in panels(run.rows())]


def test_importing_the_report_loads_no_torch_and_no_plotting_library():
    code = "import sys; from meshtune.report import page, plots, tables; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "plotly", "matplotlib", "numpy"} & set(result.stdout.split())
