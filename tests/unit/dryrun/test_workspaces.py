"""Workspaces of kernels: bytes by shape, sources, and what is not known."""

import re
from dataclasses import replace

from golden import refuses
from made_traces import step_of, trace_of

from meshtune.dryrun.workspaces import SIZES, Workspaces
from meshtune.errors import UserError
from meshtune.meter.trace import BACKWARD, FORWARD, Operation
from meshtune.plan.hardware import catalogue


def operation(name: str, *shapes: tuple[int, ...], phase: str = BACKWARD) -> Operation:
    return Operation(name, phase, "", 0, 0, shapes, "bfloat16")


def test_attention_of_as_many_heads_of_keys_expands_nothing():
    query, boundaries = (1024, 4, 80), (5,)
    shapes = (*[query] * 5, (4, 1024), boundaries, boundaries)
    taken = Workspaces("hopper").temporary(operation("meshtune.attention_backward.default", *shapes))
    grouped = (query, query, (1024, 2, 80), (1024, 2, 80), *shapes[4:])
    newer = Workspaces("hopper", "flash-4").temporary(
        operation("meshtune.attention_backward.default", *grouped)
    )
    assert dict(newer) == {
        "dpsum, lse_log2": 49_152, "dq_accum, FlashAttention 4": 2_359_296, "dk_accum, dv_accum": 2_359_296,
    }  # fmt: skip
    wide = [(*shape[:2], 256) if len(shape) == 3 else shape for shape in grouped]
    dedicated = operation("meshtune.attention_backward.default", *wide)
    assert [name for name, _ in Workspaces("blackwell", "flash-4").temporary(dedicated)] == [
        "dpsum, lse_log2"
    ]
    assert len(Workspaces("hopper", "flash-3").temporary(dedicated)) == 3
    # 1,536 rows in fp32: 1,024 tokens and a block of 128 for each of four documents; 80 wide is padded to 96
    assert dict(taken) == {"softmax_d": 24_576, "dq_accum": 2_359_296}


def test_heads_of_values_are_padded_to_those_of_queries():
    query, value, boundaries = (1000, 4, 24), (1000, 4, 16), (2,)
    forward = operation("meshtune.attention.default", query, query, value, boundaries, boundaries)
    one = {"padded values": 192_000, "padded output": 192_000}  # 1,000 tokens of 4 heads of 24 in 16 bits
    assert dict(Workspaces("hopper").temporary(forward)) == one
    shapes = value, query, query, value, value, (4, 1000), boundaries, boundaries
    taken = dict(Workspaces("hopper").temporary(operation("meshtune.attention_backward.default", *shapes)))
    assert {name: taken[name] for name in one} == {name: 2 * size for name, size in one.items()}
    # 1,128 rows in fp32; 24 wide is padded to 32
    assert taken.keys() - one.keys() == {"softmax_d", "dq_accum"} and taken["dq_accum"] == 577_536


def test_attention_of_a_batch_is_padded_to_blocks():
    query, key = (2, 8, 300, 64), (2, 2, 300, 64)
    taken = Workspaces("ampere").temporary(
        operation("aten._scaled_dot_product_flash_attention_backward.default", query, query, key, key)
    )
    # twice 384 rows of 8 heads of 64 in fp32; keys and values of 8 heads in bf16, twice 300 rows
    assert dict(taken) == {
        "softmax_d": 24_576, "dq_accum": 1_572_864, "dk_expanded": 614_400, "dv_expanded": 614_400,
    }  # fmt: skip


def test_attention_that_is_no_flash_attention_takes_less_and_more_in_fp32():
    name, query = "aten._scaled_dot_product_efficient_attention_backward.default", (2, 8, 300, 64)
    half = operation(name, *[query] * 4)
    full = replace(half, dtype="float32")
    delta = {"delta": 19_200}  # a number in fp32 for each of 2 x 300 tokens and 8 heads
    assert dict(Workspaces("hopper").temporary(half)) == delta
    assert dict(Workspaces("hopper").temporary(full)) == delta | {"grad_out * out": 1_228_800}
    flex = operation("meshtune_dryrun.flex_attention_backward.default", *[query] * 4)
    assert dict(Workspaces("hopper").temporary(flex)) == delta


def test_the_embeddings_gradient_sums_tokens_in_fp32_where_there_are_many():
    name, workspaces = "aten.embedding_dense_backward.default", Workspaces("hopper")
    assert workspaces.temporary(operation(name, (3, 1024, 64), (3, 1024))) == []
    taken = workspaces.temporary(operation(name, (4, 1024, 64), (4, 1024)))
    assert [size for _, size in taken] == [196_608, 1_048_576], "6 int64 a token, 64 fp32 a token"


def test_a_long_row_of_experts_is_sorted_with_copies():
    workspaces = Workspaces("hopper")
    rows = {
        shape: replace(operation("aten.sort.default", shape), dtype="int64") for shape in ((4096,), (8192,))
    }
    assert workspaces.temporary(rows[4096,]) == []
    assert [size for _, size in workspaces.temporary(rows[8192,])] == [196_608], "3 int64 each"
    routed = operation("aten._grouped_mm.default", (8192, 64), (8, 64, 64), (8,))
    assert not workspaces.temporary(routed)


def test_each_thread_has_one_workspace_of_cublas():
    forward, backward = (operation("aten.mm.default", phase=phase) for phase in (FORWARD, BACKWARD))
    for architecture, both in (("hopper", 67_108_864), ("ampere", 17_039_360), ("cdna3", 268_435_456)):
        workspaces = Workspaces(architecture)
        names = {name for each in (forward, backward) for name, _ in workspaces.lasting(each)}
        assert names == {"main: cuBLAS workspace", "backward: cuBLAS workspace"}
        (row,) = workspaces.table(trace_of(step_of([forward, backward, forward])))
        assert (row.name, row.operations, row.bytes) == ("cuBLAS workspace", 2, both)


def test_the_table_has_the_largest_of_each_and_its_source():
    name = "aten.embedding_dense_backward.default"
    step = step_of([operation(name, (8, 1024, 64), (8, 1024)), operation(name, (4, 1024, 64), (4, 1024))])
    rows = Workspaces("hopper").table(trace_of(step))
    assert (rows[0].name, rows[0].operations, rows[0].bytes) == ("grad_weight_per_segment", 2, 2_097_152)
    few = trace_of(step, micro_batches=3)
    few.of, few.steady = 8, 0  # the micro-batch of both stands for 6
    assert Workspaces("hopper").table(few)[0].operations == 2 * 6
    assert all(re.search(r"\.(cpp|cu)", row.source) for row in rows)


def test_all_gpu_kinds_have_workspaces():
    for kind, gpu in catalogue().items():
        if gpu.architecture != "cpu":
            assert Workspaces(gpu.architecture).architecture, kind


def test_an_architecture_without_a_row_is_an_error():
    with refuses(UserError):
        Workspaces("pascal")


def test_every_operator_with_a_buffer_has_its_sizes():
    from meshtune.dryrun import workspaces

    named = {name for table in workspaces.tables()["buffer"] for name in table["of"]}
    assert named == set(SIZES)
    sizes = {
        *[
            "queries",
            "keys",
            "unlike",
            "padded_queries",
            "heads",
            "key_heads",
            "head",
            "padded_head",
            "padded_keys",
            "hidden",
            "tokens",
        ]
    }
    for table in workspaces.tables()["buffer"]:
        assert {each for each in table["size"] if isinstance(each, str)} <= sizes
        assert table["source"]
