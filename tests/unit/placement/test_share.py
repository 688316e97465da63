"""Compare what each rank holds with counts by hand, torch's own rules, and what real ranks hold."""

import math
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from cases import cases
from collectives import Collectives
from families import FAMILIES, SPARSE
from golden import refuses
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from meshtune.attention.register import register
from meshtune.layout import AXES, SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.model.anatomy import anatomy
from meshtune.model.lora import add_lora
from meshtune.model.trace import census, census_of
from meshtune.parallel.mesh import Axis, join
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.tensor import split_model
from meshtune.placement.ranks import coordinates, group, rank_at
from meshtune.placement.share import share, stage_blocks, stage_of_rank
from meshtune.placement.split import piece, pieces, within

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import zero_memory

register()


@given(size=st.integers(0, 50), parts=st.integers(1, 12))
def test_pieces_are_those_of_torch_chunk(size, parts):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
    expected = chunks + [[]] * (parts - len(chunks))

    assert [list(range(*piece(size, parts, index))) for index in range(parts)] == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_fused_parts_are_cut_each_by_itself_and_their_shards_have_every_element_once(sizes, tp, shards):
    parts = torch.arange(sum(sizes)).split(sizes)
    for index in range(tp):
        rows = pieces(sizes, tp, index)
        expected = [part[slice(*piece(len(part), tp, index))].tolist() for part in parts]
        assert [list(run) for run in rows] == expected
        local = [element for part in expected for element in part]
        for shard in range(shards):
            start, stop = piece(len(local), shards, shard)
            assert [row for run in within(rows, start, stop) for row in run] == local[start:stop]


COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def largest(costs, cuts, first, last):
    stages = [sum(costs[start:stop]) for start, stop in pairwise(cuts)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(costs=COSTS, data=st.data(), first=st.integers(0, 20), last=st.integers(0, 20))
def test_no_other_cut_has_a_smaller_largest_stage(costs, data, first, last):
    n = len(costs)
    stages = data.draw(st.integers(1, n))
    every = [(0, *cuts, n) for cuts in combinations(range(1, n), stages - 1)]

    found = stage_blocks(costs, stages, first=first, last=last)

    assert all(len(blocks) >= 1 for blocks in found)
    assert [i for blocks in found for i in blocks] == list(range(n))
    cuts = (0, *(blocks.stop for blocks in found))
    assert largest(costs, cuts, first, last) == min(largest(costs, c, first, last) for c in every)


@given(
    blocks=st.integers(1, 9),
    data=st.data(),
    first=st.sampled_from([0, 0, -250, -333, -1000, 400]),
    last=st.one_of(st.integers(0, 8000), st.sampled_from([0, 500, 1000, 1500, 3000])),
)
def test_equal_blocks_are_cut_by_the_same_rule(blocks, data, first, last):
    """Find `stage_blocks`' cut by trying all; the first block may cost less than the others."""
    stages = data.draw(st.integers(1, blocks))
    costs = [1000 + min(first, 0), *[1000] * (blocks - 1)]
    more = max(first, 0)

    def rank(cuts):
        each = [sum(costs[start:stop]) for start, stop in pairwise(cuts)]
        each[0] += more
        each[-1] += last
        return max(each), sum(cost * cost for cost in each), tuple(reversed(cuts))

    best = min(((0, *cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1)), key=rank)
    found = stage_blocks(costs, stages, first=more, last=last)

    assert (0, *(each.stop for each in found)) == best


@pytest.mark.parametrize("cost", [1.0, 12_658_795_243])  # as large as FLOPs are
def test_equal_blocks_are_spread_evenly_later_stages_being_larger(cost):
    assert [len(blocks) for blocks in stage_blocks([cost] * 7, 3)] == [2, 2, 3]
    assert [len(blocks) for blocks in stage_blocks([cost] * 11, 5, last=3 * cost)] == [2, 2, 3, 3, 1]


def test_embedding_and_head_take_blocks_off_their_stages():
    found = stage_blocks([1.0] * 8, 4, first=0.5, last=2.0)

    assert [len(blocks) for blocks in found] == [2, 2, 3, 1]


def test_more_stages_than_blocks_are_refused():
    with refuses(ValueError):
        stage_blocks([1, 1], 3)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_belongs_to_one_rank(schedule, pp):
    virtual = 3 if schedule in VIRTUAL_SCHEDULES else 1
    held = [stage_of_rank(schedule, pp, virtual, rank) for rank in range(pp)]

    each = 2 if schedule in V_SCHEDULES else virtual
    assert sorted(stage for stages in held for stage in stages) == list(range(pp * each))


def test_a_v_schedule_turns_round_at_the_last_rank():
    assert [stage_of_rank("zbv", 2, 1, rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert [stage_of_rank("interleaved1f1b", 2, 2, rank) for rank in range(2)] == [(0, 2), (1, 3)]


SIZES = st.integers(1, 3)
LAYOUTS = st.builds(
    lambda pp, dp, shard, cp, tp: Layout(
        pp=pp, dp_replicate=dp, dp_shard=shard, zero=0 if shard == 1 else 3, cp=cp, tp=tp
    ),
    SIZES, SIZES, SIZES, SIZES, SIZES,
)  # fmt: skip


@given(layout=LAYOUTS)
def test_coordinates_count_through_the_ranks_as_torch_numbers_a_mesh(layout):
    mesh = torch.arange(layout.world).view(*(getattr(layout, axis) for axis in AXES))
    for rank in range(layout.world):
        place = coordinates(layout, rank)
        assert mesh[tuple(place[axis] for axis in AXES)] == rank
        assert rank_at(layout, place) == rank
    for number, axis in enumerate(AXES):
        line = tuple(mesh.movedim(number, -1).reshape(-1, getattr(layout, axis))[0].tolist())
        assert group(layout, 0, axis) == line


def test_neighbours_in_the_world_are_neighbours_in_tp():
    layout = Layout(pp=2, dp_replicate=2, tp=2)

    assert group(layout, 5, "tp") == (4, 5)
    assert group(layout, 5, "dp_replicate") == (5, 7)
    assert group(layout, 5, "pp") == (1, 5)


# shares #


@pytest.mark.ci
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tp", cases([2, 4], test=[4]))
@pytest.mark.parametrize(
    "family",
    cases(
        ["llama", "qwen2", "qwen3", "phi3", "olmo2", "starcoder2", "gemma3", "cohere", "deepseek_v3"],
        test=["llama", "phi3"],
    ),
)
def test_a_tensor_parallel_rank_holds_what_split_model_leaves_it(family, tp, lora):
    config = (FAMILIES | SPARSE)[family](vocab_size=250)  # 250 words do not divide evenly
    for rank in range(tp):
        model = AutoModelForCausalLM.from_config(config)
        if lora:
            add_lora(model, lora_rank=3, alpha=6)
        found = share(census_of(model), Layout(tp=tp), rank)
        split_model(model, anatomy(model), Axis("tp", tp, rank), sequence=False)

        assert sum(found.parameters.values()) == sum(p.numel() for p in model.parameters())
        assert found.bytes.gradients == sum(2 * p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.ci
@pytest.mark.parametrize("family", cases(["llama", "gpt2", "gemma2"], test=["llama", "gpt2"]))  # 2 are tied
@pytest.mark.parametrize(
    "text", cases(["pp2-1f1b", "pp2-interleaved1f1b-v2", "pp2-zbv", "pp4-gpipe"], test=["pp2-zbv"])
)
def test_stages_hold_the_whole_model_and_a_tied_embedding_twice(family, text):
    layout = Layout.parse(text)
    model = census(
        FAMILIES[family](**{"n_layer" if family == "gpt2" else "num_hidden_layers": 4}, **LAYERS[family])
    )
    shares = [share(model, layout, rank) for rank in range(layout.world)]

    held = sum(sum(each.parameters.values()) for each in shares)
    assert held == model.total + model.tied * model.vocabulary * model.hidden
    assert sorted(n for each in shares for blocks in each.blocks for n in blocks) == [0, 1, 2, 3]
    assert [each.embedding for each in shares] == [True] + [False] * (layout.pp - 1)
    assert [each.head for each in shares].index(True) == (0 if text == "pp2-zbv" else layout.pp - 1)


LAYERS = {"llama": {}, "gpt2": {}, "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2}}


@pytest.mark.parametrize(
    "text", cases(["mb1-ga4", "dp2-ga4", "zero1x2-ga4", "zero2x2-ga4", "zero3x2-ga4"], ci=["zero1x2-ga4"])
)
def test_real_ranks_keep_exactly_the_bytes_of_their_shares(text):
    layout = Layout.parse(text)
    model = census(zero_memory.config())

    measured = run_ranks(layout.world, zero_memory.measure, text, "bf16")

    assert measured == [share(model, layout, rank).bytes for rank in range(layout.world)]


@pytest.mark.parametrize(
    ("text", "expected"),
    cases(
        [
            ("mb1-ga4", {}),
            ("dp2-ga4", {"all_reduce": 5}),
            ("zero1x2-ga4", {"all_gather": 6, "reduce_scatter": 6}),
            ("zero2x2-ga4", {"all_gather": 6, "reduce_scatter": 24}),
            ("zero3x2-ga4", {"all_gather": 4 * (2 * 4 + 2), "reduce_scatter": 24}),
            ("dp2-zero3x2-ga4", {"all_gather": 40, "reduce_scatter": 24, "all_reduce": 6}),
            ("zero1x2-pp2-1f1b-ga4", {"all_gather": 3, "reduce_scatter": 3, "send": 4}),
            ("zero3x2-pp2-1f1b-ga4", {"all_gather": 4 * (2 * 2 + 1), "reduce_scatter": 12, "send": 4}),
            ("dp2-cp2-full-ga2", {"all_reduce": 5, "all_gather": 2 * 8, "reduce_scatter": 2 * 4}),
            ("dp2-cp2-full3-ga2", {"all_reduce": 5, "all_gather": 2 * (4 + 3), "reduce_scatter": 2 * 4}),
            ("dp2-ulysses2-attention-ga2", {"all_reduce": 5, "all_to_all": 2 * 4 * 11}),
            ("dp2-ulysses2-full1-ga2", {"all_reduce": 5, "all_to_all": 2 * (4 * 8 + 4)}),
            ("tp2-sp-full1-ga4", {"all_gather": 4 * (18 + 2), "reduce_scatter": 4 * (18 + 1)}),
            ("tp2-pp2-1f1b-full1-ga4", {"all_reduce": 4 * (2 * 4 + 1 + 1), "send": 4}),
            ("tp2-ga4", {"all_reduce": 4 * 18}),
            ("tp2-sp-ga4", {"all_gather": 4 * 18, "reduce_scatter": 4 * 18}),
            ("tp2-sp-regather-ga4", {"all_gather": 4 * (18 + 8), "reduce_scatter": 4 * 18}),
        ],
        test=6,
        ci=4,
    ),
)
def test_messages_are_those_that_were_counted(text, expected):
    """Four blocks; the counts of engine runs, whatever the axis."""
    found = share(census(zero_memory.config()), Layout.parse(text), 0).collectives

    assert {each.op: each.count for each in found} == expected


def a_pass(family, text):
    layout = Layout.parse(text)
    config = (FAMILIES | SPARSE)[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    parts, ids = anatomy(model), torch.arange(32)[None]
    tp = join(layout, torch.device("cpu")).tp
    split_model(model, parts, tp, sequence=layout.sp, regather=layout.sp_regather)
    recompute_blocks(model, parts, layout.recompute, range(2)[: layout.recompute_blocks])
    with Collectives() as collectives:
        body = model.get_submodule(parts.body)
        out = body(input_ids=ids, position_ids=ids, documents=((32,),), use_cache=False)
        out.last_hidden_state.square().mean().backward()
    return collectives.count


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama", "tp2-full"),
        ("llama", "tp2-sp-full1"),
        ("phi3", "tp2-sp-selective"),
        ("phi3", "tp2-linear1"),
        ("llama", "tp2-sp-regather"),
        ("deepseek_v3", "tp2-full"),
        ("deepseek_v3", "tp2-sp-selective"),
        ("qwen2_moe", "tp2-sp-full"),
        ("mixtral", "tp2-full1"),
        ("mixtral", "tp2-sp-regather"),
    ],
)
def test_tensor_parallel_messages_are_those_of_a_real_pass(family, text):
    counted = run_ranks(2, a_pass, family, text)[0]
    expected = Counter()
    for message in share(census((FAMILIES | SPARSE)[family]()), Layout.parse(text), 0).collectives:
        expected[OPERATIONS[message.op]] += message.count * (message.what != "gradients")

    assert counted == expected


OPERATIONS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather_base",
    "reduce_scatter": "reduce_scatter_base",
}


@pytest.mark.ci
@pytest.mark.parametrize("cp", ["ulysses2", "cp2"])
def test_tensor_parallel_halves_the_heads_that_context_ranks_exchange(cp):
    config = zero_memory.config()
    config.num_attention_heads = config.num_key_value_heads = 8
    model = census(config)

    def exchanged(text):
        collectives = share(model, Layout.parse(text), 0).collectives
        return sum(each.bytes for each in collectives if each.axis == "cp")

    assert exchanged(f"{cp}-ga2") == 2 * exchanged(f"tp2-sp-{cp}-ga2") > 0


def test_ranks_that_compute_all_heads_exchange_all_of_them_with_context_ranks():
    model = census(FAMILIES["olmo2"]())

    def exchanged(text):
        collectives = share(model, Layout.parse(text), 0).collectives
        return sum(each.bytes for each in collectives if each.axis == "cp")

    assert exchanged("ulysses2-ga2") == exchanged("tp2-sp-ulysses2-ga2") > 0
    assert exchanged("cp2-ga2") == exchanged("tp2-sp-cp2-ga2") > 0


def test_message_bytes_are_of_whole_tensors():
    model = census(zero_memory.config())
    gather, scatter = share(model, Layout.parse("zero3x2-mb2-ga4"), 0).collectives
    (reduce,) = share(model, Layout.parse("tp2-mb2-ga4"), 0, seq_len=32).collectives

    ends = 2 * model.vocabulary * model.hidden  # embedding and head are gathered once a micro-batch
    assert gather.bytes == 2 * 4 * (2 * model.total - ends)  # bf16
    assert scatter.bytes == 4 * 4 * model.total  # summed in fp32
    assert reduce.bytes == reduce.count * 2 * 32 * 64 * 2


def test_lora_shards_what_is_frozen_and_sums_only_adapters():
    config = FAMILIES["llama"]()
    adapted = census(
        config, frozen=[name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()],
        adapters={f"model.layers.{n}.self_attn.q_proj": 2 for n in range(2)},
    )  # fmt: skip
    found = share(adapted, Layout.parse("zero3x2-ga2"), 0)

    adapters = 2 * 2 * (64 + 64)
    assert found.bytes.weights == (2 * (adapted.total - adapters) + 4 * adapters) // 2
    assert found.bytes.optimizer == 8 * adapters // 2
    assert [message.count for message in found.collectives] == [2 * 2 * 3, 2 * 2]
    assert math.isclose(found.collectives[1].bytes, 2 * 4 * adapters)
