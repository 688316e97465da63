"""Seconds of a step's parts: nested parts, collectives of real ranks, and how ranks are put together."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from meshtune.layout import Layout
from meshtune.meter.clock import StepClock, measured, recomputing
from meshtune.meter.parts import PARTS, step_time, time_row

CPU = torch.device("cpu")


def test_a_part_is_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = iter([0.0, 0.0, 1.0, 4.0, 6.0, 10.0, 20.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(passed))
    clock = StepClock(CPU, {})
    with clock.running(), clock.part("backward"), clock.part("recomputation"), measured("wait data"):
        pass  # 0 to 20; 1 to 10; 4 to 6
    assert clock.take() == {"backward": 11.0, "recomputation": 7.0, "wait data": 2.0}
    assert clock.take() == {}


def test_recomputation_counts_in_a_backward_alone_and_only_where_a_clock_runs() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            with recomputing():
                return gradient * 2

    x, clock = torch.ones(2, requires_grad=True), StepClock(CPU, {})
    Again.apply(x).sum().backward()
    assert clock.take() == {}
    with clock.running():
        with recomputing():
            pass
        assert clock.take() == {}
        Again.apply(x).sum().backward()
    assert clock.take().keys() == {"recomputation"}


def waits() -> tuple[dict[str, float], bool]:
    """One rank's seconds, where rank 1 comes 0.2 s late to each collective; whether torch is as before."""
    rank, x = dist.get_rank(), torch.ones(4)
    alone = dist.new_group()
    started, waited = dist.ProcessGroup.allreduce, dist.Work.wait
    clock = StepClock(CPU, {dist.group.WORLD.group_name: "tensor", alone.group_name: None})
    with clock.running(), clock.part("forward"):
        time.sleep(0.2 * rank)
        dist.all_reduce(x)
        dist.all_reduce(x, group=alone)  # of hosts: not measured
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.2)  # computation that hides it
        work.wait()
    return clock.take(), (dist.ProcessGroup.allreduce, dist.Work.wait) == (started, waited)


@pytest.mark.all  # it compares times
def test_a_rank_waits_for_one_that_comes_late_and_not_for_what_is_hidden() -> None:
    (early, restored), (late, _) = run_ranks(2, waits, forked=True)
    assert restored
    assert early["wait tensor"] - late["wait tensor"] > 0.15
    assert early["forward"] > 0.19 and late["forward"] > 0.39


def test_what_others_wait_longer_than_the_last_one_is_waiting_and_the_rest_communication() -> None:
    ranks = [
        {"forward": 1.0, "backward": 2.0, "wait data": 1.5, "wait other": 0.1},
        {"forward": 1.5, "backward": 2.5, "wait data": 0.5, "wait other": 0.1},
    ]
    found = step_time(Layout(dp_replicate=2), ranks, [5.0, 5.0])
    assert found.parts == pytest.approx(
        dict.fromkeys(PARTS, 0.0)
        | {"forward": 1.25, "backward": 2.25, "communication": 0.6, "waiting": 0.5, "rest": 0.4}
    )
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.slowest == 1 and found.busy == pytest.approx([3.4, 4.4])
    assert found.exposed == pytest.approx({"data": 0.5, "other": 0.1})


def test_stages_of_a_pipeline_are_compared_with_themselves() -> None:
    """The second stage's gradients are larger: that is no waiting. What a stage waits for the other is."""
    layout = Layout(dp_replicate=2, pp=2, gradient_accumulation_steps=2)
    ranks = [
        {"wait data": 1.0},
        {"wait data": 1.0},
        {"wait data": 3.0},
        {"wait data": 3.0, "wait pipeline": 4.0},
    ]
    found = step_time(layout, ranks, [8.0] * 4)
    assert found.parts["communication"] == 2.0 and found.parts["waiting"] == 0.0
    assert found.parts["bubble"] == 1.0 and found.idle == [0.0, 0.0, 0.0, 4.0]
    row = time_row(7, found, [2.0, 2.0, 1.0, 1.0])
    assert (row["kind"], row["step"], row["in_flight"]) == ("time", 7, [2.0, 2.0, 1.0, 1.0])
    assert "idle" not in time_row(7, found)


class Queue:
    """A CUDA stream as far as a clock sees it: when what was put into it so far has ended."""

    def __init__(self) -> None:
        self.end = 0.0

    def wait_event(self, event: "Mark") -> None:
        self.end = max(self.end, event.at)


class Mark:
    """A CUDA event, in seconds."""

    def __init__(self, enable_timing: bool = True) -> None:
        self.at = 0.0

    def record(self, stream: Queue) -> None:
        self.at = stream.end

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Mark") -> float:
        return 1000 * (end.at - self.at)


class Group:
    """A process group whose all-reduce runs for 3 s on the stream from which it is started."""

    group_name = "tp"

    def allreduce(self, stream: Queue) -> object:
        stream.end += 3.0
        return object()


def test_on_cuda_the_compute_stream_s_collectives_and_event_waits_count_and_no_other_stream_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, beside = Queue(), Queue()
    current = [compute]
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    original, clock = Queue.wait_event, StepClock(torch.device("cuda"), {"tp": "tensor"})
    with clock.running(), clock.part("forward"):
        compute.end += 1.0  # a kernel
        Group().allreduce(compute)  # not asynchronous: on the compute stream
        current.append(beside)  # FSDP2's streams: what they run and wait for holds nothing up
        Group().allreduce(beside)
        beside.end += 4.0
        gathered = Mark()
        gathered.record(beside)
        beside.wait_event(gathered)
        current.pop()
        compute.end += 2.0
        compute.wait_event(gathered)  # 7 s against 1 + 3 + 2
    assert Queue.wait_event is original
    assert clock.take() == {"forward": 3.0, "wait tensor": 3.0, "wait data": 1.0}
