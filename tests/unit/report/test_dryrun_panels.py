"""Pictures of a dry run: no peak is lost, phases are marked, and every name has a colour in both themes."""

import csv
import io
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from golden import says
from hand_traces import simulation_of, step_of, trace_of

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.kernels import Kernels, KernelTable
from meshtune.meter.trace import (
    ACTIVATIONS,
    CATEGORIES,
    PHASES,
    WITHOUT_GRADIENTS,
    Change,
    StepTrace,
    Storage,
)
from meshtune.plan.over_time import Timed
from meshtune.report.draw.charts import specification
from meshtune.report.draw.colours import COLOURS
from meshtune.report.draw.kinds import Interval
from meshtune.report.draw.picture import write
from meshtune.report.draw.theme import LIGHT
from meshtune.report.draw.thin import MOST_ROWS
from meshtune.report.dryrun.document import panels
from meshtune.report.dryrun.living import levels
from meshtune.report.dryrun.panels import (
    COLUMNS,
    MOST_INTERVALS,
    memory_panel,
    pipeline_panel,
    shown,
    streams_panel,
)
from meshtune.units import GIB, MIB


def rows_of(layer: dict, spec: dict) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(layer.get("data", spec.get("data"))["values"])))


def tops(panel) -> list[float]:
    return [sum(sizes) for sizes in zip(*panel.parts.values(), strict=True)]


def test_the_levels_are_the_highest_of_each_operation_and_what_it_leaves():
    step = step_of(1)
    totals = [(at, sum(sizes.values()) // MIB) for at, sizes in levels(step, 1000)]
    # 23 of weights, then gathered 20, an activation of 32, the second block likewise, 100 of logits
    assert totals[:6] == [(0, 43), (1, 75), (2, 75), (3, 107), (4, 187), (5, 95)]
    assert max(totals, key=lambda level: level[1])[1] * MIB == step.peak()[0]


def test_of_too_many_levels_the_peaks_stay():
    step = step_of(1)
    few = levels(step, len(CATEGORIES) + 4)
    assert len(few) <= len(CATEGORIES) + 4 < len(levels(step, 1000))
    assert max(sum(sizes.values()) for _, sizes in few) == step.peak()[0]
    for name in CATEGORIES:
        assert max(sizes[name] for _, sizes in few) == max(sizes[name] for _, sizes in levels(step, 1000))


def test_the_peaks_of_both_steps_are_drawn_and_marked():
    trace = trace_of()
    panel = memory_panel(trace)
    assert [section.text for section in panel.sections] == ["first step", "later steps"]
    first, later = (step.peak()[0] / GIB for step in trace.steps)
    assert later == pytest.approx(first + 40 * MIB / GIB)
    assert [point.y for point in panel.peaks] == [first, later]
    drawn = tops(panel)
    for point in panel.peaks:
        assert max(drawn[place] for place, x in enumerate(panel.x) if x == point.x) == point.y
    assert max(drawn) == pytest.approx(later)
    assert panel.x_title == "operations" and panel.x[-1] == 2 * len(trace.steps[0].operations)


def test_the_chart_holds_the_peak_and_its_phases():
    panel = memory_panel(trace_of(), capacity=GIB / 2)
    spec = specification(panel, width="container")
    areas, strip = spec["layer"][:2]
    assert areas["mark"]["interpolate"] == "step-after"
    top = max(float(row["end"]) for row in rows_of(areas, spec))
    assert top == pytest.approx(trace_of().steps[1].peak()[0] / GIB, rel=1e-5)
    assert {row["part"] for row in rows_of(strip, spec)} == {*PHASES} - {WITHOUT_GRADIENTS}  # which kto has
    ends = [(float(row["x"]), float(row["end"])) for row in rows_of(strip, spec)]
    assert ends[0][0] == 0 and ends[-1][1] == panel.x[-1]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    assert panel.mark is not None and panel.mark.text == "capacity 0.5 GiB"
    assert memory_panel(trace_of(), capacity=GIB).mark is None, "the curve would be flat below it"


def test_every_category_and_phase_has_its_own_colour():
    names = [*map(shown, CATEGORIES), *(phase for phase in PHASES if phase != "optimizer")]
    assert len({COLOURS[name] for name in names}) == len(names)
    names.remove(WITHOUT_GRADIENTS)
    scale = specification(memory_panel(trace_of()), width=400)["layer"][0]["encoding"]["color"]["scale"]
    assert set(scale["domain"]) == set(names)
    assert scale["range"] == [COLOURS[name] for name in scale["domain"]]


def long_step() -> StepTrace:
    """A step of 20,000 operations with one storage more in one of them, and one more category in another."""
    step = StepTrace(1)
    step.operations = step_of(1).operations[:1] * 20_000
    for at in range(20_000):
        size = 5 * GIB if at == 12_345 else 2 * GIB + at
        category = "logits" if at == 777 else ACTIVATIONS
        step.storages.append(Storage(size, category, "", "", ""))
        step.changes += [Change(at, at, True), Change(at, at, False)]
    return step


def test_thinning_loses_neither_the_peak_nor_a_category():
    trace = trace_of()
    trace.steps = [long_step()]
    panel = memory_panel(trace)
    assert len(panel.x) < MOST_ROWS + 10
    assert max(tops(panel)) == 5 and panel.x[tops(panel).index(5)] == 12_345
    assert max(panel.parts["logits"]) > 2


def test_many_phases_are_drawn_by_the_longest_in_each_column():
    step = long_step()
    for number in range(20_000):
        operation = step_of(1).operations[0] if number < 2 else step.operations[number % 2]
        step.operations[number] = operation
    step.operations[1] = step_of(1).operations[-1]
    for number in range(2, 20_000):
        step.operations[number] = step.operations[int(number % 7 == 0)]
    trace = trace_of()
    trace.steps = [step]
    bands = memory_panel(trace).bands
    assert len(bands) <= COLUMNS and bands[0].start == 0 and bands[-1].end == 20_000
    assert {band.name for band in bands} == {"forward"}  # six operations of seven


def test_an_axis_of_seconds_begins_each_operation_when_it_starts():
    trace = trace_of()
    starts = [[0.5 * number for number in range(len(step.operations) + 1)] for step in trace.steps]
    panel, counted = memory_panel(trace, starts=starts), memory_panel(trace)
    assert panel.x_title == "seconds"
    assert panel.x == tuple(0.5 * x for x in counted.x) and panel.parts == counted.parts


@pytest.mark.ci
def test_a_picture_is_written_on_paper_of_its_theme(tmp_path):
    file = write(tmp_path / "memory.svg", [[memory_panel(trace_of(8, stages=(1,)))]], title="x")
    text = file.read_text()
    assert all(words in text for words in (f'fill="{LIGHT["paper"]}"', "rank 8 (stage 1)", "peak 227 MiB"))


def test_micro_batches_that_were_not_traced_are_named():
    assert "1 of its 64 micro-batches" in memory_panel(trace_of(of=64)).title


def test_streams_are_lanes_whose_gaps_stay():
    busy = [
        Interval("compute", 0.0, 1.0, "compute", "aten.mm"),
        Interval("dp_shard", 0.2, 0.9, "data", "all_gather"),
        Interval("compute", 2.0, 3.0, "compute", "aten.mm"),
    ]
    panel = streams_panel(busy, title="Streams of rank 0")
    assert panel.lanes == ("compute", "dp_shard")
    assert [(one.lane, one.start, one.end, one.name) for one in panel.intervals if one.lane == "compute"] == [
        ("compute", 0, 1, "compute"), ("compute", 2, 3, "compute"),
    ]  # fmt: skip


def test_more_intervals_than_a_chart_can_show_are_joined_but_long_gaps_are_not():
    busy = [
        Interval("compute", begin + n * 1e-4, begin + (n + 0.9) * 1e-4, "compute", f"{n}")
        for begin in (0.0, 4.0)
        for n in range(30_000)
    ]
    panel = streams_panel(busy, title="Streams")
    assert (bars := len(panel.intervals)) <= MOST_INTERVALS
    assert panel.title.startswith(f"Streams: {bars:,} bars for 60,000 operations, as neighbours closer than ")
    gaps = [one.start - before.end for before, one in itertools.pairwise(panel.intervals)]
    assert max(gaps) == pytest.approx(1.0, abs=1e-3)


def test_the_pipeline_has_a_lane_a_rank_and_its_bubble_in_the_title():
    timed = [
        Timed(0, "F", 0.0, 1.0, 0, 0), Timed(1, "F", 1.0, 2.0, 1, 0), Timed(1, "B", 2.0, 4.0, 1, 0),
        Timed(0, "I", 4.0, 5.0, 0, 0), Timed(0, "W", 5.0, 6.0, 0, 0),
    ]  # fmt: skip
    panel = pipeline_panel(timed)
    assert panel.lanes == ("rank 0", "rank 1")
    assert [one.name for one in panel.intervals] == [
        "forward", "forward", "backward", "backward of inputs", "backward of weights",
    ]  # fmt: skip
    assert panel.title.endswith("a rank runs no pass for 50.0% of it")
    assert {COLOURS[one.name] for one in panel.intervals}


def test_the_roofline_has_the_kernels_with_flops_at_their_places_and_names_the_others():
    rows = [
        Kernels("blocks", "forward", "aten.mm.default", 1, 2e14, 1e11, 0.25),
        Kernels("blocks", "backward", "aten.mm.default", 2, 4e14, 2e11, 0.75),
        Kernels("communication", "forward", "all_gather dp_shard", 9, 0, 4e10, 0.75),
        Kernels("blocks", "forward", "aten.mul.Tensor", 9, 0, 3e11, 0.25),
    ]
    efficiencies = {"clock": 1, "matmul": 0.9, "stack_matmul": 1, "memory": 0.9}
    machine = SimpleNamespace(matmul_max=8e14, bandwidth=3e12, **efficiencies)
    workload = SimpleNamespace(precision="bf16", attention_kernel=lambda gpu: "flash-4")
    run = replace(simulation_of("zero3x8-mb1-ga1", trace_of()), workload=workload)
    vars(run).update(replays={0: [Replay()] * 2}, times=(), kernels_of={0: KernelTable(rows)})
    vars(run)["costs"] = SimpleNamespace(machine=machine)
    panel = panels(run)[-1]
    (group,) = panel.groups
    assert group.name == "mm, blocks: 50.0%" and (group.points[0].x, group.points[0].y) == (2000, 600)
    sheet, predicted = panel.guides
    assert sheet.text == "data sheet: 989" and predicted.y[1:] == (720, 720)
    assert [2.7 * x for x in predicted.x[:2]] == pytest.approx(predicted.y[:2])
    says(panel.unit)
    names = [replace(group, name=f"{'m' * length}, blocks") for length in (9, 40)]
    legend = str(specification(replace(panel, groups=tuple(names)), width="container", narrow=True))
    assert "split(datum.label, ', ')" in legend
    del rows[:2]
    assert [one.key for one in panels(run)] == ["memory_of_rank_0"]
