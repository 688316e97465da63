"""Causal attention inside documents, by the fastest kernel that can do it.

    kernel   of             what runs
    fused    cpu            one fused call per document, into one output buffer (op.py, cpu.py)
    varlen   cuda, 16 bit   one variable-length flash call for the micro-batch (op.py, cuda.py)
    flex     cuda, softcap  flex attention with a block mask (cuda.py)
    plain    either         scaled_dot_product_attention per document, with plain autograd

`plain` does what the others can't: dropout, fp32 on CUDA, head sizes that the kernels refuse. A kernel is a
plain value: whoever calls may name one, and `fastest_kernel` is the choice without a name. So is the kind of
device whose kernels run (`kernels`): a model is told it when it is built (train/model.py).
"""

from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtune.attention.cpu import additive_mask
from meshtune.attention.cuda import flex
from meshtune.attention.op import attention
from meshtune.data.boundaries import Boundaries
from meshtune.placement.census import takes_flash

Kernel = Literal["fused", "varlen", "flex", "plain"]
# What is asked of attention -> kernels that can't do it.
UNSUPPORTED = {"dropout": ("fused", "varlen", "flex"), "softcap": ("varlen",), "sinks": ("flex",)}


def fastest_kernel(
    q: Tensor, v: Tensor, dropout: float, softcap: float | None, sinks: Tensor | None, kernels: str
) -> Kernel:
    """Name of the fastest kernel that can do it, for queries and values [tokens, heads, head_dim].

    dropout: probability, 0 for none. softcap: cap c in c · tanh(score / c) of the scaled scores; None: none.
    sinks: as in `attend`. kernels: "cpu" or "cuda", the kind of device whose kernels can run.
    """
    if dropout:
        return "plain"
    if kernels != "cuda":
        return "fused"
    if softcap is not None:
        return "flex" if sinks is None and q.shape[-1] == v.shape[-1] else "plain"
    return "varlen" if takes_flash(q.shape[-1], v.shape[-1], q.element_size()) else "plain"


def kernel_for(
    q: Tensor, v: Tensor, dropout: float, softcap: float | None, sinks: Tensor | None, kernels: str,
    *, kernel: Kernel | None,
) -> Kernel:  # fmt: skip
    """The kernel that is named, or the fastest for None; the rest is as in `fastest_kernel`.

    Raises ValueError for a named one that can't do what is asked.
    """
    if kernel is None:
        return fastest_kernel(q, v, dropout, softcap, sinks, kernels)
    asked = {"dropout": bool(dropout), "softcap": softcap is not None, "sinks": sinks is not None}
    if lacking := [name for name, given in asked.items() if given and kernel in UNSUPPORTED[name]]:
        raise ValueError(f'attention by "{kernel}" has no {" and no ".join(lacking)}; "plain" has all')
    return kernel


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Boundaries, scale: float, dropout: float,
    softcap: float | None, window: int | None, *, kernel: Kernel | None = None, sinks: Tensor | None = None,
    kernels: str | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention inside each document, of flattened tokens: q [queries, heads, head_dim] ->
    [queries, heads, v_dim].

    k, v: [keys, kv_heads, head_dim], where kv_heads divides heads. documents: of these queries and keys.
    scale: factor of q · k. dropout, softcap: as in `fastest_kernel`. window: keys that a query sees at most,
    its own included; None: all earlier ones. kernel: as in `kernel_for`. sinks [heads]: score of one more key
    that every query of a head sees, whose value is zero (gpt-oss, arXiv:2508.10925, section 2.3); None: none.
    kernels: as in `fastest_kernel`; None: those of the tensors' own device.
    """
    kernels = kernels or q.device.type
    match kernel_for(q, v, dropout, softcap, sinks, kernels, kernel=kernel):
        case "flex":
            assert softcap is not None
            return flex(q, k, v, documents, scale, softcap, window)
        case "plain":
            return _one_by_one(
                q, k, v, documents, scale, dropout, softcap, window, sinks=sinks, kernels=kernels
            )
        case name:
            out, _ = attention(
                q, k, v, documents.queries, documents.keys, documents.longest_query, documents.longest_key,
                scale, window, softcap, sinks, name,
            )  # fmt: skip
            return out


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, documents: Boundaries, scale: float, dropout: float,
    softcap: float | None, window: int | None, *, kernel: Kernel | None = None, sinks: Tensor | None = None,
    kernels: str | None = None,
) -> Tensor:  # fmt: skip
    """`attend` to the rows of a micro-batch: q [batch, heads, seq, size] -> [batch, seq, heads, size].

    k, v: [batch, kv_heads, seq, size]. The other arguments are those of `attend`. Padding gets finite
    values; no document sees it.
    """
    batch, _, seq, _ = q.shape
    q, k, v = map(flat, (q, k, v))
    if documents.columns is not None:
        k, v = (x.index_select(0, documents.columns) for x in (k, v))
    out = attend(
        q, k, v, documents, scale, dropout, softcap, window, kernel=kernel, sinks=sinks, kernels=kernels
    )
    return out.unflatten(0, (batch, seq))


def flat(x: Tensor) -> Tensor:
    """Tokens of all rows one behind another: [batch, heads, seq, size] -> [batch · seq, heads, size]."""
    return x.transpose(1, 2).flatten(0, 1)


# Plain autograd, document by document #


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, softcap: float | None, mask: Tensor | None,
    *, sinks: Tensor | None, kernels: str,
) -> Tensor:  # fmt: skip
    """Attention of documents of equal lengths, q [documents, heads, queries, head_dim] -> the same, under
    plain autograd.

    mask: added to the scores, [queries, keys]; None: causal. With a softcap, or sinks, the scores [queries,
    keys] are saved for the backward.
    """
    gqa = q.shape[1] != k.shape[1]
    by_hand = softcap is not None or sinks is not None
    if gqa and (by_hand or kernels == "cuda"):  # the memory-efficient CUDA kernel knows no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        gqa = False
    if not by_hand:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    else:
        scores = scores + mask
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        last = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, last], -1).softmax(-1)[..., :-1]
    return F.dropout(weights.to(q.dtype), dropout) @ v


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, documents: Boundaries, scale: float, dropout: float,
    softcap: float | None, window: int | None, *, sinks: Tensor | None, kernels: str,
) -> Tensor:  # fmt: skip
    """Same as `attend`, by one `_plain` call for neighbouring documents of equal lengths."""
    groups = [(length, seen, len(list(alike))) for (length, seen), alike in groupby(documents.lengths)]
    queries = [length * number for length, _, number in groups]
    keys = [seen * number for _, seen, number in groups]
    outs = []
    # Split and cat, not slices: the gradient of a split is written once, that of n slices n times.
    parts = zip(groups, q.split(queries), k.split(keys), v.split(keys), strict=True)
    for (length, seen, number), *tensors in parts:
        windowed = window is not None and window < seen
        mask = None
        if windowed or length != seen:
            mask = additive_mask(length, seen, window if windowed else None, q.dtype, q.device)
        own_q, own_k, own_v = (x.unflatten(0, (number, -1)).transpose(1, 2) for x in tensors)
        out = _plain(own_q, own_k, own_v, scale, dropout, softcap, mask, sinks=sinks, kernels=kernels)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


# Traced, every new set of document lengths would be compiled anew.
_one_by_one: Any = torch.compiler.disable(_by_length)
