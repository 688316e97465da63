"""Matmuls and attention in isolation, at the benches' shapes: `python benchmarks/gpu/kernels.py [--tiny]`.

Attention runs by each version of FlashAttention that is installed, as packed rows run it: documents of one
length, one behind another. Prints milliseconds (medians) and TFLOP/s; only keys that a query sees count.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshtune.attention import flash
from meshtune.attention.core import attend
from meshtune.data.boundaries import row_boundaries
from meshtune.placement.census import Attention

TOKENS, REPEATS = 8192, 20
MATMULS = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (8192, 2048), (2048, 8192))
EIGHT_B, ONE_B = Attention(32, 8, 128, 128), Attention(32, 8, 64, 64)
CASES = [(shape, length) for shape in (EIGHT_B, ONE_B) for length in (1024, 4096, 8192)]


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of `run`, after three runs that compile and warm up."""
    taken = []
    for _ in range(REPEATS + 3):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken[3:])


def figure(flops: float, run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    found = milliseconds(run, device)
    return {"ms": round(found, 3), "tflops": round(flops / found / 1e9, 1)}


def matmuls(tokens: int, device: torch.device) -> Iterator[tuple[str, dict[str, float]]]:
    for rows, cols in MATMULS:
        if tokens < TOKENS:
            rows, cols = rows // 64, cols // 64
        x = torch.randn(tokens, cols, device=device, dtype=torch.bfloat16)
        weight = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
        run = lambda x=x, weight=weight: x @ weight.t()  # noqa: E731
        yield f"{tokens} x {cols} x {rows}", figure(2.0 * tokens * rows * cols, run, device)


def attentions(tokens: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    for shape, length in CASES:
        length = length * tokens // TOKENS

        def drawn(heads: int, size: int = shape.qk_dim) -> Tensor:
            made = torch.randn(tokens, heads, size, device=device, dtype=torch.bfloat16)
            return made.requires_grad_()

        q, k, v = drawn(shape.query_heads), drawn(shape.key_heads), drawn(shape.key_heads)
        rows = ((length,),) * (tokens // length)
        documents = row_boundaries(rows, length).map(lambda tensor: tensor.to(device))

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, documents: Any = documents) -> Tensor:
            return attend(q, k, v, documents, q.shape[-1] ** -0.5, 0.0, None, None)

        out = forward()
        grad = torch.randn_like(out)
        inputs = (q, k, v)

        def backward(out: Tensor = out, inputs: Any = inputs, grad: Tensor = grad) -> Any:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        flops = shape.forward(tokens * (length + 1) // 2)
        name = f"heads {shape.query_heads}/{shape.key_heads} of {shape.qk_dim}, documents of {length}"
        yield (
            name,
            {"forward": figure(flops, forward, device), "backward": figure(2.5 * flops, backward, device)},
        )


def main() -> None:
    tiny = "--tiny" in sys.argv
    device = torch.device("cpu") if tiny and not torch.cuda.is_available() else torch.device("cuda", 0)
    tokens = 256 if tiny else TOKENS
    found: dict[str, Any] = {"matmuls": dict(matmuls(tokens, device)), "refused": []}
    for versions in ([], *([version] for version in flash.versions_here(device))):
        chosen, refused = flash.choose(versions, [EIGHT_B, ONE_B], torch.bfloat16, device)
        found["refused"] += refused
        if not refused:
            found[f"FlashAttention {chosen}"] = dict(attentions(tokens, device))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
