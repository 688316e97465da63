"""Compare what the planner counts with what the engine does: closed forms with the engine's own arithmetic,
which the engine's tests hold to what real ranks have.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import cases
from families import FAMILIES
from transformers import AutoModelForCausalLM, OPTConfig

from meshtune.errors import UserError
from meshtune.layout import CP_METHODS, RECOMPUTE, SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.model.lora import add_lora
from meshtune.model.trace import census_of
from meshtune.placement.census import Census, step_flops
from meshtune.placement.columns import Columns, layout_at
from meshtune.placement.ranks import rank_at
from meshtune.placement.rules import Traits
from meshtune.placement.share import census_stages, share, stage_of_rank
from meshtune.placement.states import held_states
from meshtune.plan.accounting import Accounting, accounting_of, engine_accounting
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.states import Step, rank_elements, weight_elements
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.search import stages_of
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

CPU = cluster_of(ClusterConfig(gpu="cpu", memory_gib=128, gpus_per_node=2), gpus=64)
SEQ_LEN = 64
PLAIN = Traits("Plain", blocks=12, heads=8, kv_heads=2, vocabulary=256)

# a model, as config and method make it #

CHANGES = {
    "opt": lambda **changes: OPTConfig(
        hidden_size=64, num_attention_heads=4, vocab_size=256, ffn_dim=96, word_embed_proj_dim=64,
        dropout=0.0, max_position_embeddings=64, **changes,
    ),
}  # fmt: skip
ALTERNATING = ("gemma2", "gemma3")  # windows in every other block


def config_of(family: str, blocks: int):
    changes: dict = {"n_layer" if family == "gpt2" else "num_hidden_layers": blocks}
    if family in ALTERNATING:
        changes["layer_types"] = (["sliding_attention", "full_attention"] * blocks)[:blocks]
    return (FAMILIES | CHANGES)[family](**changes)


@cache
def census_for(family: str, blocks: int = 2, method: str = "full", tied: bool | None = None) -> Census:
    """method: full, lora, or what is frozen: embedding."""
    config = config_of(family, blocks)
    if tied is not None:
        config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config)
    if method == "lora":
        add_lora(model, lora_rank=3, alpha=6)
    elif method == "embedding":
        model.get_input_embeddings().requires_grad_(False)
    return census_of(model)


def workload_for(
    census: Census, precision: str = "bf16", seq_len: int = SEQ_LEN, optimizer: str = "adamw"
) -> Workload:
    return Workload(
        model=census.family, work=Work.of(census), traits=replace(PLAIN, blocks=len(census.blocks)),
        seq_len=seq_len, global_batch_size=64, precision=precision,
        optimizer=optimizer,
    )  # fmt: skip


# states #

DATA = [
    "mb1-ga1", "mb1-ga3", "dp2-mb1-ga1", "dp2-mb2-ga4", "cp2-mb1-ga1", "ulysses2-dp2-mb1-ga2",
    "zero1x2-mb1-ga1", "zero1x4-mb1-ga3", "dp2-zero1x3-cp2-mb1-ga1", "zero2x2-mb1-ga1", "zero2x5-mb1-ga2",
    "zero3x2-mb1-ga1", "zero3x7-mb1-ga4", "dp2-zero3x2-mb1-ga1", "zero3x2-cp3-mb1-ga2",
    "dp3-zero2x2-cp2-mb1-ga1", "zero3x64-mb1-ga1",
]  # fmt: skip
TENSOR = [
    "tp2-mb1-ga1", "tp2-sp-mb1-ga4", "tp4-sp-mb1-ga1", "dp2-tp2-mb1-ga2", "zero1x2-tp4-sp-mb1-ga1",
    "zero3x2-tp2-sp-mb1-ga1", "dp2-zero3x3-cp2-tp4-mb1-ga2",
]  # fmt: skip
PIPELINE = [
    "pp2-1f1b-mb1-ga4", "pp3-gpipe-mb1-ga1", "pp2-interleaved1f1b-v2-mb1-ga4", "pp3-loopedbfs-v2-mb1-ga4",
    "pp2-zb-mb1-ga4", "pp3-zbv-mb1-ga6", "pp2-dualpipev-mb1-ga4", "zero1x2-pp3-1f1b-mb1-ga3",
    "zero3x2-pp2-1f1b-mb1-ga2", "dp2-pp2-1f1b-mb1-ga2", "dp2-zero2x2-cp2-tp2-sp-pp2-1f1b-mb1-ga4",
    "tp4-pp7-1f1b-mb1-ga8",
]  # fmt: skip
STATES = ("weights", "gradients", "optimizer", "gathered")


def held(workload: Workload, layouts: Sequence[Layout]) -> dict[str, np.ndarray]:
    """The states at the end of a step's passes, [first, middle and last pipeline rank, layouts]."""
    c = Columns.of(layouts)
    a = accounting_of(workload, CPU)
    found = planned_states(workload, c, a, stages_of(workload, c))
    return {name: np.broadcast_to(found[name], (3, len(layouts))) for name in STATES}


def planned_states(workload: Workload, c: Columns, a: Accounting, stages: Stages) -> dict[str, np.ndarray]:
    """Bytes of the states around the end of a step's passes, by name, and of weights gathered for the step.

    ZeRO-1's sums over micro-batches are there before the update, beside the last block's gradients; the
    shards of others when it begins.
    """
    events = Liveness(Step(workload.work, c, a, workload.seq_len, stages)).timeline()
    before, update = events["end of backward"], events["update"]
    summed = (c.zero == 1) & (c.gradient_accumulation_steps > 1)
    sums = held_states(a.precision, rank_elements(workload.work, c, stages).total, c).gradients
    assert np.all((before["gradients"] >= sums - 1e-3) | ~summed)
    return {
        "weights": update["weights"], "optimizer": update["optimizer"],
        "gradients": np.where(summed, sums, update["gradients"]),
        "gathered": np.where(c.zero < 3, events["loss"]["gathered_weights"], 0.0),
    }  # fmt: skip


def shared(workload: Workload, census: Census, layout: Layout, pipeline_rank: int) -> dict[str, int]:
    place = {"pp": pipeline_rank, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}
    found = share(
        census, layout, rank_at(layout, place), precision=workload.precision, seq_len=workload.seq_len,
        optimizer=workload.optimizer,
    ).bytes  # fmt: skip
    return {
        "weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer,
        "gathered": found.gathered,
    }  # fmt: skip


# All in CI; by default those that differ most in how they are cut.
MOST_UNLIKE = ("llama", "phi3", "gpt2")
EACH = cases([*FAMILIES, *CHANGES], test=MOST_UNLIKE)
METHODS = cases(["full", "lora", "embedding"], test=["full", "lora"])


@pytest.mark.parametrize("method", cases(["full", "lora", "embedding"], test=1, ci=2))
@pytest.mark.parametrize("family", EACH)
def test_states_are_the_shares_to_the_byte(family: str, method: str) -> None:
    census = census_for(family, 2, method)
    for precision in ("fp32", "bf16", "bf16-pure"):
        workload = workload_for(census, precision)
        layouts = [Layout.parse(text) for text in (*DATA, *TENSOR)]
        found = held(workload, layouts)
        for place, layout in enumerate(layouts):
            planned = {name: value[0, place] for name, value in found.items()}
            expected = shared(workload, census, layout, 0)
            assert planned == pytest.approx(expected, abs=1e-3), (precision, layout)


@pytest.mark.parametrize(
    ("family", "method"),
    cases(
        [(family, method) for family in MOST_UNLIKE for method in ("full", "lora")],
        ci=[("llama", "full"), ("gpt2", "lora")],
    ),
)
def test_the_states_of_muon_are_the_shares_to_the_byte(family: str, method: str) -> None:
    census = census_for(family, 7, method)
    texts = ["mb1-ga1", "dp2-mb2-ga4", "cp2-mb1-ga1", "pp2-1f1b-mb1-ga4", "pp2-dualpipev-mb1-ga4"]
    for precision in ("fp32", "bf16", "bf16-pure"):
        workload = workload_for(census, precision, optimizer="muon")
        assert_ends_hold_their_shares(workload, census, texts)


def assert_ends_hold_their_shares(workload: Workload, census: Census, texts: Sequence[str]) -> None:
    """Compare planned states of the first and last stage with those of their ranks. texts: layouts."""
    layouts = [Layout.parse(text) for text in texts]
    found = held(workload, layouts)
    for place, layout in enumerate(layouts):
        for index, rank in ((0, 0), (2, layout.pp - 1)):
            planned = {name: value[index, place] for name, value in found.items()}
            expected = shared(workload, census, layout, rank)
            assert planned == pytest.approx(expected, abs=1e-3), (workload.precision, layout, rank)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_gathered_weights_are_the_shares(family: str) -> None:
    """Apart from the others, which hold them together with the weights."""
    census = census_for(family)
    work = Work.of(census)
    weights = (
        *(replace(w, count=w.count * work.blocks) for w in work.block_weights),
        *work.first_weights,
        *work.last_weights,
    )
    for precision in ("fp32", "bf16", "bf16-pure"):
        for text in (*DATA, *TENSOR):
            layout = Layout.parse(text)
            c = Columns.of([layout])
            planned = held_states(engine_accounting(precision).precision, weight_elements(weights, c), c)
            expected = share(census, layout, 0, precision=precision).bytes
            for name in expected._fields:
                value = np.broadcast_to(getattr(planned, name), 1)[0]
                assert value == pytest.approx(getattr(expected, name), abs=1e-3), (precision, text, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", cases(["llama", "phi3", "olmo2", "gpt2", "opt"], ci=["llama", "gpt2"]))
def test_states_of_the_pipelines_ends_are_the_shares(family: str, method: str, tied: bool) -> None:
    census = census_for(family, 7, method, tied)
    for precision in ("fp32", "bf16"):
        workload = workload_for(census, precision)
        assert_ends_hold_their_shares(workload, census, PIPELINE)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_states_of_all_ranks_are_the_shares_in_sum(family: str) -> None:
    """Blocks alternate: the planner's average is no rank's, but the sum over all ranks is the same."""
    model = AutoModelForCausalLM.from_config(config_of(family, 6))
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0 or model.config.tie_word_embeddings)
    census = census_of(model)
    workload = workload_for(census)
    for text in ("pp3-1f1b-mb1-ga3", "pp2-interleaved1f1b-v3-mb1-ga2", "zero3x2-pp3-1f1b-mb1-ga3"):
        layout = Layout.parse(text)
        every = [shared(workload, census, layout, rank) for rank in range(layout.pp)]
        found = whole_pipeline(workload, census, layout)
        assert found == pytest.approx({name: sum(each[name] for each in every) for name in STATES}), text


def whole_pipeline(workload: Workload, census: Census, layout: Layout) -> dict[str, float]:
    """The planner's states of every pipeline rank together, with the engine's stages."""
    stages = census_stages(census, layout, workload.seq_len)
    total: dict[str, float] = dict.fromkeys(STATES, 0.0)
    c = Columns.of([layout])
    for rank in range(layout.pp):
        own = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
        sizes = [len(stages[stage]) for stage in own]
        ends = (0 in own, len(stages) - 1 in own)
        one = Stages(*(np.full((1, 1), x) for x in (sum(sizes), *ends, rank)))
        a = accounting_of(workload, CPU)
        found = planned_states(workload, c, a, one)
        for name in STATES:
            total[name] += float(np.broadcast_to(found[name], (1, 1))[0, 0])
    return total


# stages #


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family", cases(["llama", "qwen3", "phi3", "gpt2", "gemma2"], ci=["llama", "gemma2"])
)
def test_every_pipeline_rank_has_the_blocks_that_the_engine_gives_it(family: str, method: str) -> None:
    """Gemma2's two kinds of blocks cost nearly the same; where a window is short, they would not."""
    census = census_for(family, 7, method)
    workload = workload_for(census)
    texts = ["pp2-1f1b-mb1-ga8", "pp3-1f1b-mb1-ga8", "pp4-1f1b-mb1-ga8", "pp2-zbv-mb1-ga8",
             "pp2-interleaved1f1b-v2-mb1-ga8"]  # fmt: skip
    for layout in map(Layout.parse, texts):
        stages = census_stages(census, layout, SEQ_LEN)
        found = stages_of(workload, Columns.of([layout])).blocks[:, 0]
        for index, rank in ((0, 0), (2, layout.pp - 1)):
            own = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
            assert found[index] == sum(len(stages[stage]) for stage in own), layout


# layouts #


def random_layout(draw: random.Random) -> Layout:
    """Any layout that does not contradict itself, whatever a model says to it."""

    def one(*values: Any) -> Any:
        return draw.choice(values)

    while True:
        zero, pp = one(0, 0, 1, 2, 3), one(1, 1, 2, 3, 4, 8)
        tp, cp = one(1, 1, 2, 3, 4, 8, 16), one(1, 1, 2, 3, 4, 8)
        schedule = one(*SCHEDULES) if pp > 1 else "1f1b"
        try:
            return Layout(
                dp_replicate=one(1, 2, 3), dp_shard=one(2, 3, 8) if zero else 1, zero=zero, cp=cp,
                cp_method=one(*CP_METHODS) if cp > 1 else "allgather", tp=tp,
                sp=tp > 1 and one(False, True), pp=pp, schedule=schedule,
                virtual_stages=one(1, 2, 3) if schedule in VIRTUAL_SCHEDULES else 1,
                micro_batch_size=one(1, 2, 6), gradient_accumulation_steps=one(*range(1, 14)),
                recompute=one(*RECOMPUTE), recompute_blocks=one(None, None, 1, 8),
            )  # fmt: skip
        except UserError:
            continue


LAYOUTS = [random_layout(random.Random(seed)) for seed in range(1500)]


def test_columns_give_their_layouts_back() -> None:
    c = Columns.of(LAYOUTS)
    assert [layout_at(c, place) for place in range(len(LAYOUTS))] == LAYOUTS
    assert np.array_equal(c.world, [layout.world for layout in LAYOUTS])
    assert np.array_equal(c.global_batch_size, [layout.global_batch_size for layout in LAYOUTS])


# work #


@pytest.mark.parametrize("method", cases(["full", "lora", "embedding"], ci=2))
@pytest.mark.parametrize("family", EACH)
def test_parameters_and_flops_are_the_censuss(family: str, method: str) -> None:
    census = census_for(family, 2, method)
    work = Work.of(census)
    workload = workload_for(census)
    flops = step_flops(census, [SEQ_LEN], SEQ_LEN)

    assert work.parameters == pytest.approx(census.total, abs=1e-3)
    assert work.trainable == census.trainable / census.total
    assert flops and workload.flops_per_token == pytest.approx(flops.total / SEQ_LEN, rel=1e-12)
    judged = replace(workload, work=replace(workload.work, mismatched=1.0))  # as meter/mfu.py
    assert judged.flops_per_token == pytest.approx((flops.total + flops.forward) / SEQ_LEN, rel=1e-12)
