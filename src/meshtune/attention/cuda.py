"""Attention on CUDA, a whole micro-batch in one call.

varlen   16 bit, no softcap: the variable-length flash kernel over flattened tokens
flex     with a softcap or sinks: flex attention with a block mask
"""

from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshtune.attention.runs import Lengths, QueryRuns
from meshtune.compat import varlen_attention

# Padding is cut into documents of this many tokens: it is computed too, and so costs little.
PADDING_LENGTH = 128
FLEX_GRAPHS = 128  # most compiled graphs of flex attention in a process


@lru_cache(maxsize=8)
def _boundaries(documents: Lengths, seq: int, device: torch.device) -> tuple[Tensor, int]:
    """(cu_seqlens int32 [documents + 1] of the flattened micro-batch, tokens of its longest document).

    The padding of each row, of `seq` columns, is cut into documents of PADDING_LENGTH tokens, counted too.
    """
    lengths: list[int] = []
    for row in documents:
        rest = seq - sum(row)
        lengths += [*row, *[PADDING_LENGTH] * (rest // PADDING_LENGTH), rest % PADDING_LENGTH]
    lengths = [length for length in lengths if length]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths)


@lru_cache(maxsize=8)
def _document_ids(documents: Lengths, seq: int, device: torch.device) -> Tensor:
    """Index of each token's document in its row, [batch, seq]; -1 for padding."""
    rows = [
        [number for number, length in enumerate(row) for _ in range(length)] + [-1] * (seq - sum(row))
        for row in documents
    ]
    return torch.tensor(rows, device=device)


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, window: int | None) -> Tensor:
    """Causal attention by one variable-length flash call: q [batch, heads, seq, head_dim] -> the same.

    bf16 or fp16; k and v may have fewer heads. Padding gets finite values: zeros would need a copy of the
    output, which o_proj would save. window: keys that a query sees at most, its own included; None: all
    earlier ones of its document.
    """
    batch, heads, seq, head_dim = q.shape
    boundaries, longest = _boundaries(documents, seq, q.device)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).reshape(batch * seq, -1, head_dim) for x in (q, k, v))
    left = -1 if window is None or window >= longest else window - 1
    out = varlen_attention(
        flat_q, flat_k, flat_v, boundaries, boundaries, longest, longest, scale=scale, window_size=(left, 0)
    )
    return out.view(batch, seq, heads, head_dim).transpose(1, 2)


class _Flat(NamedTuple):
    """The queries or the keys of all runs, one run after the other."""

    tokens: Tensor  # [tokens of all runs]: index of each in [batch · columns]
    boundaries: Tensor  # [runs + 1] int32: where each run begins; the last one: where all end
    longest: int  # tokens of the longest run


@lru_cache(maxsize=8)
def _flat(runs: QueryRuns, side: Literal["queries", "keys"], columns: int, device: torch.device) -> _Flat:
    """Flatten one side of the runs; each must be in one row. columns: in a row of that side."""
    spans = [(run.rows.start * columns, getattr(run, side)) for run in runs.runs]
    tokens = torch.cat([torch.arange(row + span.start, row + span.stop) for row, span in spans])
    lengths = [span.stop - span.start for _, span in spans]
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return _Flat(tokens.to(device), boundaries.to(device), max(lengths))


def varlen_runs(q: Tensor, k: Tensor, v: Tensor, runs: QueryRuns, scale: float) -> Tensor:
    """Causal attention by one variable-length flash call: q [batch, heads, queries, head_dim] -> the same.

    k and v [batch, kv_heads, keys, head_dim], bf16 or fp16. runs: at least one, all with the same window:
    that of the first one is used. Queries in no run get zeros. Keys that several runs see are copied for each
    of them: under context parallelism at most two copies.
    """
    batch, heads, columns, head_dim = q.shape
    queries = _flat(runs, "queries", columns, q.device)
    keys = _flat(runs, "keys", k.shape[2], q.device)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    window = runs.runs[0].window
    part = varlen_attention(
        flat_q.index_select(0, queries.tokens),
        flat_k.index_select(0, keys.tokens), flat_v.index_select(0, keys.tokens),
        queries.boundaries, keys.boundaries, queries.longest, keys.longest,
        scale=scale, window_size=(-1 if window is None or window >= keys.longest else window - 1, 0),
    )  # fmt: skip
    out = part.new_zeros(batch * columns, heads, head_dim).index_copy(0, queries.tokens, part)
    return out.view(batch, columns, heads, head_dim).transpose(1, 2)


@cache
def compiled_flex():
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler: only where used

    # Each window, softcap and kind of shape is a graph; beyond the limit torch runs it written out, slowly.
    config.recompile_limit = max(config.recompile_limit, FLEX_GRAPHS)
    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _block_mask(documents: Lengths, seq: int, window: int | None, device: torch.device):
    """Block mask of causal attention inside documents, for rows of `seq` columns; padding sees no key."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids = _document_ids(documents, seq, device)

    def visible(row, head, query, key):
        seen = (ids[row, query] == ids[row, key]) & (key <= query) & (ids[row, query] >= 0)
        return seen if window is None else seen & (key > query - window)

    return create_block_mask(visible, len(documents), None, seq, seq, device=str(device))


@lru_cache(maxsize=8)
def runs_mask(runs: QueryRuns, batch: int, columns: int, keys: int, device: torch.device):
    """Block mask of runs, for rows of `columns` queries and `keys` keys; queries in no run see no key."""
    from torch.nn.attention.flex_attention import create_block_mask

    first, last = torch.zeros(batch, columns, dtype=torch.long), torch.full((batch, columns), -1)
    for run in runs.runs:
        positions = torch.arange(run.first_query, run.keys.stop)
        reach = len(positions) + run.first_query if run.window is None else run.window
        first[run.rows, run.queries] = (positions - reach + 1).clamp(min=run.keys.start)
        last[run.rows, run.queries] = positions
    first, last = first.to(device), last.to(device)

    def visible(row, head, query, key):
        return (key >= first[row, query]) & (key <= last[row, query])

    return create_block_mask(visible, batch, None, columns, keys, device=str(device))


def flex(
    q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, softcap: float | None,
    window: int | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal flex attention inside documents: [batch, heads, seq, head_dim] -> the same, zeros for padding.

    Arguments as those of `core.attend_documents`. Compiled at the first call.
    """
    mask = _block_mask(documents, q.shape[2], window, q.device)
    return flex_with_mask(q, k, v, mask, scale, softcap, sinks)


def flex_with_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Flex attention under a block mask: q [batch, heads, queries, head_dim] -> the same.

    k, v: [batch, kv_heads, keys, head_dim]. mask: a BlockMask, such as that of `runs_mask`. sinks: as in
    `core.attend_documents`.
    """

    def capped(score, row, head, query, key):
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    # Below 128 queries torch would take its kernel for decoding, which has no configuration for some grouped
    # heads ("No choices to select").
    training = {"BACKEND": "TRITON"}
    options = {"score_mod": capped, "block_mask": mask, "scale": scale, "kernel_options": training}
    grouped = q.shape[1] != k.shape[1]
    if sinks is None:
        return compiled_flex()(q, k, v, enable_gqa=grouped, **options)
    from torch.nn.attention.flex_attention import AuxRequest

    with_lse = AuxRequest(lse=True)
    out, more = compiled_flex()(q, k, v, enable_gqa=grouped, return_aux=with_lse, **options)
    lse = more.lse
    assert lse is not None
    # A query that sees no key has -inf, whose gradient would be no number.
    share = torch.sigmoid(lse.clamp(min=torch.finfo(lse.dtype).min / 2) - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)
