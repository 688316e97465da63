"""The page of a sweep, from databases whose numbers the tests know."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from golden import refuses, says
from page_data import data_in, valid
from sweeps import MODELS, bench_row, bench_rows, write_sweep

from meshtune.commands.report import report
from meshtune.errors import UserError
from meshtune.report.draw.charts import specification
from meshtune.report.draw.picture import specification as picture_of
from meshtune.report.experiments.ablation import Ablation
from meshtune.report.experiments.batch import at, curve_of
from meshtune.report.experiments.database import counts_by_status, database_of, read_sweep_rows
from meshtune.report.experiments.page import sweep_page
from meshtune.report.experiments.panels import errors, front, panels
from meshtune.report.experiments.rows import best, sweep_of
from meshtune.report.experiments.table import columns as table_columns
from meshtune.report.plan.documents import file_panels, read_plan
from meshtune.rundir import RunDir


@pytest.fixture
def database(tmp_path):
    facts = {
        "machine": {"host": "here", "cores": 2, "processor": "a processor"},
        "versions": {"torch": "9.9"},
    }
    return write_sweep(tmp_path, bench_rows(), axes=["model.name", "layout"], **facts)


def sweep_in(file):
    return sweep_of(read_sweep_rows(file))


def drawn(file) -> dict:
    sweep = sweep_in(file)
    return {panel.key: panel for panel in panels(sweep, Ablation(sweep))}


def table_in(html: str) -> dict:
    return data_in(html, "data-of-experiments")


def test_the_heat_map_has_the_fastest_layout_of_each_model_and_number_of_ranks(database):
    panel = drawn(database)["best_layouts"]
    assert panel.rows == ("small", "large <b>") and panel.columns == ("1", "2", "4", "8")
    assert panel.unit == "10⁹ tokens/s/rank × parameters"  # MFU is not known on a processor
    cell = panel.cells[0][1]
    assert cell.texts == (("13.4"), "dp2", "mb4") and cell.value == pytest.approx(10 * 0.96 * 1.4)
    assert panel.cells[1][3].value is None and panel.cells[1][3].texts == ("out of memory",)
    assert panel.cells[0][3] is None  # no experiment


@pytest.mark.ci
def test_vega_lite_takes_every_picture_of_a_sweep(database):
    for panel in drawn(database).values():
        for narrow in (False, True):
            valid(specification(panel, width="container", narrow=narrow))


def test_results_that_the_file_no_longer_lists_are_not_on_the_page(tmp_path):
    """Their settings may be those of another experiment, whose base is another one."""
    old, new = bench_row("small", 1, 1), bench_row("small", 1, 1)
    old["tokens_per_second_per_gpu"] = 9 * new["tokens_per_second_per_gpu"]
    database = write_sweep(tmp_path, [old, new], unlisted=[1])
    (one,) = sweep_in(database).done
    assert (one.number, one.repeats) == (2, 1)
    made = sweep_page(database)
    assert made.facts["experiments"] == counts_by_status(database) == {"done": 1}
    assert "1 result that the sweep" in made.before


def test_on_a_phone_texts_of_cells_fit_or_are_left_out(database):
    panel = drawn(database)["best_layouts"]
    chart = specification(panel, width="container", narrow=True)
    missing, first, others = (layer["mark"] for layer in chart["layer"][2:5])
    assert first["fontSize"] == 12 and missing["fontSize"] == 0  # "13.4", and "out of memory" in a fourth
    assert others["fontSize"] == 11 and "dp2\\nmb4" in str(chart)
    title = " ".join(chart["layer"][0]["encoding"]["x"]["axis"]["title"])
    assert title.startswith("ranks highest: 13.7 ") and ", mb4-ga2 (experiment 3), " in title
    many = replace(panel, columns=tuple(map(str, range(20))), cells=(panel.cells[0][:1] * 20,) * 2)
    assert len(specification(many, width="container", narrow=True)["layer"]) == 4


def test_mfu_is_the_colour_where_it_is_known(tmp_path):
    rows = [bench_row("small", 1, 1, mfu=0.25), bench_row("small", 2, 1, mfu=0.2)]
    panel = drawn(write_sweep(tmp_path, rows, gpus=8))["best_layouts"]
    assert panel.unit == "MFU" and [cell.value for cell in panel.cells[0]] == [0.25, 0.2]
    assert panel.x_title == "GPUs"


def test_scaling_is_beside_the_ideal_of_the_smallest_number(database):
    weak = drawn(database)["weak"]
    series = {group.name: [(p.x, p.y) for p in group.points] for group in weak.groups}
    points = series["small, 2 sequences each"]
    assert points == [(1, 1), (2, pytest.approx(2 * 0.96 / 0.98)), (4, pytest.approx(4 * 0.92 / 0.98))]
    assert weak.guides[0].x == weak.guides[0].y
    strong = drawn(database)["strong"]
    assert {point.x for group in strong.groups for point in group.points} == {1, 2, 4}


def test_ticks_reach_points_beyond_the_ideal_and_a_log_axis_says_so(tmp_path):
    rows = [
        bench_row("small", ranks, 1, global_batch_size=8, tokens_per_second_per_gpu=speed)
        for ranks, speed in ((1, 100), (2, 425), (4, 600))
    ]
    chart = specification(drawn(write_sweep(tmp_path, rows))["strong"], width=400)
    axis = chart["layer"][0]["encoding"]["y"]["axis"]
    assert axis["values"] == [1, 2, 5, 10, 20] and axis["title"].endswith("(log)")  # points at 1, 8.5 and 24


def test_pictures_of_a_column_turn_crowded_names_and_fit_a_page(database):
    bars = [f"GPUs 1 → {n}" for n in range(20)]
    sizes = {"names": tuple(bars), "parts": {"speed": (2.0,) * 20}, "ends": ("1 pair",) * 20}
    many = replace(drawn(database)["gains"], **sizes)
    small = next(Ablation(sweep_in(database), by="model").panels())
    small = replace(small, columns=("8", "16", "32", "64", "128", "256", "512"))
    spec = picture_of([[many], [small]], title="", width=318)
    (drawn_bars,), (charts,) = (row["hconcat"] for row in spec["vconcat"])
    domain = drawn_bars["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert domain == bars[:16] and drawn_bars["title"]["text"][-1].endswith("the first 16 of 20 changes")
    assert charts["spec"]["layer"][0]["encoding"]["x"]["axis"]["labelAngle"] == -40


def test_each_axis_is_compared_with_everything_else_equal(database):
    ablation = Ablation(sweep_in(database))
    names = [axis.key for axis in ablation.independent]
    assert names == ["model.name", "layout.micro_batch_size", "cluster.gpus", "global_batch"]
    gains = {(one.axis, one.before, one.after): one for one in ablation.gains}
    gain = gains["layout.micro_batch_size", "1", "4"]
    assert (gain.speed, gain.pairs) == (pytest.approx(1.4 / 1.1), 6)  # two models on 1, 2 and 4 ranks
    assert gains["cluster.gpus", "1", "4"].speed == pytest.approx(0.92 / 0.98)
    assert not [key for key in gains if key[0] == "model.name"]
    bars = drawn(database)["gains"]
    assert bars.parts["speed"][bars.names.index("micro batch size 1 → 4")] == gain.speed


def test_an_axis_that_another_one_fixes_has_no_gains_of_its_own(tmp_path):
    layouts = ("mb1-ga4", "tp2-sp-mb1-ga4", "mb2-ga2", "tp2-sp-mb2-ga2")
    rows = [bench_row("small", 1, 1, layout=layout, settings={"layout": layout}) for layout in layouts]
    ablation = Ablation(sweep_in(write_sweep(tmp_path, rows)))
    assert [axis.name for axis in ablation.axes] == ["tp", "sp", "micro batch size"]
    assert [(one.axis, one.pairs) for one in ablation.gains] == [
        ("layout.tp", 2), ("layout.micro_batch_size", 2)
    ]  # fmt: skip
    says(ablation.table().notes[-1])
    planned = {"fp32": "zero3x2-mb1-ga2", "bf16": "dp2-mb1-ga2"}
    rows = [
        bench_row("small", 2, 1, layout=planned[name], settings={"train.precision": name}) for name in planned
    ]
    (tmp_path / "planned").mkdir()
    assert not Ablation(sweep_in(write_sweep(tmp_path / "planned", rows))).gains, "the layouts differ too"


def test_layouts_that_differ_in_several_fields_are_compared_whole(tmp_path):
    layouts = {"dp1": "mb2-ga8", "zero3x2": "zero3x2-mb2-ga4", "pp2": "pp2-1f1b-mb2-ga8"}
    rows = [
        bench_row("small", 1 if name == "dp1" else 2, 2, layout=layout, global_batch_size=16,
                  settings={"method": method, "layout": name})
        for method in ("full", "lora") for name, layout in layouts.items()
    ]  # fmt: skip
    table = Ablation(sweep_in(write_sweep(tmp_path, rows))).table()
    assert [(row[0], row[-1]) for row in table.rows[1:]] == [
        ("layout dp1 → zero3x2", "2"), ("layout dp1 → pp2", "2")
    ]  # fmt: skip
    says(table.notes[-1])


def test_small_charts_and_colours_are_the_axes_that_are_named(database):
    sweep = sweep_in(database)
    panel = next(Ablation(sweep, by="model", color="micro_batch_size").panels())
    assert panel.heads == ("model small", "model large <b>") and panel.groups == ("1", "2", "4")
    assert panel.columns == ("2", "4", "8", "16", "32") and panel.x_title == "global batch"
    best = max(one.shown.speed for one in sweep.done if one.model == "small")
    assert max(dot.y for dot in panel.dots if dot.head == "model small" and dot.joined) == best
    chart = specification(panel, width="container")
    assert chart["columns"] == 2 and chart["facet"]["sort"] == {"field": "place", "op": "min"}
    for word in ("recompute", "layout"):
        with refuses(UserError):
            Ablation(sweep, by=word)


def test_the_held_out_loss_is_drawn_along_the_axis_that_changes_it_most(tmp_path):
    rates, layouts = (1e-5, 1e-4, 1e-3), ("mb1-ga2", "tp2-mb1-ga2", "tp4-mb1-ga2", "tp8-mb1-ga2")
    rows = [
        bench_row("small", 1, 1, layout=layout, eval_loss=2 + number / 10 + place / 1000,
                  settings={"layout": layout, "train.learning_rate": rate})
        for number, rate in enumerate(rates) for place, layout in enumerate(layouts)
    ]  # fmt: skip
    panels = drawn(write_sweep(tmp_path, rows))
    assert panels["by_axis_speed"].x_title == "tp"
    loss = panels["by_axis_loss"]
    assert loss.columns == ("1e-05", "0.0001", "0.001") and loss.groups == ("1", "2", "4", "8")
    assert 1.9 < loss.y.ends[0] < 2 and loss.unit.startswith(
        "loss per label token; lines: the lowest of each"
    )
    assert loss.title == "Held-out loss by learning rate, coloured by tp"


def test_one_pair_that_was_measured_once_is_in_the_table_but_not_among_the_bars(tmp_path):
    rows = [bench_row("small", 1, 1, settings={"train.precision": name}) for name in ("bf16", "fp32")]
    ablation = Ablation(sweep_in(write_sweep(tmp_path, rows)))
    (row,) = ablation.table().rows
    assert row[-1] == "one pair" and "gains" not in {panel.key for panel in ablation.panels()}
    says(ablation.table().notes)


def test_no_experiment_beats_one_of_the_front(database):
    some = [one for one in sweep_in(database).done if one.model == "small"]
    chosen = front(some)
    for one in some:
        beaten = [
            f
            for f in chosen
            if f.shown.speed >= one.shown.speed and f.shown.peak_bytes <= one.shown.peak_bytes
        ]
        assert beaten
    assert len(chosen) == 3  # a micro-batch size each, all on one rank
    panels = drawn(database)
    assert [label.point.text for label in panels["front"].labels] == ["mb1", "mb4"] * 2
    assert panels["by_axis_memory"].unit.endswith("; lowest: 0.168, small, mb1-ga2 (experiment 1)")


def test_predictions_are_beside_measurements_with_the_quartiles_of_their_errors(database):
    panel = drawn(database)["step_beside"]
    assert [group.name for group in panel.groups] == ["predicted", "simulated"]
    assert panel.unit == (
        "predicted: median error 10.0% (quartiles 10.0% to 10.0%), n = 18; "
        "simulated: median error 5.0% (quartiles 5.0% to 5.0%), n = 18"
    )
    assert errors([-0.1, 0.1, 0.3, 0.2, 0.5]) == "median error 20.0% (quartiles 10.0% to 30.0%), n = 5"
    assert errors([0.25]) == "error 25.0%, n = 1"


def test_regret_is_what_the_layout_ranked_first_lacks_of_the_fastest_one(tmp_path):
    rows = [bench_row(model, 2, size) for model in MODELS for size in (1, 2, 4)]
    rows[2]["predicted_tokens_per_second_per_gpu"] = 1.0  # the fastest one of "small", 1.4 to 1.2
    pair = [bench_row("small", 4, size) for size in (1, 2)]  # too few layouts
    panel = drawn(write_sweep(tmp_path, [*rows, *pair]))["regret"]
    assert panel.names == ("small, 2 ranks", "large <b>, 2 ranks") and "7.1% on average" in panel.title
    assert panel.parts["slower"] == pytest.approx((100 / 7, 0))
    assert panel.ends[0] == "14.3%: dp2 mb2, of 3 layouts"


def test_seeds_are_one_point_their_median(tmp_path):
    speeds = (100.0, 130.0, 110.0)
    rows = [
        bench_row("small", 1, 1, tokens_per_second_per_gpu=speed, settings={"train.seed": seed})
        for seed, speed in enumerate(speeds)
    ]
    (one,) = sweep_in(write_sweep(tmp_path, rows)).done
    assert one.shown.speed == 110 and one.repeats == 3


def test_the_order_in_which_settings_are_written_makes_no_other_experiment(tmp_path):
    rows = [
        bench_row("small", 1, 1, settings={"train.precision": "fp32", "data.seq_len": 256, "train.seed": 1}),
        bench_row("small", 1, 1, settings={"train.seed": 2, "data.seq_len": 256, "train.precision": "fp32"}),
    ]
    (one,) = sweep_in(write_sweep(tmp_path, rows)).done
    assert one.repeats == 2


def test_experiments_on_the_nodes_of_slurm_have_their_device_and_their_unit(tmp_path):
    row = bench_row("small", 2, 1)
    row["document"]["measured"]["device"] = "a node's GPU"
    file = write_sweep(tmp_path, [row, bench_row("small", 1, 1)], gpus=None, submitted_from="login")
    assert sweep_in(file).speed_unit == "tokens/s/GPU"
    says(sweep_page(file).footer)


def test_fractions_are_sorted_by_their_size_and_other_settings_as_words(tmp_path):
    settings = (
        {"train.learning_rate": 1e-5, "data.seq_len": 256},
        {"train.learning_rate": 1, "data.seq_len": 512},
    )
    rows = [bench_row("small", 1, 1, settings=one) for one in settings]
    columns = {one["name"]: one for one in table_columns(sweep_in(write_sweep(tmp_path, rows)))}
    rate, length = columns["train.learning_rate"], columns["data.seq_len"]
    assert (rate["form"], rate["values"], rate["filter"]) == ("number", [1e-5, 1], True)
    assert (length["form"], length["values"]) == ("text", ["256", "512"])


def test_of_many_experiments_the_dots_say_how_many_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("meshtune.report.experiments.panels.MOST_DOTS", 3)
    panel = drawn(write_sweep(tmp_path, bench_rows()))["front"]
    assert panel.groups[0].name == f"{len(panel.groups[0].points)} of 18 experiments"
    assert len(panel.groups[0].points) == 3


@pytest.mark.ci
def test_a_sweep_that_was_simulated_says_so_in_every_title(tmp_path):
    rows = [bench_row("small", ranks, 1) for ranks in (1, 2, 4)]
    made = sweep_page(write_sweep(tmp_path, rows, simulated="planner"))
    assert made.panels and all(panel.title.endswith(", simulated (planner)") for panel in made.panels)
    assert "(simulated)</h1>" in made.html() and "the planner predicted every figure" in made.html()
    speeds = [point.y for panel in made.panels if panel.key == "speed" for point in panel.groups[0].points]
    assert speeds == [row["predicted_tokens_per_second_per_gpu"] for row in rows]
    assert "utilisation" not in {panel.key for panel in made.panels}  # of one model it repeats the speed


@pytest.mark.ci
def test_the_table_has_every_experiment_and_its_reason(database):
    html = sweep_page(database).html()
    table = table_in(html)
    columns = {column["name"]: column for column in table["columns"]}
    count = len(MODELS) * 9 + 2
    assert columns["experiment"]["values"] == list(range(1, count + 1))
    status = columns["status"]
    assert [status["words"][place] for place in status["at"]][-2:] == ["out of memory", "refused"]
    reasons = columns["reason"]
    assert [reasons["words"][place] for place in reasons["at"]][-1] == "tp3 divides no head."
    assert columns["tokens/s/rank"]["values"][-1] is None
    assert table["parts"]["time"]["names"] == ["backward", "forward", "optimizer"]
    assert table["columns"][table["sorted"]]["name"] == "tokens/s/rank"


@pytest.mark.ci
def test_nothing_of_a_database_becomes_markup(database):
    html = sweep_page(database).html()
    assert "large <b>" not in html and "<memory>" not in html and "&lt;b&gt;" not in html.split("<script")[0]


@pytest.mark.ci
def test_a_thousand_experiments_are_a_page_below_two_megabytes(tmp_path):
    rows = [bench_row("small", 1 + n % 8, 1 + n // 8) for n in range(1000)]
    html = sweep_page(write_sweep(tmp_path, rows)).html()
    assert len(html.encode()) < 2e6


def test_losses_are_compared_at_equal_tokens_and_at_equal_updates(tmp_path):
    rows = []
    for number, batch in enumerate((4, 4, 8), 1):
        run = RunDir(tmp_path / "runs" / str(number)).create()
        for step in range(1, 9):
            run.append({"kind": "train", "step": step, "tokens": batch * 100, "epoch": step * batch / 16})
            loss = 4 - 0.1 * step * (batch // 4) + (0.2 if number == 2 else 0)
            run.append({"kind": "eval", "step": step, "loss": loss})
        # The learning rate follows the batch, and makes no line of its own.
        settings = {
            "train.global_batch_size": batch,
            "train.learning_rate": batch / 1e4,
            "train.seed": number,
        }
        rows.append(
            bench_row("small", 1, 1, global_batch_size=batch, settings=settings, gradient_noise_scale=6.0)
        )
    file = write_sweep(tmp_path, rows, run="train")
    found = drawn(file)
    at_tokens = {point.x: (point.y, point.ends) for point in found["batch_loss_tokens"].groups[0].points}
    assert found["batch_loss_tokens"].unit == "after 3,200 tokens"
    assert at_tokens[4] == (pytest.approx(3.3), (pytest.approx(3.2), pytest.approx(3.4)))
    assert at_tokens[8] == (pytest.approx(3.2), None)  # after four of its eight updates
    at_updates = {point.x: point.y for point in found["batch_loss_steps"].groups[0].points}
    assert at_updates == {4: pytest.approx(3.3), 8: pytest.approx(2.4)}
    curve = curve_of(RunDir(tmp_path / "runs" / "1"))
    assert curve is not None and curve.epoch_tokens == pytest.approx(1600)
    assert at(curve, "tokens", 1000) == pytest.approx(3.75) and at(curve, "steps", 0.5) is None
    assert {point.y for point in found["batch_noise"].groups[0].points} == {6.0}


def test_a_sweep_without_a_result_has_a_page(tmp_path):
    made = sweep_page(write_sweep(tmp_path, [{"status": "waiting", "settings": {"layout": "mb1-ga1"}}]))
    assert made.panels == [] and "No experiment is done yet" in made.html()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "0 experiments" in sweep_page(write_sweep(empty, [])).html()


def test_only_the_database_of_a_sweep_of_this_form_is_read(tmp_path):
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE x (y)")
    assert database_of(other) and not database_of(tmp_path / "missing")
    with refuses(UserError):
        read_sweep_rows(other)
    with refuses(UserError):
        read_sweep_rows(write_sweep(tmp_path, [], form=2))


def test_the_fastest_of_a_key_is_chosen():
    assert best([], lambda one: one.gpus) == {}


@pytest.mark.all
def test_the_command_takes_a_database_or_its_folder_and_writes_pictures(database, tmp_path, capsys):
    report([database.parent], plot=tmp_path / "pictures", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == str(tmp_path / "report.html")
    assert facts["experiments"] == {"done": 18, "out of memory": 1, "refused": 1}
    assert {file.name for file in (tmp_path / "pictures").iterdir()} >= {
        "best_layouts.png",
        "front.png",
        "weak.pdf",
    }
    report([database], out=tmp_path / "here.html")
    assert capsys.readouterr().out.endswith(f"\n{tmp_path / 'here.html'}\n")


def test_kinds_are_not_mixed_and_other_files_are_named(database, run, tmp_path):
    with refuses(UserError):
        report([run.path, database])
    with refuses(UserError):
        report([database, database.parent])
    (tmp_path / "x.json").write_text("{}")
    with refuses(UserError):
        report([tmp_path / "x.json"])
    with refuses(UserError):
        report([tmp_path / "rum"])


def test_plans_are_pages_too(tmp_path, capsys):
    memory = {
        "weights": 2.0**30,
        "activations": 2.0**30,
        "peak": 2.0**31,
        "event": "loss",
        "capacity": 2.0**33,
    }
    times = {"compute": 1.0, "data": 0.5, "total": 1.5}
    layout = {"layout": "mb1-ga4", "memory": memory, "time": times, "step_seconds": 1.5, "mfu": 0.4,
              "tokens_per_second_per_gpu": 1000.0}  # fmt: skip
    plan = {
        "model": {"name": "org/a <i>"}, "cluster": {"gpu": "h100-sxm", "gpus": 8}, "layouts": [layout],
        "workload": {"global_batch_size": 64, "seq_len": 2048}, "changes": ["Use a <larger> batch."],
        "rejected": [{"reason": "too large", "count": 3, "example": "mb8-ga1"}],
    }  # fmt: skip
    file = tmp_path / "a.json"
    file.write_text(json.dumps(plan))
    of_run = tmp_path / "plan.yaml"
    of_run.write_text(json.dumps({"layout": "mb1-ga4", "predicted": layout | {"time": None}}))
    memory_panel, time_panel = file_panels([read_plan(file)])
    assert memory_panel.parts == {"weights": (1.0,), "activations": (1.0,)} and memory_panel.mark.value == 8
    assert time_panel.ends == ("1.50 s · MFU 40%",)
    report([file])
    html = (tmp_path / "a.html").read_text()
    assert "8 x h100-sxm, global batch 64 × 2,048 tokens" in html and "3: too large (mb8-ga1)" in html
    assert "<larger>" not in html
    report([file, of_run], out=tmp_path / "two.html")
    assert [panel.key for panel in file_panels([read_plan(file), read_plan(of_run)])] == ["memory"]


def test_odd_rows_of_a_database_are_left_out_and_counted(tmp_path):
    """Each column with a value of another type, and damaged JSON: SQLite takes any value in any column."""
    whole = [bench_row("small", 1, 1), bench_row("small", 2, 1)]
    odd = [whole[0] | {name: "x"} for name in whole[0] if name not in ("layout", "model", "attempts")]
    odd += [
        whole[0] | {name: 3.5} for name in ("layout", "model", "status", "reason", "settings", "document")
    ]
    odd += [whole[0] | {"document": {"measured": 3}}, whole[0] | {"settings": "[1]"}]
    database = write_sweep(tmp_path, [*whole, *odd], axes="x", machine=3, unlisted=[])
    source = read_sweep_rows(database)
    assert [row["number"] for row in source.rows] == [1, 2] and len(source.left_out) == len(odd) + 2
    made = sweep_page(database)
    assert made.facts["experiments"] == {"done": 2} and source.left_out_sentence in made.before
    made.html()
