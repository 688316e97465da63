"""Experts on several ranks: each layout as on one rank, in fp64, where experts run by a loop."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from families import SPARSE, exact
from layouts import Trained, check, differences, make_folder, trained
from safetensors.torch import load_file
from tiny import write_rows
from torch import nn
from transformers import AutoModelForCausalLM

from meshtune.api.export import exported
from meshtune.rundir import RunDir

ONE = "mb4-ga4"
NEAR = 1e-9  # relative difference in fp64
LORA = ("method=lora", "lora.r=4")
OF_EXPERTS = (*LORA, "lora.target_modules=[all-linear,experts]")
LAYOUTS = """
dp2-ep2 zero1x2-ep2 zero2x2-ep2 zero3x2-ep2 cp2-ep2 ulysses2-ep2 tp2-sp-ep2
zero3x2-ep2-full zero2x2-ep2-selective dp2-ep2-linear1
dp4-ep2 zero3x4-ep2 zero2x4-ep4 dp2-zero3x2-ep2 dp2-zero1x2-ep4 dp2-zero2x2-ep4-full tp4-sp-ep2
dp2-cp2-ep4 zero3x2-cp2-ep2 dp2-tp2-sp-ep2 zero3x2-tp2-sp-ep4 cp2-tp2-sp-ep2
dp2-ep2-pp2-1f1b zero3x2-ep2-pp2-1f1b zero1x2-ep2-pp2-zbv tp2-sp-ep2-pp2-zb-v2
zero3x2-ep2-pp2-interleaved1f1b-v2-full dp2-ep2-pp2-dualpipev-mb2-ga4
dp2-zero3x2-ep4-pp2-1f1b-mb1-ga4 zero3x8-ep4-mb1-ga2 zero3x2-tp2-sp-ep2-pp2-1f1b dp2-ep2-pp2-gpipe
cp2-ep2-pp2-loopedbfs-v2-attention
"""
FAMILIES = ["mixtral", "olmoe", "deepseek_v3", "gpt_oss"]


def make(folder: Path, family: str, change: Callable[[nn.Module], Any] = lambda _: None) -> Path:
    """A folder with a family's tiny model, changed in place by `change`, and data."""
    torch.manual_seed(0)
    config = SPARSE[family](vocab_size=301, initializer_range=0.05, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        change(model)
    return make_folder(folder, model)


def run(folder: Path, name: str, layout: str, *words: str, precision: str = "fp64") -> Trained:
    with exact():
        return trained(folder, folder / name, layout, precision, *words, forked=True)


def is_one(folder: Path, layout: str, *words: str) -> None:
    """Assert that a layout trains as one rank does."""
    kind = "-".join(words).replace("/", "")
    one = folder / f"one{kind}"
    reference = Trained.read(one) if one.exists() else run(folder, one.name, ONE, *words)
    ours = run(folder, f"{layout}{kind}", layout, *words)
    assert max(differences(ours, reference)[:3]) < NEAR, differences(ours, reference)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.mark.parametrize(
    "layout", cases(LAYOUTS.split(), test=["dp2-ep2"], ci=["zero3x2-tp2-sp-ep4", "tp2-sp-ep2-pp2-zb-v2"])
)
def test_a_layout_gives_the_numbers_of_one_rank(layout: str, folder: Path) -> None:
    is_one(folder, layout)


@pytest.mark.parametrize("layout", cases(["zero3x2-ep2", "tp2-sp-ep2-pp2-1f1b"], ci=1))
def test_adapters_train_next_to_frozen_experts(layout: str, folder: Path) -> None:
    is_one(folder, layout, *LORA)


@pytest.mark.all
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward"])
def test_preferences_train_over_experts(objective: str, folder: Path) -> None:
    """Train with passes without gradients: the reference's, and KTO's over mismatched answers."""
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    if objective == "kto":
        rows = [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]
    else:
        rows = [row | {"chosen": row["completion"], "rejected": "none"} for row in rows]
    file = write_rows(folder / f"{objective}.jsonl", rows)
    words = f"objective={objective}", f"data.train={file}", f"data.eval={file}"
    is_one(folder, "zero3x2-ep2-full", *words)


ADAPTED = """
zero3x2-tp2-sp-ep4-full dp2-ep2 dp2 zero1x2 zero2x2-selective zero3x2 zero3x2-ep2-full tp2-sp tp2 tp2-sp-ep2
pp2-1f1b zero1x2-ep2-pp2-zbv zero3x4-ep2 zero2x4-ep4 cp2-ep2 dp2-zero3x2-ep2
"""


@pytest.mark.parametrize("layout", cases(ADAPTED.split(), ci=1))
def test_adapters_of_experts_are_cut_with_them(layout: str, folder: Path) -> None:
    is_one(folder, layout, *OF_EXPERTS)


@pytest.mark.all
@pytest.mark.parametrize("layout", ["dp2-ep2", "zero3x2-ep2-full"])
def test_grouped_products_are_as_near_to_one_rank_as_their_rounding(layout: str, folder: Path) -> None:
    reference = run(folder, f"{layout}-one", ONE, precision="fp32")
    check(run(folder, f"{layout}-fp32", layout, precision="fp32"), reference, "fp32")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


OF_FAMILIES = [(name, at) for start, name in enumerate(FAMILIES) for at in LAYOUTS.split()[start % 2 :: 2]]


@pytest.mark.all
@pytest.mark.parametrize(("family", "layout"), OF_FAMILIES, indirect=["family"])
def test_a_family_gives_the_numbers_of_one_rank(family: Path, layout: str) -> None:
    is_one(family, layout)


def chosen_first(experts: int, model: Any) -> None:
    """Let the routers of DeepSeek-V3 give every token its first `experts` experts."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:experts] = 9


CROWDED = [(2, "zero3x2-ep2-full"), (2, "zero3x2-ep2-selective"), (2, "dp2-ep2"), (1, "dp2-zero2x2-ep4")]


@pytest.mark.all
@pytest.mark.parametrize(("experts", "layout"), CROWDED)
def test_one_expert_or_one_rank_may_have_every_token(experts: int, layout: str, tmp_path: Path) -> None:
    make(tmp_path, "deepseek_v3", partial(chosen_first, experts))
    is_one(tmp_path, layout)


METHODS = {"full": (), "experts": OF_EXPERTS}
SHORT = ["train.max_steps=2", "checkpoint.every=2"]


@pytest.mark.parametrize("kind", cases([*METHODS], ci=1))
def test_a_checkpoint_continues_bit_for_bit_and_with_another_ep(kind: str, folder: Path) -> None:
    four, two = ((*METHODS[kind], *more) for more in (["train.max_steps=4"], SHORT))
    layout = "zero3x4-ep2"
    whole = run(folder, f"whole{kind}", layout, *four)
    stopped = run(folder, f"stopped{kind}", layout, *two)
    alone = exported(stopped.folder, folder / f"alone{kind}", merge=False, step=2, push_to=None)  # one device
    (file,) = alone.glob("*.safetensors")
    assert all(torch.equal(tensor, stopped.tensors[name]) for name, tensor in load_file(file).items())
    again = run(folder, f"stopped{kind}", layout, *four)
    assert again.losses == whole.losses
    assert all(torch.equal(again.tensors[name], whole.tensors[name]) for name in whole.tensors)
    for step, at in enumerate([ONE, "dp2-zero2x2-ep4", "tp2-sp-ep2", ONE], 1):
        moved = run(
            folder, f"moved{kind}", at, *METHODS[kind], f"train.max_steps={step}", "checkpoint.every=1"
        )
    assert max(differences(moved, whole)[:3]) < NEAR


@pytest.mark.ci
def test_the_exported_folder_has_every_bit_and_answers_are_those_of_one_rank(folder: Path) -> None:
    still = ("train.learning_rate=1e-30", "train.weight_decay=0", "train.max_steps=1", "eval.samples=3")
    ours, one = (run(folder, f"still-{name}", name, *still) for name in ("zero3x4-ep2", ONE))
    stored = Trained.read(one.folder).tensors
    assert ours.tensors.keys() == stored.keys()
    assert all(torch.equal(ours.tensors[name], stored[name]) for name in stored)
    answers = [RunDir(each.folder).samples_file.read_text().splitlines() for each in (ours, one)]
    texts = [[json.loads(line)["answer"] for line in lines] for lines in answers]
    assert texts[0] == texts[1]
