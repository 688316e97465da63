"""Experts in 4 bits: codes against bitsandbytes, passes and merging against a model with their values."""

from typing import Any

import bitsandbytes.functional as theirs
import pytest
import torch
from cases import cases
from families import SPARSE
from forward import pass_equally
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, JetMoeConfig, PretrainedConfig, PreTrainedModel

from meshtune.experts.products import experts_of
from meshtune.experts.register import use_products
from meshtune.model.lora import frozen_linears, frozen_matrices, merge_lora
from meshtune.model.trace import census_of
from meshtune.quantised import nf4
from meshtune.train.model import LoraSpec, ModelSpec, single_model

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64}


def dequantised(codes: nf4.Codes, dtype: torch.dtype) -> Tensor:
    rows, blocks = codes.scales.shape[1:]
    return nf4.dequantise_op(*codes, (0, blocks, 0, rows), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_has_the_codes_and_values_that_bitsandbytes_gives_its_matrix(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "PART", 2**10)  # some rows of all experts at a time
    scale = torch.tensor([0.02, 0.5, 3.0])[:, None, None]
    stack = (torch.randn(3, 192, 128, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    codes = nf4.codes_of(stack, dtype, torch.device("cpu"))
    assert [part.shape for part in codes] == [torch.Size(size) for size in nf4.code_shapes(*stack.shape)]
    values = dequantised(codes, dtype)
    for number, matrix in enumerate(stack):
        options: Any = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
        packed, state = theirs.quantize_4bit(matrix, **options)
        assert torch.equal(codes.packed[number].view(-1, 1), packed)
        numbers = torch.cat([state.offset[None], state.state2.absmax])  # type: ignore[index, union-attr]
        assert torch.equal(codes.constants[number].view(torch.float32), numbers)
        state.absmax = codes.scales[number].flatten()  # its kernel for processors rounds a few otherwise
        assert torch.equal(values[number], theirs.dequantize_4bit(packed, state))


def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model in 4 bits with adapters, and one that holds the values of the same codes."""
    attention = "eager" if family == "gpt_oss" else "sdpa"
    spec: dict[str, Any] = {
        "source": SPARSE[family](**SIZES), "init": "random", "precision": "fp32", "attention": attention,
        "lora": LoraSpec(r=4, alpha=8, target_modules=("all-linear", "experts")),
    }  # fmt: skip
    ours, reference = (
        single_model(ModelSpec(**spec, quantise=dtype), torch.device("cpu")) for dtype in ("float32", "")
    )
    for name, parameter in reference.named_parameters():
        path, _, leaf = name.rpartition(".")
        module: Any = ours.get_submodule(path)
        if leaf == "weight" and isinstance(module, nf4.Nf4Linear):
            parameter.data = module.dequantised(torch.float32)
        elif codes := nf4.codes_of_experts(module, leaf):
            parameter.data = dequantised(codes, torch.float32)
    generator = torch.Generator().manual_seed(1)
    copies = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
            copies[name].data.copy_(parameter)
    return ours, reference


@pytest.mark.parametrize("family", cases(["gpt_oss", "qwen3_moe", "deepseek_v3"], test=2))
def test_passes_and_merged_weights_are_those_of_the_values(family: str) -> None:
    ours, reference = pair(family)
    experts = [p for module in experts_of(ours) for p in module.parameters() if p.ndim == 3]
    held = [p.dtype for p in experts if not p.requires_grad]
    assert held and set(held) == {torch.uint8}
    ids = torch.randint(3, 200, (2, 32), generator=torch.Generator().manual_seed(2))
    pass_equally(ours, reference, ids)
    expected = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        if (grad := expected[name].grad if parameter.requires_grad else None) is not None:
            assert (parameter.grad - grad).norm() <= 1e-5 * grad.norm(), name  # type: ignore[operator]
    assert 0 < merge_lora(ours, torch.bfloat16) < 0.01  # type: ignore[operator]
    assert merge_lora(reference) is None
    merged, whole = ours.state_dict(), reference.state_dict()
    assert merged.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(merged[name], weight)


JETMOE = JetMoeConfig(
    vocab_size=256, hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=32,
    intermediate_size=64, num_local_experts=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "trained", "found"),
    [
        (SPARSE["qwen3_moe"](**SIZES), "", {"gate_up_proj", "down_proj"}),
        (SPARSE["qwen3_moe"](**SIZES | {"moe_intermediate_size": 96}), "", {"gate_up_proj"}),
        (SPARSE["qwen3_moe"](**SIZES), "down_proj", {"gate_up_proj"}),
        (JETMOE, "", set()),  # runs transformers' own code
    ],
)
def test_a_run_and_its_plan_agree_on_which_experts_are_in_4_bits(
    config: PretrainedConfig, trained: str, found: set[str]
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    use_products(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(trained) and name.endswith(trained))
    linears = {f"{path}.weight" for path in frozen_linears(model)}
    names = {*frozen_matrices(model)} - linears
    assert {name.rpartition(".")[2] for name in names} == found
    blocks = census_of(model).blocks
    planned = {
        f"model.layers.{number}.{each.name}"
        for number, block in enumerate(blocks) for each in block.parameters if each.in_4_bits
    }  # fmt: skip
    assert planned == names | linears
