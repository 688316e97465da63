"""Trace files for Perfetto, read back: the format's fields, times, nesting, memory."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_traces import cluster, pipeline, workload

from meshtune.dryrun.costs import Costs
from meshtune.dryrun.streams import StepTime, simulate
from meshtune.layout import Layout
from meshtune.meter.trace import CATEGORIES, Change, RankTrace
from meshtune.report.dryrun.panels import busy, passes, starts
from meshtune.report.dryrun.perfetto import write_trace

LAYOUT = Layout.parse("pp4-1f1b-mb1-ga8")


@pytest.fixture(scope="module")
def traces() -> list[RankTrace]:
    """Traces of three of four ranks; storage 2 is allocated by the second kernel and freed by the
    fourth, storage 0 during the second.
    """
    made = pipeline(LAYOUT, ranks=[0, 1, 3])
    for trace in made:
        change = ((-1, 1, True), (1, 2, True), (1, 0, True), (1, 0, False), (3, 2, False))
        trace.steps[1].changes = [Change(*each) for each in change]
        trace.steps[1].storages[2].bytes, trace.steps[1].storages[0].bytes = 1000, 500
    return made


@pytest.fixture(scope="module")
def time(traces: list[RankTrace]) -> StepTime:
    """Simulated step of the traces."""
    return simulate(traces, LAYOUT, Costs.of(workload(), cluster(8)), copies={2: 1})


@pytest.fixture(scope="module")
def events(tmp_path_factory: Any, time: StepTime, traces: list[RankTrace]) -> list[dict[str, Any]]:
    """Events of a file that was written and read."""
    file: Path = tmp_path_factory.mktemp("trace") / "deep" / "step.json"
    write_trace(file, time, traces)
    assert [each.name for each in file.parent.iterdir()] == ["step.json"]
    document = json.loads(file.read_text("utf-8"))
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    return document["traceEvents"]


def test_events_have_the_fields_of_the_format(events: list[dict[str, Any]], time: StepTime) -> None:
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert event["ts"] + event["dur"] <= 1e6 * time.seconds + 0.001
        if event["ph"] == "C":
            assert set(event["args"]) == set(CATEGORIES)
            assert all(isinstance(size, int) and size >= 0 for size in event["args"].values())
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(1e6 * time.seconds)


def test_ranks_are_processes_and_streams_threads(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {pid for pid, _ in named} == {0, 1, 2, 3}
    assert named[0, 0] == "passes" and named[0, 1] == "compute"
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(named)
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == [
        "pipeline rank 0", "pipeline rank 1", "pipeline rank 2, as rank 1", "pipeline rank 3",
    ]  # fmt: skip


def test_events_of_a_thread_are_one_after_the_other(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        for (_, end), (begin, _) in pairwise(spans):
            assert begin >= end - 1e-6


def test_kernels_lie_within_their_passes(events: list[dict[str, Any]]) -> None:
    spans = [(e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(spans) == 4 * 2 * 8
    kernels = [e for e in events if e["ph"] == "X" and e["tid"] == 1 and e["args"]["phase"] != "optimizer"]
    for kernel in kernels:
        begin, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        assert any(kernel["pid"] == pid and a - 1e-6 <= begin and end <= b + 1e-6 for pid, a, b in spans)


def test_memory_is_counted_on_ranks_that_were_traced(events: list[dict[str, Any]]) -> None:
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"]].append(event)
    assert set(counters) == {0, 1, 3}
    for each in counters.values():
        assert [event["args"]["activations"] for event in each] == [0, 1500, 1000, 0]
        assert [event["args"]["weights"] for event in each] == [1, 1, 1, 1]
        times = [event["ts"] for event in each]
        assert times == sorted(times) and times[0] < times[1]


def test_passes_and_times_of_operations(time: StepTime, traces: list[RankTrace]) -> None:
    first = time.ranks[0]
    assert [each.kind for each in passes(first)] == list("FFFFBFBFBFBFBBBB")
    step = traces[0].steps[1]
    times = starts(first, step, time.seconds)
    assert len(times) == len(step.operations) + 1
    assert times == sorted(times) and times[-1] == time.seconds
    assert {each.lane for each in busy(first)} == {"compute", "pp send forward"}
