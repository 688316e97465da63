"""Files for memory_viz, read back with torch's own reader (torch.cuda._memory_viz)."""

import pickle
import re
from pathlib import Path

import pytest
from torch.cuda import _memory_viz as viewer

from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.snapshot import snapshot, write_snapshot
from meshtune.dryrun.workspaces import Workspaces
from meshtune.meter.trace import BACKWARD, FORWARD, Change, Operation, StepTrace, Storage

MIB = 1 << 20


def steps() -> list[StepTrace]:
    """Two steps: a weight, an activation of a matmul, a gathered buffer on another stream."""
    module = "model.layers.3.mlp.up_proj"

    def step(number: int) -> StepTrace:
        operations = [
            Operation("aten.empty.memory_format", FORWARD, "", 0, 0, (), ""),
            Operation("fsdp.all_gather_copy_in.default", FORWARD, "", 0, 0, (), "", reads=(1,), writes=(1,)),
            Operation("aten.mm.default", FORWARD, module, 1, 0, (), "bfloat16", writes=(2,)),
            Operation("aten.mm.default", BACKWARD, module, 1, 0, (), "bfloat16", writes=(3,)),
        ]
        storages = [
            Storage(
                64 * MIB, "weights", "", "", "", shape=(4096, 8192), dtype="bfloat16", name="up_proj.weight"
            ),
            Storage(30 * MIB, "communication", "", "aten.empty.memory_format", FORWARD),
            Storage(5 * MIB, "activations", module, "aten.mm.default", FORWARD, micro_batch=1),
            Storage(1000, "gradients", module, "aten.mm.default", BACKWARD, micro_batch=1),
            Storage(500, "gathered_weights", "", "", ""),
        ]
        changes = [
            Change(-1, 0, True), Change(0, 1, True), Change(1, 4, True), Change(2, 2, True),
            Change(2, 1, False), Change(3, 3, True), Change(3, 2, False), Change(3, 4, False),
        ]  # fmt: skip
        return StepTrace(number, operations, storages, changes)

    return [step(1), step(2)]


@pytest.fixture(params=[False, True], ids=["plain", "expandable"])
def written(request, tmp_path: Path):
    """(Replays, what torch's reader is given)."""
    replays = replay_steps(steps(), workspaces=Workspaces("hopper"), expandable=request.param, record=True)
    file = tmp_path / "memory.pickle"
    write_snapshot(file, steps(), Workspaces("hopper"), expandable=request.param)
    return replays, pickle.loads(file.read_bytes())


def test_segments_are_summed_as_by_the_allocator(written):
    replays, read = written
    text = viewer.segsum(read)  # raises where blocks do not fill their segment
    reserved = replays[-1].reserved  # nothing was given back
    asked = 64 * MIB + 2 * 32 * MIB + 1000  # the weight, cuBLAS in two threads, the second step's gradient
    assert f"segments: {len(replays[-1].segments)}\n" in text
    assert f"total_reserved: {viewer.Bytes(reserved)}\n" in text
    assert f"total_allocated: {viewer.Bytes(asked)}\n" in text
    assert "stream_1" in text  # the gathered buffer's, whose segment is free again


def test_the_trace_has_every_action_in_order(written):
    _, read = written
    text = viewer.trace(read)
    assert text.startswith("Device 0 ----------------\n")
    events = read["device_traces"][0]
    assert f"{len(events)} entries\n" in text
    allocations = [event for event in events if event["action"] == "alloc"]
    assert (
        text.count(" = ")
        == len(allocations) + text.count("cudaMalloc")
        == len(allocations) + sum(event["action"] == "segment_alloc" for event in events)
    )
    assert (
        text.count("del ")
        == text.count("free completed")
        == sum(event["action"] == "free_requested" for event in events)
    )
    assert not re.search(r"MEM\[", text) or "segment_map" in text  # each is in a segment


def test_bytes_of_the_events_have_the_replays_peak(written):
    replays, read = written
    reserved = most = 0
    for event in read["device_traces"][0]:
        sign = {"alloc": 0, "segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        reserved += sign.get(event["action"], 0) * event["size"]
        most = max(most, reserved)
    assert most == max(each.reserved for each in replays)


def test_frames_name_module_operation_and_category(written):
    _, read = written
    lines = [
        viewer._frames_fmt(event["frames"], full_filename=True)
        for event in read["device_traces"][0]
        if event["action"] == "alloc"
    ]
    assert ["model.layers.3.mlp.up_proj:2:aten.mm.default", "step 2 forward:1:activations"] in lines
    assert ["up_proj.weight:-1:up_proj.weight bfloat16[4096, 8192]", "step 1 begin:0:weights"] in lines
    assert ["outside of modules:1:resize_", "step 2 forward:0:gathered_weights"] in lines
    assert ["workspace:0:main: cuBLAS workspace"] in lines


def test_the_viewers_pages_and_flame_graphs_are_made(written):
    _, read = written
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "MemoryViz.js" in plot(read)
    flames = viewer.memory(read, format_flamegraph=lambda text: text)
    assert "active_allocated;step 1 begin:0:weights;up_proj.weight:-1:" in flames
    assert flames.count("\n") >= len(read["segments"])
    assert viewer.compare(read["segments"], read["segments"], format_flamegraph=lambda text: text) == ""
    left = viewer.filter_alloc_free_pairs(read)["device_traces"][0]
    assert sum(event["size"] for event in left if event["action"] == "alloc") == 128 * MIB + 1000


def test_a_replay_that_ran_out_of_memory_ends_with_that():
    replays = replay_steps(steps(), capacity=90 * MIB, record=True)
    text = viewer.trace(snapshot(steps(), replays))
    assert f"raise OutOfMemoryError # {viewer.Bytes(30 * MIB)} requested" in text
