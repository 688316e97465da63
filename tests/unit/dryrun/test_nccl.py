"""NCCL's tuning model: choices and predictions, against its formulas by hand and published bandwidths."""

from dataclasses import replace

import pytest
from golden import says
from made_traces import cluster, collective, matmul, step_of, trace_of, workload

from meshtune.dryrun.costs import Costs
from meshtune.dryrun.nccl import Nccl, Timed, differences
from meshtune.dryrun.streams import simulate
from meshtune.layout import Layout
from meshtune.meter.trace import Collective

GIB = 2**30


def predicted(op: str, ranks: int, size: int, *, kind: str = "h100-sxm", stride: int = 1) -> Timed:
    """NCCL's prediction on usual machines of a kind."""
    nccl = Nccl.of(cluster(ranks * stride, kind))
    assert nccl is not None
    timed = nccl.collective(Collective(op, "tp", ranks, size, stride))
    assert timed is not None
    return timed


def bus_bandwidth(op: str, ranks: int, kind: str) -> float:
    """GB/s of a large collective as nccl-tests counts them."""
    factor = (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
    return 8 * GIB * factor / predicted(op, ranks, 8 * GIB, kind=kind).seconds / 1e9


@pytest.mark.parametrize(
    ("op", "ranks", "kind", "published", "algorithm"),
    [
        ("all_reduce", 8, "h100-sxm", 480, "nvls"),  # NVIDIA's S62129, cited in NVIDIA/nccl#1374
        ("all_reduce", 32, "h100-sxm", 370, "nvls tree"),  # NVIDIA/nccl#1649: 370 to 380
        ("all_reduce", 8, "a100-80", 235, "ring"),  # the bound in NCCL 2.17's tuning.cc
        ("all_gather", 8, "h100-sxm", 370, "ring"),  # the same file's for Hopper
    ],
)
def test_bandwidths_are_the_published_ones(
    op: str, ranks: int, kind: str, published: float, algorithm: str
) -> None:
    assert bus_bandwidth(op, ranks, kind) == pytest.approx(published, rel=0.06)
    assert predicted(op, ranks, 8 * GIB, kind=kind).algorithm == algorithm


def test_a_ring_in_a_node_by_hand() -> None:
    """Channels: 6 of 60 GB/s carry 360 of the 18 x 20.6 GB/s of an H100; 7 steps of 3.4 µs after 8.4 µs."""
    timed = predicted("all_gather", 8, GIB)
    assert timed[1:] == ("ring", "Simple")
    assert timed.seconds == pytest.approx(1e-6 * (8.4 + 7 * 3.4) + GIB / (360e9 * 8 / 7))


def test_a_ring_over_the_network_by_hand() -> None:
    """Four nodes: 8 channels of 45 GB/s; 3 of 31 steps cross the network, those inside wait for its posts."""
    timed = predicted("all_gather", 32, GIB)
    assert timed[1:] == ("ring", "Simple")
    latency = 8.4 + 28 * 3.4 + 3 * 14.0
    assert timed.seconds == pytest.approx(1e-6 * latency + GIB / (360e9 * 32 / 31))


def test_small_messages_take_the_protocol_of_low_latency() -> None:
    timed = predicted("all_reduce", 8, 1024)
    assert timed[1:] == ("ring", "LL")
    assert timed.seconds == pytest.approx(1e-6 * (6.6 + 14 * 0.6) + 1024 / (141e9 * 8 / 14))


def test_one_rank_in_each_node_has_one_network_card() -> None:
    """ZeRO beside tp8: each group has a rank in a node, and 48 of its card's 50 GB/s."""
    timed = predicted("all_gather", 8, GIB, stride=8)
    assert timed.seconds == pytest.approx(GIB * 7 / 8 / 48e9, rel=0.02)
    assert predicted("all_gather", 8, 2**16, stride=8).algorithm == "pat"


def test_switches_add_up_from_hopper_on() -> None:
    assert predicted("all_reduce", 8, GIB).algorithm == "nvls"
    for kind in ("a100-80", "h100-pcie"):
        assert predicted("all_reduce", 8, GIB, kind=kind).algorithm != "nvls"


def test_what_nccl_has_no_model_of_has_no_prediction() -> None:
    nccl = Nccl.of(cluster(8))
    assert nccl is not None
    for op in ("send", "receive", "all_to_all"):
        assert nccl.collective(Collective(op, "pp", 8, GIB)) is None
    assert nccl.collective(Collective("all_reduce", "tp", 1, GIB)) is None
    assert Nccl.of(cluster(8, "mi300x")) is None


def test_collectives_that_the_models_predict_differently_are_named() -> None:
    costs = Costs.of(workload(), cluster(8))
    nccl = Nccl.of(cluster(8))
    assert nccl is not None
    large = Collective("all_reduce", "tp", 8, 64 * 2**20)
    longer = Collective("all_reduce", "tp", 8, 64 * 2**20 + 4096)  # by a norm: the same line
    gather = Collective("all_gather", "tp", 8, 4 * GIB)
    first, *others = differences({large: 1, longer: 1, gather: 1}, nccl, costs.collective)
    assert others == [], "the planner's formula and NCCL agree on the gather"
    says(first)
    (line,) = differences({Collective("all_reduce", "tp", 8, GIB): 1}, nccl, lambda _: 10.0)
    says(line)


def test_the_norm_of_gradients_is_summed_in_a_tree_not_around_a_ring_of_all_ranks() -> None:
    """A few bytes that the step waits for: around a ring of 512 ranks they would take 15 ms."""
    costs, nccl = Costs.of(workload(), cluster(512)), Nccl.of(cluster(512))
    norm = Collective("all_reduce", "dp_shard", 512, 40)
    assert nccl is not None and (timed := nccl.collective(norm)) is not None
    assert timed.algorithm == "tree" and costs.collective(norm) < 3 * timed.seconds


def test_a_step_can_be_simulated_with_either_model() -> None:
    costs = Costs.of(workload(), cluster(8))
    traces = [trace_of(step_of([matmul(), collective("all_reduce", "tp", GIB, 8), matmul()]))]
    layout = Layout.parse("tp8-mb1-ga1")
    nccl = Nccl.of(cluster(8))
    by_rings, by_nccl = (simulate(traces, layout, each) for each in (costs, replace(costs, nccl=nccl)))
    assert by_nccl.parts.tensor == pytest.approx(predicted("all_reduce", 8, GIB).seconds)
    assert by_rings.parts.tensor > by_nccl.parts.tensor
