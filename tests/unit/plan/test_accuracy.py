"""Error bars of predictions."""

import tomllib
from importlib.resources import files

import pytest
from made_plans import machines, workload

from meshtune.layout import Layout
from meshtune.plan.accuracy import accuracy
from meshtune.plan.cost import RunCost, RunLength
from meshtune.plan.hardware import catalogue, stacks
from meshtune.plan.search import explained

TABLES = tomllib.loads(files("meshtune.plan").joinpath("accuracy.toml").read_text("utf-8"))
OTHERS = TABLES["unmeasured"]


def test_a_stack_that_nobody_measured_has_the_error_of_sources_left_out_and_is_said_to():
    found = accuracy("meshtune", "h100-sxm")
    assert (found.time, found.memory) == (OTHERS["time"] / 100, OTHERS["memory"] / 100)
    assert (found.time_rows, found.memory_rows) == (0, 0)
    sentence = found.sentence("meshtune", "h100-sxm")
    assert sentence.startswith(
        f"±{found.time:.0%} of time and ±{found.memory:.0%} of memory: nobody has published 5 runs of mesh"
    )


def test_a_measured_stack_has_its_own_error_on_the_kind_that_it_was_measured_on_alone():
    own = TABLES["composer"]["a100-80"]
    found = accuracy("composer", "a100-80")
    assert found.time == own["time"] / 100 < OTHERS["time"] / 100 and found.time_rows == own["time_rows"]
    assert found.memory == OTHERS["memory"] / 100 and found.memory_rows == 0  # no peak of it is published
    sentence = found.sentence("composer", "a100-80")
    assert f"the mean error for {own['time_rows']} published runs of composer on a100-80" in sentence
    assert "of memory: nobody has published 5 peaks of composer on a100-80" in sentence
    assert accuracy("composer", "b200").time_rows == 0


def test_times_on_a_processor_have_no_error_bar():
    assert accuracy("meshtune", "cpu").time is None


def test_every_table_is_of_a_stack_and_a_kind_and_has_rows_enough():
    for stack, kinds in TABLES.items():
        if stack == "unmeasured":
            continue
        assert stack in stacks() and kinds.keys() <= catalogue().keys()
        for errors in kinds.values():
            for name in ("time", "memory"):
                assert (name in errors) == (f"{name}_rows" in errors)
                assert errors.get(f"{name}_rows", 5) >= 5


@pytest.mark.parametrize(("compiled", "stack"), [(False, "meshtune"), (True, "meshtune-compiled")])
def test_a_choice_has_the_error_bars_of_its_stack_also_in_json(compiled, stack):
    small = workload("qwen3-0.6b", 8, 1024)
    choice = explained(small.compiled() if compiled else small, machines(), Layout.parse("dp8-mb1-ga1"))
    assert choice.stack == stack
    assert choice.as_dict()["error"] == accuracy(stack, "h100-sxm").as_dict()
    run = RunCost.of(choice, RunLength(10, 10 * small.tokens))
    assert run.error == accuracy(stack, "h100-sxm").time
    assert f" ±{run.error:.0%}: " in run.sentence()
