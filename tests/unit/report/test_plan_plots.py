"""A plan as a page and as a picture."""

import csv
import io
import json
import re
import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
from cases import cases
from golden import refuses
from page_data import charts_of, valid
from shapes import of_shape

from meshtune.commands.options import pictures_to
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.rules import Traits
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.cluster import cluster_of
from meshtune.plan.cost import RunLength
from meshtune.plan.memory.states import gpt_parameters
from meshtune.plan.search import Workload, search
from meshtune.report.draw import picture, vega
from meshtune.report.draw.charts import specification
from meshtune.report.draw.document import Pictures
from meshtune.report.draw.kinds import Areas, HeatMap, Interval, Scatter, Stacks, Timeline
from meshtune.report.draw.picture import in_rows, known_suffix, target
from meshtune.report.draw.picture import specification as picture_of
from meshtune.report.draw.theme import LIGHT, config
from meshtune.report.plan.documents import CommandLine
from meshtune.report.plan.documents import answer as document_of
from meshtune.report.plan.panels import NO_LAYOUT, distinct, panels, short, spread
from meshtune.sections import ClusterConfig
from meshtune.units import GIB

SHAPE = {"layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
TRAITS = Traits("Plain", blocks=16, heads=32, kv_heads=8, vocabulary=128256)
WORKLOAD = Workload("1b <x>", of_shape(**SHAPE), TRAITS, 4096, 32)


def plan_of(gpus: int, batch: int = 32, **cluster):
    work = Workload(WORKLOAD.model, WORKLOAD.work, TRAITS, 4096, batch)
    return search(work, cluster_of(ClusterConfig(gpu="h100-sxm", gpus=gpus, **cluster)))


def answer_of(plan, length: RunLength = RunLength(None, None)) -> Answer:  # noqa: B008
    offer = offer_of(plan, length=length)
    return Answer(plan.workload, (offer,), offer, length=length)


@pytest.fixture(scope="module")
def plan():
    return plan_of(8)


@pytest.fixture(scope="module")
def answer(plan):
    return answer_of(plan)


@pytest.fixture(scope="module")
def drawn(answer):
    sizes = {gpus: plan_of(gpus) for gpus in (4, 8)}
    batches = {
        (size, gpus): next(iter(plan_of(gpus, size).best(1)), None) for size in (16, 32) for gpus in (4, 8)
    }
    return panels(answer, answer.best(10), sizes, batches | {(16, 4): None})


@pytest.fixture(scope="module")
def script():
    return runpy.run_path("scripts/plan_pictures.py")


def by_key(drawn, key):
    return next(panel for panel in drawn if panel.key == key)


def data_of(chart: dict) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(chart["data"]["values"])))


def test_stacks_are_the_predictions_of_the_best_layouts(plan, drawn):
    memory, time = (panel for panel in drawn if isinstance(panel, Stacks))
    best = plan.best(10)
    assert memory.names == time.names == tuple(str(c.layout) for c in best)
    for n, c in enumerate(best):
        assert sum(sizes[n] for sizes in memory.parts.values()) == pytest.approx(c.memory.peak / GIB)
        assert sum(sizes[n] for sizes in time.parts.values()) == pytest.approx(c.seconds.total)
    assert memory.mark is not None and memory.mark.value == plan.cluster.memory / GIB


def test_the_front_is_the_plans_and_no_dot_beats_it(plan, drawn):
    panel = by_key(drawn, "front")
    dots, front, (chosen,) = (group.points for group in panel.groups)
    slowest = 5 * float(plan.seconds.total.min())
    near = [n for n in plan.pareto() if plan.seconds.total[n] <= slowest]
    assert [point.text for point in front] == [str(plan.choice(n).layout) for n in near]
    assert max(point.x for point in dots) <= slowest
    assert chosen.text == str(plan.choice(0).layout)
    assert len(dots) <= len(plan)
    for dot in dots:
        assert not any(dot.x < point.x and dot.y < point.y for point in front)
    places = {(point.x, point.y) for point in front}
    assert {(label.point.x, label.point.y) for label in panel.labels} <= places


def test_dots_of_one_cell_are_drawn_once_and_no_more_than_a_page_can_hold():
    time, memory = np.array([1.0, 1.0, 100.0, 100.0]), np.array([1.0, 1.0001, 50.0, 1.0])
    assert len(distinct(time, memory)) == 3
    values = np.random.default_rng(0).uniform(1, 100, (2, 50_000))
    assert 400 < len(distinct(*values, most=1000)) <= 1000


def test_names_along_the_front_have_room():
    heights = [80, 79, 60, 59, 30, 29, 28]
    places = spread(heights, range(7), apart=5)
    assert places == [0, 2, 6]
    assert spread([], [], 5) == [] and spread([1], [4], 5) == [4]


def test_the_map_has_a_cell_for_each_batch_and_size_and_none_where_nothing_fits(drawn):
    heat = by_key(drawn, "batches")
    assert (heat.rows, heat.columns) == (("GBS 32", "GBS 16"), ("4 GPUs", "8 GPUs"))
    nothing = heat.cells[1][0]
    assert nothing.value is None and nothing.texts == (NO_LAYOUT,)
    assert heat.cells[0][1].value == pytest.approx(plan_of(8).best(1)[0].tokens_per_second_per_gpu)


def test_every_title_says_predicted_and_what_was_not_searched_has_no_panel(answer, drawn):
    assert [panel.title for panel in drawn if not panel.title.endswith(", predicted")] == []
    assert [point.x for point in by_key(drawn, "scaling").groups[0].points] == [4, 8]
    best = answer.best(10)
    assert [type(panel) for panel in panels(answer, best)] == [Stacks, Stacks, Areas, Scatter]
    assert panels(answer, best, {8: plan_of(8)}, {(16, 8): None}) == panels(answer, best)


@pytest.mark.all
def test_vega_lite_takes_every_panel(drawn):
    for panel in drawn:
        for narrow in (False, True):
            valid(specification(panel, width="container", narrow=narrow))


def test_page_and_picture_draw_the_same_numbers(drawn):
    bars = specification(drawn[0], width="container")["layer"][0]
    whole = picture_of(in_rows(drawn), title="plan")
    first = whole["vconcat"][0]["hconcat"][0]
    assert first["title"]["text"] == drawn[0].title
    assert data_of(first["layer"][0]) == data_of(bars)
    for row in data_of(bars):
        layout = drawn[0].names.index(row["name"])
        size = drawn[0].parts[row["part"]][layout]
        assert float(row["size"]) == pytest.approx(size, rel=1e-5)
        assert float(row["end"]) - float(row["start"]) == pytest.approx(size, rel=1e-4, abs=1e-3)


@pytest.mark.ci
def test_the_page_is_one_file_that_asks_nobody_and_obeys_no_name(answer, tmp_path):
    file = tmp_path / "new" / "plan.html"
    drawn = panels(answer, answer.best(10), batches=answer.batches())
    target(file).write(document_of(answer, line=CommandLine("plan <x>", "a=<x>"), drawn=drawn))
    text = file.read_text()
    own = text[: text.index("<script")] + text[text.index("</script>") :]
    assert "1b &lt;x&gt;" in own and "<x>" not in own
    assert not re.search(r"(src|href)=.?http", own)
    assert set(charts_of(own)) == {"memory", "time", "memory_over_time", "front", "batches"}
    assert len(text.encode()) <= 1.1e6
    assert list(tmp_path.glob("new/.*")) == []


def test_without_altair_the_picture_is_refused_with_the_remedy(answer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    for suffix in ("html", "png", "svg"):
        with refuses(UserError):
            target(tmp_path / f"plan.{suffix}").write(document_of(answer))
    assert list(tmp_path.iterdir()) == []


NASTY = '</script>"\'\\ ${alert(1)} datum["x"] a.b[0] \u2028 é\n<img src=x>'


@pytest.mark.ci
def test_names_are_text_and_never_part_of_an_expression_or_a_field():
    from meshtune.report.draw.kinds import Axis, Band, Cell, Dot, Group, Lines, Mark, Multiples, Point, Series
    from meshtune.report.draw.page import script_json

    point = Point(1, 2, NASTY)
    for panel in (
        Lines("a", NASTY, NASTY, (Series(NASTY, "main", (1, 2), (3, 4)),), ".2f", NASTY),
        Stacks("b", NASTY, NASTY, (NASTY,), {NASTY: (1.0,)}, (NASTY,), Mark(2, NASTY)),
        Scatter("c", NASTY, NASTY, (Group(NASTY, (point,)),), Axis(NASTY, (0, 5)), Axis(NASTY, (0, 5))),
        Multiples(
            "g", NASTY, NASTY, (NASTY, "b"), (NASTY,), (NASTY, "b"),
            (Dot(NASTY, NASTY, 2, NASTY, NASTY, True),), Axis(NASTY, (0, 5)), NASTY, NASTY,
        ),
        HeatMap("d", NASTY, NASTY, (NASTY,), (NASTY,), ((Cell(1.0, (NASTY,), NASTY),),)),
        Areas(
            "f", NASTY, NASTY, (0.0, 1.0), {NASTY: (1.0, 2.0)}, (NASTY, NASTY), NASTY, Mark(2, NASTY),
            bands=(Band(0, 1, NASTY),), sections=(Mark(0, NASTY),), peaks=(point,),
        ),
        Timeline("e", NASTY, NASTY, (NASTY,), (Interval(NASTY, 0, 1, NASTY, NASTY),)),
    ):  # fmt: skip
        spec = specification(panel, width=600, title_offset=10)
        assert (spec["title"]["text"], spec["title"]["subtitle"]) == (NASTY, NASTY), "title and unit"
        assert "<" not in script_json(spec)
        for key, value in strings_of(spec):
            if key in ("field", "expr", "filter", "labelExpr", "test"):
                assert "alert" not in value
            elif key == "calculate" and "alert" in value:
                assert json.loads(value) == NASTY  # one quoted string
        svg = vega.svg(spec | {"config": config(LIGHT, background="white")})
        assert "<img" not in svg and "<script" not in svg
        assert "alert(1)" in svg


def strings_of(value, key=""):
    """Every string of a specification with the key it stands under."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from strings_of(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner, key)
    elif isinstance(value, str):
        yield key, value


def test_a_timeline_has_a_bar_for_each_interval_in_its_lane():
    intervals = (
        Interval("rank 0", 0, 2, "forward", "micro-batch 0"),
        Interval("rank 1", 2, 4.5, "forward"),
        Interval("rank 1", 4.5, 9, "backward"),
    )
    spec = specification(Timeline("schedule", "Schedule", "ms", ("rank 0", "rank 1"), intervals), width=400)
    bars = spec["layer"][0]
    assert bars["encoding"]["y"]["scale"]["domain"] == ["rank 0", "rank 1"]
    assert bars["encoding"]["color"]["scale"]["domain"] == ["forward", "backward"]
    data = csv.DictReader(io.StringIO(spec["layer"][0].get("data", spec.get("data"))["values"]))
    assert [(row["lane"], float(row["start"]), float(row["end"])) for row in data] == [
        ("rank 0", 0, 2), ("rank 1", 2, 4.5), ("rank 1", 4.5, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "start"), cases([("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")], ci=1)
)
def test_pictures_are_written_whole(answer, tmp_path, suffix, start):
    file = tmp_path / f"plan.{suffix}"
    target(file).write(document_of(answer, drawn=panels(answer, answer.best(10))))
    assert file.read_bytes()[:4] == start and file.stat().st_size > 20_000
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.mark.ci
def test_each_picture_of_a_folder_is_as_wide_as_a_column_in_every_format(answer, tmp_path):
    document = document_of(answer, drawn=panels(answer, answer.best(3)))
    counts: list[str] = []
    files = target(tmp_path / "figures", "8.4cm").write(document, counts.append)
    assert counts[0].startswith("drew 0 of ") and len(counts) == len(document.panels)
    keys = ("memory", "time", "memory_over_time", "front")
    assert {file.name for file in files} == {
        f"{key}.{kind}" for key in keys for kind in ("png", "svg", "pdf")
    } | {"captions.txt"}
    captions = files[-1].read_text()
    for key in keys:
        svg = (tmp_path / "figures" / f"{key}.svg").read_text()
        assert 'width="84.0000mm"' in svg
        (panel,) = (panel for panel in document.panels if panel.key == key)
        assert f"{key}: {panel.title} ({panel.unit})" in captions and panel.title not in svg
        drawn = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
        assert drawn == pytest.approx(84 * 96 / 25.4, rel=0.08)  # px, so that texts keep their size
        png = (tmp_path / "figures" / f"{key}.png").read_bytes()
        assert int.from_bytes(png[16:20]) == round(84 * 300 / 25.4)
        simulated = replace(document, name="study (simulated)", parts=[Pictures([panel])])
        assert '"simulated"' in json.dumps(picture.picture_of(simulated, 317))
        pdf = (tmp_path / "figures" / f"{key}.pdf").read_bytes()
        assert float(re.search(rb"/MediaBox \[0 0 ([\d.]+)", pdf)[1]) == pytest.approx(
            84 * 72 / 25.4, abs=0.01
        )


def test_places_and_widths_of_pictures_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "file").touch()
    for name, width in (
        ("plan.gif", None),
        ("file", None),
        ("a.svg", "84"),
        ("a.svg", "3mm"),
        ("a.html", "84mm"),
    ):
        with refuses(UserError):
            target(tmp_path / name, width)
    with refuses(UserError):
        pictures_to(None, "84mm")
    assert known_suffix(tmp_path / "PLAN.PNG", (".png",)) == ".png"


def test_short_names_keep_what_a_layout_is():
    layout = Layout.parse("dp2-zero3x4-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga8-full")
    assert short(layout) == ("dp2 zero3x4 tp2 pp2", "mb2 full")
    assert short(Layout()) == ("mb1",)


def test_the_terms_are_all_of_a_gpts_parameters(script):
    hidden = np.array([64.0, 768, 16384])
    shares = script["parameter_shares"](hidden)
    assert sum(shares.values()) == pytest.approx([1, 1, 1])
    matrices, embeddings, _ = shares.values()
    assert matrices[2] > 0.99 and embeddings[0] > 0.99
    assert gpt_parameters(96, 12288, 50257, 2048) == pytest.approx(174.6e9, rel=1e-3)  # GPT-3


@pytest.mark.ci
def test_the_picture_of_the_parameters_is_the_same_file_again(tmp_path, script):
    parameters_picture = script["parameters_picture"]
    first, second = (parameters_picture(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second and b"matrices of the blocks" in first
    with pytest.raises(UserError):
        parameters_picture(tmp_path / "a.html")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("function", "words"), [("layouts_picture", "activations"), ("over_time_picture", "rank 3")]
)
def test_the_pictures_of_plans_are_drawn(tmp_path, script, function, words):
    text = script[function](tmp_path / "x.svg").read_text()
    assert text.startswith("<svg") and words in text and "Llama 3.1" in text
