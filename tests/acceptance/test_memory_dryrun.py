"""The planner's memory against dry runs: small layouts, then a quarter of the small cases of
validation/memory_dryrun.py, another one each week, and a large one; `make validation-memory` has them all.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from transformers import (
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    JetMoeConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen3MoeConfig,
    XGLMConfig,
)

from meshtune.dryrun.world import Job
from meshtune.layout import Layout
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import memory_dryrun
from memory_cases import CATEGORIES_BEYOND, LARGE, SMALL
from memory_rows import Row, compare

TINY = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip

WHOLE_BLOCKS = LlamaConfig(**TINY.to_dict() | {"intermediate_size": 768})  # of 64, under tp2

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def job_of(layout: str, source: PretrainedConfig = TINY, seq_len: int = 512, **spec: Any) -> Job:
    """A step of full sequences with random weights. spec: fields of ModelSpec."""
    return Job(
        spec=ModelSpec(source=source, init="random", **spec), optimizer=OptimizerSpec(),
        layout=Layout.parse(layout), seq_len=seq_len, documents=(seq_len,),
    )  # fmt: skip


def check(name: str, job: Job, kind: str, phase: str = "", *, categories: bool = False) -> None:
    """Assert that each phase's peak is within the limit; the message names the categories that are off.

    phase: this one alone. categories: each of them is within the limit too.
    """
    rows = compare(name, job, memory_dryrun.simulate(job))
    rows = [row for row in rows if phase in ("", row.phase)]
    assert rows
    limit = memory_dryrun.LIMITS[kind]
    for row in rows:
        off = row.rank, row.phase, f"{row.error:+.1%}", row.terms
        assert abs(row.error) <= limit, off
        assert not categories or abs(next(iter(row.terms.values()))) <= limit, off


def assert_peaks_are_alike(rows: list[Row]) -> None:
    """Assert that the fullest phase's peak is planned within 1 %."""
    planned, simulated = (max(getattr(row, name) for row in rows) for name in ("predicted_bytes", "bytes"))
    assert planned == pytest.approx(simulated, rel=0.01)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        ("zero3x2-mb2-ga2", "cpu"),
        ("tp2-sp-mb2-ga1", "cpu"),
        pytest.param("cp4-mb4-ga1", "cuda", marks=pytest.mark.all),
    ],
)
def test_a_step_holds_what_is_planned(layout: str, kernels: str) -> None:
    check(layout, job_of(layout, kernels=kernels), "small")


@pytest.mark.parametrize(
    ("layout", "precision"),
    cases(
        [("mb2-ga1", "bf16"), ("mb2-ga1-full", "bf16"), ("dp2-mb1-ga1-full", "bf16"), ("mb2-ga1", "fp32"),
         ("tp2-sp-mb1-ga1", "bf16"), ("zero3x2-mb1-ga1-full", "bf16"), ("zero1x2-mb1-ga1", "bf16")], ci=1,
    ),
)  # fmt: skip
def test_updates_inside_the_backward_hold_what_is_planned(layout: str, precision: str) -> None:
    job = replace(job_of(layout, precision=precision), optimizer=OptimizerSpec(in_backward=True))
    check(layout, job, "small")


@pytest.mark.parametrize(
    ("layout", "precision", "chosen"),
    cases(
        [("mb2-ga2", "fp32", {}), ("mb2-ga1", "bf16", {"in_backward": True}), ("tp2-sp-mb2-ga1", "bf16", {}),
         ("zero3x2-mb2-ga1", "bf16", {}), ("dp2-mb2-ga1", "bf16", {"in_backward": True}),
         ("zero1x2-mb2-ga1", "bf16", {"in_backward": True}), ("pp2-1f1b-mb1-ga2", "bf16", {})],
        ci=2,
    ),
)  # fmt: skip
def test_states_in_host_memory_are_planned(layout: str, precision: str, chosen: dict[str, Any]) -> None:
    job = replace(job_of(layout, precision=precision), optimizer=OptimizerSpec(offload=True, **chosen))
    held, planned = memory_dryrun.simulate(job), memory_dryrun.planned(job)
    for row in compare(layout, job, held):
        assert abs(row.error) <= memory_dryrun.LIMITS["small"], (row.phase, f"{row.error:+.1%}", row.terms)
    for rank, of_host in zip(held, planned.host, strict=True):
        host, out, back = rank["host"]
        assert host == pytest.approx(of_host, rel=0.01)
        assert host == pytest.approx(out, rel=0.01) == back


@pytest.mark.parametrize(
    ("family", "layout"),
    cases(
        [*product(["llama", "gemma2"], ["mb2-ga1", "mb2-ga1-selective"])],
        ci=[("gemma2", "mb2-ga1-selective")],
    ),
)
def test_compiled_blocks_hold_what_is_planned(family: str, layout: str) -> None:
    shape = {name: getattr(TINY, name) for name in (*SHAPE, "num_key_value_heads")}
    source = TINY if family == "llama" else Gemma2Config(**shape, head_dim=32, attn_logit_softcapping=None)
    job = job_of(layout, source, kernels="cuda", compile=True)
    assert_peaks_are_alike(compare(family, job, memory_dryrun.simulate(job)))


@pytest.mark.parametrize(
    ("axes", "recompute", "compiled"),
    cases(
        [*product(["tp2", "tp2-sp"], ["full", "selective"], [False, True])],
        ci=[("tp2", "full", False), ("tp2-sp", "selective", True)],
    ),
)
def test_a_blocks_backward_under_tp_holds_what_is_planned(axes: str, recompute: str, compiled: bool) -> None:
    layout, source = f"{axes}-mb2-ga1-{recompute}", LlamaConfig(**TINY.to_dict() | {"vocab_size": 512})
    job = job_of(layout, source, 2048, kernels="cuda", compile=compiled)
    assert_peaks_are_alike(compare(layout, job, memory_dryrun.simulate(job)))


OFFLOADED = {  # layout -> inputs that leave the GPU for each micro-batch of the first and the last rank
    "mb4-ga2-offload": [7], "zero3x2-mb4-ga2-offload5": [4], "tp2-sp-mb4-ga1-offload": [7],
    "pp2-1f1b-mb2-ga4-offload": [3, 2], "pp2-gpipe-mb2-ga4-offload": [3, 2], "cp2-mb4-ga2-offload": [7],
}  # fmt: skip


@pytest.mark.parametrize("layout", cases(OFFLOADED, ci=["mb4-ga2-offload", "pp2-1f1b-mb2-ga4-offload"]))
def test_offloaded_inputs_are_in_host_memory(layout: str) -> None:
    job = job_of(layout, LlamaConfig(**TINY.to_dict() | {"num_hidden_layers": 8}), 1024, kernels="cuda")
    held = memory_dryrun.simulate(job)
    for row in compare(layout, job, held):
        assert abs(row.error) <= memory_dryrun.LIMITS["small"], (row.rank, row.phase, f"{row.error:+.1%}")
    chosen = job.layout
    hidden = 1024 // chosen.cp // (chosen.tp if chosen.sp else 1) * chosen.micro_batch_size * 256 * 2
    for rank, moved, planned in zip(held, OFFLOADED[layout], memory_dryrun.planned(job).host, strict=True):
        host, out, back = rank["host"]
        assert out == back == moved * hidden * chosen.gradient_accumulation_steps
        assert host == pytest.approx(planned, rel=0.02)
        assert host % (moved * hidden) == 0 < planned


SETTINGS: dict[str, dict[str, Any]] = {  # what changes what is kept for the backward, or what is trained
    "lora.dropout": {"lora": LoraSpec(r=8, dropout=0.05)},
    "of some layers": {"lora": LoraSpec(r=8, dropout=0.05, target_modules=("q_proj", "v_proj"))},
    "lora.use_dora": {"lora": LoraSpec(r=8, use_dora=True, dropout=0.05)},
    "lora.use_rslora": {"lora": LoraSpec(r=8, use_rslora=True)},
    "lora.modules_to_save": {"lora": LoraSpec(r=8, modules_to_save=("embed_tokens", "lm_head"))},
    "lora.layers_to_transform": {"lora": LoraSpec(r=8, layers_to_transform=(2, 3))},
    "method=qlora": {"lora": LoraSpec(r=8), "quantise": "bfloat16"},
    "data.chat_template": {"lora": LoraSpec(r=8), "embeddings": 2080},
    "model.freeze": {"freeze": ("model.embed_tokens*", "*mlp*")},
    "train.neftune_alpha": {"neftune_alpha": 5.0},
    "train.label_smoothing": {"label_smoothing": 0.1},
    "data.packing=false": {},
}


PADDED = {"data.packing=false": (1000,)}  # documents of each sequence, of 1024 tokens; others are full


@pytest.mark.parametrize(
    ("setting", "layout"),
    cases(
        [*product(SETTINGS, ["zero3x2-mb2-ga1-full", "tp2-sp-mb2-ga1", "mb2-ga2"])],
        ci=[("method=qlora", "zero3x2-mb2-ga1-full"), ("lora.use_dora", "tp2-sp-mb2-ga1")],
    ),
)
def test_a_setting_is_in_the_plan(setting: str, layout: str) -> None:
    job = job_of(layout, WHOLE_BLOCKS, seq_len=1024, kernels="cuda", **SETTINGS[setting])
    job = replace(job, documents=PADDED.get(setting, job.documents))
    assert_peaks_are_alike(compare(setting, job, memory_dryrun.simulate(job)))


@pytest.mark.all
def test_a_block_s_gradients_come_while_its_activations_go() -> None:
    """Gradients of weights are most where tokens are few: all of them are there at the end alone."""
    small = LlamaConfig(**TINY.to_dict() | {"num_hidden_layers": 2})
    check("two blocks", job_of("zero3x8-mb1-ga1-full", small), "small", "backward", categories=True)


@pytest.mark.all
def test_a_tied_head_s_gradient_stays_until_the_embedding_s() -> None:
    tied = LlamaConfig(**TINY.to_dict() | {"vocab_size": 32000, "tie_word_embeddings": True})
    check("tied", job_of("zero3x8-mb1-ga1-full", tied), "small")


@pytest.mark.parametrize("mode", cases(["", "-attention"]))
def test_ranks_that_compute_all_heads_hold_what_is_planned(mode: str) -> None:
    """OLMo 2 gathers queries, keys and values, whose norms go over all heads."""
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {name: getattr(TINY, name) for name in SHAPE} | {"num_key_value_heads": 2} | ends
    check(f"olmo2{mode}", job_of(f"tp4-sp-mb4-ga1{mode}", Olmo2Config(**shape)), "small")


@pytest.mark.all
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [LlamaConfig, CohereConfig, Gemma2Config])
def test_heads_hold_what_is_planned(family: type[PretrainedConfig], precision: str) -> None:
    """The gradient of the matrix's output is another tensor than the logits' where those are scaled (Cohere)
    or capped (Gemma 2).
    """
    shape = {name: getattr(TINY, name) for name in SHAPE} | {"num_key_value_heads": 4, "head_dim": 32}
    wide = {"vocab_size": 16000, "num_hidden_layers": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    job = job_of("mb2-ga1", family(**shape | wide), precision=precision)
    check(f"{family.__name__} {precision}", job, "small", "forward")


ENDS = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OWN_ATTENTION = {
    "bloom": ("eager", BloomConfig(hidden_size=256, n_layer=4, n_head=8, **ENDS)),
    "falcon": ("sdpa", FalconConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, **ENDS)),
    "xglm": (
        "eager",
        XGLMConfig(
            d_model=256, num_layers=4, attention_heads=8, ffn_dim=1024, dropout=0.0, attention_dropout=0.0,
            max_position_embeddings=512, **ENDS,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "family"),
    cases(
        [
            *((layout, "bloom") for layout in ("mb1-ga2", "mb4-ga1-full", "zero3x2-mb4-ga1")),
            *((layout, family) for layout in ("mb4-ga1", "zero3x2-mb4-ga1-full") for family in OWN_ATTENTION),
        ],
        ci=1,
    ),
)
def test_attention_that_writes_its_scores_holds_what_is_planned(family: str, layout: str) -> None:
    attention, config = OWN_ATTENTION[family]
    check(family, job_of(layout, config, attention=attention), "small")


EXPERTS = {
    "mixtral": MixtralConfig(
        **{name: getattr(TINY, name) for name in SHAPE}, num_key_value_heads=4, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **{name: getattr(TINY, name) for name in SHAPE}, num_key_value_heads=4, head_dim=32, num_experts=8,
        moe_intermediate_size=256, num_experts_per_tok=2,
    ),
    "deepseek-v3": DeepseekV3Config(
        **{name: getattr(TINY, name) for name in SHAPE}, num_key_value_heads=8, q_lora_rank=96,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8,
        moe_intermediate_size=128, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    "jetmoe": JetMoeConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_key_value_heads=4, kv_channels=32,
        intermediate_size=512, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
    ),
}  # fmt: skip


ROUTED_BEYOND = {("jetmoe", "mb1-ga2-full", "bf16")}
ROUTED = [
    ("mixtral", "mb4-ga1", "bf16"), ("mixtral", "zero3x2-mb4-ga1-full", "fp32"),
    ("qwen3-moe", "mb4-ga1", "fp32"), ("qwen3-moe", "mb4-ga1-full", "bf16"),
    ("qwen3-moe", "zero3x2-mb4-ga1", "bf16"), ("qwen3-moe", "tp2-sp-mb4-ga1", "bf16"),
    ("qwen3-moe", "mb4-ga1-selective", "bf16"), ("qwen3-moe", "tp2-mb4-ga1", "bf16"),
    ("qwen3-moe", "dp2-ep2-mb1-ga1", "bf16"), ("qwen3-moe", "zero3x2-ep2-mb2-ga2-full", "bf16"),
    ("deepseek-v3", "mb2-ga2", "fp32"), ("deepseek-v3", "tp2-mb2-ga2", "bf16"),
    ("qwen3-moe", "tp2-sp-ep2-mb1-ga1", "bf16"), ("jetmoe", "mb4-ga1", "bf16"),
    ("jetmoe", "zero3x2-mb4-ga1-full", "bf16"), ("jetmoe", "zero3x2-mb4-ga1-full", "fp32"), *ROUTED_BEYOND,
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    cases(
        [
            pytest.param(*case, marks=pytest.mark.xfail(strict=True, reason="see TODO.md, The dry run"))
            if case in ROUTED_BEYOND
            else case
            for case in ROUTED
        ],
        ci=1,
    ),
)
def test_experts_hold_what_is_planned(family: str, layout: str, precision: str) -> None:
    """Rows of tokens' experts are as many as tokens times experts a token, however they are routed."""
    check(family, job_of(layout, EXPERTS[family], precision=precision), "small")


COPIES = ["tp4-sp-ep2-mb1-ga1", "tp4-sp-ep2-mb1-ga2", "dp2-mb1-ga1-full", "dp2-mb1-ga2"]


@pytest.mark.parametrize("layout", cases(COPIES, ci=1))
def test_sums_over_copies_of_experts_hold_what_is_planned(layout: str) -> None:
    check(layout, job_of(layout, EXPERTS["qwen3-moe"], 64), "small")


ADAPTED = ["tp2-sp-mb4-ga1", "mb4-ga1-full", "dp4-ep4-mb2-ga1", "zero3x2-ep2-mb2-ga2-full"]


@pytest.mark.parametrize("layout", cases(ADAPTED, ci=1))
def test_adapters_of_experts_hold_what_is_planned(layout: str) -> None:
    lora = LoraSpec(r=8, target_modules=("all-linear", "experts"))
    check("adapters of experts", job_of(layout, EXPERTS["qwen3-moe"], lora=lora), "small")


@pytest.mark.ci
def test_a_wrong_formula_is_named() -> None:
    job = job_of("mb1-ga1")
    held = memory_dryrun.simulate(job)
    for step in held[0]["steps"]:
        step["parts"]["logits"] = 2 * step["parts"].get("logits", 0)
    forward = compare("mb1-ga1", job, held)[0]
    assert abs(forward.error) > memory_dryrun.LIMITS["small"]
    assert next(iter(forward.terms)) == "logits" and "logits" in memory_dryrun.worst_term(forward)


@pytest.mark.parametrize("name", cases([*SMALL][::4], ci=1))
def test_random_steps_hold_what_is_planned(name: str) -> None:
    check(name, SMALL[name], "small", categories=name not in CATEGORIES_BEYOND)


@pytest.mark.all
def test_a_large_model_holds_what_is_planned() -> None:
    name = "llama-3.1-8b zero3x4-tp2-sp-mb2-ga2"
    check(name, LARGE[name], "large", categories=True)


def test_the_cases_are_many_and_every_technique_is_among_them() -> None:
    assert len(SMALL) >= 50
    layouts = [job.layout for job in SMALL.values()]
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {"none", "attention", "selective", "full"} == {layout.recompute for layout in layouts}
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        assert any(getattr(layout, axis) > 1 for layout in layouts)
    assert any(layout.recompute_blocks for layout in layouts) and any(job.spec.lora for job in SMALL.values())
    assert all(job.layout.world <= 8 for job in SMALL.values())
    names = " ".join(LARGE)
    for model in ("8b", "70b", "405b", "qwen3-32b", "gemma-2-27b", "olmo-2-32b"):
        assert model in names
