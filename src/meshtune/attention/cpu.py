"""Attention on the CPU, behind `op.attention`: one fused kernel call per document, into one output buffer.

    without a softcap   torch's flash attention for CPUs
    with a softcap      scores = softcap · tanh(scale · q kᵀ / softcap), block by block, which no fused CPU
                        kernel of torch offers

Neither builds a mask of seq × seq, nor expands keys and values to the number of query heads. Neighbouring
documents of equal lengths share a call. A document longer than its sliding window takes several calls, each
with the keys that its window reaches, so that time and mask grow with length × window.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meshtune.attention.arguments import Core, Inputs

CAPPED_BLOCK = 256  # queries whose scores exist at a time with a softcap
WINDOW_BLOCK = 512  # queries of one masked call, at most


class Call(NamedTuple):
    """One kernel call: neighbouring documents of equal lengths, or some queries of one document. The last
    query stands at the last key.
    """

    queries: slice  # of the flattened tokens
    keys: slice
    documents: int = 1
    window: int | None = None  # keys that a query sees at most, its own included; None: all earlier ones

    @property
    def masked(self) -> bool:
        """True if a plain causal kernel call would give another result."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return self.window is not None or queries != keys

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        """Some tokens of x [tokens, heads, head_dim] as [documents, heads, tokens each, head_dim], a view."""
        return x[tokens].unflatten(0, (self.documents, -1)).transpose(1, 2)

    def lse_of(self, lse: Tensor) -> Tensor:
        """The queries of a log-sum-exp [heads, queries] as [documents, heads, queries each], a view."""
        return lse[:, self.queries].unflatten(1, (self.documents, -1)).transpose(0, 1)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Its `additive_mask`; None if a causal call does without."""
        if not self.masked:
            return None
        length, seen = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return additive_mask(length, seen, self.window, dtype, torch.device("cpu"))


def additive_mask(
    queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Additive mask [queries, keys] of causal attention whose last query stands at the last key: 0, or -inf
    where hidden.

    Query i sees keys i - window + 1 … i: as in Hugging Face, a window counts the query itself.
    """
    own, seen = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    hidden = seen > own
    if window is not None:
        hidden |= seen <= own - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def calls(core: Core) -> tuple[Call, ...]:
    """The kernel calls of all documents."""
    return _calls(tuple(core.query_boundaries.tolist()), tuple(core.key_boundaries.tolist()), core.window)


@lru_cache(maxsize=32)
def _calls(queries: tuple[int, ...], keys: tuple[int, ...], window: int | None) -> tuple[Call, ...]:
    lengths = zip((b - a for a, b in pairwise(queries)), (b - a for a, b in pairwise(keys)), strict=True)
    found: list[Call] = []
    query = key = 0
    for (length, seen), alike in groupby(lengths):
        number = len(list(alike))
        if length == seen and (window is None or length <= window):
            own = slice(query, query + number * length), slice(key, key + number * seen)
            found.append(Call(*own, documents=number))
        else:
            for each in range(number):
                found += _blocks(query + each * length, key + each * seen, length, seen, window)
        query, key = query + number * length, key + number * seen
    return tuple(found)


def _blocks(query: int, key: int, length: int, seen: int, window: int | None) -> Iterator[Call]:
    """The calls of one document, each with the keys that its queries see. query, key: its first ones."""
    size = WINDOW_BLOCK if window is None else min(max(window, 64), WINDOW_BLOCK)
    behind = key + seen - (query + length)  # from a query to its own key
    for first in range(query, query + length, size):
        last = min(first + size, query + length)
        begin = key if window is None else max(key, first + behind - window + 1)
        yield Call(slice(first, last), slice(begin, last + behind), window=window)


def forward(q: Tensor, k: Tensor, v: Tensor, core: Core) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as `op.attention` describes them. Raises ValueError if they do not fit."""
    queries, keys = int(core.query_boundaries[-1]), int(core.key_boundaries[-1])
    if (queries, keys) != (len(q), len(k)):
        raise ValueError(
            f"The documents have {queries} queries and {keys} keys, attention got {len(q)} and {len(k)}."
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    every = calls(core)
    for call in every:
        parts = call.of(q, call.queries), call.of(k, call.keys), call.of(v, call.keys)
        part, part_lse = _kernel(*parts, call.mask(q.dtype), core.scale, core.softcap)
        if len(every) == 1 and part.stride()[1:3] == (v.shape[-1], part.shape[1] * v.shape[-1]):
            return part.transpose(1, 2).flatten(0, 1), part_lse.transpose(0, 1).flatten(1)
        call.of(out, call.queries).copy_(part)
        call.lse_of(lse).copy_(part_lse)
    return out, lse


def backward(grad: Tensor, inputs: Inputs, outputs: tuple[Tensor, Tensor], core: Core) -> Inputs:
    """Gradients of q, k and v. grad: of the output; inputs, outputs: of `forward`."""
    (q, k, v), (out, lse), every = inputs, outputs, calls(core)
    # Blocks of one document share keys: gradients add up. Otherwise each is written once.
    shared = any(call.masked for call in every)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = ((torch.zeros_like if shared else torch.empty_like)(x) for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    for call in every:
        queries = call.of(grad, call.queries), call.of(q, call.queries)
        keys = call.of(k, call.keys), call.of(v, call.keys)
        ends = call.of(out, call.queries), call.lse_of(lse)
        mask = call.mask(q.dtype)
        gq, gk, gv = _kernel_backward(*queries, *keys, *ends, mask, core.scale, core.softcap)
        call.of(grad_q, call.queries).copy_(gq)
        for whole, part in ((grad_k, gk), (grad_v, gv)):
            own = call.of(whole, call.keys)
            own.add_(part) if shared else own.copy_(part)
    return grad_q, grad_k, grad_v


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None):
    """(Output, shaped as q [batch, heads, queries, head_dim]; log-sum-exp [batch, heads, queries]).

    mask: added to the scores, [queries, keys]; None: causal, with the first query at the first key.
    """
    if softcap is not None:
        return _capped(q, k, v, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _kernel_backward(grad, q, k, v, out, lse, mask: Tensor | None, scale: float, softcap: float | None):
    """Gradients of q, k and v. grad: of `out`; the others: what `_kernel` was called with and returned."""
    if softcap is not None:
        return _capped_backward(grad, q, k, v, out, lse, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )


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


def _capped(
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


def _capped_backward(
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

    grad: of `out`. out, lse: what `_capped` returned; the others: what it was called with.
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
