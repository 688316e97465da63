"""QLoRA under the techniques: as on one rank, which test_nf4.py compares with peft."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import cases
from families import FAMILIES, SPARSE
from layouts import Trained, check, make_folder, trained
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from meshtune.rundir import RunDir

ONE = "mb4-ga4"
QLORA = ("method=qlora", "lora.r=4", "lora.alpha=8")
SAVED = "lora.modules_to_save=[embed_tokens, lm_head, model.norm, layers.3.mlp]"
METHODS = {
    "lora": QLORA,
    "dora": (*QLORA, "lora.use_dora=true"),
    "experts": (*QLORA, "lora.target_modules=[all-linear, experts]"),
    "saved": (*QLORA, SAVED),
    "some": (*QLORA, "lora.target_modules=[q_proj, down_proj]", "lora.layers_to_transform=[1, 3]"),
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "initializer_range": 0.05}
MODELS = {
    "llama": FAMILIES["llama"](vocab_size=301, **SIZES | {"intermediate_size": 224}),  # one stays whole
    # biases, a tied embedding; more ranks of tp than key-value heads
    "qwen2": FAMILIES["qwen2"](vocab_size=301, **SIZES | {"hidden_size": 256}),
    "phi3": FAMILIES["phi3"](vocab_size=301, **SIZES),  # fused projections
    "qwen3_moe": SPARSE["qwen3_moe"](vocab_size=301, **SIZES, moe_intermediate_size=64, head_dim=32),
    # [experts, in, out] and biases; two experts, so that four ranks with ep2 cut inside of one
    "gpt_oss": SPARSE["gpt_oss"](
        vocab_size=301,
        **SIZES,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=4 * ["full_attention"],
    ),
}
TABLE = {  # layout -> models and methods
    "dp2": ["llama, lora"],
    "zero1x2-attention": ["llama, dora"],
    "zero2x2-selective": ["qwen2, lora"],
    "zero3x2-selective2": ["phi3, dora"],
    "zero3x2": ["llama, saved"],
    "tp2": ["qwen2, dora"],
    "tp2-sp": ["phi3, lora"],
    "tp2-sp-regather": ["llama, dora"],
    "zero3x4-full2": ["qwen2, lora"],
    "tp4-sp": ["qwen2, dora"],
    "cp2-full": ["llama, some"],
    "ulysses2": ["qwen2, lora"],
    "pp2-1f1b": ["qwen2, dora"],
    "pp2-zbv": ["phi3, lora", "qwen2, lora"],
    "pp2-dualpipev": ["llama, saved"],
    "dp2-pp2-1f1b": ["llama, lora"],
    "cp2-tp2-sp": ["phi3, dora"],
    "zero3x2-tp2-sp-full": ["phi3, lora", "qwen2, dora"],
    "zero3x2-tp2-sp-pp2-1f1b": ["llama, lora"],
    "zero3x2-ep2-full": ["qwen3_moe, experts"],
    "zero3x2-selective": ["qwen3_moe, dora"],
    "tp2-sp-ep2-pp2-zbv": ["qwen3_moe, lora"],
    "zero3x4-ep2": ["gpt_oss, experts"],
}
ROWS = [(recipe, layout) for layout, recipes in TABLE.items() for recipe in recipes]
Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function(recipe, layout, steps=3, before="") -> a run in fp64, made once.

    before: layout of its first two steps; "": the same.
    """
    folder = tmp_path_factory.mktemp("qlora")

    @cache
    def data(model: str) -> Path:
        torch.manual_seed(0)
        (folder / model).mkdir()
        return make_folder(folder / model, AutoModelForCausalLM.from_config(MODELS[model]))

    @cache
    def of(recipe: str, layout: str, steps: int = 3, before: str = "") -> Trained:
        model, method = recipe.split(", ")
        output = folder / f"{model}-{method}-{before}-{layout}-{steps}"
        if before:
            shutil.copytree(of(recipe, before, 2).folder, output)
        words = (*METHODS[method], f"train.max_steps={steps}")
        return trained(data(model), output, layout, "fp64", *words)

    return of


@pytest.mark.parametrize(("recipe", "layout"), cases(ROWS, ci=[("phi3, lora", "zero3x2-tp2-sp-full")]))
def test_a_layout_gives_the_numbers_of_one_rank(recipe: str, layout: str, run: Run) -> None:
    check(run(recipe, layout), run(recipe, ONE), "fp64")


CONTINUES = [  # recipe, layout before, layout after
    ("phi3, dora", "zero3x2-tp2-sp", "dp2-pp2-1f1b"),
    ("qwen2, lora", "pp2-1f1b", "tp4-sp"),
    ("llama, saved", ONE, "zero3x4"),
]


@pytest.mark.parametrize(("recipe", "before", "after"), cases(CONTINUES))
def test_adapters_continue_in_another_layout(recipe: str, before: str, after: str, run: Run) -> None:
    """A checkpoint has no frozen matrix: each start reads and quantises the base."""
    ours = run(recipe, after, 4, before)
    check(ours, run(recipe, ONE, 4), "fp64")
    reader = FileSystemReader(RunDir(ours.folder).checkpoints / "step-4")
    stored = [name for name in reader.read_metadata().state_dict_metadata if name.startswith("model.")]
    trained = ".lora_", "embed_tokens", "lm_head", "model.norm", "layers.3.mlp"  # those of SAVED
    assert stored and all(any(part in name for part in trained) for name in stored)
