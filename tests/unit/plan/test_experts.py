"""Expert parallelism in plans: bytes of exchanges, grouped matmuls, memory, and the search."""

from dataclasses import replace

import mixtures
import numpy as np
import pytest
import torch
from golden import refuses, says
from known import known
from tiny_families import tiny_config
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.trace import census_of
from meshtune.placement.columns import Columns
from meshtune.plan.accounting import stack_accounting
from meshtune.plan.advice import alternatives, reasoning
from meshtune.plan.cluster import cluster_for
from meshtune.plan.hardware import catalogue
from meshtune.plan.machine import Machine
from meshtune.plan.memory.flight import activations_in_flight
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step, weight_elements
from meshtune.plan.memory.timeline import peak
from meshtune.plan.search import search
from meshtune.plan.seconds.collectives import exchange_seconds
from meshtune.plan.seconds.experts import grouped_passes
from meshtune.plan.seconds.gpu import gradient_accumulation
from meshtune.plan.seconds.step import step
from meshtune.plan.work import Work

SHARED, LINK = 2048, 450e9  # hidden size; bytes/s of an H100 to the others of its node
SEQ_LEN = 4096


@pytest.fixture(scope="module")
def mixture() -> Work:
    return known("qwen3-30b-a3b").work


def machine(**constants: float) -> Machine:
    """An H100 machine whose links reach what they are made for, without latency."""
    plain = Machine.of(catalogue()["h100-sxm"], "meshtune")
    ideal = dict.fromkeys(("link_share", "network_share", "expert_share"), 1.0)
    return replace(plain, **ideal | {"link_latency": 0.0, "network_latency": 0.0} | constants)


def exchange(work: Work, layout: str, **constants: float) -> tuple[float, float]:
    """Seconds of (forward, backward) of one block's exchanges."""
    layouts = Columns.of([Layout.parse(layout)])
    both = exchange_seconds(
        work, layouts, machine(**{"launch": 0.0} | constants), layouts.rank_tokens(SEQ_LEN)
    )
    return float(both.forward[0]), float(both.backward[0])


def test_exchanges_move_each_tokens_rows_to_other_ranks_and_back(mixture: Work) -> None:
    assert (mixture.routed, mixture.hidden) == (8, SHARED)
    one = SEQ_LEN * 8 * SHARED * 2 * 7 / 8 / LINK  # T · k · H · b · (ep - 1)/ep
    assert exchange(mixture, "zero3x8-ep8") == pytest.approx((2 * one, 2 * one))
    assert exchange(mixture, "zero3x8-ep8-full") == pytest.approx((2 * one, 4 * one))
    assert exchange(mixture, "zero3x8") == (0, 0)
    assert exchange(mixture, "zero3x8-cp2-ep8") == pytest.approx((one, one))
    assert exchange(replace(mixture, imbalance=1.5), "zero3x8-ep8")[0] == pytest.approx(3 * one)
    # Before it a message of sizes, which the host waits for and a recomputation does not need
    forward, backward = exchange(mixture, "zero3x8-ep8-full", launch=1e-3, link_latency=1e-4)
    assert (forward, backward) == pytest.approx((2 * one + 1e-3 + 3e-4, 4 * one + 4e-4))
    # Sent once to each rank with an expert of the token: 5.3 of 8 copies.
    once = exchange(mixture, "zero3x8-ep8", expert_once=1.0)[0]
    assert once / (2 * one) == pytest.approx(1 - (7 / 8) ** 8)
    # Half of the rows go to the other node, over a rank's part of its network.
    across = SEQ_LEN * 8 * SHARED * 2 / 2 / 50e9
    assert exchange(mixture, "zero3x16-ep16")[0] == pytest.approx(2 * across)


def test_grouped_matmuls_have_the_flops_of_their_rows_and_cost_more_with_few(mixture: Work) -> None:
    gemm = next(gemm for gemm in mixture.matrices if gemm.experts)
    layouts = Columns.of([Layout.parse(text) for text in ("mb1", "zero3x8-ep8", "mb16", "zero3x8-ep8-mb16")])
    forward, inputs, weights = grouped_passes(machine(), layouts.rank_tokens(SEQ_LEN), gemm, mixture, layouts)
    rows = layouts.rank_tokens(SEQ_LEN) * 8
    flops = 2 * rows * gemm.rows * gemm.cols
    rate = flops / forward
    assert np.all(np.diff(rate[:2]) > 0) and np.all(rate[2:] > rate[:2])
    assert np.all(rate < catalogue()["h100-sxm"].matmul_max)
    assert np.all(weights[:1] > forward[:1]) and np.all(inputs > 0)  # 256 rows an expert to sum over


@pytest.mark.parametrize(
    "layout", ["zero3x8-ep8", "dp2-zero3x8-cp2-ep4", "dp8-ep4", "zero1x16-ep2", "zero3x8"]
)
def test_ranks_of_a_group_have_all_experts_once(mixture: Work, layout: str) -> None:
    layouts = Columns.of([Layout.parse(layout)])
    stacked = [weight for weight in mixture.block_weights if weight.of_experts]
    elements = weight_elements(stacked, layouts)
    every = 128 * 3 * SHARED * 768
    assert elements.whole * layouts.ep == every
    shards = np.where(layouts.ep > 1, layouts.expert_shards, layouts.shard_ranks)
    assert elements.shard * layouts.ep * np.where(layouts.zero > 0, shards, 1) == every
    rest = [weight for weight in mixture.block_weights if not weight.of_experts]
    assert weight_elements(rest, layouts).whole == weight_elements(rest, Columns.of([Layout()])).whole


def test_gradients_of_experts_are_summed_over_their_own_copies(mixture: Work) -> None:
    texts = "tp8-sp-ep4", "tp8-sp-ep8", "dp8-ep8", "dp8-ep4"
    layouts, accounting = Columns.of([*map(Layout.parse, texts)]), stack_accounting("meshtune", "bf16")
    stages = Stages.even(mixture.blocks, layouts)
    made = Step(mixture, layouts, accounting, SEQ_LEN, stages)
    experts, trained = 128 * 3 * SHARED * 768 / layouts.ep, made.elements.block.trained
    # Two ranks of tp8-sp-ep4 hold the same experts: an all-reduce in fp32, of what else is in bf16.
    assert list(made.all_reduced) == [experts[0], 0, trained[2] - experts[2], trained[3]]
    every, widened = made.elements.total.trained[0], 48 * experts
    assert list(made.states.gradients[0]) == [
        2 * every[0] + 2 * widened[0], 2 * every[1], 4 * every[2], 4 * every[3]
    ]  # fmt: skip
    gradients, whole = mixture.split_experts(layouts, True), machine()
    moved = gradient_accumulation(whole, gradients, layouts, layouts.token_ranks / layouts.ep)
    bytes_of_each = moved * whole.bandwidth * whole.memory / gradients
    assert bytes_of_each == pytest.approx([14, 0, 6, 14])  # cast, and into and out of the buffer of copies


def test_recomputed_blocks_keep_the_experts_of_each_token(mixture: Work) -> None:
    layouts = Columns.of([*map(Layout.parse, ("mb1-full", "tp2-sp-mb1-full"))])
    stages, accounting = Stages.even(mixture.blocks, layouts), stack_accounting("meshtune", "bf16")
    flight = activations_in_flight(Step(mixture, layouts, accounting, SEQ_LEN, stages))
    one = SEQ_LEN * (2 * SHARED + 8 * 8)  # the block's input, and 8 numbers of 8 bytes
    assert list(flight.of_block[0]) == [one, one / 2]


def test_uneven_tokens_cost_memory_and_time_only_where_experts_are_split(mixture: Work) -> None:
    layouts = Columns.of([Layout.parse(text) for text in ("zero3x8-mb1", "zero3x8-ep8-mb1")])
    uneven, accounting = replace(mixture, imbalance=2.0), stack_accounting("meshtune", "bf16")
    before, after = (
        (peak(work, layouts, accounting, SEQ_LEN).peak, step(work, layouts, machine(), SEQ_LEN).total)
        for work in (mixture, uneven)
    )
    for own, more in zip(before, after, strict=True):
        assert own[0] == more[0] and own[1] < more[1]
    # Rows, both halves and their product of 48 blocks, another time, at least
    added = (after[0] - before[0])[1]
    assert added > 48 * SEQ_LEN * 8 * 2 * (SHARED + 3 * 768)


def planned(*words: str):
    """The plan of Qwen3-30B-A3B on 8 H100, or as `words` have it."""
    workload = known("qwen3-30b-a3b", *words)
    settings = config.load(None, ["model.name=x", "cluster.gpu=h100-sxm", "cluster.gpus=8", *words])
    return search(workload, cluster_for(settings), fixed=settings.partial_layout.given)


def test_a_search_tries_the_sizes_that_divide_experts_and_ranks() -> None:
    plan = planned()
    sizes = {
        (int(ep), int(ranks)) for ep, ranks in zip(plan.columns.ep, plan.columns.token_ranks, strict=True)
    }
    assert {ep for ep, _ in sizes} == {1, 2, 4, 8} and all(ranks % ep == 0 for ep, ranks in sizes)
    fixed = planned("layout={zero: 3, dp_shard: auto, ep: 8, recompute: full}")
    assert {str(choice.layout) for choice in fixed.best(9)} >= {"zero3x8-ep8-mb4-ga2-full"}
    for sentence in reasoning(fixed, fixed.choice(0)):
        if sentence.startswith("Experts"):
            says(sentence)
    assert any(other.name == "all experts on each rank" for other in alternatives(fixed))
    with refuses(UserError):
        planned("layout={ep: 16, dp_shard: auto, zero: 3}")


def test_a_search_leaves_out_what_a_routers_bias_refuses() -> None:
    unbiased = planned("layout={tp: auto, dp_shard: auto, zero: 3, recompute: full}", "experts.balance=bias")
    assert len(unbiased) == 0 and any("no buffer for a bias" in each.reason for each in unbiased.rejected)


@pytest.mark.ci
def test_published_mixtures_are_predicted_as_the_page_says() -> None:
    rows = [row for row in mixtures.read(mixtures.ROWS) if mixtures.why_not(row) is None]
    rows = [row for row in rows if row["balanced"] == "forced" and not row["id"].startswith("aws-")]
    found = mixtures.errors(rows, mixtures.predictor(rows)(mixtures.fit(rows)))
    assert found["all rows"][0] == 45 and found["all rows"][1] < 13


def test_experts_without_tokens_in_the_trace_do_no_work() -> None:
    """JetMoE's loop runs each expert, and the tokens of a trace choose the first ones."""
    with torch.device("meta"):
        census = census_of(AutoModelForCausalLM.from_config(tiny_config("jetmoe")))
    assert any(not matrix.count for block in census.blocks for matrix in block.matrices)
    work = sum(2 * gemm.rows * gemm.cols * gemm.count for gemm in Work.of(census).matrices)
    assert work * len(census.blocks) == census.matmul[0]
