"""The experts' own computation on rows that are sorted by expert: two products, or three with a gate.

grouped_mm   torch's, one kernel for all experts
loop         a matmul an expert: the reference, and where grouped_mm can't run
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtune.quantised import nf4

Matmul = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows, weights [experts, in, out], counts -> rows

ALIGNED = 16  # bytes, where each row must start that grouped_mm reads or writes
AMPERE = (8, 0)  # oldest compute capability of its kernels


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model whose experts run through transformers' function of a configured name."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield module


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


def looped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


MATMULS: dict[str, Matmul] = {"grouped_mm": grouped, "loop": looped}


def matmul_for(module: nn.Module, kernels: str, dtype: torch.dtype) -> str:
    """Choose the matmul of a module's experts, a key of MATMULS. kernels: "cpu", "cuda" or "meta"."""
    parameters = [getattr(module, name) for name in stacked(module)]
    aligned = all(size * dtype.itemsize % ALIGNED == 0 for p in parameters for size in p.shape[1:])
    dtypes = [torch.bfloat16]
    if kernels == "cpu":
        dtypes.append(torch.float32)
    old = kernels == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE
    runs = dtype in dtypes and aligned and not old
    return "grouped_mm" if kernels == "meta" or runs else "loop"


def entry(module: nn.Module) -> str:
    """Name of the parameter that multiplies the experts' inputs."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def stacked(module: nn.Module) -> tuple[str, str]:
    """Names of the parameters that rows are multiplied with."""
    return entry(module), "down_proj"


def compute(module: Any, rows: Tensor, counts: Tensor, matmul: Matmul) -> Tensor:
    """Run a module's experts on rows [rows, hidden], counts[e] of them for expert e."""
    inner = project(module, entry(module), rows, counts, matmul)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = project(module, "down_proj", inner, counts, matmul)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def project(module: Any, name: str, rows: Tensor, counts: Tensor, matmul: Matmul) -> Tensor:
    """Multiply rows by the weights of their experts, the module's parameter `name`, and add their biases."""
    out = product(module, name, rows, counts, matmul)
    if module.has_bias:
        biases = getattr(module, f"{name}_bias")
        experts = torch.arange(len(counts), device=counts.device)
        out = out + biases[experts.repeat_interleave(counts, output_size=len(rows))]
    if hasattr(module, f"{name}_lora_A"):
        out = out + low_rank(module, name, rows.to(out.dtype), counts, matmul)
    return out


def low_rank(module: Any, name: str, rows: Tensor, counts: Tensor, matmul: Matmul) -> Tensor:
    """Multiply rows by the adapters of their experts, which belong to the parameter `name` (adapters.py).

    A rank whose rows grouped_mm can't read is filled up with zeros.
    """
    a, b = (getattr(module, f"{name}_lora_{which}").to(rows.dtype) for which in "AB")
    if short := -a.shape[1] % (ALIGNED // rows.dtype.itemsize):
        a, b = F.pad(a, (0, 0, 0, short)), F.pad(b, (0, short))
    inner = matmul(rows, a.transpose(1, 2), counts) * module.lora_scale
    return matmul(inner, b.transpose(1, 2), counts)


def product(module: Any, name: str, rows: Tensor, counts: Tensor, matmul: Matmul) -> Tensor:
    """Multiply rows by the weights of their experts, which may be in 4 bits."""
    if codes := nf4.codes_of_experts(module, name):
        return nf4.multiply_experts(module, codes, rows, counts, matmul)
    weights = getattr(module, name)
    return matmul(rows.to(weights.dtype), weights if module.is_transposed else weights.mT, counts)
