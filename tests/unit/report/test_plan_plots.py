"""A plan as a page and as a picture."""

import json
import re

import numpy as np
import pytest

from meshtune.config import ClusterConfig
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.rules import Traits
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory import gpt_parameters
from meshtune.plan.search import Workload, search
from meshtune.plan.work import Work
from meshtune.report.plan_plots import (
    MOST_LAYOUTS,
    Front,
    Heat,
    Scaling,
    Stack,
    distinct,
    figure,
    known_suffix,
    panels,
    parameter_shares,
    parameters_picture,
    plotly_figure,
    short,
    spread,
    write,
)
from meshtune.units import GIB

SHAPE = {"layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
TRAITS = Traits("Plain", blocks=16, heads=32, kv_heads=8, vocabulary=128256)
WORKLOAD = Workload("1b <x>", Work.of_shape(**SHAPE), TRAITS, 4096, 32)


def plan_of(gpus: int, batch: int = 32, **cluster):
    work = Workload(WORKLOAD.model, WORKLOAD.work, TRAITS, 4096, batch)
    return search(work, cluster_of(ClusterConfig(gpu="h100-sxm", gpus=gpus, **cluster)))


@pytest.fixture(scope="module")
def plan():
    return plan_of(8)


@pytest.fixture(scope="module")
def found(plan):
    sizes = {gpus: plan_of(gpus) for gpus in (4, 8)}
    batches = {
        (size, gpus): next(iter(plan_of(gpus, size).best(1)), None) for size in (16, 32) for gpus in (4, 8)
    }
    return panels(plan, sizes, batches | {(16, 4): None})


def one(found, kind):
    return next(panel for panel in found if isinstance(panel, kind))


def test_stacks_are_the_predictions_of_the_best_layouts(plan, found):
    memory, time = (panel for panel in found if isinstance(panel, Stack))
    best = plan.best(MOST_LAYOUTS)
    assert memory.layouts == time.layouts == tuple(str(c.layout) for c in best)
    for n, c in enumerate(best):
        assert sum(sizes[n] for sizes in memory.parts.values()) == pytest.approx(c.memory.peak / GIB)
        assert sum(sizes[n] for sizes in time.parts.values()) == pytest.approx(c.seconds.total)
    assert memory.mark is not None and memory.mark[0] == plan.cluster.memory / GIB


def test_the_front_is_the_plans_and_no_dot_beats_it(plan, found):
    front = one(found, Front)
    assert [name for _, _, name in front.front] == [str(plan.choice(n).layout) for n in plan.pareto()]
    assert len(front.dots) <= len(plan)
    for time, memory, _ in front.dots:
        assert not any(time < t and memory < m for t, m, _ in front.front)
    assert {(x, y) for x, y, _ in front.labels} <= {(x, y) for x, y, _ in front.front}


def test_dots_of_one_cell_are_drawn_once():
    time, memory = np.array([1.0, 1.0, 100.0, 100.0]), np.array([1.0, 1.0001, 50.0, 1.0])
    assert len(distinct(time, memory)) == 3


def test_names_along_the_front_have_room():
    heights = [80, 79, 60, 59, 30, 29, 28]
    places = spread(heights, range(7), apart=5)
    assert places == [0, 2, 6]
    assert spread([], [], 5) == [] and spread([1], [4], 5) == [4]


def test_the_map_has_a_cell_for_each_batch_and_size_and_none_where_nothing_fits(found):
    heat = one(found, Heat)
    assert (heat.batches, heat.gpus) == ((16, 32), (4, 8))
    assert heat.speeds[0][0] is None and heat.texts[0][0] == ("no layout",)
    assert heat.speeds[1][1] == pytest.approx(plan_of(8).best(1)[0].tokens_per_second_per_gpu)


def test_sizes_show_the_best_of_each(found):
    assert one(found, Scaling).gpus == (4, 8)


def test_what_was_not_searched_has_no_panel(plan):
    assert [type(panel) for panel in panels(plan)] == [Stack, Stack, Front]
    assert panels(plan, None, {(16, 8): None}) == panels(plan)


def test_where_nothing_fits_the_nearest_are_drawn_and_called_so(tmp_path):
    tight = plan_of(1, memory_gib=12)
    assert len(tight) == 0
    stack = panels(tight)[0]
    assert isinstance(stack, Stack) and "Nothing fits" in stack.title
    assert write(tmp_path / "tight.png", tight).stat().st_size > 10_000


def test_plotly_takes_every_panel(found):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for panel in found:
        graph_objects.Figure(plotly_figure(panel))  # refuses unknown properties


def test_both_back_ends_draw_the_same_numbers(plan, found):
    first = found[0]
    bars = plotly_figure(first)["data"]
    axes = next(a for a in figure(plan, found).axes if a.get_title(loc="left") == first.title)
    for trace, drawn in zip(bars, axes.containers, strict=True):
        assert trace["name"] == drawn.get_label()
        assert [bar.get_width() for bar in drawn] == pytest.approx(trace["x"], rel=1e-5)


def test_the_page_is_one_file_that_asks_nobody_and_obeys_no_name(plan, found, tmp_path):
    file = write(tmp_path / "new" / "plan.html", plan)
    text = file.read_text()
    own = text[: text.index("<script>")] + text[text.rindex("<script>") :]
    assert "1b &lt;x&gt;" in own and "<x>" not in own
    assert not re.search(r"(src|href)=.?http", own)
    data = json.loads(re.search(r"const FIGURES = (.*), THEMES = ", own)[1])  # pyright: ignore[reportOptionalSubscript]
    assert set(data) == {"memory", "time", "front"}
    assert list(tmp_path.glob("new/.*")) == []


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xm")])
def test_pictures_are_written_whole(plan, tmp_path, suffix, start):
    file = write(tmp_path / f"plan.{suffix}", plan)
    assert file.read_bytes()[:4] == start and file.stat().st_size > 20_000
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_an_unknown_suffix_is_refused_with_the_ones_that_are_known(plan, tmp_path):
    with pytest.raises(UserError, match=r"'\.gif'.*\.html, \.png, \.svg.*plan\.html"):
        write(tmp_path / "plan.gif", plan)
    with pytest.raises(UserError, match="nothing"):
        write(tmp_path / "plan", plan)
    assert known_suffix(tmp_path / "PLAN.PNG", (".png",)) == ".png"


def test_short_names_keep_what_a_layout_is():
    layout = Layout.parse("dp2-zero3x4-tp2-sp-pp2-interleaved1f1b-v2-mb2-ga8-full")
    assert short(layout) == ("dp2 zero3x4 tp2 pp2", "mb2 full")
    assert short(Layout()) == ("mb1",)


def test_the_terms_are_all_of_a_gpts_parameters():
    hidden = np.array([64.0, 768, 16384])
    shares = parameter_shares(hidden)
    assert sum(shares.values()) == pytest.approx([1, 1, 1])
    matrices, embeddings, _ = shares.values()
    assert matrices[2] > 0.99 and embeddings[0] > 0.99
    assert gpt_parameters(96, 12288, 50257, 2048) == pytest.approx(174.6e9, rel=1e-3)  # GPT-3


def test_the_picture_of_the_parameters_is_the_same_file_again(tmp_path):
    first, second = (parameters_picture(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second and b"matrices of the blocks" in first
    with pytest.raises(UserError):
        parameters_picture(tmp_path / "a.html")
