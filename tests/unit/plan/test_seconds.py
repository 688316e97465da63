"""The time of a step, against figures by hand and from papers."""

from dataclasses import fields, replace

import numpy as np
import pytest
from families import FAMILIES
from shapes import of_shape

from meshtune.layout import Layout
from meshtune.model.trace import census
from meshtune.placement.columns import Columns
from meshtune.plan.hardware import catalogue, stacks
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.block import block_seconds
from meshtune.plan.seconds.collectives import ring_bandwidth, ring_collectives, tree_all_reduce
from meshtune.plan.seconds.gpu import block_compute, matmul, matrix_passes
from meshtune.plan.seconds.step import StepTime, step
from meshtune.plan.work import Gemm, Work, attended

# A GPU that reaches all it can, software that costs nothing, networks of round figures.
IDEAL = Machine(
    matmul_max=1e15, core_matmul_max=1e15, weight_bytes=2, element=2, bandwidth=1e18, link=400e9,
    network=200e9, host_bandwidth=1e18, node=8, multiprocessors=100, attention_64=1e21,
    attention_128=1e21, attention_256=1e21, attention_keys=0, attention_backward=1, clock=1, matmul=1,
    depth=0, tiles=0, misaligned=1, unloaded=1, attention=1, memory=1, link_share=1, network_share=1,
    link_latency=0, network_latency=0, stack_matmul=1, stack_attention=1, ring_attention=0, flash=1,
    score_bytes=0, batched=1, elementwise_hidden=0, elementwise_wide=0, elementwise_rotary=0,
    elementwise_norm=0, hidden_backward=2, wide_backward=2, rotary_backward=2, rounding_bytes=0,
    unsummed_bytes=0,
    counted=0, adapter_passes=5, adapter_sums=3, adapter_launches=4, dropout_passes=2.5, dropout_backward=2.5,
    logit_bytes=0, split_logit_bytes=0,
    selective=0, launch=0, block_launches=10, launch_blocking=0, host_micro_batch=0, host_step=0,
    gradient_bytes=4, ahead=0, tensor_hold=0, scatter_bytes=4, tensor_overlap=0, context_overlap=0,
    shard_overlap=0, shard_share=1, ends_apart=0, gather_overlap=0, data_overlap=0, torch_stages=0,
    contention=0, optimizer_bytes=0, send_share=1, send_split=0, balanced=0, grouped=1, expert_passes=0,
    expert_launches=0, expert_overlap=0, expert_share=1, expert_once=0,
)  # fmt: skip
GPT = of_shape(
    layers=32, hidden=4096, ffn=16384, heads=32, kv_heads=32, vocabulary=0, gated=0, tied=1
)  # without a head, so that blocks are all there is
SEQ_LEN = 2048


def seconds(text: str, machine: Machine = IDEAL, work: Work = GPT):
    return step(work, Columns.of([Layout.parse(text)]), machine, SEQ_LEN)


def real(gpu: str = "h100-sxm", stack: str = "meshtune") -> Machine:
    return Machine.of(catalogue()[gpu], stack)


def test_a_product_takes_its_flops_or_its_bytes() -> None:
    assert matmul(IDEAL, 4096, 8192, 1024) == pytest.approx(2 * 4096 * 8192 * 1024 / 1e15)
    slow = replace(IDEAL, bandwidth=1e12)
    moved = 2 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
    assert matmul(slow, 16, 8192, 8192) == pytest.approx(moved / 1e12, rel=1e-3)


def test_unaligned_sizes_and_short_inner_ones_are_slower() -> None:
    m = replace(IDEAL, misaligned=1.8, depth=100.0)
    assert matmul(m, 4096, 1800, 4096) > 1.7 * matmul(m, 4096, 1792, 4096)
    assert matmul(m, 4096, 4096, 100 * 64) < matmul(m, 4096, 4096, 64) * 100


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("window", [np.inf, 5.0, 300.0])
def test_attended_keys_are_those_of_the_mask(n: int, window: float) -> None:
    rows, columns = np.indices((n, n))
    mask = (columns <= rows) & (rows - columns < window)
    assert attended(float(n), window) == pytest.approx(mask.sum() / n)


def test_backward_is_twice_forward_and_full_recompute_a_third_more() -> None:
    none, full = seconds("mb1-ga1"), seconds("mb1-ga1-full")
    parameters = GPT.blocks * (GPT.block_parameters - 4 * 4096)  # without norms
    assert none.compute == pytest.approx(6 * parameters * SEQ_LEN / 1e15, rel=1e-4)
    assert full.compute / none.compute == pytest.approx(4 / 3, rel=1e-4)


def test_some_recomputed_blocks_cost_their_share_of_the_time() -> None:
    """Each of 32 blocks a 32nd of what all cost; on a pipeline's rank those of each of its stages."""
    machine = real()
    for text, blocks in (
        ("zero3x8-tp2-sp-mb1-ga4", 32),
        ("pp4-1f1b-mb1-ga8", 8),
        ("pp4-interleaved1f1b-v2-mb1-ga8", 4),
    ):
        for mode in ("selective", "linear", "full"):
            none, every = seconds(text, machine), seconds(f"{text}-{mode}", machine)
            for recomputed in range(1, blocks):
                some = seconds(f"{text}-{mode}{recomputed}", machine)
                share = recomputed / blocks
                for part in ("compute", "tensor", "bubble", "host"):
                    of_none, of_every = getattr(none, part), getattr(every, part)
                    expected = of_none + share * (of_every - of_none)
                    assert getattr(some, part) == pytest.approx(expected), (text, mode, part)
                # As long where the weights' collectives take longer than all that runs beside them.
                assert np.all(some.total > none.total * (1 - 1e-9))
                assert np.all(some.total < every.total * (1 + 1e-9))
            parts = StepTime(
                GPT, Columns.of([Layout.parse(f"{text}-{mode}1")]), machine, SEQ_LEN
            ).compute_parts
            assert sum(parts.values()) == pytest.approx(seconds(f"{text}-{mode}1", machine).compute)


def test_copies_to_the_host_take_what_a_block_does_not_hide() -> None:
    """31 of 32 inputs leave the GPU; a block's forward is a quarter of its passes, and hides one copy."""
    full = seconds("mb1-ga1-full")
    forward, size = full.compute / (4 * GPT.blocks), 2 * SEQ_LEN * 4096
    for copies, exposed in ((0.5, 0.0), (2.0, 1.0), (5.0, 4.0 + 2.0)):  # in forwards; a backward hides three
        machine = replace(IDEAL, host_bandwidth=size / (copies * forward))
        offload = seconds("mb1-ga1-offload", machine)
        assert offload.compute == full.compute
        assert offload.host == pytest.approx(31 * exposed * forward, rel=1e-3)
        assert seconds("mb1-ga1-full", machine).total == full.total


def test_a_rank_with_more_blocks_recomputes_no_more_of_them() -> None:
    """Ten blocks in four stages: the fullest rank of three waits with two recomputed, not three."""
    ten = replace(GPT, blocks=10)
    none, two, every = (seconds(f"pp4-1f1b-mb1-ga8{mode}", work=ten) for mode in ("", "-full2", "-full"))
    block = none.compute / 8 / 2.5  # seconds of a block's 6 FLOPs per parameter and token
    for step_seconds, recomputed in ((none, 0), (two, 2), (every, 3)):
        mean = 2.5 + min(recomputed, 2.5) / 3
        assert step_seconds.imbalance == pytest.approx(8 * block * (3 + recomputed / 3 - mean))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((48, 6144, 64), "tp8-mb4-ga1"),
        ((96, 12288, 96), "tp8-pp8-interleaved1f1b-v3-mb1-ga64"),
    ],
    ids=["22B", "175B"],
)
def test_full_recomputation_costs_a_third_of_the_time_and_attentions_next_to_none(
    shape: tuple[int, int, int], text: str
) -> None:
    """Korthikanti et al. 2022, figures 8 and 9: 30 to 40 %, against a few per cent, on A100s."""
    layers, hidden, heads = shape
    gpt = of_shape(
        layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads, vocabulary=51200, gated=0
    )
    megatron = replace(real("a100-80", "megatron"), flash=0.0)
    none = seconds(text, megatron, gpt).total
    assert 1.3 <= seconds(text + "-full", megatron, gpt).total / none <= 1.4
    assert seconds(text + "-attention", megatron, gpt).total / none <= 1.09
    sequence = text.replace("tp8", "tp8-sp") + "-attention"
    assert seconds(sequence, megatron, gpt).total / none <= 1.04


def test_lora_needs_no_gradients_of_frozen_weights() -> None:
    frozen = replace(
        GPT, matrices=tuple(replace(each, trainable=0.0) for each in GPT.matrices), trainable=0.0
    )
    assert seconds("mb1-ga1", work=frozen).compute == pytest.approx(
        seconds("mb1-ga1").compute * 2 / 3, rel=1e-4
    )


def test_rings_by_hand() -> None:
    assert ring_bandwidth(IDEAL, 8, 8) == 400e9
    assert ring_bandwidth(IDEAL, 16, 8) == 200e9, "a group of whole nodes has their whole network"
    assert ring_bandwidth(IDEAL, 4, 1) == 25e9, "eight groups share it"
    assert ring_collectives(IDEAL, 8e9, 8, 8) == pytest.approx(7 / 8 * 8e9 / 400e9)
    assert tree_all_reduce(IDEAL, 8e9, 4, 4) == pytest.approx(2 * 3 / 4 * 8e9 / 400e9)
    assert ring_collectives(IDEAL, 8e9, 1, 1) == 0


def test_rows_that_are_not_whole_loads_are_slowest() -> None:
    """A head of 50257 rows slows all three products, the one of weights too."""
    m = replace(IDEAL, misaligned=1.5, unloaded=3.0)
    aligned, mild, odd = (matmul(m, 4096, cols, 4096) / cols for cols in (50304, 50264, 50257))
    assert mild == pytest.approx(1.5 * aligned) and odd == pytest.approx(3 * aligned)
    assert matmul(m, 50257, 4096, 8192, contiguous=(50257, 4096)) > 2.9 * matmul(m, 50257, 4096, 8192)


def test_each_step_of_a_ring_takes_as_long_as_the_slowest() -> None:
    slow = replace(IDEAL, link_latency=1e-6, network_latency=1e-3)
    assert ring_collectives(slow, 0.0, 8, 8) == pytest.approx(7e-6)
    assert ring_collectives(slow, 0.0, 16, 8) == pytest.approx(15 * 1.001e-3)
    assert ring_collectives(slow, 0.0, 16, 8, count=3) == pytest.approx(3 * 15 * 1.001e-3)
    assert ring_collectives(slow, 0.0, 1, 1) == 0


def test_ranks_that_compute_all_heads_gather_them_and_take_the_time_of_all() -> None:
    machine = replace(IDEAL, attention_64=1e14, attention_128=1e14, attention_256=1e14)
    whole = replace(GPT, whole_heads=())
    tp4, alone = Columns.of([Layout.parse("tp4-mb1")]), Columns.of([Layout.parse("mb1")])
    found = block_seconds(whole, tp4, machine, SEQ_LEN, SEQ_LEN)
    of_all = block_compute(GPT, alone, machine, SEQ_LEN, SEQ_LEN)
    assert found.compute.attention_forward == of_all.attention_forward
    features = 4 * 4096 * 2 * SEQ_LEN  # queries, keys and values, and the gradient of the output
    more = found.tensor - block_seconds(GPT, tp4, machine, SEQ_LEN, SEQ_LEN).tensor
    assert more == pytest.approx(features * 3 / 4 / 400e9)


HIDDEN, WEIGHTS = 2 * SEQ_LEN * 4096, GPT.blocks * GPT.block_parameters  # bytes, elements
ALL_REDUCE = tree_all_reduce(IDEAL, HIDDEN, 4, 4)
ONCE = ring_collectives(IDEAL, 1.0, 4, 4)  # seconds a byte
BUSY = {"host_micro_batch": 1e-3, "host_step": 2e-3}
SLOW = {"bandwidth": 1e12, "matmul_max": 1e30, "core_matmul_max": 1e30}


@pytest.mark.parametrize(
    ("part", "text", "machine", "less", "expected"),
    [
        # two all-reduces in each pass, two more in a repeated forward; regathered inputs in the backward
        ("tensor", "tp4-mb1-ga1", {}, "", 32 * 4 * ALL_REDUCE),
        ("tensor", "tp4-mb1-ga1-full", {}, "", 32 * 6 * ALL_REDUCE),
        ("tensor", "tp4-mb1-ga1", {"tensor_overlap": 0.5}, "", 32 * 2 * ALL_REDUCE),
        ("tensor", "tp8-sp-regather-mb1-ga4", {}, "tp8-sp-mb1-ga4", 4 * 32 * 2 * 7 / 8 * HIDDEN / 400e9),
        ("total", "tp8-sp-regather-mb1-ga4", {}, "tp8-sp-mb1-ga4", 4 * 32 * 2 * 7 / 8 * HIDDEN / 400e9),
        # ZeRO-3's are 3 times the parameters each micro-batch, plain dp's twice, once a step (Rajbhandari et
        # al. 2020, section 7), here with gradients of 4 bytes
        ("data", "dp4-mb1-ga4", {}, "", 2 * 4 * WEIGHTS * ONCE),
        ("data", "zero1x4-mb1-ga4", {}, "", (4 + 2) * WEIGHTS * ONCE),
        ("data", "zero2x4-mb1-ga4", {}, "", (4 * 4 + 2) * WEIGHTS * ONCE),
        ("data", "zero3x4-mb1-ga4", {}, "", 4 * (2 + 2 + 4) * WEIGHTS * ONCE),
        ("data", "zero3x4-mb1-ga4", {"shard_overlap": 1.0, "link": 1e15}, "", 0),
        (
            "data",
            "zero1x4-mb1-ga4",
            {"shard_overlap": 1.0, "link": 1e15},
            "",
            2 * WEIGHTS * ONCE * 400e9 / 1e15,
        ),
        ("data", "zero1x4-mb1-ga4", {"data_overlap": 1.0}, "", (4 + 2) * WEIGHTS * ONCE),
        # keys and values in one all-gather; queries, keys, values and the output in an all-to-all each
        ("context", "cp2-mb1-ga1", {"link_latency": 1e-3, "link": 1e30}, "", 2 * 32 * 1e-3),
        ("context", "ulysses2-mb1-ga1", {"link_latency": 1e-3, "link": 1e30}, "", 2 * 32 * 4 * 1e-3),
        # a host that runs ahead adds its work to the first micro-batch, but where launches block
        ("host", "mb1-ga8", BUSY, "", 8e-3 + 2e-3),
        ("host", "mb1-ga8", BUSY | {"ahead": 1.0}, "", 1e-3 + 2e-3),
        ("host", "mb1-ga8", BUSY | {"ahead": 1.0, "launch_blocking": 1.0}, "", 8e-3 + 2e-3),
        ("host", "mb1-ga1", {"launch": 1e-4, "launch_blocking": 1.0}, "", 32 * 3e-3),
        # a sum is read and written, the gradient read; of the first micro-batch there is nothing to add
        ("compute", "mb1-ga4", SLOW, "mb1-ga1 " * 4, 4 * WEIGHTS * (2 + 2 * 4) / 1e12),
    ],
)
def test_parts_of_a_step_by_hand(
    part: str, text: str, machine: dict[str, float], less: str, expected: float
) -> None:
    """less: layouts whose seconds are taken off."""
    ideal = replace(IDEAL, **machine)
    found = getattr(seconds(text, ideal), part) - sum(getattr(seconds(t, ideal), part) for t in less.split())
    assert found == pytest.approx(expected, rel=1e-3 if machine.get("ahead") else 1e-6)


def test_what_is_split_or_ahead_takes_less() -> None:
    whole, cut = (
        seconds("tp8-pp4-1f1b-mb1-ga8", replace(IDEAL, link=1e18, send_split=split)).pipeline
        for split in (0, 1)
    )
    assert cut == pytest.approx(whole / 8)
    ahead, blocking = (
        seconds("mb1-ga1", replace(IDEAL, launch=1e-4, launch_blocking=blocks)) for blocks in (0, 1)
    )
    assert ahead.host < blocking.host


def test_tensor_parallel_ranks_hold_up_the_host_where_a_pipeline_spans_nodes() -> None:
    """By 1 ms a rank and pass, whatever is computed; over two nodes by the cube root of two more."""
    held, passes = replace(IDEAL, tensor_hold=1e-3, network=1e18), 2 * 32 / 2
    step = 8 + 1  # micro-batches, and the bubble
    for text, ranks in (("tp8-pp2-1f1b-mb1-ga8", 8), ("tp16-pp2-1f1b-mb1-ga8", 16 * 2 ** (1 / 3))):
        assert seconds(text, held).total == pytest.approx(step * passes * ranks * 1e-3, rel=1e-3)
    for text in ("tp4-pp2-1f1b-mb1-ga8", "tp16-mb1-ga8", "zero1x8-pp2-1f1b-mb1-ga8"):
        assert seconds(text, held).total == seconds(text, replace(held, tensor_hold=0)).total


def test_tensor_parallel_beyond_the_node_pays_the_networks_price() -> None:
    inside, beyond = seconds("tp8-mb1-ga1").tensor, seconds("tp16-mb1-ga1").tensor
    assert beyond > 1.5 * inside


@pytest.mark.parametrize(
    ("text", "bubble"),
    [
        ("pp4-1f1b-mb1-ga8", 3 / 8),
        ("pp4-gpipe-mb1-ga8", 3 / 8),
        ("pp4-interleaved1f1b-v2-mb1-ga8", 3 / 16),
        ("pp4-zb-mb1-ga8", 3 / 8 / 3),
        ("pp4-zbv-mb1-ga8", 3 / 8 / 6),
        ("mb1-ga8", 0),
    ],
)
def test_bubbles_are_the_papers(text: str, bubble: float) -> None:
    """As a part of the ideal time; with F = B = W, ZB-H1 leaves a third of 1F1B's."""
    fast = replace(IDEAL, network=1e18, link=1e18)
    found = seconds(text, fast)
    assert found.bubble / found.compute == pytest.approx(bubble, rel=1e-3)


def test_a_balanced_pipeline_waits_less_for_the_head() -> None:
    """The bubble is the same: waiting for the slowest stage is a part of its own."""
    heavy = replace(GPT, vocabulary=256_000.0)
    unbalanced, balanced = (
        seconds("pp4-1f1b-mb1-ga8", replace(IDEAL, balanced=b), heavy) for b in (0.0, 1.0)
    )
    assert balanced.total < unbalanced.total and balanced.imbalance < unbalanced.imbalance
    assert balanced.bubble == pytest.approx(unbalanced.bubble)
    assert seconds("mb1-ga8", IDEAL, heavy).imbalance == 0


@pytest.mark.parametrize("schedule", ["zb", "zbv", "dualpipev"])
def test_replicas_all_reduce_after_a_zero_bubble_schedule(schedule: str) -> None:
    """Its last backward, of weights, runs no hooks: `Replicas.finish` starts all messages."""
    exposing = replace(IDEAL, network=1e13, link=1e13)
    hiding = replace(exposing, data_overlap=1.0)
    assert seconds("dp2-pp4-1f1b-mb1-ga8", hiding).data == pytest.approx(0)
    exposed = seconds(f"dp2-pp4-{schedule}-mb1-ga8", hiding).data
    assert exposed > 0 and exposed == seconds(f"dp2-pp4-{schedule}-mb1-ga8", exposing).data


def test_torchs_stages_reduce_zero1s_gradients_after_all_backwards() -> None:
    """REDUCE_GRAD of torch's schedules follows all backwards of a stage, and waits for the collectives."""
    hiding = replace(IDEAL, network=1e13, link=1e13, data_overlap=1.0, shard_overlap=1.0, gather_overlap=1.0)
    torchs = replace(hiding, torch_stages=1.0)
    for beside in ("zero1x2-mb1-ga8", "dp2-pp4-1f1b-mb1-ga8"):
        assert seconds(beside, torchs).data == seconds(beside, hiding).data == pytest.approx(0)
    text = "zero1x2-pp4-1f1b-mb1-ga8"
    assert seconds(text, hiding).data == pytest.approx(0)
    gradients = 4 * GPT.blocks / 4 * GPT.block_parameters / 2
    assert seconds(text, torchs).data == pytest.approx(gradients / 1e13, rel=1e-3)


@pytest.mark.parametrize("stack", ["meshtune", "meshtune-compiled", "trainer-fsdp2", "torchtitan-2025"])
def test_fsdp2_hides_zero2s_gather_as_it_hides_zero3s(stack: str) -> None:
    """ZeRO-3 communicates all that ZeRO-2 does in a step of one micro-batch, and gathers once more."""
    work = of_shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=0, tied=1)
    machine = real(stack=stack)
    zero2, zero3 = (seconds(f"{zero}x64-mb4-ga1", machine, work) for zero in ("zero2", "zero3"))
    assert 0 < zero2.data < zero3.data
    assert real(stack="deepspeed").gather_overlap == 0 and real(stack="deepspeed").data_overlap == 1


def test_ulysses_runs_one_kernel_that_waits_for_its_heads() -> None:
    ring = replace(IDEAL, attention_128=1e15, attention_keys=1000.0, ring_attention=1.0, context_overlap=1.0)
    one_kernel = replace(ring, ring_attention=0.0, context_overlap=0.0)
    assert seconds("ulysses4-mb1-ga1", ring) == seconds("ulysses4-mb1-ga1", one_kernel)
    assert seconds("cp4-mb1-ga1", ring).compute > seconds("cp4-mb1-ga1", one_kernel).compute
    assert seconds("cp4-mb1-ga1", ring).context < 0.5 * seconds("cp4-mb1-ga1", one_kernel).context


def test_compiled_stacks_fuse_their_blocks_alike() -> None:
    """torch.compile makes the same kernels of the same blocks, whoever calls it, but for adapters."""
    fused = ("block_launches", "elementwise_hidden", "elementwise_wide")
    compiled = [name for name in stacks() if name.endswith("-compiled")]
    assert len(compiled) == 5
    found = {name: [stacks()[name][constant] for constant in fused] for name in compiled}
    assert found == dict.fromkeys(compiled, found["torchtitan-compiled"])


def test_parts_add_up_and_columns_are_rows() -> None:
    texts = ["mb1-ga4", "dp2-zero3x4-tp2-sp-mb2-ga2-full", "zero1x2-cp2-tp2-pp2-1f1b-mb1-ga4-selective",
             "ulysses2-pp2-zbv-mb1-ga8", "zero2x8-mb4-ga1-attention"]  # fmt: skip
    work = Work.of(census(FAMILIES["llama"]()))
    together = step(work, Columns.of([Layout.parse(text) for text in texts]), real(), SEQ_LEN)
    for place, text in enumerate(texts):
        alone = step(work, Columns.of([Layout.parse(text)]), real(), SEQ_LEN)
        parts = [np.broadcast_to(getattr(together, f.name), len(texts))[place] for f in fields(together)]
        assert all(part >= 0 for part in parts), text
        assert together.total[place] == pytest.approx(sum(parts))
        assert alone.total[0] == pytest.approx(together.total[place])


def test_parts_of_compute_add_up_to_it() -> None:
    columns = Columns.of([Layout.parse(text) for text in ("mb1-ga4", "zero2x4-tp2-sp-pp2-1f1b-mb2-ga4-full")])
    parts = StepTime(GPT, columns, real(), SEQ_LEN, 700).compute_parts
    assert sum(parts.values()) == pytest.approx(step(GPT, columns, real(), SEQ_LEN, 700).compute)


def test_shorter_documents_cost_less_attention() -> None:
    columns = Columns.of([Layout()])
    long, short = (step(GPT, columns, real(), 32768, d).compute for d in (32768, 512))
    assert short < 0.8 * long


def test_a_census_and_its_shape_are_the_same_work() -> None:
    config = FAMILIES["llama"](num_hidden_layers=4)
    exact = Work.of(census(config))
    shape = of_shape(
        layers=4, hidden=config.hidden_size, ffn=config.intermediate_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, vocabulary=config.vocab_size, gated=1,
        tied=float(config.tie_word_embeddings),
    )  # fmt: skip
    assert exact.parameters == pytest.approx(shape.parameters, rel=5e-3)  # norms and biases
    assert exact.wide == shape.wide
    columns = Columns.of([Layout()])
    ours, theirs = (step(work, columns, replace(IDEAL, attention=1.0), 64).compute for work in (exact, shape))
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_matmuls_in_8_bits_have_their_own_rate_and_cast_their_operands() -> None:
    gemm, tokens = Gemm(4096, 8192, fp8=True), 2048.0
    machine = replace(IDEAL, fp8_matmul_max=2e15, bandwidth=1e12)
    sizes = (tokens, 4096, 8192), (tokens, 8192, 4096), (4096, 8192, tokens)
    alone = [matmul(machine, *size, fastest=2e15) for size in sizes]
    weight, outputs, inputs = gemm.rows * gemm.cols, gemm.rows * tokens, gemm.cols * tokens
    casts = 5 * weight + 3 * inputs, 3 * weight + 5 * outputs, 3 * (inputs + outputs)
    passes = matrix_passes(machine, tokens, gemm, 1.0)
    assert passes == pytest.approx([one + moved / 1e12 for one, moved in zip(alone, casts, strict=True)])
    gathered = matrix_passes(machine, tokens, gemm, 1.0, True)  # in 8 bits: only laid out anew
    assert [one - other for one, other in zip(passes, gathered, strict=True)] == pytest.approx(
        [5 * weight / 1e12, weight / 1e12, 0], abs=1e-12
    )
    by_row = replace(machine, fp8_rowwise=1.0)
    backward = matrix_passes(by_row, tokens, gemm, 1.0, True)[1:]
    casts = 5 * weight + 3 * outputs, 3 * (inputs + outputs) + 4 * weight
    assert backward == pytest.approx(
        [one + moved / 1e12 for one, moved in zip(alone[1:], casts, strict=True)]
    )
    assert matrix_passes(machine, tokens, replace(gemm, fp8=False), 1.0)[0] == matmul(machine, *sizes[0])
