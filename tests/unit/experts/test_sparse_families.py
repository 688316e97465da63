"""Experts against transformers' own eager ones: class by class, and in tiny models."""

import copy
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from cases import cases
from double import double
from tiny_families import tiny_config, tiny_model
from torch import Tensor, nn

from meshtune.experts.products import experts_of, matmul_for
from meshtune.experts.register import use_products

HIDDEN, WIDE, EXPERTS, TOKENS, CHOSEN = 16, 8, 4, 24, 2
SETTINGS: dict[str, Any] = {  # of every class's configuration
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), WIDE),
    **dict.fromkeys(("hidden_act", "hidden_activation"), "silu"), "mlp_hidden_act": "relu2",
    "moe_latent_size": None, "swiglu_limit": 1.0, "swiglu_alpha": 1.7, "post_norm_eps": 1e-6,
    "mlp_gate_softcap": 1.0, "mlp_up_softcap": 1.0, "_experts_implementation": "eager",
}  # fmt: skip
ROUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "as the router chose": lambda index: index,
    "all to one": lambda index: index * 0 + 2,
    "two of them idle": lambda index: index // 2 * 2,
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
FAMILIES = [
    "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
    "glm4_moe", "granitemoe", "phimoe", "ernie4_5_moe", "hunyuan_v1_moe", "aria_text", "lfm2_moe",
    "nemotron_h",
]  # fmt: skip


UNCHANGED = {  # classes that run transformers' own code: routed otherwise, or through all experts (Llama 4)
    "DbrxExperts", "InklingSharedExperts", "JetMoeParallelExperts", "Llama4TextExperts",
    "LongcatFlashExperts", "NllbMoeExperts", "Step3p7Experts", "SwitchTransformersExperts",
}  # fmt: skip


def classes() -> Iterator[type[nn.Module]]:
    """Yield the classes whose experts run through transformers' function of a configured name."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = file.read_text()
        ours = re.findall(r"^@use_experts_implementation.*\nclass (\w+)", text, re.MULTILINE)
        assert {*re.findall(r"^class (\w+Experts)\(nn\.", text, re.MULTILINE)} - {*ours} <= UNCHANGED, file
        for name in ours:
            yield getattr(import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)


def difference(one: list[Any], two: list[Any]) -> float:
    """Largest difference, relative to a tensor's norm or a hundredth of the largest norm, if that is more."""
    one, two = ([None if each is None else each.detach() for each in tensors] for tensors in (one, two))
    floor = max(float(tensor.norm()) for tensor in two if tensor is not None) / 100
    return max(
        float((a if b is None else a - b).norm()) / max(floor, 0.0 if b is None else float(b.norm()))
        for a, b in zip(one, two, strict=True)
        if a is not None
    )


@pytest.mark.ci
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_class_of_experts_computes_what_transformers_does(dtype: torch.dtype) -> None:
    every, wrong = [*classes()], {}
    assert len(every) >= 60
    for kind in every:
        torch.manual_seed(0)
        eager = kind(SimpleNamespace(**SETTINGS)).to(dtype)
        assert [*experts_of(eager)] == [eager], kind
        for parameter in eager.parameters():
            nn.init.normal_(parameter, std=0.3)
        ours: Any = copy.deepcopy(eager)
        use_products(ours, "cpu", dtype)
        assert ours.matmul == ("loop" if dtype == torch.float64 else "grouped_mm")
        hidden, factors = torch.randn(2, TOKENS, HIDDEN, dtype=dtype)
        weights, index = torch.rand(TOKENS, EXPERTS, dtype=dtype).topk(CHOSEN)

        def passed(module: nn.Module, index: Tensor, *given: Tensor, factors: Tensor = factors) -> list[Any]:
            x, w = (tensor.clone().requires_grad_() for tensor in given)
            out = module(x, index, w)
            wanted = [x, w, *module.parameters()]
            return [out, *torch.autograd.grad((out * factors).sum(), wanted, allow_unused=True)]

        for name, route in ROUTES.items():
            with double():
                two, one = (passed(each, route(index), hidden, weights) for each in (eager, ours))
            if not (far := difference(one, two)) <= TOLERANCES[dtype]:
                wrong[kind.__name__, name] = far
        out, *_ = passed(ours, index[:0], hidden[:0], weights[:0], factors=factors[:0])
        assert out.shape == (0, HIDDEN)
    assert not wrong


@pytest.mark.parametrize("family", cases(FAMILIES, test=1, ci=len(FAMILIES)))
def test_a_model_with_experts_has_the_loss_and_gradients_of_transformers(family: str) -> None:
    """Experts, router, shared experts and the rest, in fp32 and fp64."""
    whole = tiny_model(tiny_config(family))
    ids = torch.randint(3, 300, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in TOLERANCES.items():
        models = [copy.deepcopy(whole).to(dtype) for _ in range(2)]
        models[0].set_experts_implementation("eager")
        use_products(models[1], "cpu", dtype)
        for name, route in ROUTES.items():
            results: list[list[Any]] = []
            for model in models:
                hooks = [
                    each.register_forward_pre_hook(
                        lambda _, args, to=route: (args[0], to(args[1]), *args[2:])
                    )
                    for each in experts_of(model)
                ]
                assert hooks
                with double():
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    wanted = [p for p in model.parameters() if p.requires_grad]
                    results.append([loss, *torch.autograd.grad(loss, wanted, allow_unused=True)])
                for hook in hooks:
                    hook.remove()
            two, one = results
            assert difference(one, two) <= tolerance, (dtype, name)


def test_grouped_mm_runs_only_what_it_can() -> None:
    module: Any = SimpleNamespace(
        has_gate=True, gate_up_proj=torch.empty(2, 24, 8), down_proj=torch.empty(2, 8, 12)
    )
    chosen = {
        (k, d): matmul_for(module, k, d) for k in ("cpu", "cuda") for d in (torch.float32, torch.bfloat16)
    }
    assert chosen["cpu", torch.float32] == "grouped_mm"
    assert chosen["cpu", torch.bfloat16] == "loop"  # rows of 12 elements: 24 bytes
    assert chosen["cuda", torch.float32] == "loop"
