"""One step over time: its length and its peak are those that the planner predicts."""

from itertools import pairwise

import pytest
from made_plans import machines
from made_plans import workload as workload_of

from meshtune.layout import Layout
from meshtune.plan.explanation import Explanation
from meshtune.plan.memory.timeline import CATEGORIES, EVENTS
from meshtune.plan.over_time import MOST_PASSES, memory_over_time, step_over_time
from meshtune.plan.search import Choice, explained
from meshtune.plan.workload import Workload

ALONE = ("zero3x64-mb1-ga3", "zero3x64-mb1-ga1", "zero2x8-tp8-sp-mb2-ga3-full", "dp8-mb1-ga1-full")
PIPELINES = (
    "dp8-pp8-1f1b-mb1-ga16", "dp8-pp8-1f1b-mb1-ga24-full", "zero1x16-pp4-1f1b-mb1-ga12-selective",
    "dp2-tp4-sp-pp8-interleaved1f1b-v4-mb1-ga16", "dp8-pp8-zb-mb1-ga16", "dp8-pp8-zbv-mb1-ga16",
    "dp8-pp8-gpipe-mb1-ga16", "dp16-pp4-1f1b-mb1-ga8-full8", "dp8-pp8-dualpipev-mb1-ga16",
)  # fmt: skip
ZERO_3 = "dp2-zero3x2-tp4-sp-pp4-1f1b-mb1-ga8", "zero3x8-pp8-1f1b-mb1-ga16-full"


def planned(text: str) -> tuple[Workload, Choice]:
    layout = Layout.parse(text)
    workload = workload_of(size=layout.global_batch_size, seq_len=8192)
    return workload, explained(workload, machines(layout.world), layout)


@pytest.mark.parametrize("text", ALONE)
def test_without_a_pipeline_the_passes_take_as_long_as_the_predicted_step(text):
    workload, choice = planned(text)
    drawn = step_over_time(workload, choice)
    assert drawn is not None and drawn.layout == choice.layout
    assert drawn.end == pytest.approx(choice.seconds.total, rel=1e-6)


@pytest.mark.parametrize("text", [text for text in PIPELINES if "dualpipev" not in text])
def test_a_pipelines_passes_take_about_as_long_as_the_closed_form_predicts(text):
    workload, choice = planned(text)
    drawn = step_over_time(workload, choice)
    assert drawn is not None and drawn.layout == choice.layout
    assert drawn.end == pytest.approx(choice.seconds.total, rel=0.03)


@pytest.mark.ci
@pytest.mark.parametrize("text", [*ALONE, *PIPELINES, *ZERO_3])
def test_the_peak_of_the_curve_is_the_layouts(text):
    workload, choice = planned(text)
    drawn = step_over_time(workload, choice)
    assert drawn is not None
    _, held = memory_over_time(workload, choice, drawn)
    top = max(held, key=lambda one: sum(one.parts.values()))
    assert sum(top.parts.values()) == pytest.approx(choice.memory.peak, rel=1e-6)
    assert top.event == EVENTS[int(choice.memory.event)]
    for name in CATEGORIES:
        assert top.parts[name] == pytest.approx(getattr(choice.memory, name), rel=1e-6, abs=1)
    tensors = Explanation(workload, choice, ()).tensors
    for name in CATEGORIES[:-1]:  # of the overhead, tensors lack the context and the allocator's share
        sizes = [tensor["bytes"] for tensor in tensors if tensor["category"] == name]
        assert sum(sizes) == pytest.approx(top.parts[name], rel=1e-6, abs=1)
    assert [one.seconds for one in held] == sorted(one.seconds for one in held)
    assert min(min(one.parts.values()) for one in held) >= 0


@pytest.mark.parametrize("text", [*PIPELINES, *ZERO_3])
def test_no_micro_batch_is_in_flight_behind_the_last_backward(text):
    """So it ends with no more than it begins with."""
    workload, choice = planned(text)
    drawn = step_over_time(workload, choice)
    assert drawn is not None
    _, held = memory_over_time(workload, choice, drawn)
    last = next(place for place, one in enumerate(held) if one.event == "update") - 1
    begin = [one for one in held[:last] if one.event == "backward of a block"][-1]
    assert held[last].event == "end of backward"
    assert held[last].parts["activations"] <= begin.parts["activations"]


@pytest.mark.parametrize("text", PIPELINES)
def test_a_rank_does_one_pass_at_a_time_and_none_before_its_inputs(text):
    drawn = step_over_time(*planned(text))
    assert drawn is not None
    ends = {(one.kind, one.stage, one.micro_batch): one.end for one in drawn.timed}
    for rank in range(drawn.layout.pp):
        own = drawn.of_rank(rank)
        assert all(later.start >= one.end - 1e-9 for one, later in pairwise(own))
    for one in drawn.timed:
        if one.kind == "F" and one.stage > 0:
            assert one.start >= ends["F", one.stage - 1, one.micro_batch] - 1e-9
        if one.kind == "W":
            assert one.start >= ends["I", one.stage, one.micro_batch] - 1e-9


def test_of_many_micro_batches_some_are_drawn_with_the_same_peak():
    workload, choice = planned("dp2-tp8-sp-pp4-interleaved1f1b-v2-mb1-ga128-full")
    drawn = step_over_time(workload, choice)
    assert drawn is not None
    assert drawn.layout.gradient_accumulation_steps == 12 and len(drawn.timed) < MOST_PASSES
    _, held = memory_over_time(workload, choice, drawn)
    assert max(sum(one.parts.values()) for one in held) == pytest.approx(choice.memory.peak, rel=1e-6)


def test_too_many_passes_are_not_drawn():
    workload, choice = planned("pp32-gpipe-mb1-ga512")
    assert step_over_time(workload, choice) is None
