"""Matrices in 4 bits, against bitsandbytes and peft."""

from typing import Any

import bitsandbytes.functional as theirs
import peft
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from families import FAMILIES
from forward import pass_equally
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig, PreTrainedModel

from meshtune.layout import Layout
from meshtune.model.lora import frozen_linears, initial_magnitude, lora_layers
from meshtune.parallel import zero
from meshtune.parallel.mesh import join, parameter_mesh
from meshtune.precision import NF4_ERROR
from meshtune.quantised import nf4
from meshtune.train.model import LoraSpec, ModelSpec, single_model

CONFIG = FAMILIES["qwen2"](hidden_size=64, intermediate_size=128)  # with biases


def their_codes(weight: Tensor) -> tuple[nf4.Codes, theirs.QuantState]:
    packed, state = theirs.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    constants = torch.cat([state.offset[None], state.state2.absmax]).view(torch.int32)
    rows = len(weight)
    return nf4.Codes(packed.view(rows, -1), state.absmax.view(rows, -1), constants), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (1000, 896)])
def test_codes_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Scales are compared with the nearest of its 256 values: its kernel for processors takes 0.2 % of them
    from a table that isn't exact.
    """
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.02
    weight[3] = 0
    codes, state = their_codes(weight)
    places = torch.arange(codes.scales.numel(), dtype=torch.int32).view_as(codes.scales)
    found = nf4.dequantise(codes, places, dtype)
    assert torch.equal(found, theirs.dequantize_4bit(codes.packed.view(-1, 1), state))
    ours = nf4.quantise(weight)
    assert torch.equal(ours.packed, codes.packed) and torch.equal(ours.constants, codes.constants)
    assert [tensor.shape for tensor in ours] == [torch.Size(size) for size in nf4.code_shapes(*shape)]
    largest = weight.float().reshape(-1, 64).abs().amax(1) - state.offset
    of_256 = state.state2.absmax.repeat_interleave(256)[: len(largest)]
    nearest = (largest / of_256)[:, None].sub(state.state2.code).abs().argmin(1)
    assert torch.equal(ours.scales.flatten().long(), nearest)


def test_rounding_changes_weights_as_much_as_a_plan_says() -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    changed = nf4.whole(nf4.quantise(weight), torch.float32) - weight
    assert changed.norm() / weight.norm() == pytest.approx(NF4_ERROR, rel=0.02)


def with_their_layers(spec: ModelSpec) -> PreTrainedModel:
    """The model with bitsandbytes' linear layers in place of all but its head."""
    model = single_model(spec, torch.device("cpu"))
    for name, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and name != "lm_head":
            new: Any = Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.float32,
                quant_type="nf4", device="meta",
            )  # fmt: skip
            values = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=new)
            new.weight, new.bias = values.to("cpu"), layer.bias
            model.set_submodule(name, new)
    return model


@pytest.mark.parametrize("use_dora", [False, True])
def test_logits_and_gradients_are_those_of_peft_and_bitsandbytes(use_dora: bool) -> None:
    spec = ModelSpec(source=CONFIG, init="random", precision="fp32", attention="sdpa")
    reference = peft.get_peft_model(
        with_their_layers(spec),
        peft.LoraConfig(r=4, lora_alpha=8, use_dora=use_dora, target_modules="all-linear"),
    )
    mirror = dict(reference.base_model.model.named_parameters())
    lora = LoraSpec(r=4, alpha=8, use_dora=use_dora)
    ours = single_model(ModelSpec(**{**vars(spec), "lora": lora, "quantise": "float32"}), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    differing = elements = 0
    for name, layer in lora_layers(ours).items():
        assert isinstance(layer, nf4.Nf4Linear)
        base: Any = reference.base_model.model.get_submodule(f"{name}.base_layer")
        weight = theirs.dequantize_4bit(base.weight.data, base.weight.quant_state)
        differing += int((layer.dequantised(torch.float32) != weight).sum())
        elements += weight.numel()
        state = base.weight.quant_state  # the same codes in both, see the test above
        layer.weight.data = base.weight.data.view_as(layer.weight)
        layer.weight_scales.data = state.absmax.view_as(layer.weight_scales)
        layer.weight_constants.data = torch.cat([state.offset[None], state.state2.absmax]).view(torch.int32)
        nn.init.normal_(layer.lora_B, std=0.1, generator=generator)
        mirror[f"{name}.lora_A.default.weight"].data.copy_(layer.lora_A)
        mirror[f"{name}.lora_B.default.weight"].data.copy_(layer.lora_B)
        if use_dora:
            magnitude = mirror[f"{name}.lora_magnitude_vector.default.weight"]
            torch.testing.assert_close(initial_magnitude(layer, weight), magnitude.data)
            layer.lora_magnitude_vector.data.copy_(magnitude)  # type: ignore[union-attr]
    assert differing < 0.005 * elements
    ids = torch.randint(3, 200, (2, 32), generator=generator)
    pass_equally(ours, reference, ids)
    for name, layer in lora_layers(ours).items():
        for matrix in ("lora_A", "lora_B"):
            expected = mirror[f"{name}.{matrix}.default.weight"].grad
            assert (getattr(layer, matrix).grad - expected).norm() <= 1e-5 * expected.norm()


def test_a_magnitude_is_of_the_weight_that_is_held() -> None:
    """GPT-2's matrices stay as they are: they lie otherwise."""
    lora = LoraSpec(r=4, use_dora=True)
    spec = ModelSpec(
        source=FAMILIES["gpt2"](), init="random", precision="fp32", lora=lora, quantise="float32"
    )
    for layer in lora_layers(single_model(spec, torch.device("cpu"))).values():
        assert layer.lora_magnitude_vector is not None
        assert torch.equal(layer.lora_magnitude_vector, initial_magnitude(layer, layer.weight))


@pytest.mark.parametrize(
    ("config", "read"),
    [
        (FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2), ""),  # multiplies by hand
        (MambaConfig(hidden_size=64, num_hidden_layers=1), ("dt_proj", "x_proj", "out_proj")),
        (CONFIG, None),
    ],
)
def test_a_layer_whose_weight_other_code_reads_stays_as_it_is(
    config: Any, read: str | tuple[str, ...] | None
) -> None:
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    whole = {name for name in names if read is not None and name.endswith(read)}
    assert whole == names - {*frozen_linears(model)}


class Codes(nn.Module):
    """A parameter of whole numbers, whose bits are those of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(
            torch.arange(6, dtype=torch.float32).view(torch.int32), requires_grad=False
        )
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return (self.numbers.view(torch.float32).to(self.scale.dtype).sum() * self.scale).sum()


def sum_of_gathered() -> float:
    """The sum of Codes under ZeRO-3 in bf16, with torch 2.11's choice of what is cast."""

    def init_dtype_attrs(self: Any, policy: Any) -> None:
        self.orig_dtype, self.param_dtype, self.reduce_dtype = (
            self.sharded_param.dtype,
            policy.param_dtype,
            None,
        )

    FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign]
    world, root = join(Layout.parse("zero3x2-mb1-ga1"), torch.device("cpu")), nn.Module()
    root.block = Codes()
    mesh = parameter_mesh(world)
    assert mesh is not None
    zero.shard(root, [root.block], mesh, 3, compute_dtype=torch.bfloat16)
    return root.block().item()


@pytest.mark.ci
def test_whole_numbers_are_gathered_as_they_are() -> None:
    assert run_ranks(2, sum_of_gathered) == [60.0, 60.0]
