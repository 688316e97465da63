"""Memory of a GPU in a simulation: reserved bytes, and whether the steps fit."""

from dataclasses import replace

import pytest
from golden import says
from made_traces import cluster, workload
from shapes import of_shape

from meshtune.dryrun.simulation import Simulation
from meshtune.layout import Layout
from meshtune.meter.trace import FORWARD, Change, Collective, Operation, RankTrace, StepTrace, Storage
from meshtune.plan.workload import Workload
from meshtune.report.dryrun.document import reserved
from meshtune.report.dryrun.facts import facts_of, rank_facts
from meshtune.report.dryrun.tables import collectives_table, peak_table

MIB = 1 << 20


def simulation(sizes: list[int], changes: list[int], memory: int, **options) -> Simulation:
    """Two steps alike that allocate (n + 1) and free (-n - 1) storages of these MiB.

    memory: MiB of the GPU; 10 of them are outside of the allocator.
    """
    operations = [Operation("aten.empty.memory_format", FORWARD, "", 0, 0, (), "") for _ in changes]
    storages = [Storage(size * MIB, "activations", "", "", "") for size in sizes]
    moves = [Change(at, abs(number) - 1, number > 0) for at, number in enumerate(changes)]
    steps = [StepTrace(number, operations, storages, moves) for number in (1, 2)]
    given = {"kernels": "cuda", "documents": (8,), "outside": 10 * MIB, "stands_for": {0: "all ranks"}}
    given["traces"] = (RankTrace(0, {}, (0,), steps, micro_batches=1, of=1),)
    return Simulation(
        model="m",
        layout=Layout(),
        cluster=replace(cluster(1), memory=memory * MIB),
        **given | options,
    )


TURNS = ([60, 80], [1, -1, 2, -2])  # 140 MiB in two segments; 80 if the first one is given back
PIECES = ([100, 30, 30, 60], [1, -1, 2, 3, -2, 4, -3, -4])  # 160 MiB, 120 with expandable segments


@pytest.mark.parametrize(
    ("steps", "memory", "expandable", "need", "fits"),
    [
        pytest.param(PIECES, 140, True, 130, True, id="expandable segments"),
        pytest.param(TURNS, 160, False, 150, True, id="segments of a size"),
        pytest.param(TURNS, 130, False, 150, True, id="fits barely, by giving segments back"),
        pytest.param(PIECES, 140, False, 170, False, id="fits with expandable segments only"),
    ],
)
def test_a_layout_needs_what_the_allocator_reserves(steps, memory, expandable, need, fits):
    one = simulation(*steps, memory=memory, expandable=expandable)
    assert (one.need, one.fits) == (need * MIB, fits)
    says(one.verdict)


@pytest.mark.parametrize("expandable", [True, False])
def test_where_no_allocator_would_fit_none_is_named(expandable: bool):
    nothing = simulation(*PIECES, memory=100, expandable=expandable)
    assert not nothing.fits and "expandable_segments" not in nothing.verdict
    assert "PYTORCH_ALLOC_CONF" not in nothing.verdict


def test_a_processor_has_no_such_allocator():
    one = simulation(*TURNS, memory=90, kernels="cpu", outside=0)
    assert (one.need, one.fits, facts_of(one)["ranks"][0]["allocator"]) == (80 * MIB, True, None)
    says(simulation(*TURNS, memory=79, kernels="cpu", outside=0).verdict)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_a_reference_whose_pass_needs_more_than_a_step_is_counted(kernels: str):
    one = simulation(*PIECES, memory=150, kernels=kernels, outside=0)
    (trace,) = one.traces
    (large,) = simulation([160], [1, -1], memory=0).traces
    with_it = replace(one, traces=(replace(trace, reference=replace(large.steps[0], step=0)),))
    assert one.fits and not one.reference_is_largest
    assert (with_it.need, with_it.fits, with_it.reference_is_largest) == (160 * MIB, False, True)
    assert facts_of(with_it)["ranks"][0]["reference"]["peak_bytes"] == 160 * MIB
    says(peak_table(with_it.traces).notes[2])


def test_of_ranks_whose_allocators_hold_as_much_the_one_with_the_higher_peak_is_the_fullest():
    first, second = (
        simulation([size], [1, -1], memory=100).traces[0] for size in (19, 20)
    )  # of one segment of 20 MiB
    traces, names = (first, replace(second, rank=4)), {0: "first", 4: "second"}
    both = simulation([1], [1], memory=100, traces=traces, stands_for=names)
    assert both.reserved(both.traces[0]) == both.reserved(both.traces[1])
    assert facts_of(both)["fullest_rank"] == both.fullest.rank == 4


@pytest.mark.parametrize("index", [1, 2])
def test_the_fullest_rank_has_the_nearest_prediction(index: int) -> None:
    """One rank in the middle is predicted; another one may be the fullest when simulated."""
    one = simulation(*PIECES, memory=200)
    model = of_shape(layers=10, hidden=64, ffn=128, heads=4, kv_heads=4, vocabulary=128)
    work = Workload("small", model, None, seq_len=128, global_batch_size=8)
    traces = (replace(one.traces[0], coordinates={"pp": index}),)
    layout = Layout.parse("pp4-1f1b-mb1-ga8")
    one = replace(one, layout=layout, cluster=cluster(4), workload=work, traces=traces)
    assert rank_facts(one, one.fullest, 0)["predicted"]["peak"] > 0


def test_facts_of_the_allocator():
    facts = facts_of(simulation(*PIECES, memory=200))["ranks"][0]
    assert facts["reserved_bytes"] == 120 * MIB
    assert facts["allocator"] == {
        "expandable_segments": True,
        "active_bytes": [100 * MIB, 100 * MIB],
        "reserved_bytes": [120 * MIB, 120 * MIB],
        "segments": [1, 1],
        "other_reserved_bytes": [160 * MIB, 160 * MIB],
        "workspaces": [],
    }
    facts = facts_of(simulation(*PIECES, memory=200, expandable=False))["ranks"][0]
    assert (facts["reserved_bytes"], facts["allocator"]["expandable_segments"]) == (160 * MIB, False)


def test_the_largest_tensors_are_listed_with_the_setting_that_shrinks_them():
    one = simulation(*PIECES, memory=200)
    (rank,) = facts_of(one, 2)["ranks"]
    assert [len(facts_of(one, number)["ranks"][0]["largest"]) for number in (0, 1)] == [0, 1]
    first = rank["largest"][0]
    assert first["bytes"] == max(each["bytes"] for each in rank["largest"]) > 0
    assert first["category"] == "activations" and first["setting"]


def test_collectives_count_the_micro_batches_that_were_not_traced():
    one = simulation([1], [1], memory=100, workload=workload())
    trace = replace(one.traces[0], of=8, steady=0)
    trace.steps[1].operations[0].collective = Collective("all_gather", "tp", 8, 4 * MIB)
    one = replace(one, traces=(trace,), cluster=cluster(8))
    (row,) = collectives_table(trace).rows
    assert row[3] == "8"
    assert facts_of(one)["ranks"][0]["collectives"][0]["count"] == 8


@pytest.mark.parametrize(("expandable", "other"), [(True, "without"), (False, "with")])
def test_the_other_allocator_stands_below_the_one_of_the_verdict(expandable: bool, other: str):
    one = simulation(*PIECES, memory=200, expandable=expandable)
    sizes = {True: [120 * MIB, 120 * MIB], False: [160 * MIB, 160 * MIB]}
    assert [*reserved(one).items()] == [
        ("reserved by the allocator", {0: sizes[expandable]}),
        (f"{other} expandable segments", {0: sizes[not expandable]}),
    ]
