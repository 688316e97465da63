"""Tables and the page of a dry run: every byte at the peak is in them, with the setting that removes it."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from golden import says
from hand_traces import simulation_of, step_of, time_of, trace_of
from terminal import printed

from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.workspaces import Row, Workspaces
from meshtune.layout import Layout
from meshtune.meter.trace import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PHASES,
    RECOMPUTATION,
    TEMPORARY,
    WEIGHTS,
    Storage,
)
from meshtune.report.draw.picture import target
from meshtune.report.dryrun.document import document, panels, write_files
from meshtune.report.dryrun.living import Alike, Peak, alike, by_module
from meshtune.report.dryrun.remedies import remedy
from meshtune.report.dryrun.tables import (
    collectives_table,
    host_reads_table,
    largest_table,
    module_table,
    peak_table,
)
from meshtune.units import MIB, ranges

LAYOUT = Layout.parse("zero3x8-mb1-ga1")


def cells(table) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def test_the_peak_is_made_of_all_that_lives_then():
    for number in (1, 2):
        step = step_of(number)
        peak = Peak.of(step)
        assert sum(each.bytes for each in peak.storages) == peak.bytes == step.peak()[0]
        assert sum(peak.parts().values()) == sum(sum(row.parts.values()) for row in by_module(peak.storages))
        assert sum(group.bytes for group in alike(peak.storages)) == peak.bytes
    assert peak.event() == "during aten.mm.default of lm_head, forward of micro-batch 0"


def test_tensors_that_differ_in_the_block_alone_are_one_group():
    groups = alike(Peak.of(step_of(2)).storages)
    states = next(group for group in groups if group.category == OPTIMIZER)
    assert (states.name, states.count, states.bytes) == ("model.layers.0-1.mlp.up_proj.weight", 2, 40 * MIB)
    assert [group.bytes for group in groups] == sorted((group.bytes for group in groups), reverse=True)
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8" and ranges([]) == ""


def test_a_rank_without_a_pipeline_has_no_stage_in_its_title():
    assert module_table(trace_of(stages=())).title == "By module, rank 0, later steps"
    assert module_table(trace_of(8, stages=(1, 2))).title == "By module, rank 8 (stages 1, 2), later steps"


def test_the_first_step_stands_beside_later_ones():
    table = peak_table([trace_of()])
    assert table.heads == ("category", "first step", "%", "later steps", "%")
    rows = cells(table)
    assert rows["optimizer"] == ("", "", "40.0 MiB", "17.6%")
    assert rows["logits"] == ("100 MiB", "53.5%", "100 MiB", "44.1%")
    assert rows["peak"] == ("187 MiB", "", "227 MiB", "")
    says(table.notes)


def test_several_ranks_stand_side_by_side_with_what_the_allocator_reserves():
    reserved = {"reserved": {0: (200 * MIB, 240 * MIB), 8: (MIB, 2 * MIB)}}
    reserved["expandable"] = {0: (190 * MIB, 230 * MIB), 8: (MIB, MIB)}
    table = peak_table([trace_of(), trace_of(8, stages=(1,))], reserved)
    assert table.heads[1:4] == (
        "rank 0\n(stage 0)\nfirst step", "rank 0\n(stage 0)\nlater steps", "rank 8\n(stage 1)\nfirst step",
    )  # fmt: skip
    assert cells(table)["optimizer"] == ("", "40.0 MiB", "", "40.0 MiB")
    assert cells(table)["reserved"] == ("200 MiB", "240 MiB", "1.00 MiB", "2.00 MiB")
    assert cells(table)["expandable"] == ("190 MiB", "230 MiB", "1.00 MiB", "1.00 MiB")
    assert table.totals == 3


def test_modules_add_up_and_blocks_are_one_row_with_their_mean():
    rows = cells(module_table(trace_of()))
    assert rows["blocks 0-1, sum"][0] == "124 MiB" and rows["blocks 0-1, mean"][0] == "62.0 MiB"
    assert rows["lm_head"][0] == "103 MiB" and rows["peak"][0] == "227 MiB"


def test_the_largest_tensors_come_with_what_removes_them():
    table = largest_table(trace_of(), LAYOUT, 2)
    assert [row[:3] for row in table.rows] == [
        ("100 MiB", "", "lm_head"), ("64.0 MiB", "2 × 32.0 MiB", "model.layers.0-1.mlp.up_proj"),
    ]  # fmt: skip
    assert table.rows[1][3:6] == ("mm, forward", "4×4 bfloat16", "activations")
    assert table.rows[1][6] == "full: the backward runs the block again"
    says(table.notes)


def tensors(category: str, **others) -> Alike:
    group = Alike(
        before="model.layers", after=".mlp", blocks=(0, 1), parameter="", states=(),
        made_by="aten.mul.Tensor", shape=(8, 16), dtype="bfloat16", category=category,
        phase=FORWARD, count=2, bytes=MIB,
    )  # fmt: skip
    return replace(group, **others)


@pytest.mark.parametrize(
    ("group", "layout", "setting"),
    [
        (tensors(OPTIMIZER), "dp8-mb1-ga1", "zero1: each of 8 ranks"),
        (tensors(OPTIMIZER), "zero1x8-mb1-ga1", "train.optimizer=lion"),
        (tensors(GRADIENTS), "zero1x8-mb1-ga1", "zero2: each of 8 ranks"),
        (tensors(GRADIENTS, dtype="float32"), "zero3x8-mb1-ga1", "train.reduce_dtype=bf16"),
        (tensors(WEIGHTS), "zero2x8-mb1-ga1", "zero3: each of 8 ranks"),
        (tensors(WEIGHTS), "mb1-ga1", "tp or pp"),
        (tensors(GATHERED), "zero2x8-mb1-ga1", "zero3: gathered block by block"),
        (tensors(GATHERED), "zero3x4-tp2-mb1-ga1", "tp4"),
        (tensors(LOGITS), "zero3x8-mb1-ga1", "tp2: a part of the vocabulary"),
        (tensors(ACTIVATIONS), "zero3x8-mb1-ga1", "selective or full"),
        (tensors(ACTIVATIONS, made_by="aten.mm.default"), "zero3x8-mb1-ga1-selective", "full:"),
        (tensors(ACTIVATIONS), "zero3x8-mb1-ga1-selective", "cp, or tp with sp: of the block"),
        (tensors(ACTIVATIONS), "zero3x8-mb4-ga1-full", "mb2: a block's input"),
        (tensors(ACTIVATIONS), "zero3x4-tp2-mb1-ga1-full", "sp or cp"),
        (tensors(ACTIVATIONS), "zero3x8-mb1-ga1-full8", "full in more blocks than 8"),
        (tensors(ACTIVATIONS), "zero3x8-mb1-ga1-selective8", "selective in more blocks than 8"),
        (tensors(ACTIVATIONS, made_by="aten.mm.default"), "zero3x8-mb1-ga1-selective8", "full:"),
        (tensors(ACTIVATIONS), "zero2x2-pp4-gpipe-mb1-ga8-full", "1f1b"),
        (tensors(ACTIVATIONS, phase=RECOMPUTATION), "zero3x8-mb2-ga1-full", "mb1: one block's"),
        (tensors(ACTIVATIONS, phase=BACKWARD), "zero3x8-mb1-ga1", "cp, or tp with sp: a gradient"),
        (tensors(ACTIVATIONS, blocks=()), "zero3x8-mb2-ga1", "mb1: it grows with the tokens"),
        (tensors(GRADIENTS, shape=(500, 8)), "zero3x8-mb1-ga1", "tp2: a part of the head's gradient"),
        (tensors(ACTIVATIONS, made_by="all_gather over tp"), "tp2-sp-mb1-ga1", "regather"),
        (tensors(COMMUNICATION), "zero3x8-mb1-ga1", "tp2: smaller collectives"),
        (tensors(COMMUNICATION, made_by="receive over pp"), "pp2-mb2-ga4", "mb1: it is a stage's input"),
        (tensors(TEMPORARY), "zero3x8-mb1-ga1", "none:"),
    ],
)  # fmt: skip
def test_each_kind_of_tensor_has_its_setting(group, layout, setting):
    assert remedy(group, Layout.parse(layout), vocabulary=500).startswith(setting)


def test_no_tensor_is_without_an_answer():
    for text in ("mb1-ga1", "dp8-mb1-ga1", "zero3x8-mb1-ga1-full", "tp2-sp-pp2-gpipe-mb2-ga4-selective"):
        for category in CATEGORIES:
            for phase in ("", *PHASES):
                for blocks in ((), (0,)):
                    assert remedy(tensors(category, phase=phase, blocks=blocks), Layout.parse(text))


def test_collectives_count_the_micro_batches_that_were_not_traced():
    rows = [row[:5] for row in collectives_table(trace_of()).rows]
    assert rows == [
        ("all_gather", "dp_shard", "8", "2", "32.0 MiB"),
        ("reduce_scatter", "dp_shard", "8", "2", "2.00 MiB"),
    ]  # fmt: skip
    table = collectives_table(trace_of(of=64))
    assert [row[3] for row in table.rows] == ["128", "128"]
    says(table.notes)


def test_reads_and_copies_by_the_host_are_listed_by_line():
    assert host_reads_table(trace_of()).rows == (
        ("meshtune/train/step.py:90 step", "read", "2", "2"),
        ("meshtune/attention/cuda.py:7 attend", "copy", "1", "1"),
    )


def run_of() -> Simulation:
    traces = [trace_of(), trace_of(8, stages=(1,)), trace_of(16, stages=(2,))]
    traces[1].substitutes = ("aten.some_kernel",)
    return simulation_of("zero3x8-pp3-1f1b-mb1-ga3", *traces, model="tiny <b>", times=[time_of(0, 8)] * 2)


@pytest.mark.ci
def test_the_page_has_the_pictures_and_tables_of_every_rank(monkeypatch):
    taken = [Row("flash attention's dq", 3, 7 * MIB, "some source")]
    monkeypatch.setattr(Workspaces, "table", lambda self, trace: taken if trace.rank == 8 else [])
    run = run_of()
    page = document(run, drawn=panels(run))
    keys = [panel.key for panel in page.panels]
    assert keys == [
        "memory_of_rank_0", "memory_of_rank_8", "memory_of_rank_16", "pipeline", "streams_of_rank_0",
        "streams_of_rank_8",
    ]  # fmt: skip
    assert [panel.x_title for panel in page.panels[:3]] == ["seconds", "seconds", "operations"]
    assert page.panels[0].x[-1] == 4.0, "two steps of two seconds"
    assert page.panels[-1].lanes == ("compute", "dp_shard")
    assert [one.name for one in page.panels[-1].intervals] == [FORWARD, "data"]
    html = page.html()
    assert "tiny &lt;b&gt;" in html and "<b>" not in html
    for words in ("rank 16 (stage 2)", "flash attention&#x27;s dq", "some_kernel", " fits: ", "260 MiB"):
        assert words in html
    titles = Counter(re.sub(r", rank.*", "", title) for title in re.findall(r"<h2>(.*?)</h2>", html))
    assert titles["The largest tensors at the peak"] == 3 and titles["Memory at the peak"] == 1
    assert {f"chart-{key}" for key in keys} == set(re.findall(r"id='(chart-\w+)'", html))


def test_a_terminal_shows_the_peaks_of_all_ranks_and_all_else_of_the_fullest():
    titles = [
        line for line in printed(document(run_of())).splitlines() if ", rank" in line or "Memory" in line
    ]
    assert sum(title.startswith("Memory at the peak") for title in titles) == 2
    assert sum(title.startswith("The largest tensors at the peak, rank 0") for title in titles) == 1


def test_memory_of_a_step_in_part_is_drawn_over_operations():
    memory, streams = panels(simulation_of("mb1-ga8", trace_of(of=8), times=[time_of(0)] * 2))
    assert (memory.x_title, streams.key) == ("operations", "streams_of_rank_0")


def test_a_page_of_one_rank_has_no_empty_table():
    run = simulation_of("zero3x8-mb1-ga1", trace_of())
    page = document(run, drawn=panels(run))
    html = page.before + page.after
    assert "<tbody></tbody>" not in html and "Operations run by a stand-in" not in html
    assert [panel.key for panel in page.panels] == ["memory_of_rank_0"]


@pytest.mark.ci
def test_files_are_the_page_and_a_picture_of_each_panel(tmp_path):
    run = simulation_of("zero3x8-pp3-1f1b-mb1-ga3", trace_of(), times=[time_of(0)] * 2)
    page = document(run, drawn=panels(run))
    files = write_files(target(tmp_path / "plots"), run, page)
    drawn = ("memory_of_rank_0", "pipeline", "streams_of_rank_0")
    assert [file.name for file in files] == [
        "dryrun.html", *(f"{name}.{kind}" for name in drawn for kind in ("png", "svg", "pdf")), "trace.json",
        "rank-0.pickle",
    ]  # fmt: skip
    assert all(file.stat().st_size > 1000 for file in files)
    assert all("simulated" in file.read_text() for file in files if file.suffix == ".svg")
    assert write_files(target(tmp_path / "a.svg", "84mm").of("x"), run, page) == [tmp_path / "a-x.svg"]


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_shows_numbers_whole(width):
    assert "227 MiB" in printed(peak_table([trace_of()]), width)
    assert "2 × 32.0 MiB" in printed(largest_table(trace_of(), LAYOUT, 20), width)


def test_a_narrow_terminal_shows_numbers_that_have_no_room_below():
    table = module_table(trace_of())
    wide, narrow = printed(table, 200), printed(table, 60)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 60
    assert sum(line.startswith("blocks 0-1, sum") for line in narrow.splitlines()) == 2
    numbers = re.compile(r"[\d.,]+ [KMG]iB")
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))


def test_a_narrow_terminal_shows_words_that_have_no_room_below():
    narrow = printed(largest_table(trace_of(), LAYOUT, 20), 80)
    for words in ("activations", "mm, forward", "4×4 bfloat16", "made by", "2 × 32.0 MiB"):
        assert words in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_a_storage_from_before_the_step_is_of_its_parameters_module():
    storage = Storage(1, WEIGHTS, "", "", "", name="model.layers.3.mlp.up_proj.weight")
    assert by_module([storage])[0].name == "blocks 3"
