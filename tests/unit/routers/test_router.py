"""Routers are found by what they do; settings that a model, its layout or its loss can't have are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON, EXPERTS, FAMILIES, skip_without_routers
from golden import refuses
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshtune.errors import UserError
from meshtune.experts.routers import Router, routers_of
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.model.capabilities import traits
from meshtune.model.census_cache import LoraShape, Variant, build_and_count
from meshtune.parallel.mesh import World, join
from meshtune.placement.experts import BalanceSpec
from meshtune.placement.rules import refusals
from meshtune.routers.balance import balance_of, load_biases
from meshtune.train.model import LoraSpec, ModelSpec, trainable_skeleton

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {}, "gpt_oss": {}, "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 16,
                    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}  # fmt: skip
# The function of the scores, and whether a bias corrects the choice.
FOUND = {
    "mixtral": ("softmax", False), "gpt_oss": ("softmax", False), "hunyuan_v1_moe": ("softmax", False),
    "glm4_moe": ("sigmoid", True), "gemma4_text": ("", False),
}  # fmt: skip


def config_of(family: str, **more: Any) -> Any:
    skip_without_routers(family)
    known = AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in (COMMON | EXPERTS).items() if name in known}
    return AutoConfig.for_model(family, **sizes | MIXTURES[family] | more)


def on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def found_in(model: PreTrainedModel) -> list[Router]:
    return routers_of(model, anatomy(model).blocks)


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_are_found_by_what_they_do(family: str) -> None:
    routers = found_in(on_meta(config_of(family)))
    assert [router.block for router in routers] == [0, 1]
    for router in routers:
        assert (router.experts, router.chosen) == (4, 2)
        assert (router.scores, router.bias is not None) == FOUND[family]


def test_biases_of_a_checkpoint_are_those_of_an_opened_model_and_moves_change_what_a_device_has() -> None:
    whole, model = (AutoModelForCausalLM.from_config(config_of("glm4_moe")) for _ in range(2))
    world = join(Layout(), torch.device("cpu"))
    balance = balance_of(BalanceSpec(kind="bias", bias_rate=0.5), whole, [model], world, sums=False)
    assert balance is not None
    for router in found_in(model):  # as a move to a device does
        model.get_submodule(router.path)._buffers["e_score_correction_bias"] = torch.zeros(4)
    balance.loads = torch.tensor([[4.0, 0, 0, 0]] * 2)
    balance.move()
    assert balance.biases[0][1].tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert balance.state() == [[-0.5, 0.5, 0.5, 0.5]] * 2
    opened = AutoModelForCausalLM.from_config(config_of("glm4_moe"))
    load_biases(opened, balance.state())
    found = [opened.get_buffer(router.bias or "").tolist() for router in found_in(opened)]
    assert found == balance.state()
    load_biases(opened, [])


@pytest.mark.parametrize(
    ("family", "spec", "layout", "sums"),
    [
        ("llama", BalanceSpec(kind="loss"), "mb1-ga1", False),
        ("mixtral", BalanceSpec(), "mb1-ga4", False),
        ("mixtral", BalanceSpec(), "pp2-1f1b-mb1-ga1", False),
        ("mixtral", BalanceSpec(kind="bias"), "mb1-ga4", False),
        ("mixtral", BalanceSpec(kind="loss"), "mb1-ga4", True),
        ("gemma4_text", BalanceSpec(kind="none", z_loss=0.1), "mb1-ga4", False),
    ],
)
def test_what_can_not_be_balanced_is_refused(family: str, spec: BalanceSpec, layout: str, sums: bool) -> None:
    dense = family == "llama"
    config = FAMILIES[family]() if dense else config_of(family)
    config.output_router_logits = not dense
    world = World(Layout.parse(layout), torch.device("cpu"), 0, ())
    model = on_meta(config)
    with refuses(UserError):
        balance_of(spec, model, [], world, sums=sums)
    others, planned = (refusals(traits(model), world.layout, balance=each) for each in (None, spec))
    assert len(planned) - len(others) == (not sums)


def trained(family: str, **spec: Any) -> set[str]:
    """Names of the trained parameters in the routers."""
    model, _ = trainable_skeleton(ModelSpec(source=config_of(family), init="random", **spec))
    paths = [f"{router.path}." for router in found_in(model)]
    return {
        name.rpartition(".")[2]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.startswith(tuple(paths))
    }


def test_a_router_is_frozen_next_to_adapters_or_where_it_is_said() -> None:
    assert trained("mixtral") == {"weight"}
    assert trained("mixtral", freeze_router=True) == set()
    assert trained("hunyuan_v1_moe", lora=LoraSpec()) == set()
    assert trained("hunyuan_v1_moe", lora=LoraSpec(), freeze_router=False) == {"lora_A", "lora_B"}
    assert trained("mixtral", lora=LoraSpec(modules_to_save=("gate",))) == {"weight"}
    with refuses(UserError):
        trained("mixtral", lora=LoraSpec(), freeze_router=False)
    with refuses(UserError):
        trainable_skeleton(ModelSpec(source=FAMILIES["llama"](), init="random", freeze_router=True))


@pytest.mark.parametrize(
    ("family", "adapts", "freeze"),
    [("hunyuan_v1_moe", True, None), ("hunyuan_v1_moe", True, False), ("mixtral", False, True)],
)
def test_a_plan_counts_the_parameters_that_a_run_trains(
    tmp_path: Path, family: str, adapts: bool, freeze: bool | None
) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    lora, shape = (LoraSpec(), LoraShape()) if adapts else (None, None)
    model, _ = trainable_skeleton(ModelSpec(source=config, init="random", lora=lora, freeze_router=freeze))
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    variant = Variant(lora=shape, freeze_router=freeze)
    assert build_and_count("x", tmp_path / "config.json", variant).census.trainable == trainable
