import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden import says
from page_data import valid

from meshtune.report.draw.curves import round_values
from meshtune.report.draw.kinds import Series
from meshtune.report.draw.picture import write
from meshtune.report.draw.thin import MOST_ROWS, merged, thinned
from meshtune.report.run.panels import panels, running_mean
from meshtune.report.run.report import report_page, try_report
from meshtune.rundir import RunDir


def test_each_panel_shows_the_values_of_its_rows(run):
    drawn = {panel.key: panel for panel in panels(run.rows())}
    trained, held_out = drawn["loss"].series
    assert (trained.x, trained.y) == ((1, 2, 3, 4), (4.0, 2.0, 4 / 3, 1.0))
    assert (held_out.x, held_out.y) == ((0, 2, 4), (5.0, 1.5, 2.0))
    assert (drawn["memory"].unit, drawn["memory"].series[0].y[-1]) == ("MiB", 4.0)


def test_what_was_not_measured_has_no_panel(run, train):
    assert "mfu" not in {panel.key for panel in panels(run.rows())}
    assert panels([]) == []
    assert {panel.key for panel in panels([train(1, mfu=0.4)])} >= {"mfu", "loss"}


def test_preferences_have_panels_and_a_loss_per_pair(empty, train, evaluation):
    empty.append({"kind": "run", "objective": "dpo"})
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": 0.2, "rewards/margins": 0.3}
    for row in (train(1, **rewards), evaluation(1, 0.6, **rewards)):
        empty.append(row | {"rewards/accuracies": 0.75})
    drawn = {panel.key: panel for panel in panels(empty.rows())}
    assert drawn["loss"].unit == "per pair"
    for key, values in {"accuracy": (0.75, 0.75), "margin": (0.3, 0.3), "rewards": (0.5, 0.2)}.items():
        assert tuple(one.y[0] for one in drawn[key].series) == values
    assert "kl" not in drawn
    page = report_page(empty)
    assert "Held-out accuracy" in page and "A reward is beta times" in page


def test_a_long_run_has_its_mean_in_front_of_the_raw_values(train):
    raw, mean = {panel.key: panel for panel in panels([train(step) for step in range(1, 101)])}["loss"].series
    assert (raw.role, mean.role, mean.name) == ("raw", "main", "train, mean of 5")
    assert mean.y[49] == pytest.approx(sum(4 / step for step in range(48, 53)) / 5)


def test_running_mean_is_that_of_its_window_and_keeps_a_straight_line_straight_and_its_ends_in_place():
    values = [float(step % 5) for step in range(50)]
    assert running_mean(values, 5)[20] == sum(values[18:23]) / 5
    line = [3.0 * step + 1 for step in range(400)]
    means = running_mean(line, 41)
    assert means[5:-5] == pytest.approx(line[5:-5])
    assert means[0] == pytest.approx(line[0], abs=3 * 41 / 8)
    assert running_mean([1.0, 2.0, 6.0], 3) == (1.5, 3.0, 4.0), "means at the ends, too"


def test_thinning_keeps_the_ends_and_every_spike():
    values = [0.0] * 10_000
    values[1234], values[7777] = 50.0, -50.0
    rows = thinned([values], 200)
    assert len(rows) <= 200
    assert (rows[0], rows[-1]) == (0, 9_999)
    assert 1234 in rows
    assert min(values[row] for row in rows) == -50.0
    assert rows == sorted(rows)


def test_thinning_keeps_the_extremes_of_every_series_and_all_of_a_short_one():
    long = [float(row % 977) for row in range(20_000)]
    late: list[float | None] = [None] * 5_000 + [float(row) for row in range(15_000, 0, -1)]
    rare: list[float | None] = [1.0 if row % 4_000 == 0 else None for row in range(20_000)]
    rows = thinned([long, late, rare])
    assert len(rows) <= MOST_ROWS
    for column in (long, late, rare):
        known = [row for row, value in enumerate(column) if value is not None]
        values = [column[row] for row in known]
        drawn = [column[row] for row in rows if column[row] is not None]
        assert {known[0], known[-1]} <= set(rows)
        assert (min(drawn), max(drawn)) == (min(values), max(values))  # pyright: ignore[reportArgumentType]
    assert {row for row in range(20_000) if rare[row]} <= set(rows)
    assert thinned([long[:MOST_ROWS]]) == list(range(MOST_ROWS))


def test_series_over_other_steps_share_one_table():
    same = (Series("a", "main", (1, 3), (10, 30)), Series("b", "other", (1, 3), (2, 4)))
    assert merged(same) == ([1, 3], [[10, 30], [2, 4]]) and merged([]) == ([], [])
    assert merged([Series("a", "main", (1, 1), (10, 30))]) == ([1], [[30]])
    x, (first, second) = merged([Series("a", "main", (1, 3), (10, 30)), Series("b", "other", (2, 3), (0, 5))])
    assert (x, first, second) == ([1, 2, 3], [10, None, 30], [None, 0, 5])


@pytest.mark.ci
def test_vega_lite_takes_every_figure(run, train):
    from meshtune.report.draw.charts import specification

    for panel in panels([*run.rows(), train(5, mfu=0.5, mfu_6n=0.6)]):
        spec = valid(specification(panel, width="container"))
        *curves, pointer = spec["layer"]
        assert [curve["encoding"]["color"]["scale"]["domain"] for curve in curves] == [
            [one.name for one in panel.series]
        ] * len(panel.series)
        assert [tip["title"] for tip in pointer["encoding"]["tooltip"]] == [
            "at step", *(one.name for one in panel.series)
        ]  # fmt: skip


def picture_of(run: RunDir, file: Path) -> Path:
    return write(file, [[panel] for panel in panels(run.rows())], title="run")


@pytest.mark.ci
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_written_as_files(run, tmp_path, monkeypatch, suffix):
    """Neither a browser nor a network is needed: there is no program on PATH and the proxy is closed."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", "")
    file = picture_of(run, tmp_path / f"run.{suffix}")
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<svg")
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == [file.name]


def test_a_picture_draws_each_panel_once(run, tmp_path):
    text = picture_of(run, tmp_path / "run.svg").read_text()
    for panel in panels(run.rows()):
        assert text.count(f">{panel.title}</text>") == 1


def test_every_axis_has_its_name_once(run, train, tmp_path):
    run.append(train(5, mfu=0.5, mfu_6n=0.6))
    drawn = panels(run.rows())
    text = picture_of(run, tmp_path / "run.svg").read_text()
    titles = re.findall(r'role-axis-title"[^>]*><text[^>]*>([^<]*)<', text)
    assert sorted(titles) == sorted(name for panel in drawn for name in ("step", panel.y_title))
    assert len(drawn) == 8 and {"tokens/s", "MiB", "seconds"} <= set(titles)


@pytest.mark.ci
def test_importing_the_report_loads_no_torch_and_no_plotting_library():
    code = (
        "import sys; from meshtune.report.run import report, tables; "
        "from meshtune.report.draw import picture; "
        "from meshtune.report.plan import documents; print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "altair", "vl_convert"} & set(result.stdout.split())


def test_the_report_of_a_run_loads_no_numpy_either():
    code = "import sys; from meshtune.report.run import report, tables; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy" not in result.stdout.split()


def test_without_altair_the_reason_names_it_and_the_command_for_later(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    reason = try_report(run)
    says(reason)
    assert not run.report_file.exists()


def test_a_run_without_rows_has_a_report_without_altair(empty: RunDir, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    assert try_report(empty) == ""
    assert "Nothing has been measured yet." in empty.report_file.read_text()


def test_a_report_that_cannot_be_written_is_a_sentence_too(empty: RunDir):
    empty.report_file.mkdir()
    reason = try_report(empty)
    assert "could not be written" in reason and f"Later: meshtune report {empty.path}" in reason


@pytest.mark.parametrize(
    ("ends", "values"),
    [
        ((2, 8), [2, 3, 5, 7]),
        ((15, 1100), [20, 50, 100, 200, 500, 1000]),
        ((0.5, 2e4), [1, 10, 100, 1e3, 1e4]),
    ],
)
def test_a_logarithmic_axis_has_round_values_inside_its_ends(ends, values):
    assert round_values(ends) == pytest.approx(values)


def test_a_legend_has_only_as_many_columns_as_a_phone_has_room_for(train):
    from meshtune.report.draw.charts import specification

    panel = next(one for one in panels([train(step) for step in range(1, 101)]) if one.key == "time")
    spec = specification(panel, width="container")
    (columns,) = {one["encoding"]["color"]["legend"]["columns"]["expr"] for one in spec["layer"][:2]}
    (entry,) = map(float, re.findall(r"floor\(width / (\S+?)\)", columns))
    assert entry > 6 * len("waiting for data")
