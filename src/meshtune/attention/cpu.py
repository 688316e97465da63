"""Attention on the CPU: one fused kernel call per run, straight into one output buffer.

    without a softcap   torch's flash attention for CPUs
    with a softcap      `meshtune::capped_attention`: scores = softcap · tanh(scale · q kᵀ / softcap), block
    by
                        block, which no fused CPU kernel of torch offers

Neither builds a mask of seq × seq, nor expands keys and values to the number of query heads.
"""

from typing import Any

import torch
from torch import Tensor

from meshtune.attention.runs import QueryRun, additive_mask

CAPPED_BLOCK = 256  # queries whose scores exist at a time in `capped_attention`


def fused(
    q: Tensor, k: Tensor, v: Tensor, runs: tuple[QueryRun, ...], padded: bool, scale: float,
    softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention run by run: q [batch, heads, queries, head_dim] -> the same, with gradients.

    k, v: [batch, kv_heads, keys, head_dim]. padded: True if some queries are in no run: they get zeros; with
    False they would be uninitialised memory. softcap: of the scaled scores; None: none. sinks: as in
    `core.attend_documents`.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _PerRun.apply(q, k, v, runs, padded, scale, softcap, sinks)  # type: ignore[return-value]


# One kernel call per run, into one output #


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None):
    """(Output, shaped as q [batch, heads, queries, head_dim]; log-sum-exp [batch, heads, queries]).

    mask: added to the scores, [queries, keys]; None: causal, with the first query at the first key.
    """
    if softcap is not None:
        return torch.ops.meshtune.capped_attention(q, k, v, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _kernel_backward(grad, q, k, v, out, lse, mask: Tensor | None, scale: float, softcap: float | None):
    """Gradients of q, k and v. grad: of `out`; the others: what `_kernel` was called with and returned."""
    if softcap is not None:
        return torch.ops.meshtune.capped_attention_backward(grad, q, k, v, out, lse, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _is_whole(runs: tuple[QueryRun, ...], padded: bool) -> bool:
    """True if one causal call without a mask does the whole micro-batch. padded: as in `fused`."""
    return len(runs) == 1 and not padded and not runs[0].masked


class _PerRun(torch.autograd.Function):
    """Attention run by run, with the arguments of `fused`; the last dimension of q, k and v is contiguous.

    Saves q, k, v, the output and its log-sum-exp, each once.

    Autograd over slices would instead save every document's output next to their concatenation and fill a
    gradient of the whole length for every slice.

    A sink is one more key with a value of zero, which no kernel has: its score is added to the log-sum-exp
    that the kernel returns, and the output scaled down. From these two the kernel's own backward gives the
    right gradients of q, k and v, since it takes weights from the one and row sums from the other.
    """

    @staticmethod
    def forward(
        ctx: Any, q, k, v, runs: tuple[QueryRun, ...], padded: bool, scale: float, softcap: float | None,
        sinks: Tensor | None,
    ):  # fmt: skip
        batch, heads, seq = q.shape[:3]
        if _is_whole(runs, padded):
            out, lse = _kernel(q, k, v, None, scale, softcap)
        else:
            # Tokens before heads: what the output projection reads without a copy.
            shape = (batch, seq, heads, v.shape[-1])
            out = (q.new_zeros if padded else q.new_empty)(shape).transpose(1, 2)
            lse_dtype = torch.promote_types(q.dtype, torch.float32)
            empty = q.new_zeros if padded else q.new_empty
            lse = empty(batch, seq, heads, dtype=lse_dtype).transpose(1, 2)
            for run in runs:
                mask = additive_mask(run, q.dtype, q.device)
                part = (
                    q[run.rows, :, run.queries],
                    k[run.rows, :, run.keys],
                    v[run.rows, :, run.keys],
                )
                out[run.rows, :, run.queries], lse[run.rows, :, run.queries] = _kernel(
                    *part, mask, scale, softcap
                )
        if sinks is not None:
            plain, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out.mul_((plain - lse).exp_()[..., None])
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.runs, ctx.padded, ctx.scale, ctx.softcap = runs, padded, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        runs, scale, softcap = ctx.runs, ctx.scale, ctx.softcap
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[7]:
            row_sums = (grad.to(lse.dtype) * out).sum(-1)
            weights = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            grad_sinks = (weights * row_sums).sum((0, 2)).neg_().to(sinks.dtype)
        if _is_whole(runs, ctx.padded):
            grads = _kernel_backward(grad, q, k, v, out, lse, None, scale, softcap)
            return *grads, None, None, None, None, grad_sinks
        # Blocks of one windowed document share keys: gradients add up. Otherwise each is written once.
        shared = any(run.masked for run in runs)
        grad_q = (torch.zeros_like if ctx.padded else torch.empty_like)(q)
        grad_k, grad_v = ((torch.zeros_like if ctx.padded or shared else torch.empty_like)(x) for x in (k, v))
        for run in runs:
            mask = additive_mask(run, q.dtype, q.device)
            rows, queries, keys = run.rows, run.queries, run.keys
            gq, gk, gv = _kernel_backward(
                grad[rows, :, queries],
                q[rows, :, queries],
                k[rows, :, keys],
                v[rows, :, keys],
                out[rows, :, queries],
                lse[rows, :, queries],
                mask,
                scale,
                softcap,
            )
            grad_q[rows, :, queries] = gq
            if not shared:
                grad_k[rows, :, keys], grad_v[rows, :, keys] = gk, gv
            else:
                grad_k[rows, :, keys] += gk
                grad_v[rows, :, keys] += gv
        return grad_q, grad_k, grad_v, None, None, None, None, grad_sinks


# Softcap: scores exist for one block of queries at a time #


def _capped_blocks(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float):
    """Yield (queries, keys, q of the block, capped scores with -inf where hidden) for blocks of queries.

    queries, keys: slices of the columns in the block and of those it sees. q: [batch, kv_heads, group ·
    queries, head_dim]: the query heads of one key-value head (its group) are laid behind one another, so that
    grouped-query attention is a plain batched matmul and nothing is expanded. scores: [batch, kv_heads,
    group, queries, keys]. Both are at least fp32; the scores may be overwritten. mask: as in `_kernel`.
    """
    batch, heads, length, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, length, head_dim)
    for start in range(0, length, CAPPED_BLOCK):
        stop = min(start + CAPPED_BLOCK, length)
        seen = stop if mask is None else keys
        block = grouped[:, :, :, start:stop].to(torch.promote_types(q.dtype, torch.float32))
        block = block.reshape(batch, kv_heads, -1, head_dim)
        scores = (block @ k[:, :, :seen].to(block.dtype).transpose(-1, -2)).mul_(scale / softcap)
        scores = scores.tanh_().mul_(softcap).view(batch, kv_heads, heads // kv_heads, stop - start, seen)
        if mask is None:
            later = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu_(start + 1)
            scores.masked_fill_(later, float("-inf"))
        else:
            scores += mask[start:stop]
        yield slice(start, stop), slice(0, seen), block, scores


@torch.library.custom_op("meshtune::capped_attention", mutates_args=())
def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Soft-capped attention; only the scores of one block of queries exist at a time.

    q [batch, heads, queries, head_dim] -> the same, and the log-sum-exp [batch, heads, queries] (Gemma 2,
    arXiv:2408.00118, section 2). mask: additive [queries, keys]; None: causal, first query at the first key.
    """
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys, _, scores in _capped_blocks(q, k, mask, scale, softcap):
        log_sum = scores.logsumexp(-1)  # [batch, kv_heads, group, queries]
        weights = scores.sub_(log_sum[..., None]).exp_().flatten(2, 3)
        part = weights @ v[:, :, keys].to(weights.dtype)
        out[:, :, queries] = part.view(batch, heads, -1, v.shape[-1])
        lse[:, :, queries] = log_sum.flatten(1, 2)
    return out, lse


@torch.library.custom_op("meshtune::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; scores are computed again, block by block (FlashAttention, algorithm 4).

    grad: of `out`. out, lse: what `capped_attention` returned; the others: what it was called with.
    """
    batch, heads, _, head_dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for queries, keys, block, scores in _capped_blocks(q, k, mask, scale, softcap):
        rows = scores.shape[-2]

        def grouped(x: Tensor, rows: int = rows) -> Tensor:
            return x.to(lse.dtype).reshape(batch, kv_heads, group * rows, -1)

        flat = scores.flatten(2, 3)
        weights = (flat - grouped(lse[:, :, queries])).exp_()
        part = grouped(grad[:, :, queries])
        grad_v[:, :, keys] += weights.transpose(-1, -2) @ part
        weights_grad = part @ v[:, :, keys].to(part.dtype).transpose(-1, -2)
        weights_grad -= (part * grouped(out[:, :, queries])).sum(-1, keepdim=True)
        # Where hidden, the weight is 0 and the slope infinite: the slope is made 0 instead.
        slope = flat.div_(softcap).square_().neg_().add_(1).masked_fill_(flat.isinf(), 0)
        scores_grad = weights_grad.mul_(weights).mul_(slope).mul_(scale)
        grad_q[:, :, queries] = (scores_grad @ k[:, :, keys].to(part.dtype)).view(
            batch, heads, rows, head_dim
        )
        grad_k[:, :, keys] += scores_grad.transpose(-1, -2) @ block
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@capped_attention.register_fake
def _(q, k, v, mask, scale, softcap):
    batch, heads, length, _ = q.shape
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2), lse


@capped_attention_backward.register_fake
def _(grad, q, k, v, out, lse, mask, scale, softcap):
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)
