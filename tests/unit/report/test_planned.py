"""Check a plan in the terminal, at several widths, with and without colours."""

from dataclasses import replace

import pytest
from terminal import printed

from meshtune.layout import Layout
from meshtune.plan.cluster import cluster_of
from meshtune.plan.cost import RunCost
from meshtune.plan.memory.timeline import Memory
from meshtune.plan.search import Choice
from meshtune.plan.seconds.step import PARTS, Seconds
from meshtune.report.draw.bars import LETTERS, Bar, blocks
from meshtune.report.draw.colours import COLOURS, MEMORY, MEMORY_PARTS, TIME
from meshtune.report.draw.document import Section
from meshtune.report.plan.numbers import of_capacity, seconds
from meshtune.report.plan.tables import cost_columns, explanation, layouts_table, side_by_side
from meshtune.sections import ClusterConfig
from meshtune.units import GIB

CLUSTER = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8))
NAMES = (
    "zero3x8-mb1-ga8",
    "zero2x4-tp2-sp-mb2-ga8",
    "zero3x2-tp2-sp-pp2-interleaved1f1b-v2-mb1-ga32-selective",
)


def choice(layout: str = NAMES[1], *, gib: float = 64, step: float = 8, speed: float = 1000) -> Choice:
    """Half of the memory weights, a quarter optimizer; three quarters of the time compute."""
    size = gib * GIB / 16
    held = Memory(8 * size, 0, size, 4 * size, size, 0, size, 0, size, event=2, rank=0)
    spent = Seconds(0.75 * step, 0.1 * step, 0, 0, 0, 0.1 * step, 0, 0.05 * step, 0, 0)
    return Choice(Layout.parse(layout), CLUSTER, spent, held, speed, 0.4)


CHOICES = [choice(name, gib=40 + 10 * n, step=8 + n) for n, name in enumerate(NAMES)]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 240])
def test_a_table_is_never_wider_than_the_terminal_and_keeps_a_line_for_each_layout(width):
    tables = [layouts_table(CHOICES), layouts_table(CHOICES[:2]), explanation(CHOICES[2])]
    for each in (*tables, *([side_by_side([choice()] * 3)] if width > 40 else [])):
        assert max(map(len, printed(each, width).splitlines())) <= width
    lines = printed(layouts_table(CHOICES[:2]), width).splitlines()
    tables = sum("layout" in line for line in lines)  # below each other where one has no room
    assert sum(any(name[:7] in line for name in NAMES) for line in lines) == 2 * tables
    assert tables == (2 if width == 40 else 1)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_are_whole_in_a_narrow_terminal_as_are_the_step_time_and_the_mfu(width):
    long = "zero3x8-cp2-tp2-sp-pp2-interleaved1f1b-v8-mb1-ga16-selective"
    text = printed(layouts_table([*CHOICES, choice(long, step=11)]), width)
    lines = text.splitlines()
    assert {"step", "MFU", "GiB"} <= set(text.split()) and max(map(len, lines)) <= width
    for step in ("8.00 s", "9.00 s", "10.00 s", "11.00 s"):
        assert sum(step in line for line in lines) == 1
    begins = next(number for number, line in enumerate(lines) if "11.00 s" in line)
    words = [line.lstrip(" 4").split() for line in lines[begins:]]
    pieces = [line[0] for line in words if line and not line[0].startswith(("memory", "time"))]
    assert long.startswith("".join(pieces[: 1 if width == 120 else 2]))
    assert all(piece.endswith(("-", "selective")) for piece in pieces[:2])


def test_a_wide_terminal_shows_all_and_a_narrow_one_leaves_columns_out():
    wide, narrow = (printed(layouts_table(CHOICES[:2]), width) for width in (160, 72))
    assert "50.0 / 79.1 GiB" in wide and "MFU" in wide and "time" in wide
    assert "50.0" in narrow and "/ 79.1 GiB" not in narrow and "time" not in narrow


def test_bars_shrink_before_a_column_is_left_out():
    tables = [printed(layouts_table(CHOICES[:1]), width) for width in (120, 100)]
    assert all("time" in table and "/ 79.1 GiB" in table for table in tables)
    assert tables[0].count("C") > tables[1].count("C")


def test_letters_are_as_many_as_the_parts_are_large():
    bar = Bar({"weights": 8, "gradients": 2, "optimizer": 6}, scale=32, width=32, until=24)
    assert printed(bar, 32).rstrip("\n") == "WWWWWWWWGGOOOOOO········"


def test_colours_are_as_long_as_the_parts_to_an_eighth_of_a_column():
    cells = Bar({"weights": 1.5, "gradients": 0.25, "optimizer": 2.25}, scale=4, width=4).cells(8)
    assert [cells.count(name) for name in ("weights", "gradients", "optimizer")] == [12, 2, 18]
    assert blocks(cells).plain == "█▌██"  # the second column is half of it, on what has more of the rest
    assert len(blocks(cells)) == 4


def test_rounding_does_not_add_up():
    assert len(Bar(dict.fromkeys(COLOURS, 1.0), scale=len(COLOURS), width=20).cells(1)) == 20


def test_what_begins_late_is_blank_before_it():
    bar = Bar({"": 2.5, "weights": 1.5}, scale=4, width=4)
    assert blocks(bar.cells(8)).plain == "  ▌█"
    assert printed(bar, 4).rstrip("\n") == "  WW"


@pytest.mark.parametrize("colours", ["256", "truecolor"])
def test_a_terminal_with_colours_has_blocks_and_no_letters(colours):
    text = printed(layouts_table(CHOICES), 160, colours)
    assert "█" in text and "\x1b[" in text and "WW" not in text


@pytest.mark.parametrize("colours", [None, "standard"])
def test_one_without_enough_of_them_has_letters_and_says_what_they_are(colours):
    text = printed(layouts_table(CHOICES), 160, colours)
    assert "WW" in text and "█" not in text
    assert all(name in text for name in ("weights", "optimizer", "compute", "bubble", "free"))


def test_every_name_has_a_colour_and_a_letter_of_its_own():
    for names, colours in ((MEMORY_PARTS, MEMORY), (PARTS, TIME)):
        assert [COLOURS[name] for name in names] == [*colours]
        assert len({LETTERS[name] for name in names}) == len({COLOURS[name] for name in names}) == len(names)


def test_a_layout_that_does_not_fit_is_red_and_its_bar_goes_beyond_the_capacity():
    text = printed(layouts_table([choice(gib=100)]), 160, "truecolor")
    assert "\x1b[31m100.0 / 79.1 GiB" in text
    plain = printed(explanation(choice(gib=100)))
    assert f"does not fit: {100 - CLUSTER.memory / GIB:.1f} GiB more than a GPU has" in plain


def test_an_explanation_sums_to_the_peak_and_the_step():
    text = printed(explanation(CHOICES[2]), 120)
    rows = {line.split()[1]: line.split() for line in text.splitlines() if len(line.split()) > 3}
    assert rows["weights"][2:5] == ["30.0", "GiB", "50.0%"]
    assert rows["60.0"][:4] == ["peak", "60.0", "GiB", "100.0%"]
    assert rows["compute"][2:5] == ["7.50", "s", "75.0%"]
    assert rows["10.00"][:4] == ["step", "10.00", "s", "100.0%"]
    assert "at the peak: backward of a block, on the first pipeline rank" in text
    assert "on every rank" in printed(explanation(CHOICES[0]), 120)


def test_no_layout_and_a_model_without_optimizer_state_are_no_error():
    printed(layouts_table([]))
    empty = replace(choice().memory, optimizer=0.0)
    assert "0 B" in printed(explanation(replace(choice(), memory=empty)))


def test_seconds_have_three_or_four_digits_and_a_peak_above_a_thousand_gib_its_separator():
    assert of_capacity(choice(gib=1296.8)) == "1,296.8 / 79.1 GiB"
    assert [seconds(each) for each in (0, 0.0123, 0.094, 3.456, 73.8, 1234.5)] == [
        "0 s", "12.3 ms", "94.0 ms", "3.46 s", "73.80 s", "1,234 s",
    ]  # fmt: skip


def test_layouts_stand_side_by_side_and_notable_differences_are_marked():
    text = printed(side_by_side([choice(gib=64, step=8), choice(NAMES[2], gib=100, step=8.05)]), 80)
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert text.splitlines()[0].split() == ["A", NAMES[1]]
    assert text.splitlines()[1].split() == ["B", NAMES[2], "does", "not", "fit"]
    assert rows["peak"].split()[3:] == ["64.0", "GiB", "100", "GiB", "+36.0", "GiB*"]
    assert rows["W"].split()[2:] == ["32.0", "GiB", "50.0", "GiB", "+18.0", "GiB*"]
    assert rows["step"].split()[2:] == ["8.00", "s", "8.05", "s", "+50.0", "ms"]  # less than 1 %
    assert rows["MFU,"].split()[2:] == ["40.0", "40.0"]
    assert "logits" not in text and "pipeline" not in text  # of neither
    assert max(map(len, text.splitlines())) <= 80


def test_layouts_of_different_clusters_stand_side_by_side_with_their_gpus():
    lines = printed(side_by_side([choice(), choice("zero3x16-mb1-ga4")]), 80).splitlines()
    assert lines[0].split() == ["A", NAMES[1], "on", "8", "GPUs"]
    assert lines[1].split() == ["B", "zero3x16-mb1-ga4", "on", "16", "GPUs"]


def test_a_section_without_lines_has_no_title():
    assert printed(Section("Why the usual ones are not first", [])) == ""
    assert printed(Section("One", ["line"])).split() == ["One", "line"]


def test_error_bars_stand_once_in_the_heads_of_a_table_and_behind_the_figures_of_an_explanation():
    error = CHOICES[0].accuracy
    time, memory = f"±{error.time:.0%}", f"±{error.memory:.0%}"
    for width in (60, 80, 160):
        text = printed(layouts_table(CHOICES[:2]), width)
        assert text.count(time) == text.count(memory) == 1
    text = printed(explanation(CHOICES[0]), 120)
    assert f"8.00 s a step {time}" in text and f"GiB {memory} at the peak" in text
    assert f"step {time}" in printed(side_by_side(CHOICES[:2]))


def test_columns_of_costs_are_those_that_a_run_has() -> None:
    priced = RunCost(10, 1000, 7200.0, 16.0, 40.0, 2.5, "EUR", 0.1)
    columns = cost_columns([None, replace(priced, currency=""), priced])
    assert [*columns] == ["hours", "gpu_hours", "cost", "million"]
    assert columns["cost"].head == "EUR" and "±10%" in columns["hours"].head
    assert [columns[name].cells[0] for name in columns] == 4 * [""]
    untimed = replace(priced, seconds=None, gpu_hours=None, cost=None, cost_per_million_tokens=None)
    assert cost_columns([untimed, None]) == {}
