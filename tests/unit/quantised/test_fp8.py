"""Matmuls in 8-bit floats, against torchao's own layers; what refuses them."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from golden import refuses
from graphs import Graphs
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from meshtune import config, precision
from meshtune.api import choose
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.load import on_meta
from meshtune.model.lora import adapt, fp8_linears
from meshtune.model.trace import census
from meshtune.parallel import zero
from meshtune.placement.rules import Traits, refusals
from meshtune.quantised import fp8


def layer(*, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=bias)).bfloat16()


def results(model: nn.Module, tokens: int = 24) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters that are trained."""
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    out = model(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    trained = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [out.detach(), x.grad, *trained]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [24, 13])  # 48 a micro-batch are a multiple of 16, 26 are padded
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_multiplies_as_torchaos(recipe: str, bias: bool, tokens: int) -> None:
    model, plain = layer(bias=bias), layer(bias=bias)
    fp8.convert(model, ["0"], recipe, emulate=True)
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True)
    theirs = convert_to_float8_training(layer(bias=bias), config=settings)
    ours, wide = results(model, tokens), results(plain, tokens)
    assert all(map(torch.equal, ours, results(theirs, tokens)))
    for narrow, exact in zip(ours[:3], wide[:3], strict=True):  # e4m3 rounds by 2 to 3 %, e5m2 by 4 to 6 %
        assert 0.02 < (narrow - exact).float().norm() / exact.float().norm() < 0.09
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain.named_parameters()
    }


def test_a_frozen_layer_with_an_adapter_multiplies_so_too() -> None:
    model = layer()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.requires_grad_(False)
        torch.manual_seed(3)
        adapt(each[0], 4, alpha=8, dtype=torch.bfloat16)
    fp8.convert(model, ["0"], emulate=True)
    alone = layer()
    fp8.convert(alone, ["0"], emulate=True)
    assert torch.equal(results(model)[0], results(alone)[0])  # B is zero
    assert not torch.equal(results(model)[0], results(plain)[0])


def gathered_results(backend: str) -> list[Tensor]:
    """Output and gradient of the input of a layer that these ranks share, in its second pass."""
    model = layer()
    fp8.convert(model, ["0"], emulate=True)
    if backend:
        model[0].compile(backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    zero.shard(model, [model[0]], mesh, 3, reduce_dtype=torch.float32)
    fp8.gather_in_8_bits(zero.groups(model), mesh.get_group(), torch.bfloat16)
    results(model)
    shared: Any = model[0]
    assert all(not each.untyped_storage().nbytes() for each in shared.fp8_gathered)
    return results(model)[:2]


@pytest.mark.parametrize(("ranks", "backend"), [(5, ""), (2, "aot_eager_decomp_partition")])
def test_a_gathered_layer_has_the_scale_of_the_whole_matrix(ranks: int, backend: str) -> None:
    alone = layer()
    fp8.convert(alone, ["0"], emulate=True)
    for ours in run_ranks(ranks, gathered_results, backend):  # five pad 96 rows to 100
        assert all(map(torch.equal, ours, results(alone)))


def test_compiled_layers_are_one_graph_without_a_break() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = Graphs()
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(10)).bfloat16()
    fp8.convert(model, [f"{number}.0" for number in range(10)], emulate=True)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    for block in model:
        block._compiled_call_impl = torch.compile(block._call_impl, backend=graphs)
        x = block(x)
    x.sum().backward()
    assert graphs.made == 1 and not torch._dynamo.utils.counters["graph_break"]


def test_large_layers_of_blocks_multiply_in_8_bits_and_no_others() -> None:
    shape = FAMILIES["llama"](hidden_size=1024, intermediate_size=2048, num_hidden_layers=1)
    model: Any = on_meta(shape)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = [name.rpartition(".")[2] for name in fp8_linears(model, shapes)]
    keys = model.config.num_key_value_heads * 1024 // model.config.num_attention_heads
    assert keys < precision.FP8_LEAST
    assert found == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    numbers = census(shape)
    assert numbers.fp8[:2] == (5, 7)
    head, narrow = 1024 * model.config.vocab_size, 1024 * 1024 * 2 + 3 * 1024 * 2048
    assert numbers.fp8[2] == pytest.approx(narrow / (narrow + 2 * 1024 * keys + head), rel=0.01)


TRAITS = Traits("LlamaForCausalLM", blocks=4, heads=8, kv_heads=4, vocabulary=32)


def test_what_can_not_be_compiled_is_refused() -> None:
    for sentences in (
        refusals(TRAITS, Layout(), fp8=True, compile=False),
        refusals(TRAITS, Layout.parse("pp2-zbv-mb1-ga8"), fp8=True, compile="auto"),
        refusals(replace(TRAITS, experts=True), Layout(), fp8=True, compile="auto"),
    ):
        with refuses(UserError):
            raise UserError(sentences)
    assert not refusals(TRAITS, Layout.parse("zero3x2-tp2-sp-pp2-1f1b-mb1-ga8"), fp8=True, compile="auto")


def test_what_has_no_8_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(UserError):
        config.load(None, ["model.name=m", "data.train=x.jsonl", "method=qlora", "train.precision=fp8"])
    with refuses(UserError):
        census(FAMILIES["llama"]()).check_fp8("tiny")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with refuses(UserError):
        choose.check_fp8("torch.compile needs triton, which is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    choose.check_fp8("")
    monkeypatch.setattr(fp8, "find_spec", lambda _: None)
    with refuses(UserError):
        fp8.convert(layer(), ["0"], emulate=True)
