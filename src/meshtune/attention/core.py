"""Causal attention inside documents, by the fastest kernel that can do it.

    kernel   of                     what runs
    fused    cpu                    one fused call per document, into one output buffer (cpu.py)
    varlen   cuda, 16 bit           one variable-length flash call for the micro-batch (cuda.py)
    flex     cuda, softcap, sinks   flex attention with a block mask (cuda.py)
    plain    either                 scaled_dot_product_attention per document, with plain autograd

`plain` does what the others can't: dropout, fp32 on CUDA, head sizes that the kernels refuse. A kernel is a
plain value: whoever calls may name one, and `fastest_kernel` is the choice without a name. So is the kind of
device whose kernels run (`kernels`): a model is told it when it is built (train/model.py).
"""

from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtune.attention.cpu import fused
from meshtune.attention.cuda import flex, flex_with_mask, runs_mask, varlen, varlen_runs
from meshtune.attention.runs import Lengths, QueryRun, QueryRuns, additive_mask, blocks_of, runs_of

Kernel = Literal["fused", "varlen", "flex", "plain"]
# What is asked of attention -> kernels that can't do it.
UNSUPPORTED = {"dropout": ("fused", "varlen", "flex"), "softcap": ("varlen",), "sinks": ("varlen",)}


def fastest_kernel(
    q: Tensor, v: Tensor, dropout: float, softcap: float | None, sinks: Tensor | None, kernels: str
) -> Kernel:
    """Name of the fastest kernel that can do it, for queries and values [batch, heads, seq, head_dim].

    dropout: probability, 0 for none. softcap: cap c in c · tanh(score / c) of the scaled scores; None: none.
    sinks: as in `attend_documents`. kernels: "cpu" or "cuda", the kind of device whose kernels can run.
    """
    if dropout or q.shape[-1] != v.shape[-1]:
        return "plain"
    if kernels != "cuda":
        return "fused"
    if softcap is not None or sinks is not None:
        return "flex"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "varlen" if fits else "plain"


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


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, dropout: float, softcap: float | None,
    window: int | None, *, kernel: Kernel | None = None, sinks: Tensor | None = None,
    kernels: str | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention inside each document: q [batch, heads, seq, head_dim] -> the same.

    Padding gets zeros, from the varlen kernel other finite values; no document sees it.

    k, v: [batch, kv_heads, seq, head_dim], where kv_heads divides heads. documents: each row's document
    lengths from column 0 on; the rest of a row is padding. scale: factor of q · k. dropout, softcap: as in
    `fastest_kernel`. window: keys that a query sees at most, its own included; None: all earlier ones.
    kernel: as in `kernel_for`. sinks [heads]: score of one more key that every query of a head sees,
    whose value is zero (gpt-oss, arXiv:2508.10925, section 2.3); None: none. kernels: as in `fastest_kernel`;
    None: those of the tensors' own device.
    """
    kernels = kernels or q.device.type
    match kernel_for(q, v, dropout, softcap, sinks, kernels, kernel=kernel):
        case "fused":
            padded = any(sum(row) < q.shape[2] for row in documents)
            return fused(q, k, v, runs_of(documents, window), padded, scale, softcap, sinks)
        case "varlen":
            return varlen(q, k, v, documents, scale, window)
        case "flex":
            return flex(q, k, v, documents, scale, softcap, window, sinks)
        case _:
            return _one_by_one(
                q, k, v, documents, scale, dropout, softcap, window, sinks=sinks, kernels=kernels
            )


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, runs: QueryRuns, scale: float, dropout: float, softcap: float | None,
    *, kernel: Kernel | None = None, sinks: Tensor | None = None, kernels: str | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention where a rank's queries are other columns than its keys (context parallelism).

    q [batch, heads, queries, head_dim], k and v [batch, kv_heads, keys, head_dim] -> shaped as q. runs: which
    queries see which keys, with the window; queries in no run get zeros. scale, dropout, softcap, kernel,
    sinks, kernels: as in `attend_documents`.
    """
    kernels = kernels or q.device.type
    if not runs.runs:
        # Only padding. The other ranks gather in their backward, so this one needs a backward too, and
        # something saved, or recomputation would not gather again.
        return fused(q, k, v, (), True, scale, softcap, sinks)
    match kernel_for(q, v, dropout, softcap, sinks, kernels, kernel=kernel):
        case "fused":
            return fused(q, k, v, tuple(blocks_of(runs)), True, scale, softcap, sinks)
        case "varlen":
            return varlen_runs(q, k, v, runs, scale)
        case "flex":
            mask = runs_mask(runs, q.shape[0], q.shape[2], k.shape[2], q.device)
            return flex_with_mask(q, k, v, mask, scale, softcap, sinks)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for run in blocks_of(runs):
        run_q = q[run.rows, :, run.queries]
        run_k, run_v = (x[run.rows, :, run.keys] for x in (k, v))
        out[run.rows, :, run.queries] = _plain(
            run_q, run_k, run_v, scale, dropout, softcap, run, sinks=sinks, kernels=kernels
        )
    return out


# Plain autograd, document by document #


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, softcap: float | None, run: QueryRun,
    *, sinks: Tensor | None, kernels: str,
) -> Tensor:  # fmt: skip
    """Attention of one run, q [batch, heads, queries, head_dim] -> the same, under plain autograd.

    q, k, v: the columns only of this run; `run` is only read for its mask. With a softcap, or sinks, the
    scores [queries, keys] are saved for the backward.
    """
    mask = additive_mask(run, q.dtype, q.device)
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


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, dropout: float, softcap: float | None,
    window: int | None, *, sinks: Tensor | None, kernels: str,
) -> Tensor:  # fmt: skip
    """Same as `attend_documents`, by one `_plain` call per document.

    Neighbouring rows with equal document lengths share their calls.
    """
    seq, groups = q.shape[2], [(lengths, len(list(alike))) for lengths, alike in groupby(documents)]
    outs = []
    # Split and cat, not slices: the gradient of a split is written once, that of n slices n times.
    split_rows = zip(*(x.split([count for _, count in groups]) for x in (q, k, v)), strict=True)
    for (lengths, _), rows in zip(groups, split_rows, strict=True):
        padding = seq - sum(lengths)
        slices = zip(*(x.split([*lengths, padding], dim=2) for x in rows), strict=True)
        parts = []
        for length, (part_q, part_k, part_v) in zip(lengths, slices, strict=False):
            whole = slice(0, length)
            run = QueryRun(whole, whole, whole, window if window is not None and window < length else None)
            part = _plain(part_q, part_k, part_v, scale, dropout, softcap, run, sinks=sinks, kernels=kernels)
            parts.append(part)
        last = rows[0].new_zeros(*rows[0].shape[:2], padding, rows[2].shape[-1])
        outs.append(torch.cat([*parts, last], dim=2))
    return torch.cat(outs)
