"""Experts of a mixture in isolation: `python benchmarks/gpu/experts.py products|block [--tiny]`.

    products   grouped matmuls in bf16 against fp32: equal, odd and few rows an expert, one without any
    block      the experts of one block, forward and backward, by meshtune's function and by transformers'

Shapes are those of Qwen3-30B-A3B. Prints a line of JSON: milliseconds, TFLOP/s, bytes, relative differences.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernels import figure
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from meshtune.experts.products import grouped, looped
from meshtune.experts.register import NAME, experts_of, use_products

EXPERTS, CHOSEN, HIDDEN, INNER, TOKENS = 128, 8, 2048, 768, 16384
TINY = 16  # tokens and sizes are divided by it


def counts_of(rows: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield rows of each expert, `rows` in all or a few more or less: by name."""
    equal = torch.full((EXPERTS,), rows // EXPERTS, device=device)
    odd = equal + 1 - equal % 2 + 2 * (torch.arange(EXPERTS, device=device) % 5)
    odd[EXPERTS // 2] = 0
    few = torch.arange(EXPERTS, device=device) % 4
    yield from (("equal", equal), ("odd", odd), ("few", few))


def difference(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


def products(scale: int, device: torch.device) -> dict[str, Any]:
    """Speed of `grouped` and its relative differences from fp32: output, gradients of rows and of weights."""
    found: dict[str, Any] = {}
    columns, out = HIDDEN // scale, 2 * INNER // scale
    for name, counts in counts_of(TOKENS * CHOSEN // scale, device):
        drawn = torch.randn(int(counts.sum()), columns, device=device)
        weights = torch.randn(EXPERTS, columns, out, device=device) / columns**0.5
        gradient, results = torch.randn(len(drawn), out, device=device).bfloat16(), []
        for function, dtype in ((grouped, torch.bfloat16), (looped, torch.float32)):
            inputs = [each.bfloat16().to(dtype).requires_grad_() for each in (drawn, weights)]
            made = function(inputs[0], inputs[1], counts)
            made.backward(gradient.to(dtype))
            results.append([made.detach(), *(each.grad for each in inputs)])
        rows, matrices = drawn.bfloat16(), weights.bfloat16()
        run = lambda rows=rows, matrices=matrices, counts=counts: grouped(rows, matrices, counts)  # noqa: E731
        errors = [difference(ours, exact) for ours, exact in zip(*results, strict=True)]
        unused = float(results[0][2][counts == 0].abs().sum())
        found[name] = figure(2.0 * len(drawn) * columns * out, run, device)
        found[name] |= {"differences": errors, "gradient_without_rows": unused}
    return found


def block(scale: int, device: torch.device) -> dict[str, Any]:
    """Speed and memory of one block's experts by each function, and its output's difference from eager."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN // scale, moe_intermediate_size=INNER // scale, num_experts=EXPERTS, vocab_size=64,
        num_experts_per_tok=CHOSEN, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        hidden = torch.randn(TOKENS // scale, config.hidden_size, dtype=torch.bfloat16)
        chosen = torch.randn(len(hidden), EXPERTS).topk(CHOSEN)
    use_products(model, device.type, torch.bfloat16)
    (experts,) = experts_of(model)
    hidden, weights = hidden.requires_grad_(), chosen.values.softmax(-1).bfloat16()

    def step() -> Tensor:
        made = experts(hidden, chosen.indices, weights)
        made.backward(made.detach())
        return made.detach()

    flops = 3 * 2.0 * len(hidden) * CHOSEN * 3 * config.hidden_size * config.moe_intermediate_size
    found: dict[str, Any] = {}
    made: dict[str, Tensor] = {}
    for name in ("eager", "grouped_mm", NAME):
        module: Any = experts
        module.config._experts_implementation = name
        made[name] = step()  # makes the gradients' memory
        before = memory(device, torch.cuda.memory_allocated)
        if before is not None:
            torch.cuda.reset_peak_memory_stats()
        found[name] = figure(flops, step, device)
        peak = memory(device, torch.cuda.max_memory_allocated)
        found[name]["bytes"] = peak - before if peak is not None and before is not None else None
        found[name]["difference"] = difference(made[name], made["eager"].float())
    return found


def memory(device: torch.device, read: Callable[[], int]) -> int | None:
    return read() if device.type == "cuda" else None


def main() -> None:
    tiny = "--tiny" in sys.argv
    device = torch.device("cpu") if tiny and not torch.cuda.is_available() else torch.device("cuda", 0)
    print(json.dumps({"products": products, "block": block}[sys.argv[1]](TINY if tiny else 1, device)))


if __name__ == "__main__":
    main()
