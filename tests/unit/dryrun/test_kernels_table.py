"""Kernels by place and phase, from traces made by hand."""

from dataclasses import replace

import pytest
from made_traces import SIZE, cluster, collective, matmul, step_of, trace_of, workload

from meshtune.dryrun.costs import Costs, moved_bytes
from meshtune.dryrun.kernels import BLOCKS, COMMUNICATION, EMBEDDING, HEAD, UPDATES, block_of, kernel_table
from meshtune.meter.trace import BACKWARD, FORWARD, RECOMPUTATION, UPDATE, Operation
from meshtune.report.dryrun.facts import phases

COSTS = Costs.of(workload(), cluster(8))
BODY = ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
MODULES = (*BODY, "model.norm", "lm_head")  # more behind the blocks than before them


def operations(micro_batches: int = 1) -> list[Operation]:
    """Make a matmul of each module forward, two backward, two recomputed ones, an all-reduce, an update."""
    made = []
    for number in range(micro_batches):
        place = {"micro_batch": number}
        made += [matmul(module=module, **place) for module in MODULES]
        for module in reversed(MODULES):
            if "layers" in module:
                made.append(matmul(RECOMPUTATION, module=module, **place))
            made += [matmul(BACKWARD, module=module, **place) for _ in range(2)]
    made.append(collective("all_reduce", "tp", 1000, 8))
    return [*made, matmul(UPDATE, micro_batch=-1, stage=-1)]


def test_kernels_are_counted_by_place_and_phase() -> None:
    table = kernel_table(trace_of(step_of(operations())), COSTS)
    counts = {(row.place, row.phase): row.launches for row in table.rows}
    assert counts == {
        (EMBEDDING, FORWARD): 1, (EMBEDDING, BACKWARD): 2,
        (BLOCKS, FORWARD): 2, (BLOCKS, RECOMPUTATION): 2, (BLOCKS, BACKWARD): 4,
        (HEAD, FORWARD): 2, (HEAD, BACKWARD): 4,
        (COMMUNICATION, FORWARD): 1, (UPDATES, UPDATE): 1,
    }  # fmt: skip
    assert [row.place for row in table.totals()] == [
        *(place for place in (BLOCKS, EMBEDDING, HEAD, COMMUNICATION, UPDATES) for _ in range(
            len({phase for where, phase in counts if where == place})
        ))
    ]  # fmt: skip
    reduce = next(row for row in table.rows if row.place == COMMUNICATION)
    assert (reduce.name, reduce.bytes, reduce.intensity) == ("all_reduce tp", 1000, 0)
    computed = sum(COSTS.compute(each, step_of([]).storages) for each in operations())
    assert sum(row.seconds for row in table.rows if row is not reduce) == pytest.approx(computed)


def test_the_mean_block_is_of_one_micro_batch() -> None:
    table = kernel_table(trace_of(step_of(operations(3)), micro_batches=3), COSTS)
    assert table.blocks == 2 * 3
    forward = next(row for row in table.of_block() if row.phase == FORWARD)
    assert forward.launches == 1
    assert forward.flops == 2 * SIZE**3
    assert forward.bytes == 3 * 2 * SIZE**2
    assert forward.intensity == pytest.approx(SIZE / 3)
    assert forward.seconds == pytest.approx(COSTS.compute(matmul()))


def test_micro_batches_that_were_not_traced_count() -> None:
    trace = trace_of(step_of(operations(3)), micro_batches=3)
    trace.of, trace.steady = 10, 1
    every = kernel_table(trace_of(step_of(operations(10)), micro_batches=10), COSTS)
    few = kernel_table(trace, COSTS)
    assert few.blocks == every.blocks == 20
    assert [row.launches for row in few.totals()] == [row.launches for row in every.totals()]


def test_phases_of_the_document_are_sums_of_the_table() -> None:
    step = step_of(
        [*operations(3), Operation("aten.zero_.default", UPDATE, "", -1, -1, (), "", read=8, written=8)]
    )
    trace = trace_of(step, micro_batches=3)
    trace.of, trace.steady = 10, 1
    table = kernel_table(trace, COSTS)
    found, rows = phases(table), table.rows
    assert {*found} == {FORWARD, BACKWARD, RECOMPUTATION, UPDATE}
    for phase, sums in found.items():
        alike = [row for row in rows if row.phase == phase]
        assert sums["kernels"] == sum(row.launches for row in alike)
        assert sums["flops"] == sum(row.flops for row in alike)
        assert sums["bytes"] == sum(row.bytes for row in alike)
    assert found[FORWARD]["kernels"] == 5 * 10 + 1 and found[UPDATE]["bytes"] == 3 * 2 * SIZE**2 + 8


def test_paths_of_blocks() -> None:
    assert block_of("model.layers.13.self_attn.q_proj") == "model.layers.13"
    assert block_of("transformer.h.0") == "transformer.h.0"
    assert block_of("model.layers.2.experts.5.up") == "model.layers.2"
    assert block_of("model.norm") == block_of("lm_head2") == ""


def test_bytes_that_are_moved() -> None:
    """A lookup reads the rows that it gives; a copy does not read what it overwrites."""
    add = Operation("aten.add.Tensor", FORWARD, "", 0, 0, (), "bfloat16", read=200, written=100)
    assert moved_bytes(add) == 300
    assert moved_bytes(replace(add, name="aten.embedding.default", read=10**9)) == 200
    assert moved_bytes(replace(add, name="aten.copy_.default")) == 200
    # 100 of a source go to places in a tensor that is counted as a whole; a new tensor of ones reads none
    assert moved_bytes(replace(add, name="aten.scatter_add_.default", read=10_100, written=10_000)) == 300
    assert moved_bytes(replace(add, name="aten.new_ones.default", read=10_000)) == add.written
    shard, whole = (2, 5), (80,)
    copy_in = replace(add, name="fsdp.all_gather_copy_in.default", shapes=(shard, whole), read=180)
    assert moved_bytes(copy_in) == 2 * 20
