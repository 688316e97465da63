"""Adapters of experts against peft's `target_parameters`: numbers, files, merged weights; what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cases import cases
from double import double
from golden import refuses
from tiny_families import tiny_config, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.experts.adapters import adapted_weights
from meshtune.experts.register import use_products
from meshtune.model.adapter import PREFIX, load_adapter, save_adapter
from meshtune.model.lora import add_lora, initial_adapters, merge_lora
from meshtune.model.trace import census_of
from meshtune.plan.work import Work

# Mamba's layers of Nemotron-H, whose experts have no gate, are refused by peft. GPT-OSS has biases, and its
# weights are transposed. Qwen3-MoE has a dense layer here; others have shared experts, DeepSeek-V3 both.
TARGETS = {
    "qwen3_moe": ["all-linear", "experts"], "gpt_oss": ["experts"], "nemotron_h": ["q_proj", "experts"],
    "deepseek_v3": ["all-linear", "experts"], "qwen2_moe": ["all-linear"],
}  # fmt: skip
LORA: dict[str, Any] = {"lora_rank": 3, "alpha": 8.0}
IDS = torch.randint(3, 300, (2, 19), generator=torch.Generator().manual_seed(0))
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


def ours(base: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(base)
    use_products(model, "cpu", base.dtype)
    return model


def theirs(base: PreTrainedModel, folder: Path, **options: Any) -> Any:
    """Load an adapter folder with peft, on transformers' own experts."""
    plain = copy.deepcopy(base)
    plain.set_experts_implementation("eager")
    return peft.PeftModel.from_pretrained(plain, folder, autocast_adapter_dtype=False, **options).eval()


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)


def passed(model: Any) -> Tensor:
    with double():
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        out.loss.backward()
    return out.logits.detach()


def logits(model: Any) -> Tensor:
    with double(), torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", cases([*TARGETS], test=["gpt_oss", "deepseek_v3"], ci=len(TARGETS)))
def test_adapters_of_mixtures_are_pefts(family: str, rslora: bool, tmp_path: Path) -> None:
    """Logits and gradients, the saved folder, which both read, and the merged weights, in fp32 and fp64."""
    for dtype, near in TOLERANCES.items():
        dense = {"mlp_only_layers": [0]} if family == "qwen3_moe" else {}
        base = tiny_model(tiny_config(family, **dense)).to(dtype).eval()
        model, folder = ours(base), tmp_path / str(dtype)
        add_lora(model, **LORA, target_modules=TARGETS[family], use_rslora=rslora)
        fill(model)
        save_adapter(folder, model, None, base_name="base", use_rslora=rslora, **LORA)
        reference = theirs(base, folder, is_trainable=True)
        expected = passed(reference)
        assert torch.allclose(passed(model), expected, rtol=near, atol=near)
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        weights = adapted_weights(model).values()
        assert len(weights) % 2 == 0 and bool(weights) == ("experts" in TARGETS[family])
        for each in weights:
            a, b = (matrix.grad for matrix in each.pair)
            for which, grad in ("A", a.flatten(0, 1)), ("B", b.permute(1, 2, 0).flatten(1)):
                wanted = gradients[f"{PREFIX}{each.in_peft}.lora_{which}.default.weight"]
                assert wanted is not None and (grad - wanted).norm() <= near * wanted.norm()
        again = ours(base)
        load_adapter(again, folder)
        assert torch.allclose(logits(again), expected, rtol=near, atol=near)
        merge_lora(again)
        merged = dict(reference.merge_and_unload().named_parameters())
        for name, parameter in again.named_parameters():
            torch.testing.assert_close(parameter, merged[name], rtol=near, atol=near)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("refused", [{"dropout": 0.1}, {"use_dora": True}])
def test_what_peft_refuses_of_shared_mlps_is_printed(
    refused: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by peft, and not computed otherwise: it adapts the same weights once the dropout is 0."""
    base = tiny_model(tiny_config("qwen3_next")).eval()
    model = ours(base)
    add_lora(model, **LORA, target_modules=["down_proj"], **refused)
    fill(model)
    save_adapter(tmp_path, model.eval(), None, base_name="base", **LORA, **refused)
    assert "peft 0.21 refuses" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ParamWrapper does not work"):
        theirs(base, tmp_path)
    again = ours(base)
    load_adapter(again, tmp_path)
    assert torch.equal(logits(again.eval()), logits(model))
    if "dropout" in refused:
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0}))
        torch.testing.assert_close(logits(theirs(base, tmp_path)), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", cases(["laguna", "mistral_large4", "inkling2_text"], ci=1))
def test_adapters_that_peft_does_not_load_are_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as those of Laguna's `shared_experts.`, which becomes `shared_experts..`."""
    base = tiny_model(tiny_config(family)).eval()
    add_lora(model := ours(base), **LORA)
    fill(model)
    save_adapter(tmp_path, model, None, base_name="base", **LORA)
    assert "peft 0.21 does not load" in capsys.readouterr().err
    assert not torch.allclose(logits(theirs(base, tmp_path)), logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_one_parameter_that_peft_saved_is_read(tmp_path: Path) -> None:
    base = tiny_model(tiny_config("qwen3_moe")).eval()
    named: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**named))
    fill(adapted)
    adapted.save_pretrained(tmp_path)
    model = ours(base)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs(base, tmp_path)), rtol=1e-5, atol=1e-5)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": ["mlp.gate.weight"]}))
    with refuses(UserError):
        load_adapter(ours(base), tmp_path)


def test_initial_adapters_are_drawn_whole_and_change_nothing() -> None:
    """In every layout the same values; those of A are as wide as peft's for one linear layer."""
    base = tiny_model(tiny_config("qwen3_moe")).eval()
    model = ours(base)
    torch.manual_seed(1)
    add_lora(model, **LORA, target_modules=TARGETS["qwen3_moe"])
    torch.manual_seed(1)
    values, parameters = initial_adapters(model), dict(model.named_parameters())
    assert sum(name.endswith("_lora_A") for name in values) == len(adapted_weights(model))
    assert all(torch.equal(values[name], parameters[name]) for name in values)
    assert torch.equal(logits(model), logits(ours(base)))
    for each in adapted_weights(model).values():
        a, _ = each.pair
        assert 0.9 < float(a.detach().abs().max()) * a.shape[-1] ** 0.5 <= 1


def test_plans_count_adapters_of_experts() -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    chosen, before = model.config.num_experts_per_tok, census_of(model).matmul[0]
    add_lora(model, **LORA, target_modules=["experts"])
    census, trained = census_of(model), [p for p in model.parameters() if p.requires_grad]
    assert census.unsupported is None and census.trainable == sum(p.numel() for p in trained)
    work = 2 * chosen * sum(p.numel() // len(p) for p in trained)
    assert census.matmul[0] - before == work
    assert Work.of(census).adapts_experts


@pytest.mark.parametrize(
    ("target", "experts", "linears"),
    [("experts.down_proj", 1, 0), ("gate_up_proj", 1, 0), (r".*\.experts\..*", 2, 0), ("down_proj", 0, 2)],
)
def test_names_and_expressions_mean_experts_too(target: str, experts: int, linears: int) -> None:
    """Except for names that linear layers have: a dense layer's and the shared experts' `down_proj`."""
    model = tiny_model(tiny_config("deepseek_v3"))
    adapted = add_lora(model, **LORA, target_modules=[target])
    stacked = adapted_weights(model).keys()
    assert (len(stacked & {*adapted}), len({*adapted} - stacked)) == (experts, linears)


def test_targets_and_settings_that_experts_do_not_have_are_refused() -> None:
    """A model without any, and what peft refuses next to target_parameters."""
    peft_refuses = {"dropout": 0.1, "use_dora": True}
    whole = {"modules_to_save": ["experts"]}  # trained whole, and adapted
    refused = ("qwen3", {}), ("llama4_text", {}), ("qwen3_moe", peft_refuses), ("qwen3_moe", whole)
    for family, settings in refused:
        with refuses(UserError):
            add_lora(tiny_model(tiny_config(family)), **LORA, target_modules=["experts"], **settings)
