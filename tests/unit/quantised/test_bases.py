"""Bases that are quantised already: read as the tools that made them would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as theirs
import numpy as np
import pytest
import torch
from families import FAMILIES, RECURRENT
from golden import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.load import mapped
from meshtune.parallel.mesh import join
from meshtune.quantised import nf4
from meshtune.quantised.deferred import Deferred
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec, rank_model, single_model

Made = tuple[dict[str, Tensor], Tensor]  # (what files hold of a weight by the end of its name, the weight)
Make = Callable[[Tensor], Made]
CPU, BF16, GROUP = torch.device("cpu"), torch.bfloat16, 32


def packed(numbers: np.ndarray) -> Tensor:
    """Whole numbers of 4 bits [rows, columns], 8 neighbours of a row in a word, the first lowest."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for column in range(numbers.shape[1]):
        words[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * (column % 8))
    return torch.from_numpy(words.view(np.int32))


def drawn(weight: Tensor) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """(Codes [in, out], zeros [groups, out] and scales of a matrix [out, in]), at random."""
    outputs, inputs = weight.shape
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (inputs, outputs))
    zeros = generator.integers(0, 16, (inputs // GROUP, outputs))
    return codes, zeros, torch.rand(inputs // GROUP, outputs).half() / 8


def from_groups(codes: np.ndarray, zeros: np.ndarray, scales: Tensor, group: np.ndarray) -> Tensor:
    whole = (codes - zeros[group]).T * scales.double().numpy()[group].T
    return torch.from_numpy(whole).to(BF16)


def gptq(*, act_order: bool, stored_less: int = 1) -> Make:
    def make(weight: Tensor) -> Made:
        codes, zeros, scales = drawn(weight)
        group = np.arange(len(codes)) // GROUP
        group = np.random.default_rng(1).permutation(group) if act_order else group
        parts = {
            "qweight": packed(codes.T).T, "qzeros": packed((zeros - stored_less) % 16), "scales": scales,
        }  # fmt: skip
        parts |= {"g_idx": torch.from_numpy(group).int()} if act_order else {}
        return parts, from_groups(codes, zeros, scales, group)

    return make


def awq(weight: Tensor) -> Made:
    codes, zeros, scales = drawn(weight)
    order = (np.arange(codes.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).ravel()
    parts = {"qweight": packed(codes[:, order]), "qzeros": packed(zeros[:, order]), "scales": scales}
    return parts, from_groups(codes, zeros, scales, np.arange(len(codes)) // GROUP)


def pack_quantized(weight: Tensor) -> Made:
    codes, zeros, scales = drawn(weight)
    shape = torch.tensor(weight.shape)
    parts = {"weight_packed": packed(codes.T), "weight_scale": scales.T, "weight_shape": shape}
    return parts, from_groups(codes, np.full_like(zeros, 8), scales, np.arange(len(codes)) // GROUP)


def bitsandbytes(
    *, nested: bool = True, block: int = 64, kind: str = "nf4", storage: torch.dtype = torch.uint8
) -> Make:
    def make(weight: Tensor) -> Made:
        codes, state = theirs.quantize_4bit(weight, None, None, block, nested, kind)
        parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        state.shape = torch.Size([1, weight.numel()])  # its kernel for processors wants whole blocks in a row
        return {"weight": codes.flatten().view(storage)[:, None], **parts}, theirs.dequantize_4bit(
            codes, state
        ).view(weight.shape)

    return make


def rows_of_8_bits(weight: Tensor) -> Made:
    codes, scales, _ = theirs.int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, theirs.int8_vectorwise_dequant(codes, scales).to(BF16)


def scaled(name: str, block: int | None, dtype: torch.dtype = torch.float8_e4m3fn) -> Make:
    """block: rows and columns of one; 0: one is a row, None: it is all."""

    def make(weight: Tensor) -> Made:
        (rows, columns), codes = weight.shape, (weight * 20).to(dtype)
        high, wide = (block, block) if block else (rows, columns) if block is None else (1, columns)
        scale = torch.rand(-(-rows // high), -(-columns // wide)) + 0.5
        expected = (codes.float() * torch.kron(scale, torch.ones(high, wide))[:rows, :columns]).to(BF16)
        if dtype != torch.int8 and not (rows % len(scale) or columns % scale.shape[1]):
            assert torch.equal(Fp8Dequantize(None)._dequantize_one(codes, scale, BF16), expected)
        return {"weight": codes, name: scale[0, 0] if block is None else scale}, expected

    return make


def compressed(form: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Make]] = {
    "nf4": ({"quant_method": "bitsandbytes"}, bitsandbytes()),
    "nf4, scales whole": ({"quant_method": "bitsandbytes"}, bitsandbytes(nested=False)),
    "nf4, blocks of 128": ({"quant_method": "bitsandbytes"}, bitsandbytes(block=128)),
    "nf4, stored for FSDP": ({"quant_method": "bitsandbytes"}, bitsandbytes(storage=BF16)),
    "fp4": ({"quant_method": "bitsandbytes"}, bitsandbytes(kind="fp4")),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes"}, rows_of_8_bits),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, scaled("weight_scale_inv", 64)),
    "fp8, one scale": ({"quant_method": "fp8"}, scaled("weight_scale_inv", None)),
    "fp8, by rows": (compressed("float-quantized"), scaled("weight_scale", 0)),
    "int8, by rows": (compressed("int-quantized"), scaled("weight_scale", 0, torch.int8)),
    "gptq": (GPTQ, gptq(act_order=False)),
    "gptq, act-order": (GPTQ | {"desc_act": True}, gptq(act_order=True)),
    "gptq, v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(act_order=True, stored_less=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed-tensors": (compressed("pack-quantized"), pack_quantized),
}


def folders(path: Path, form: str, family: str = "llama") -> tuple[Path, Path, list[str]]:
    """(A quantised model's folder, a folder with the weights that it means, names of these weights)."""
    torch.manual_seed(0)
    settings, make = FORMATS[form]
    config = (FAMILIES | RECURRENT)[family](hidden_size=64, intermediate_size=160, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(plain := path / "plain")
    tensors = load_file(plain / "model.safetensors")
    stored, names = {}, [name for name in tensors if name.endswith("proj.weight")]
    for name in names:
        parts, tensors[name] = make(tensors[name])
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    (quantised := path / "quantised").mkdir()
    fields = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (quantised / "config.json").write_text(json.dumps(fields))
    others = {name: tensor for name, tensor in tensors.items() if name not in names}
    for folder, content in ((plain, tensors), (quantised, others | stored)):
        contiguous = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return quantised, plain, names


def adapted(folder: Path, quantise: str) -> dict[str, Tensor]:
    """Values of a model with adapters next to its base, but for those that are drawn."""
    spec = ModelSpec(source=str(folder), precision="bf16-pure", lora=LoraSpec(), quantise=quantise)
    model = single_model(spec, CPU)
    assert not hasattr(model.config, "quantization_config")
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_A" not in name}


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_that_the_format_means(form: str, tmp_path: Path) -> None:
    """Also where they are held in 4 bits. Codes of bitsandbytes that are ours are taken over as they are."""
    quantised, plain, names = folders(tmp_path, form)
    found, expected = (mapped(str(folder), dtype=BF16) for folder in (quantised, plain))
    assert all(isinstance(found[name], Deferred) for name in names)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and torch.equal(found[name], tensor), name
    torch.testing.assert_close(adapted(quantised, ""), adapted(plain, ""), rtol=0, atol=0)
    values, of_plain = adapted(quantised, "bfloat16"), adapted(plain, "bfloat16")
    if form in ("nf4", "nf4, stored for FSDP"):
        stored = load_file(quantised / "model.safetensors")
        for name in (name for name in names if "down_proj" not in name):  # of 160 columns
            codes = nf4.Codes(*(values.pop(name + suffix) for suffix in nf4.SUFFIXES))
            assert torch.equal(codes.packed.view(-1), stored[name].view(-1).view(torch.uint8))
            assert torch.equal(codes.scales.view(-1), stored[f"{name}.absmax"])
            assert torch.equal(nf4.whole(codes, BF16), expected[name])
            [of_plain.pop(name + suffix) for suffix in nf4.SUFFIXES]
    torch.testing.assert_close(values, of_plain, rtol=0, atol=0)


def test_experts_are_stacked_as_they_are_read(tmp_path: Path) -> None:
    quantised, plain, _ = folders(tmp_path, "fp8", "qwen3_next")
    found, expected = (mapped(str(folder), dtype=BF16) for folder in (quantised, plain))
    experts = [name for name in expected if ".experts." in name]
    assert {expected[name].ndim for name in experts} == {3}
    assert all(isinstance(found[name], Deferred) for name in experts)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    values, of_plain = adapted(quantised, "bfloat16"), adapted(plain, "bfloat16")
    assert values["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.uint8
    torch.testing.assert_close(values, of_plain, rtol=0, atol=0)


def test_only_8_bits_are_trained_whole(tmp_path: Path) -> None:
    for form, problem in {"fp8": None, "gptq": "gptq"}.items():
        (folder := tmp_path / form).mkdir()
        spec = ModelSpec(source=str(folders(folder, form)[0]), precision="bf16")
        if problem:
            with refuses(UserError):
                rank_model(spec, join(Layout(), CPU), optimizer=OptimizerSpec())
            continue
        made = rank_model(spec, join(Layout(), CPU), optimizer=OptimizerSpec())
        assert dict(made.parallel.named_parameters())["model.layers.0.mlp.up_proj.weight"].requires_grad
