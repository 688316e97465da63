"""A step on streams, from traces made by hand: sums, overlap, contention, pipelines and their bubbles."""

from dataclasses import replace
from itertools import pairwise

import pytest
from golden import refuses
from known import known
from made_traces import SIZE, cluster, collective, matmul, pipeline, step_of, storages, trace_of, workload

from meshtune.dryrun.costs import Costs
from meshtune.dryrun.queues import Run, Stuck, Task
from meshtune.dryrun.streams import StepTime, simulate
from meshtune.layout import Layout
from meshtune.meter.trace import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GRADIENTS,
    OFFLOADS,
    UPDATE,
    WEIGHTS,
    Operation,
    StepTrace,
    Storage,
)
from meshtune.placement.columns import Columns
from meshtune.placement.schedules import orders
from meshtune.plan.seconds.collectives import exchange_seconds


def costs(gpus: int = 8, **constants: float) -> Costs:
    """Costs on H100s whose host takes no time, with other constants of the machine."""
    made = Costs.of(workload(), cluster(gpus))
    idle = {"launch": 0.0, "host_micro_batch": 0.0, "host_step": 0.0} | constants
    machines = {dtype: replace(machine, **idle) for dtype, machine in made.by_dtype.items()}
    return Costs(replace(made.machine, **idle), machines)


def one(operations: list[Operation], layout: str = "mb1-ga1", **constants: float) -> StepTime:
    return simulate([trace_of(step_of(operations))], Layout.parse(layout), costs(**constants))


def seconds(operation: Operation, **constants: float) -> float:
    made = costs(**constants)
    return made.collective(operation.collective) if operation.collective else made.compute(operation)


def test_a_step_without_communication_is_the_sum_of_its_kernels() -> None:
    operations = [matmul(), matmul(BACKWARD), matmul(BACKWARD, reads=(0, 2)), matmul(UPDATE, micro_batch=-1)]
    run = one(operations)
    assert run.seconds == pytest.approx(sum(map(seconds, operations)))
    assert run.parts.compute == pytest.approx(sum(map(seconds, operations[:3])))
    assert run.parts.optimizer == pytest.approx(seconds(operations[3]))
    assert run.parts.total == pytest.approx(run.seconds)


def test_what_the_host_adds_is_known_by_phase_but_for_the_step_s_start() -> None:
    launch = 10 * seconds(matmul())
    run = one([matmul(), matmul(), matmul(BACKWARD), matmul(UPDATE)], launch=launch)
    alone = launch - seconds(matmul())
    assert [run.host(phase) for phase in (FORWARD, BACKWARD, UPDATE)] == pytest.approx([alone] * 3)
    assert run.parts.host == pytest.approx(launch + 3 * alone)
    assert run.parts.total == pytest.approx(run.seconds)


def test_a_processor_runs_each_kernel_behind_its_launch() -> None:
    """Nothing is hidden, and the launches are in the passes, where a processor's clock measures them."""
    launch, alone = 1e-5, seconds(matmul())
    run = one([matmul(), matmul(BACKWARD)], launch=launch, launch_blocking=1.0)
    assert run.seconds == run.parts.compute == pytest.approx(2 * (launch + alone))
    assert run.parts.host == 0


@pytest.mark.parametrize("ep", [8, 64])  # in a node; over nodes, whose network takes longest
def test_exchanges_of_experts_take_what_is_planned(ep: int) -> None:
    made, mixture = costs(ep), known("qwen3-30b-a3b").work
    layouts = Columns.of([Layout.parse(f"zero3x{ep}-ep{ep}-mb1-ga1")])
    rows = layouts.rank_tokens(4096) * mixture.routed
    planned = exchange_seconds(mixture, layouts, made.machine, layouts.rank_tokens(4096)).backward
    sent = collective("all_to_all", "ep", int(rows[0] * mixture.hidden * 2), ep).collective
    assert sent and 2 * made.collective(sent) == pytest.approx(float(planned[0]))


def test_a_blocking_collective_stops_the_compute_stream() -> None:
    between = collective("all_reduce", "tp", 2**28, 8)
    run = one([matmul(), between, matmul()])
    assert run.seconds == pytest.approx(2 * seconds(matmul()) + seconds(between))
    assert run.parts.tensor == pytest.approx(seconds(between))
    assert run.parts.total == pytest.approx(run.seconds)


def test_an_asynchronous_collective_runs_beside_computation_and_is_waited_for_where_it_is_read() -> None:
    """The gradient's all-reduce is longer than one matmul, and shorter than two."""
    size = 2**25
    reduce = collective("all_reduce", "dp_replicate", size, 8, waits=False, reads=(2,), writes=(2,))
    alone = seconds(reduce)
    assert seconds(matmul()) < alone < 2 * seconds(matmul())
    beside = matmul(reads=(0, 1), writes=(0,))
    reader = matmul(UPDATE, reads=(2, 1), writes=(2,), micro_batch=-1)
    exposed = one([matmul(), reduce, beside, reader], contention=0.0)
    assert exposed.seconds == pytest.approx(2 * seconds(matmul()) + alone)
    assert exposed.parts.data == pytest.approx(alone - seconds(matmul()))
    hidden = one([matmul(), reduce, beside, beside, reader], contention=0.0)
    assert hidden.seconds == pytest.approx(4 * seconds(matmul()))
    assert hidden.parts.data == 0


def test_computation_beside_a_collective_takes_longer_by_the_contention() -> None:
    reduce = collective("all_reduce", "dp_replicate", 2**25, 8, waits=False, reads=(2,), writes=(2,))
    beside = matmul(reads=(0, 1), writes=(0,))
    run = one([matmul(), reduce, beside, beside, beside], contention=0.25)
    lost = seconds(reduce) * 0.25 / 1.25
    assert run.seconds == pytest.approx(4 * seconds(matmul()) + lost)
    assert run.parts.data == pytest.approx(lost)
    assert run.parts.compute == pytest.approx(4 * seconds(matmul()))


def test_the_host_runs_ahead_until_it_reads_a_result() -> None:
    """Launches of 1 ms are hidden behind kernels of more, and exposed once the host has waited for one."""
    kernel = seconds(matmul())
    launch = kernel / 2
    hidden = one([matmul()] * 4, launch=launch)
    assert hidden.seconds == pytest.approx(launch + 4 * kernel)
    trace = trace_of(step_of([matmul()] * 4))
    trace.steps[1].host_waits.append(1)
    read = simulate([trace], Layout.parse("mb1-ga1"), costs(launch=launch))
    assert read.seconds == pytest.approx(2 * launch + 4 * kernel)
    assert read.parts.host == pytest.approx(2 * launch)
    bound = one([matmul()] * 4, launch=2 * kernel)
    assert bound.seconds == pytest.approx(4 * 2 * kernel + kernel)


def sharded_step(blocks: int) -> StepTrace:
    """ZeRO-3 as FSDP2 runs it: shards copied in, gathered, copied out, used; then gradients scattered."""
    kept = [*storages(), *(Storage(1, WEIGHTS, "", "", "") for _ in range(blocks))]
    step = StepTrace(2, [], kept)

    def buffer(category: str = COMMUNICATION) -> int:
        kept.append(Storage(1, category, "", "", ""))
        return len(kept) - 1

    for block in range(blocks):
        flat, whole = buffer(), buffer("gathered_weights")
        place = ("forward", "", 0, 0)
        sizes = ((1,), (8,))
        copy_in = Operation("fsdp.all_gather_copy_in.default", *place, sizes, "bfloat16", reads=(3 + block,))
        copy_in.writes = (flat,)
        copy_out = Operation("fsdp.split_with_sizes_copy.default", *place, (), "bfloat16", reads=(flat,))
        copy_out.writes = (whole,)
        gather = collective("all_gather", "dp_shard", 2**25, 8, waits=False, reads=(flat,), writes=(flat,))
        step.operations += [copy_in, gather, copy_out, matmul(reads=(0, whole), writes=(0,))]
    for _ in range(blocks):
        sent, shard, summed = buffer(), buffer(GRADIENTS), buffer(GRADIENTS)
        place = {"phase": BACKWARD, "reads": (sent,), "writes": (shard,)}
        scatter = collective("reduce_scatter", "dp_shard", 2**25, 8, waits=False, **place)
        added = Operation("aten.add_.Tensor", BACKWARD, "", -1, -1, (), "float32", reads=(shard, summed))
        added.writes = (summed,)
        step.operations += [matmul(BACKWARD, writes=(sent,)), scatter, added]
    return step


def test_sharded_weights_are_gathered_behind_the_block_before() -> None:
    """All-gathers and reduce-scatters shorter than a matmul: only the first and the last are exposed."""
    run = simulate([trace_of(sharded_step(6))], Layout.parse("zero3x8-mb1-ga1"), costs(contention=0.0))
    kernel = seconds(matmul())
    gather = seconds(collective("all_gather", "dp_shard", 2**25, 8))
    assert gather < kernel
    assert run.seconds == pytest.approx(12 * kernel + 2 * gather)
    assert run.parts.data == pytest.approx(2 * gather)
    streams = {interval.stream for interval in run.ranks[0].intervals}
    assert streams == {"compute", "dp_shard all_gather", "dp_shard reduce_scatter"}
    on = {each.name: each.stream for each in run.ranks[0].intervals}
    assert on["fsdp.all_gather_copy_in.default"] == "dp_shard all_gather"
    assert on["aten.add_.Tensor"] == "dp_shard reduce_scatter"
    assert on["fsdp.split_with_sizes_copy.default"] == "compute"
    ends: dict[str, float] = {}
    for interval in run.ranks[0].intervals:
        assert interval.begin >= ends.get(interval.stream, 0.0) - 1e-12, "intervals of a stream overlap"
        ends[interval.stream] = interval.end


def test_collectives_of_one_axis_run_one_after_the_other() -> None:
    """A reduce-scatter and an all-gather of the same ranks are on two streams, and use one communicator."""
    reduce = collective("reduce_scatter", "dp_shard", 2**27, 8, waits=False, reads=(2,), writes=(2,))
    gather = collective("all_gather", "dp_shard", 2**27, 8, waits=False, reads=(3,), writes=(3,))
    other = collective("all_gather", "cp", 2**27, 8, waits=False, reads=(4,), writes=(4,))
    run = one([matmul(), reduce, gather, other, matmul(reads=(0, 1), writes=(0,))])
    spans = {each.stream: (each.begin, each.end) for each in run.ranks[0].intervals}
    assert spans["dp_shard all_gather"][0] == pytest.approx(spans["dp_shard reduce_scatter"][1])
    assert spans["cp all_gather"][0] < spans["dp_shard reduce_scatter"][1]


# Pipelines #


def simulated(layout: str, forward: int = 1, ranks: list[int] | None = None) -> tuple[StepTime, float, float]:
    """(Run, seconds of a stage's forward, of its backward); every stage is alike, sends take no time."""
    parsed = Layout.parse(layout)
    copies = {pp: 1 for pp in range(parsed.pp) if ranks is not None and pp not in ranks}
    run = simulate(pipeline(parsed, forward=forward, ranks=ranks), parsed, costs(), copies=copies)
    kernel = seconds(matmul())
    return run, forward * kernel, 2 * forward * kernel


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_of_equal_stages(schedule: str, pp: int, micro_batches: int) -> None:
    run, forward, backward = simulated(f"pp{pp}-{schedule}-mb1-ga{micro_batches}")
    for rank in run.ranks:
        assert rank.parts.bubble == pytest.approx((pp - 1) * (forward + backward))
        assert rank.parts.compute == pytest.approx(micro_batches * (forward + backward))
    assert run.parts.bubble == pytest.approx((pp - 1) * (forward + backward))
    assert run.parts.imbalance == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    run, forward, backward = simulated(f"pp4-interleaved1f1b-v{virtual}-mb1-ga8")
    whole = virtual * (forward + backward)  # of a rank's stages
    assert run.parts.bubble == pytest.approx(3 * whole / virtual)


def test_zero_bubble_schedules_wait_less() -> None:
    zb, forward, backward = simulated("pp4-zb-v2-mb1-ga8")
    assert zb.parts.bubble < 3 * (forward + backward)
    zbv, *_ = simulated("pp4-zbv-mb1-ga8")
    assert zbv.parts.bubble < 3 * (forward + backward)


def test_in_dualpipev_a_forward_sends_after_the_backward_that_follows_it() -> None:
    """torch runs both as one action, and sends what it has to send when the action is done."""
    layout, found = Layout.parse("pp4-dualpipev-mb1-ga8"), 0
    run, *_ = simulated(str(layout))
    for rank, passes in zip(run.ranks, orders(layout), strict=True):
        ends: dict[tuple[str, int, int], float] = {}
        sent = {}
        for each in rank.intervals:
            if each.stream == "compute":
                ends[each.run] = each.end
            elif each.stream == "pp send forward":
                sent[each.run.stage, each.run.micro_batch] = each.begin
        for one, after in pairwise(passes):
            place = (one.stage, one.micro_batch)
            if (one.kind, after.kind) == ("F", "B") and place in sent:
                found += 1
                assert sent[place] >= ends["B", after.stage, after.micro_batch]
    assert found


def test_a_message_that_counts_as_a_micro_batch_before_moves_no_pass() -> None:
    """Ranks with two stages number their messages to another rank together (world.number_messages)."""
    layout = Layout.parse("pp4-zbv-mb1-ga8")
    traces = pipeline(layout)
    before = simulate(traces, layout, costs())
    for step in {id(step): step for trace in traces for step in trace.steps}.values():
        place = {"stage": step.operations[0].stage, "micro_batch": 0}
        behind = max(n for n, each in enumerate(step.operations) if each.phase == BACKWARD)
        step.operations.insert(behind, collective("send", "pp", 0, 4, **place))
    assert simulate(traces, layout, costs()).parts == before.parts


@pytest.mark.parametrize(
    "layout",
    ["pp4-1f1b-mb1-ga8", "pp5-gpipe-mb1-ga5", "pp4-interleaved1f1b-v2-mb1-ga8", "pp4-dualpipev-mb1-ga8"],
)
def test_the_middle_rank_stands_for_the_others_in_the_middle(layout: str) -> None:
    pp = Layout.parse(layout).pp
    every, *_ = simulated(layout)
    some, *_ = simulated(layout, ranks=[0, 1, pp - 1])
    assert some.seconds == pytest.approx(every.seconds)
    assert some.parts.bubble == pytest.approx(every.parts.bubble)
    assert [rank.trace for rank in some.ranks] == [0, *[1] * (pp - 2), pp - 1]


def test_a_rank_that_was_asked_for_does_not_change_the_step() -> None:
    """A rank in the middle with less to do, one of another index on another axis: copies stay copies."""
    layout = Layout.parse("pp5-1f1b-mb1-ga8")
    traces, copies = pipeline(layout, forward=2, ranks=[0, 2, 4]), {1: 2, 3: 2}
    asked = [pipeline(layout, ranks=[1])[0], replace(pipeline(layout, ranks=[2])[0], rank=7)]
    before, after = (simulate(some, layout, costs(), copies=copies) for some in (traces, [*traces, *asked]))
    assert after.seconds == before.seconds
    assert [rank.trace for rank in after.ranks] == [0, 2, 2, 2, 4]
    assert simulate([*traces, *asked], layout, costs(), copies={3: 2}).seconds < before.seconds


def test_a_slow_stage_is_imbalance_and_not_bubble() -> None:
    layout = Layout.parse("pp4-1f1b-mb1-ga16")
    traces = pipeline(layout)
    slow = pipeline(layout, forward=2)[-1]
    run = simulate([*traces[:-1], slow], layout, costs())
    kernel = seconds(matmul())
    assert run.parts.compute == pytest.approx(16 * 3 * kernel * 5 / 4)
    assert run.parts.imbalance == pytest.approx(16 * 3 * kernel * 3 / 4)
    assert run.parts.total == pytest.approx(run.seconds)


def test_micro_batches_that_were_left_out_are_like_the_steady_one() -> None:
    layout = Layout.parse("pp4-1f1b-mb1-ga32")
    every = simulate(pipeline(layout), layout, costs())
    few = pipeline(replace(layout, gradient_accumulation_steps=8))
    for trace in few:
        trace.of, trace.steady = 32, 4
    assert simulate(few, layout, costs()).seconds == pytest.approx(every.seconds)


def test_without_a_trace_of_the_last_rank_nothing_is_simulated() -> None:
    layout = Layout.parse("pp4-1f1b-mb1-ga8")
    with refuses(ValueError):
        simulate(pipeline(layout, ranks=[0, 1]), layout, costs(), copies={2: 1})


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = [Task((0, "compute"), 1.0, after=[1]), Task((1, "compute"), 1.0, after=[0])]
    with refuses(Stuck):
        Run(tasks, 0.0).to_end()


@pytest.mark.parametrize("times", [0.5, 3.0])
def test_a_copy_to_the_host_or_back_takes_what_computation_does_not_hide(times: float) -> None:
    """Those to the host until the next one begins, one back until its result is read."""
    out, back = (replace(matmul(), name=name, flops=0, writes=()) for name in OFFLOADS)
    back = replace(back, reads=(), writes=(0,))
    kernel, width = seconds(matmul()), 2 * SIZE**2
    operations = [out, matmul(), out, matmul(), back, matmul(BACKWARD, reads=(2, 1)), matmul(BACKWARD)]
    run = one(operations, host_bandwidth=width / (times * kernel))
    exposed = max(0.0, times - 1) * kernel
    assert run.parts.compute == pytest.approx(4 * kernel)
    assert run.seconds == pytest.approx(4 * kernel + 3 * exposed)
    assert run.parts.host == pytest.approx(3 * exposed)
