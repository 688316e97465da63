"""Error bars of predictions."""

import tomllib
from importlib.resources import files

import pytest
from made_plans import machines, workload

from meshtune.layout import Layout
from meshtune.plan.accuracy import BANDS, accuracy, band_of
from meshtune.plan.cost import RunCost, RunLength
from meshtune.plan.hardware import catalogue, stacks
from meshtune.plan.search import explained

TABLES = tomllib.loads(files("meshtune.plan").joinpath("accuracy.toml").read_text("utf-8"))
OTHERS = TABLES["unmeasured"]


def test_a_stack_that_nobody_measured_has_the_error_of_sources_left_out_and_is_said_to():
    for band, words in BANDS.items():
        found = accuracy("meshtune", "h100-sxm", band)
        assert (found.time, found.memory) == (OTHERS["time"][band][0] / 100, OTHERS["memory"] / 100)
        assert (found.time_rows, found.memory_rows) == (0, 0)
        assert found.sentence("meshtune", "h100-sxm").startswith(
            f"±{found.time:.0%} of time and ±{found.memory:.0%} of memory: nobody has published 5 runs of "
            f"meshtune on h100-sxm {words}; assumed as the mean error"
        )


def test_a_measured_stack_has_its_own_error_on_the_kind_and_in_the_band_that_it_was_measured_in():
    percent, rows = TABLES["composer"]["a100-80"]["time"]["node"]
    found = accuracy("composer", "a100-80", "node")
    assert found.time == percent / 100 < OTHERS["time"]["node"][0] / 100 and found.time_rows == rows
    assert found.memory == OTHERS["memory"] / 100 and found.memory_rows == 0  # no peak of it is published
    sentence = found.sentence("composer", "a100-80")
    assert f"the mean error for {rows} published runs of composer on a100-80 on one machine." in sentence
    assert "of memory: nobody has published 5 peaks of composer on a100-80" in sentence
    for gpu, band in (("b200", "node"), ("a100-80", "tensor")):
        assert accuracy("composer", gpu, band).time == OTHERS["time"][band][0] / 100
        assert accuracy("composer", gpu, band).time_rows == 0


@pytest.mark.parametrize(
    ("layout", "mfu", "band"),
    [
        ("zero3x8-mb1", 0.4, "node"), ("tp4-pp2-1f1b-mb1-ga8", 0.4, "node"), ("zero3x16-mb1", 0.4, "nodes"),
        ("zero1x2-tp4-pp4-1f1b-mb1-ga8", 0.4, "pipeline"), ("tp16-mb1", 0.4, "tensor"),
        ("tp16-pp2-1f1b-mb1-ga8", 0.4, "tensor"), ("zero3x8-mb1", 0.05, "node_low"),
        ("tp16-mb1", 0.05, "tensor_low"),
    ],
)  # fmt: skip
def test_bands_are_of_layouts_whose_times_are_predicted_equally_well(layout, mfu, band):
    assert band_of(Layout.parse(layout), 8, mfu) == band


def test_times_on_a_processor_have_no_error_bar():
    assert accuracy("meshtune", "cpu", "node").time is None


def test_every_table_is_of_a_stack_and_a_kind_and_has_rows_enough():
    for stack, kinds in TABLES.items():
        if stack == "unmeasured":
            continue
        assert stack in stacks() and kinds.keys() <= catalogue().keys()
        for errors in kinds.values():
            assert ("memory" in errors) == ("memory_rows" in errors)
            assert errors.get("time", {}).keys() <= BANDS.keys()
            rows = [rows for _, rows in errors.get("time", {}).values()]
            assert min([*rows, errors.get("memory_rows", 5)]) >= 5
    assert OTHERS["time"].keys() == BANDS.keys()


@pytest.mark.parametrize(
    ("compiled", "stack", "band"), [(False, "meshtune", "node_low"), (True, "meshtune-compiled", "node")]
)
def test_a_choice_has_the_error_bars_of_its_stack_also_in_json(compiled, stack, band):
    small = workload("qwen3-0.6b", 8, 1024)
    choice = explained(small.compiled() if compiled else small, machines(), Layout.parse("dp8-mb1-ga1"))
    assert choice.stack == stack
    assert choice.as_dict()["error"] == accuracy(stack, "h100-sxm", band).as_dict()
    run = RunCost.of(choice, RunLength(10, 10 * small.tokens))
    assert run.error == accuracy(stack, "h100-sxm", band).time
    assert f" ±{run.error:.0%}: " in run.sentence()
