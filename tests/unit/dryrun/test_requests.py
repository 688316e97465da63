"""Requests of a trace to the allocator: streams, workspaces, two steps on one allocator."""

from functools import partial

import pytest
from made_traces import job_of
from transformers import LlamaConfig

from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.requests import (
    ALL_REDUCE,
    COMPUTE,
    GATHER,
    REDUCE,
    StorageKey,
    WorkspaceKey,
    replay_steps,
    requests_of,
    streams_of,
)
from meshtune.dryrun.workspaces import Workspaces
from meshtune.dryrun.world import trace_rank
from meshtune.meter.trace import BACKWARD, FORWARD, Change, Collective, Operation, StepTrace, Storage

MIB = 1 << 20


def operation(
    name: str, reads: tuple = (), writes: tuple = (), *, phase: str = BACKWARD, **more
) -> Operation:
    return Operation(name, phase, "", 0, 0, more.pop("shapes", ()), "", reads=reads, writes=writes, **more)


def collective(op: str) -> Collective:
    return Collective(op, "dp_shard", 4, 0)


def fsdp_step() -> StepTrace:
    """Storages of one group of parameters: 0 its shard, 1 and 2 an all-gather's, 3 a gradient, 4 and 5 a
    reduce-scatter's, 6 the shard's gradient in its own dtype, 7 a cast in the update.
    """
    categories = [
        "weights", "communication", "communication", "gradients", "communication", "gradients", "gradients",
        "temporary",
    ]  # fmt: skip
    gathers = {"phase": FORWARD, "collective": collective("all_gather")}
    return StepTrace(
        1,
        [
            operation("fsdp.all_gather_copy_in.default", (1, 2), (2,), phase=FORWARD),
            operation("c10d._allgather_base_.default", (2,), (2,), **gathers),
            operation("fsdp.chunk_cat.default", (3, 4), (4,)),
            operation(
                "c10d._reduce_scatter_base_.default", (5, 4), (5,), collective=collective("reduce_scatter")
            ),
            operation("aten._to_copy.default", (5,), (6,)),
            operation("aten._to_copy.default", (6,), (7,), phase="optimizer"),
        ],
        [Storage(MIB, category, "", "", "") for category in categories],
    )


def test_storages_are_on_the_streams_on_which_fsdp2_allocates_them():
    step = fsdp_step()
    assert streams_of(step) == [COMPUTE, GATHER, GATHER, COMPUTE, COMPUTE, REDUCE, REDUCE, COMPUTE]


def test_a_gradient_of_replicas_is_cast_on_the_stream_of_their_all_reduce():
    step = fsdp_step()
    step.operations.insert(
        4, operation("c10d.allreduce_.default", (5,), (5,), collective=collective("all_reduce"))
    )
    assert streams_of(step)[5:] == [REDUCE, ALL_REDUCE, COMPUTE]


def test_shards_in_the_compute_dtype_are_gathered_from_where_they_are():
    step = fsdp_step()
    step.operations[0] = operation("fsdp.all_gather_copy_in.default", (0, 2), (2,), phase=FORWARD)
    assert streams_of(step)[:3] == [COMPUTE, COMPUTE, GATHER]


def two_steps() -> list[StepTrace]:
    """A weight of 30 MiB in both; in the first, an optimizer state of 40 that stays, and 50 that go."""
    weight = Storage(30 * MIB, "weights", "", "", "")
    state = Storage(40 * MIB, "optimizer", "", "aten.zeros.default", "optimizer")
    late = Storage(50 * MIB, "temporary", "", "aten.zeros.default", "optimizer")
    first = StepTrace(1, [operation("aten.zeros.default")] * 2, [weight, state, late])
    first.changes = [Change(-1, 0, True), Change(0, 1, True), Change(1, 2, True)]
    second = StepTrace(2, [operation("aten.empty.default")], [state, weight, late])
    second.changes = [Change(-1, 0, True), Change(-1, 1, True), Change(0, 2, True)]
    return [first, second]


def test_what_outlives_a_step_is_not_requested_again():
    first, second = requests_of(two_steps())
    assert [(request.key.storage, request.allocated) for request in first] == [(n, True) for n in range(3)]
    assert [(request.key, request.allocated) for request in second] == [
        (StorageKey(1, 2), False), (StorageKey(2, 2), True),
    ]  # fmt: skip
    replays = replay_steps(two_steps())
    assert [(each.active // MIB, each.reserved // MIB) for each in replays] == [(120, 120), (120, 120)]


def test_replays_end_with_the_step_that_runs_out_of_memory():
    steps = two_steps()
    assert [bool(each.out_of_memory) for each in replay_steps(steps, capacity=110 * MIB)] == [True]
    assert [bool(each.out_of_memory) for each in replay_steps(steps, capacity=120 * MIB)] == [False, False]


def test_a_workspace_is_taken_beside_the_results_and_freed_before_what_follows():
    matmul, freed = operation("aten.mm.default", phase=FORWARD), Storage(4 * MIB, "activations", "", "", "")
    result = Storage(6 * MIB, "activations", "", "aten.mm.default", FORWARD)
    later = Storage(3 * MIB, "gathered_weights", "", "", "")  # FSDP2 resizes a storage after the operation
    step = StepTrace(1, [matmul, matmul], [freed, result, later])
    step.changes = [Change(-1, 0, True), Change(0, 1, True), Change(0, 2, True), Change(0, 0, False)]
    (requests,) = requests_of([step], Workspaces("hopper"))
    lasting = WorkspaceKey("main: cuBLAS workspace")
    assert [(request.key, request.allocated) for request in requests] == [
        (StorageKey(1, 0), True), (StorageKey(1, 1), True), (lasting, True),
        (StorageKey(1, 2), True), (StorageKey(1, 0), False),
    ]  # fmt: skip


def test_flash_attention_takes_its_buffers_while_it_runs():
    shapes = ((512, 8, 64), (512, 8, 64), (512, 4, 64), (512, 4, 64), (512, 8, 64), (8, 512), (3,), (3,))
    backward = operation("meshtune.attention_backward.default", shapes=shapes)
    step = StepTrace(2, [backward])
    (requests,) = requests_of([step], Workspaces("hopper"))
    assert [request.allocated for request in requests] == [True] * 4 + [False] * 4
    assert {request.key.name: request.bytes for request in requests} == {
        "softmax_d": 4 * 8 * (512 + 2 * 128),
        "dq_accum": 4 * (512 + 2 * 128) * 8 * 64,
        "dk_expanded": 2 * 512 * 8 * 64,
        "dv_expanded": 2 * 512 * 8 * 64,
    }


TINY = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("zero3x4-mb2-selective", "bf16"),
        pytest.param("dp2-zero3x4-ga2-full", "bf16-pure", marks=pytest.mark.all),
        pytest.param("zero2x4-tp2-sp-mb2", "bf16", marks=pytest.mark.all),
        pytest.param("zero3x2-pp2-ga4-full", "bf16", marks=pytest.mark.all),
    ],
)
def test_traced_steps(layout, precision):
    job = job_of(TINY, layout, (512,), precision=precision, kernels="cuda")
    steps = trace_ranks(partial(trace_rank, job), [0], 1)[0].steps
    plain, expandable = replay_steps(steps), replay_steps(steps, expandable=True)
    for step, loose, tight in zip(steps, plain, expandable, strict=True):
        peak, _ = step.peak()
        assert peak <= tight.active < peak + 512 * len(step.storages)  # rounding alone
        pages = 22 * MIB * len(set(streams_of(step)))
        assert tight.active <= tight.reserved < loose.reserved + pages  # of these steps, not in general
        blocks = [block for segment in loose.segments for block in segment.blocks]
        assert sum(block.bytes for block in blocks if block.allocated) < loose.active, "at the end"
        gathers = [number for number, stream in enumerate(streams_of(step)) if stream == GATHER]
        assert {step.storages[number].category for number in gathers} == {"communication"}
        reduced = [number for number, stream in enumerate(streams_of(step)) if stream == REDUCE]
        assert bool(reduced) and all(number not in gathers for number in reduced)
    _, second = requests_of(steps)
    begin = [request for request in second if request.at == -1]
    assert not any(request.allocated for request in begin), "weights and optimizer states stay where they are"
    gone = {steps[0].storages[request.key.storage].category for request in begin}
    assert gone <= {"activations", "communication"}, (
        "buffers that a pipeline receives in are seen at their use"
    )
