"""Causal attention over packed documents, for any Hugging Face model that uses `AttentionInterface`.

    model.set_attn_implementation("meshtune")
    model(input_ids, position_ids=..., documents=((5, 3), (8,)), use_cache=False)

`documents[b]` holds the lengths of row b's documents from column 0 on; what lies beyond their sum is padding.
A token sees the earlier tokens of its own document (of the last `sliding_window` ones, itself included),
nothing else; padding gives zeros. No mask of seq × seq is ever built, and keys and values are never expanded
to the number of query heads.

    CPU                one fused call per document, straight into one output buffer    `_PerDocument`
      with a softcap   the same with our own blockwise kernel (`meshtune::capped_attention`)
    CUDA, 16 bit       one variable-length flash call for the micro-batch              `_varlen`
      with a softcap   flex attention with a block mask                                `_flex`
    anything else      scaled_dot_product_attention per document                       `_one_by_one`
    (dropout, fp32 on CUDA, a head size that the kernels refuse)

"meshtune_recompute" is the same function, but what happens inside is recomputed in the backward.

A family that does not pass `documents` down to its attention raises: it must never be silently wrong. So does
any argument that we do not know.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from meshtune.compat import varlen_attention
from meshtune.data.loader import MicroBatch
from meshtune.model.anatomy import Anatomy

NAMES = ("meshtune", "meshtune_recompute")

Lengths = tuple[tuple[int, ...], ...]

PADDING_PIECE = (
    128  # tokens; for varlen, padding is cut into documents of this length, so that it costs little
)
CAPPED_BLOCK = 256  # queries whose scores exist at a time in `capped_attention`
WINDOW_BLOCK = 512  # queries of one masked call, at most


# ------------------------------------------------------------------------------------------------------------
# Which queries see which keys
# ------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbouring queries of some rows, and the keys that they see, causally (window None) or in a band as
    well: one kernel call.

    first: where the first query stands among the keys' columns; None: at queries.start.
    """

    rows: slice
    queries: slice
    keys: slice
    window: int | None
    first: int | None = None

    @property
    def place(self) -> int:
        return self.queries.start if self.first is None else self.first

    @property
    def masked(self) -> bool:
        """Whether a plain causal call would not say the same."""
        return self.window is not None or self.place != self.keys.start


@dataclass(frozen=True, eq=False)  # by identity: slices have no hash before Python 3.12
class Runs:
    """Which queries see which keys where a rank has other columns of queries than of keys (context.py).

    Each is of one document in one row; its keys end at its last query.
    """

    each: tuple[Run, ...]


class Documents:
    """Document lengths as one opaque value.

    A compiled block hands it on without looking inside; tuples of numbers it would compile anew for every
    new set.
    """

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = lengths


def _checked(documents: Documents | Sequence[Sequence[int]], batch: int, seq: int) -> Lengths:
    rows = documents.lengths if isinstance(documents, Documents) else documents
    lengths = tuple(tuple(row) for row in rows)
    if len(lengths) != batch:
        raise ValueError(f"`documents` describes {len(lengths)} rows, the micro-batch has {batch}.")
    for row, inside in enumerate(lengths):
        if sum(inside) > seq or any(length < 1 for length in inside):
            raise ValueError(
                f"`documents[{row}]` is {inside}: lengths must be at least 1 and their sum at most {seq}."
            )
    return lengths


@lru_cache(maxsize=32)
def _runs(documents: Lengths, window: int | None) -> tuple[Run, ...]:
    """The kernel calls of a micro-batch; neighbouring rows that are cut alike share theirs."""
    runs, row = [], 0
    for lengths, alike in groupby(documents):
        rows = slice(row, row + len(list(alike)))
        row = rows.stop
        for stop in accumulate(lengths):
            start = stop - lengths[0]
            lengths = lengths[1:]
            runs.extend(_runs_inside(rows, start, stop, window))
    return tuple(runs)


def _runs_inside(rows: slice, start: int, stop: int, window: int | None) -> list[Run]:
    if window is None or stop - start <= window:
        return [Run(rows, slice(start, stop), slice(start, stop), None)]
    # Blocks of queries, each with the keys that its window reaches: time and mask grow with length × window.
    size = min(max(window, 64), WINDOW_BLOCK)
    blocks = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    return [
        Run(rows, slice(first, last), slice(max(start, first - window + 1), last), window)
        for first, last in blocks
    ]


def _blocks(runs: Runs) -> Iterator[Run]:
    """At most WINDOW_BLOCK queries at a time, each block with the keys that it sees."""
    for run in runs.each:
        shift = run.place - run.queries.start
        for start in range(run.queries.start, run.queries.stop, WINDOW_BLOCK):
            stop, place = min(start + WINDOW_BLOCK, run.queries.stop), start + shift
            begin = run.keys.start if run.window is None else max(run.keys.start, place - run.window + 1)
            yield Run(run.rows, slice(start, stop), slice(begin, stop + shift), run.window, place)


def _band(run: Run, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The additive mask [queries, keys] of a run with a window; None when plain causal attention says the
    same.

    Hugging Face counts the query itself: a window of w sees keys i - w + 1 ... i.
    """
    if not run.masked:
        return None
    length = run.queries.stop - run.queries.start
    queries = torch.arange(run.place, run.place + length, device=device)[:, None]
    keys = torch.arange(run.keys.start, run.keys.stop, device=device)[None, :]
    hidden = keys > queries
    if run.window is not None:
        hidden |= keys <= queries - run.window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


# ------------------------------------------------------------------------------------------------------------
# CPU: one kernel call per run, into one output
# ------------------------------------------------------------------------------------------------------------


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None):
    """[batch, heads, queries, head_dim] -> output of the same shape, log-sum-exp [batch, heads, queries]."""
    if softcap is not None:
        return torch.ops.meshtune.capped_attention(q, k, v, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _kernel_backward(grad, q, k, v, out, lse, mask: Tensor | None, scale: float, softcap: float | None):
    if softcap is not None:
        return torch.ops.meshtune.capped_attention_backward(grad, q, k, v, out, lse, mask, scale, softcap)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )


class _PerDocument(torch.autograd.Function):
    """Attention run by run. Saves q, k, v, the output and its log-sum-exp, each once.

    Autograd over slices would instead save every document's output beside their concatenation and fill a
    gradient of the whole length for every slice.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, runs: tuple[Run, ...], padded: bool, scale: float, softcap: float | None):
        batch, heads, seq = q.shape[:3]
        if len(runs) == 1 and not padded:
            out, lse = _kernel(q, k, v, None, scale, softcap)
        else:
            # Tokens before heads: what the output projection reads without a copy.
            shape = (batch, seq, heads, v.shape[-1])
            out = (q.new_zeros if padded else q.new_empty)(shape).transpose(1, 2)
            lse_dtype = torch.promote_types(q.dtype, torch.float32)
            lse = q.new_empty(batch, seq, heads, dtype=lse_dtype).transpose(1, 2)
            for run in runs:
                mask = _band(run, q.dtype, q.device)
                part = (
                    q[run.rows, :, run.queries],
                    k[run.rows, :, run.keys],
                    v[run.rows, :, run.keys],
                )
                out[run.rows, :, run.queries], lse[run.rows, :, run.queries] = _kernel(
                    *part, mask, scale, softcap
                )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs, ctx.padded, ctx.scale, ctx.softcap = runs, padded, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        runs, scale, softcap = ctx.runs, ctx.scale, ctx.softcap
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        if len(runs) == 1 and not ctx.padded:
            grads = _kernel_backward(grad, q, k, v, out, lse, None, scale, softcap)
            return *grads, None, None, None, None
        # Blocks of one windowed document share keys, so their gradients add up; otherwise each is written
        # once.
        shared = any(run.masked for run in runs)
        grad_q = (torch.zeros_like if ctx.padded else torch.empty_like)(q)
        grad_k, grad_v = ((torch.zeros_like if ctx.padded or shared else torch.empty_like)(t) for t in (k, v))
        for run in runs:
            mask = _band(run, q.dtype, q.device)
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
        return grad_q, grad_k, grad_v, None, None, None, None


# ------------------------------------------------------------------------------------------------------------
# CPU with a softcap: scores = softcap · tanh(scale · q kᵀ / softcap), which no fused CPU kernel offers
# ------------------------------------------------------------------------------------------------------------


def _capped_blocks(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float):
    """Yield (queries, keys seen, q block, capped scores with -inf where hidden), block of queries by block.

    Query heads of one key head are laid behind one another, [batch, kv_heads, group · queries, head_dim], so
    that grouped-query attention is a plain batched product and nothing is expanded.
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
    """Soft-capped attention, causal or with an additive mask [queries, keys]; scores of one block at a time.

    [batch, heads, queries, head_dim] -> the same, and the log-sum-exp [batch, heads, queries] (Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2).
    """
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys, _, scores in _capped_blocks(q, k, mask, scale, softcap):
        total = scores.logsumexp(-1)  # [batch, kv_heads, group, queries]
        weights = scores.sub_(total[..., None]).exp_().flatten(2, 3)
        part = weights @ v[:, :, keys].to(weights.dtype)
        out[:, :, queries] = part.view(batch, heads, -1, v.shape[-1])
        lse[:, :, queries] = total.flatten(1, 2)
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
    """Gradients of q, k and v; scores are computed again, block by block (FlashAttention, algorithm 4)."""
    batch, heads, _, head_dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (k, v))
    for queries, keys, block, scores in _capped_blocks(q, k, mask, scale, softcap):
        rows = scores.shape[-2]

        def grouped(t: Tensor, rows: int = rows) -> Tensor:
            return t.to(lse.dtype).reshape(batch, kv_heads, group * rows, -1)

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


# ------------------------------------------------------------------------------------------------------------
# CUDA
# ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _boundaries(documents: Lengths, seq: int, device: torch.device) -> tuple[Tensor, int]:
    """cu_seqlens [documents + 1] of the flattened micro-batch, padding as own documents; the longest."""
    lengths: list[int] = []
    for row in documents:
        rest = seq - sum(row)
        lengths += [*row, *[PADDING_PIECE] * (rest // PADDING_PIECE), rest % PADDING_PIECE]
    lengths = [length for length in lengths if length]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths)


@lru_cache(maxsize=8)
def _document_ids(documents: Lengths, seq: int, device: torch.device) -> Tensor:
    """[batch, seq]: the number of each token's document in its row, -1 for padding."""
    rows = [
        [number for number, length in enumerate(row) for _ in range(length)] + [-1] * (seq - sum(row))
        for row in documents
    ]
    return torch.tensor(rows, device=device)


def _varlen(q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, window: int | None) -> Tensor:
    batch, heads, seq, head_dim = q.shape
    boundaries, longest = _boundaries(documents, seq, q.device)
    flat_q, flat_k, flat_v = (t.transpose(1, 2).reshape(batch * seq, -1, head_dim) for t in (q, k, v))
    left = -1 if window is None or window >= longest else window - 1
    out = varlen_attention(
        flat_q, flat_k, flat_v, boundaries, boundaries, longest, longest, scale=scale, window_size=(left, 0)
    )
    out = out.view(batch, seq, heads, head_dim).transpose(1, 2)
    if any(sum(row) < seq for row in documents):
        out = out.masked_fill((_document_ids(documents, seq, q.device) < 0)[:, None, :, None], 0)
    return out


class _Flat(NamedTuple):
    """Tokens of runs, one run after the other: where they are in [batch · columns], where runs begin, the
    longest."""

    tokens: Tensor
    boundaries: Tensor
    longest: int


@lru_cache(maxsize=8)
def _flat(runs: Runs, of: str, columns: int, device: torch.device) -> _Flat:
    """The "queries" or the "keys" of the runs of rows with so many columns of them."""
    spans = [(run.rows.start * columns, getattr(run, of)) for run in runs.each]
    tokens = torch.cat([torch.arange(row + span.start, row + span.stop) for row, span in spans])
    lengths = [span.stop - span.start for _, span in spans]
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return _Flat(tokens.to(device), boundaries.to(device), max(lengths))


def _varlen_runs(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Tensor:
    """Keys that several runs see are laid out for each: at most twice as many as there are."""
    batch, heads, columns, head_dim = q.shape
    queries = _flat(runs, "queries", columns, q.device)
    keys = _flat(runs, "keys", k.shape[2], q.device)
    flat_q, flat_k, flat_v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    window = runs.each[0].window
    part = varlen_attention(
        flat_q.index_select(0, queries.tokens),
        flat_k.index_select(0, keys.tokens), flat_v.index_select(0, keys.tokens),
        queries.boundaries, keys.boundaries, queries.longest, keys.longest,
        scale=scale, window_size=(-1 if window is None or window >= keys.longest else window - 1, 0),
    )  # fmt: skip
    out = part.new_zeros(batch * columns, heads, head_dim).index_copy(0, queries.tokens, part)
    return out.view(batch, columns, heads, head_dim).transpose(1, 2)


@cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import (
        flex_attention,
    )  # imports the compiler: only where it is used

    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _block_mask(documents: Lengths, seq: int, window: int | None, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    ids = _document_ids(documents, seq, device)

    def visible(b, h, i, j):
        seen = (ids[b, i] == ids[b, j]) & (j <= i) & (ids[b, i] >= 0)
        return seen if window is None else seen & (j > i - window)

    return create_block_mask(visible, len(documents), None, seq, seq, device=str(device))


@lru_cache(maxsize=8)
def _runs_mask(runs: Runs, batch: int, columns: int, keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    first, last = torch.zeros(batch, columns, dtype=torch.long), torch.full((batch, columns), -1)
    for run in runs.each:
        places = torch.arange(run.place, run.keys.stop)
        reach = len(places) + run.place if run.window is None else run.window
        first[run.rows, run.queries] = (places - reach + 1).clamp(min=run.keys.start)
        last[run.rows, run.queries] = places
    first, last = first.to(device), last.to(device)

    def visible(b, h, i, j):
        return (j >= first[b, i]) & (j <= last[b, i])

    return create_block_mask(visible, batch, None, columns, keys, device=str(device))


def _flex(q, k, v, documents: Lengths, scale: float, softcap: float | None, window: int | None) -> Tensor:
    return _masked_flex(q, k, v, _block_mask(documents, q.shape[2], window, q.device), scale, softcap)


def _masked_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
    def capped(score, b, h, i, j):
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return _compiled_flex()(
        q, k, v, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


# ------------------------------------------------------------------------------------------------------------
# Anywhere: plain autograd, document by document
# ------------------------------------------------------------------------------------------------------------


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, softcap: float | None, run: Run
) -> Tensor:
    """One document, [batch, heads, length, head_dim]; keeps its scores for the backward when capped."""
    mask = _band(run, q.dtype, q.device)
    gqa = q.shape[1] != k.shape[1]
    if gqa and (softcap is not None or q.is_cuda):  # the memory-efficient CUDA kernel knows no grouped heads
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        gqa = False
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)) * (scale / softcap))
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    else:
        scores = scores + mask
    weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Lengths,
    scale: float,
    dropout: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    seq, groups = q.shape[2], [(lengths, len(list(alike))) for lengths, alike in groupby(documents)]
    outs = []
    # Split and cat, not slices: the gradient of a split is written once, that of n slices n times.
    split_rows = zip(*(t.split([count for _, count in groups]) for t in (q, k, v)), strict=True)
    for (lengths, _), rows in zip(groups, split_rows, strict=True):
        padding = seq - sum(lengths)
        slices = zip(*(t.split([*lengths, padding], dim=2) for t in rows), strict=True)
        parts = []
        for length, (own_q, own_k, own_v) in zip(lengths, slices, strict=False):
            whole = slice(0, length)
            banded = window if window is not None and window < length else None
            run = Run(whole, whole, whole, banded)
            parts.append(_plain(own_q, own_k, own_v, scale, dropout, softcap, run))
        last = rows[0].new_zeros(*rows[0].shape[:2], padding, rows[2].shape[-1])
        outs.append(torch.cat([*parts, last], dim=2))
    return torch.cat(outs)


# ------------------------------------------------------------------------------------------------------------
# The function that Hugging Face calls
# ------------------------------------------------------------------------------------------------------------

# What families pass besides, and why it changes nothing here.
HARMLESS = {
    "position_ids",  # already in the rotary embedding; the documents say where positions restart
    "position_embeddings",
    "cache_position",
    "num_items_in_batch",
}
# What would change nothing only as long as it says no.
MUST_BE_OFF = {
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "head_mask",
    "past_key_values",
    "return_dict",
}


def _refuse_unknown(
    module: nn.Module, attention_mask: Any, is_causal: bool | None, others: dict[str, Any]
) -> None:
    problems = [
        f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
        for name, value in others.items()
        if name not in HARMLESS and value is not None and not (name in MUST_BE_OFF and value is False)
    ]
    if attention_mask is not None:
        problems.append("attention_mask (describe padding by `documents`)")
    if is_causal is False:
        problems.append("is_causal=False")
    if problems:
        raise NotImplementedError(
            f"{type(module).__name__} asks of its attention what meshtune's does not do: "
            f"{', '.join(problems)}. Use model.attention=sdpa, without packing."
        )


def _way(q: Tensor, v: Tensor, dropout: float, softcap: float | None) -> str:
    """The fastest way that can do it: fused (CPU), varlen, flex or plain."""
    if dropout or q.shape[-1] != v.shape[-1]:
        return "plain"
    if not q.is_cuda:
        return "fused"
    if softcap is not None:
        return "flex"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "varlen" if fits else "plain"


def _fused(q, k, v, runs: tuple[Run, ...], padded: bool, scale: float, softcap: float | None) -> Tensor:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _PerDocument.apply(q, k, v, runs, padded, scale, softcap)  # type: ignore[return-value]


def core(
    q, k, v, documents: Lengths, scale: float, dropout: float, softcap: float | None, window: int | None
) -> Tensor:
    """[batch, heads, seq, head_dim] -> the same, by the fastest way that can do it."""
    match _way(q, v, dropout, softcap):
        case "fused":
            padded = any(sum(row) < q.shape[2] for row in documents)
            return _fused(q, k, v, _runs(documents, window), padded, scale, softcap)
        case "varlen":
            return _varlen(q, k, v, documents, scale, window)
        case "flex":
            return _flex(q, k, v, documents, scale, softcap, window)
        case _:
            return _one_by_one(q, k, v, documents, scale, dropout, softcap, window)


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """Queries of some columns against keys of others; queries in no run get zeros.

    [batch, heads, queries, head_dim] and keys and values [batch, kv_heads, keys, head_dim] -> as the queries.
    """
    if not runs.each:
        # Padding alone. The other ranks gather in their backward, so this one needs a backward too, and
        # something saved, or recomputation would not gather again.
        return _fused(q, k, v, (), True, scale, softcap)
    match _way(q, v, dropout, softcap):
        case "fused":
            return _fused(q, k, v, tuple(_blocks(runs)), True, scale, softcap)
        case "varlen":
            return _varlen_runs(q, k, v, runs, scale)
        case "flex":
            mask = _runs_mask(runs, q.shape[0], q.shape[2], k.shape[2], q.device)
            return _masked_flex(q, k, v, mask, scale, softcap)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for run in _blocks(runs):
        own_q = q[run.rows, :, run.queries]
        own_k, own_v = (t[run.rows, :, run.keys] for t in (k, v))
        out[run.rows, :, run.queries] = _plain(own_q, own_k, own_v, scale, dropout, softcap, run)
    return out


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | Sequence[Sequence[int]] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    recompute: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention inside each document, as Hugging Face's modules call it.

    query [batch, heads, seq, head_dim], key and value [batch, kv_heads, seq, head_dim] -> [batch, seq, heads,
    head_dim] and no weights. `scaling` defaults to 1/sqrt(head_dim), `dropout` is a probability.

    Raises ValueError without `documents`, or if they do not fit; NotImplementedError for arguments that would
    change the result and are not known here.
    """
    _refuse_unknown(module, attention_mask, is_causal, others)
    if documents is None:
        raise ValueError(
            f"{type(module).__name__} called meshtune's attention without `documents`: either the model was "
            "called without them, or this family does not pass keyword arguments down to its attention; then "
            "use model.attention=sdpa, without packing."
        )
    context = vars(module).get("context")  # set where other ranks have the other columns (context.py)
    ranks = context.axis.size if context else 1
    lengths = _checked(documents, query.shape[0], query.shape[2] * ranks)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    arguments = (query, key, value, lengths, scale, dropout, softcap, sliding_window)
    attend = context or core
    if recompute and torch.is_grad_enabled():
        out = checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
    else:
        out = attend(*arguments)
    return out.transpose(1, 2), None


def recomputed_document_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`document_attention` that keeps only query, key and value for the backward."""
    return document_attention(module, *args, recompute=True, **kwargs)


def no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any) -> None:
    """The mask function of both: nothing is ever built (`documents`, window and causality say it all).

    Raises NotImplementedError for what they cannot say: a padding mask, or a model's own pattern laid over
    the causal one (Hugging Face sets `use_vmap` exactly then).
    """
    if attention_mask is not None or use_vmap:
        what = "an attention_mask" if attention_mask is not None else "a pattern over the causal one"
        raise NotImplementedError(
            f"meshtune's attention was given {what}: describe padding by `documents`, "
            "or use model.attention=sdpa."
        )


def register() -> None:
    """Make both names known to transformers; importing this module does it once."""
    for name, function in zip(NAMES, (document_attention, recomputed_document_attention), strict=True):
        # A compiled block runs it as it is: traced, every new set of document lengths would be compiled anew.
        AttentionInterface.register(name, torch.compiler.disable(function))
        AttentionMaskInterface.register(name, no_mask)


register()


def body_forward(
    model: nn.Module, anatomy: Anatomy, micro_batch: MicroBatch, hidden: Tensor | None = None
) -> Tensor:
    """The model without its head: hidden states [batch, seq, hidden] after the last norm.

    hidden: what the blocks begin with, instead of the embeddings of the ids. Without our attention Hugging
    Face itself keeps the documents apart, by the positions that restart (only without a cache and a mask).
    """
    body: Any = model.get_submodule(anatomy.body)
    ours = body.config._attn_implementation in NAMES
    packed = {"documents": Documents(micro_batch.documents)} if ours else {}
    begin = {"input_ids": micro_batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    return body(**begin, position_ids=micro_batch.position_ids, use_cache=False, **packed).last_hidden_state
