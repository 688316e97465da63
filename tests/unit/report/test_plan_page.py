"""The page of a plan: what stands on it, and how its charts are drawn for a phone."""

import html
import re
from dataclasses import replace
from itertools import combinations

import pytest
from known import known

from meshtune.layout import Layout
from meshtune.plan.advice import COMPUTE
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.cost import RunLength
from meshtune.plan.explanation import Explanation
from meshtune.plan.search import explained, search
from meshtune.plan.workload import Workload
from meshtune.report.draw.charts import heat_map, specification
from meshtune.report.draw.colours import COLOURS
from meshtune.report.draw.kinds import Areas, Cell, HeatMap, Timeline
from meshtune.report.draw.picture import in_rows
from meshtune.report.draw.theme import DARK, LIGHT, SHADES
from meshtune.report.draw.words import model_title
from meshtune.report.plan import documents
from meshtune.report.plan.documents import CommandLine, best_layouts, provenance, recommended
from meshtune.report.plan.panels import memory_stacks, panels, time_stacks
from meshtune.sections import ClusterConfig
from meshtune.units import GIB

MODEL = known("llama-3.2-1b")
WORKLOAD = Workload("models/llama-3.2-1b/config.json", MODEL.work, MODEL.traits, 4096, 32)
LENGTH = RunLength(1000, 1000 * 32 * 4096)
LINE = CommandLine("meshtune plan a=1 --plot x.html", "a=1")


@pytest.fixture(scope="module")
def answer() -> Answer:
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8, price_per_gpu_hour=2.0))
    return answer_of(cluster, LENGTH)


def answer_of(cluster: Cluster, length: RunLength) -> Answer:
    offer = offer_of(search(WORKLOAD, cluster), length=length)
    return Answer(WORKLOAD, (offer,), offer, length=length)


def clusters(answer: Answer) -> str:
    """The page up to its table of layouts, from the table of clusters on."""
    return documents.answer(answer).before.partition("<h2>Clusters")[2].partition("The best layouts")[0]


def layouts(answer: Answer, most: int) -> str:
    return best_layouts(answer, most)[1].html()


def plain(page: str) -> str:
    """The page's text, without tags and scripts."""
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)))


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("models/llama-3.1-8b", "llama-3.1-8b"),
        ("/data/models/llama/config.json", "llama"),
        ("gpt2", "gpt2"),
    ],
)
def test_the_title_is_the_models_name_and_not_its_path(name, title):
    assert model_title(name) == title


def test_every_row_of_the_table_is_there_and_the_recommended_one_is_marked(answer):
    best = answer.best(10)
    rows = re.findall(r"<tr.*?</tr>", layouts(answer, 10))[1:]
    assert len(rows) == 10
    assert ["class=chosen" in row for row in rows] == [True] + [False] * 9
    for row, choice in zip(rows, best, strict=True):
        text = plain(row)
        assert str(choice.layout) in text and f"{choice.mfu:.1%}" in text
    assert all("longer than the chosen layout" in row or "as fast as" in row for row in rows[1:])


def test_cost_and_hours_of_each_layout_are_its_own(answer):
    best = answer.best(3)
    rows = re.findall(r"<tr.*?</tr>", layouts(answer, 3))[1:]
    for row, choice in zip(rows, best, strict=True):
        hours = 1000 * choice.seconds.total / 3600
        found = dict(re.findall(r"data-name='([^']+)'>([^<]+)<", row))
        assert float(found["hours"]) == pytest.approx(hours, rel=0.01)
        assert float(found["cost"]) == pytest.approx(hours * 8 * 2.0, rel=0.01)
    unknown = replace(answer, length=RunLength(None, None))
    names = re.findall(r"data-name='([^']+)'", layouts(unknown, 1))
    assert "hours" not in names and "cost" not in names and "a million tokens" in names


def test_the_page_has_the_command_to_run_and_where_its_numbers_come_from(answer):
    assert f"meshtune train a=1 layout={answer.choice.layout}" in plain(recommended(answer, LINE))
    text = plain(provenance(answer, LINE).html())
    assert "meshtune plan a=1 --plot x.html" in text and "by meshtune 0" in text
    assert answer.choice.cluster.gpu.source.split(":")[0] in text


def test_a_page_without_charts_has_all_sections_in_plain_text(answer):
    text = plain(documents.answer(answer, line=LINE).html())
    titles = ("The best layouts", "Why the usual ones are not first", "Layouts left out", "Where this comes")
    assert all(words in text for words in (*titles, "nobody has published 5 runs of meshtune on h100-sxm"))


def test_a_colour_means_one_thing_in_all_charts():
    assert len(set(COLOURS.values())) == len(COLOURS)
    others = {*SHADES} | {
        theme[role] for theme in (LIGHT, DARK) for role in ("ink", "soft", "chosen", "grid")
    }
    assert not others & set(COLOURS.values())
    for one, other in combinations([tuple(bytes.fromhex(c[1:])) for c in COLOURS.values()], 2):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 40


@pytest.mark.parametrize(("values", "low", "high"), [((7137, 7362), 3681, 7362), ((10, 100), 10, 100)])
def test_shades_span_at_least_half_of_the_highest_value(values, low, high):
    cells = (tuple(Cell(float(value), ("x",)) for value in values),)
    drawn = heat_map(HeatMap("h", "h", "x", ("a", "b"), ("r",), cells)).to_dict()
    assert drawn["layer"][1]["encoding"]["color"]["scale"]["domain"] == [low, high]


def texts_of(spec: dict) -> str:
    return str([layer.get("data", {}).get("values", "") for layer in spec["layer"]] + [spec.get("data")])


def test_on_a_phone_names_and_whole_numbers_stand_above_the_bars(answer):
    best = answer.best(3)
    for panel in (memory_stacks(best), time_stacks(best)):
        wide, narrow = (specification(panel, width="container", narrow=each) for each in (False, True))
        assert wide["layer"][0]["encoding"]["y"]["axis"]["labels"] is True
        assert narrow["layer"][0]["encoding"]["y"]["axis"]["labels"] is False
        above = next(layer for layer in narrow["layer"] if layer["encoding"].get("x") == {"value": 0})
        assert above["mark"]["align"] == "left" and above["mark"]["dy"] < -12
        for end, name in zip(panel.ends, panel.names, strict=True):
            assert f"{end}  {name}" in str(narrow)
    long = replace(panel, names=tuple(f"{name}{'-and-more' * 9}" for name in panel.names))
    text = str(specification(long, width=300, narrow=True))
    assert all(name in text for name in long.names) and "…" not in text, "names are never cut"


def marks_of(spec: dict) -> list[str]:
    """Types of the marks that a chart draws, with those of charts in it."""
    if "mark" in spec:
        return [spec["mark"]["type"]]
    inner = [each for key in ("layer", "hconcat", "vconcat") for each in spec.get(key, [])]
    return [mark for each in inner for mark in marks_of(each)]


def test_a_phone_gets_no_labels_that_overlap(answer):
    drawn = panels(answer, answer.best(3))
    scatter = next(panel for panel in drawn if panel.key == "front")
    wide, narrow = (specification(scatter, width="container", narrow=each) for each in (False, True))
    labels = [marks_of(drawn).count("text") for drawn in (wide, narrow)]
    assert labels == [3, 1]


def test_clusters_stand_in_a_table_with_their_cost_and_the_sentences_on_them(answer):
    small = answer_of(answer.choice.cluster.of_size(4), LENGTH)
    both = replace(answer, offers=(*small.offers, *answer.offers), left_out=("7 GPUs are too few.",))
    found = clusters(both)
    rows = re.findall(r"<tr.*?</tr>", found)[1:]
    assert ["class=chosen" in row for row in rows] == [False, True]
    for row, one in zip(rows, (small, answer), strict=True):
        assert str(one.choice.layout) in row and "data-name='cost'" in row
    assert "recommended" in rows[1] and "7 GPUs are too few." in found
    assert "<h2>Clusters" not in documents.answer(answer).html()


def test_a_kind_without_a_price_has_an_empty_cost(answer):
    unpriced = answer_of(cluster_of(ClusterConfig(gpu="a100-80", gpus=8)), LENGTH)
    both = replace(answer, offers=(*answer.offers, *unpriced.offers))
    _, priced, other = re.findall(r"<tr.*?</tr>", clusters(both))
    assert re.search(r"data-name='cost'>[\d.]+<", priced)
    assert "data-name='cost'><" in other and str(unpriced.choice.layout) in other


def test_error_bars_stand_in_the_heads_of_tables_and_the_titles_of_charts(answer):
    error = answer.choice.accuracy
    time, memory = f"±{error.time:.0%}", f"±{error.memory:.0%}"
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", layouts(answer, 3))
    assert f"step {time}" in heads and f"peak GiB {memory}" in heads
    best = answer.best(3)
    assert memory_stacks(best).title.endswith(memory) and time_stacks(best).title.endswith(time)


def test_explained_layouts_have_a_page_with_the_reasons_against_them_and_their_levers():
    choice = explained(
        WORKLOAD, cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8)), Layout.parse("dp8-mb1-ga4")
    )
    one = Explanation(WORKLOAD, choice, ("It is <slow>.",), ("It can't run.",))
    document = documents.explained([one])
    page = document.html()
    assert page.index("It can&#x27;t run.") < page.index("<code>dp8-mb1-ga4</code>")
    assert (
        document.parts[0].title.startswith("meshtune can't train") and next(iter(document.facts)) == "refused"
    )
    assert "It is &lt;slow&gt;." in page and "<code>dp8-mb1-ga4</code>" in page
    assert html.escape(one.levers[0].sentence()) in page
    assert one.compute and sum(one.compute.values()) == pytest.approx(choice.seconds.compute)
    assert f": {COMPUTE['attention']}" in page
    of_overhead = [part for part in one.tensors if part["category"] == "overhead"]
    assert sum(part["bytes"] for part in of_overhead) == pytest.approx(choice.memory.overhead)
    assert sum(part["bytes"] for part in one.tensors) == pytest.approx(choice.memory.peak)
    assert all(part["name"] in page for part in of_overhead) and "CUDA context" in page


def test_each_explained_layout_is_drawn_over_a_step_on_axes_that_all_share():
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8))
    layouts = map(Layout.parse, ("dp8-mb1-ga4", "dp4-pp2-1f1b-mb1-ga8", "dp2-pp4-1f1b-mb1-ga16"))
    drawn = documents.explained_panels(
        [Explanation(WORKLOAD, explained(WORKLOAD, cluster, one), ()) for one in layouts]
    )
    over_step = [panel for panel in drawn if isinstance(panel, Areas | Timeline)]
    assert [panel.key for panel in over_step] == [
        "memory_over_time_1", "memory_over_time_2", "memory_over_time_3", "pipeline_2", "pipeline_3",
    ]  # fmt: skip
    (end,) = {panel.x_end for panel in over_step}
    assert end == max(panel.x[-1] for panel in over_step if isinstance(panel, Areas))
    assert "dp2-pp4-1f1b-mb1-ga16" in over_step[-1].title
    for panel in over_step:
        x = specification(panel, width="container")["layer"][0]["encoding"]["x"]
        assert x["scale"]["domain"] == [0, end]


def test_a_picture_has_charts_over_time_in_rows_of_their_own(answer):
    drawn = panels(answer, answer.best(3))
    assert [[panel.key for panel in row] for row in in_rows(drawn)] == [
        ["memory", "time"], ["memory_over_time"], ["front"],
    ]  # fmt: skip


def test_memory_over_a_step_marks_its_peak_and_gives_the_event_there_a_width(answer: Answer) -> None:
    panel = next(panel for panel in panels(answer, [answer.choice]) if isinstance(panel, Areas))
    tops = [sum(sizes) for sizes in zip(*panel.parts.values(), strict=True)]
    (peak,) = panel.peaks
    at = tops.index(max(tops))
    assert (panel.x[at], tops[at]) == (peak.x, pytest.approx(peak.y))
    assert peak.y == pytest.approx(answer.choice.memory.peak / GIB)
    assert panel.x[at - 1] < peak.x < panel.x[at + 1] and [*panel.x] == sorted(panel.x)
    assert panel.texts[at] in peak.text and max(panel.x) == panel.x[-1]
