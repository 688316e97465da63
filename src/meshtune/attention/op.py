"""One operator of torch for causal attention inside documents, forward and backward, on every device.

    meshtune::attention            q, k, v, boundaries of the documents -> output, log-sum-exp
    meshtune::attention_backward   their gradients

Tokens of all rows stand behind one another, and documents are tensors: the compiler, selective recomputation
and the dry run see one operator, whose graph is the same for every set of documents.

    kernel "fused"    torch's flash attention for CPUs, call by call, or ours with a softcap (cpu.py)
    kernel "varlen"   one variable-length flash call on CUDA, in 16 bits (cuda.py)

Heads of values that are smaller than those of queries and keys (latent attention) are padded with zeros for
the kernel, which takes equal ones only; the results are the same, and the backward's tensors are not padded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtune.attention import cpu, cuda
from meshtune.attention.arguments import Core

KERNELS = {"fused": cpu, "varlen": cuda}


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The tensors with zeros behind each head that is smaller than the largest."""
    most = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, most - x.shape[-1])) if x.shape[-1] < most else x for x in tensors]


@torch.library.custom_op("meshtune::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, query_boundaries: Tensor, key_boundaries: Tensor, longest_query: Tensor,
    longest_key: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of documents: q [queries, heads, head_dim] -> [queries, heads, v_dim], and
    log-sum-exp [heads, queries], at least in fp32.

    k, v: [keys, kv_heads, head_dim], where kv_heads divides heads; heads of v, and of the output, may have
    another size. query_boundaries, key_boundaries: int32
    [documents + 1]; document i has the tokens from boundary i up to, but without, boundary i + 1, and its
    last query stands at its last key. longest_query, longest_key: most tokens of a document, numbers on the
    CPU, tensors since a compiled graph is made for every other number. scale: factor of q · k. window: keys
    that a query sees at most, its own included; None: all earlier ones. softcap: of the scaled scores; None:
    none. sinks [heads]: as in `core.attend`. kernel: one of KERNELS.
    """
    longest = int(longest_query), int(longest_key)
    core = Core(query_boundaries, key_boundaries, *longest, scale, window, softcap)
    out, lse = KERNELS[kernel].forward(*_padded(q, k, v), core)
    out = out[..., : v.shape[-1]].contiguous()  # CUDA's has the memory order of q: of one row, heads first
    if sinks is not None:
        # A sink is one more key with a value of zero, which no kernel has: its score is added to the
        # log-sum-exp that the kernel returns, and the output scaled down. From these two the kernel's own
        # backward gives the right gradients of q, k and v, since it takes weights from the one and row sums
        # from the other.
        plain, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out.mul_((plain - lse).exp_().t()[..., None])
    return out, lse


@torch.library.custom_op("meshtune::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_boundaries: Tensor,
    key_boundaries: Tensor, longest_query: Tensor, longest_key: Tensor, scale: float, window: int | None,
    softcap: float | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v. grad: of the output; the others: of the call of `attention`."""
    longest = int(longest_query), int(longest_key)
    core = Core(query_boundaries, key_boundaries, *longest, scale, window, softcap)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad, out, *inputs = _padded(grad, out, q, k, v)
    grads = KERNELS[kernel].backward(grad, (*inputs,), (out, lse), core)
    if q.shape[-1] == v.shape[-1]:
        return grads
    grad_q, grad_k, grad_v = (
        torch.empty_like(x).copy_(wide[..., : x.shape[-1]]) for x, wide in zip((q, k, v), grads, strict=True)
    )
    return grad_q, grad_k, grad_v


@attention.register_fake
def _(q, k, v, *rest):
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:2], v.shape[-1]), lse


@attention_backward.register_fake
def _(grad, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *documents, scale, window, softcap, sinks, kernel = inputs
    ctx.set_materialize_grads(False)  # of the log-sum-exp, which nobody reads
    ctx.save_for_backward(q, k, v, *output, *documents, sinks)
    ctx.settings = scale, window, softcap, kernel


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None):
    q, k, v, out, lse, *documents, sinks = ctx.saved_tensors
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    grad_sinks = None
    if sinks is not None and ctx.needs_input_grad[10]:
        row_sums = (grad.to(lse.dtype) * out).sum(-1)
        weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
        grad_sinks = -(weights.t() * row_sums).sum(0).to(sinks.dtype)
    grads = attention_backward(grad, q, k, v, out, lse, *documents, *ctx.settings)
    return *grads, *[None] * 7, grad_sinks, None


attention.register_autograd(_backward, setup_context=_keep)
