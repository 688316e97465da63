"""Context parallelism (cp): the ranks share one sequence, each with some of its columns.

    allgather   one all-gather brings all keys and values to every rank, whose queries see the earlier ones
                (Llama 3, 2024, arXiv:2407.21783, section 3.3.2). Any number of heads. The columns go zigzag
                (parts 0 and 3 | 1 and 2 for two ranks), so that all ranks have equal (query, key) counts.
    ulysses     an all-to-all makes some columns of all heads into all columns of some heads, attention runs
                as on one rank, another all-to-all undoes it (Jacobs et al. 2023, arXiv:2309.14509). The
                columns are contiguous.

Outside attention a token needs no other token, so no other part of the model changes. Labels are shifted
before the split, positions are split with their tokens; the lengths of documents stay those of whole rows.

Bytes that a rank sends in a layer's forward, of b-byte elements: allgather (cp - 1) · S/cp · 2 · kv · d · b,
ulysses (cp - 1) / cp · S/cp · 2 · (q + kv) · d · b; in the backward the same. Gathered keys and values are
kept for the backward; with recomputation they are gathered again.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshtune.attention.core import attend_documents, attend_runs
from meshtune.attention.runs import Lengths, QueryRun, QueryRuns
from meshtune.data.batch import IGNORE, MicroBatch, Noise
from meshtune.model.anatomy import Anatomy
from meshtune.parallel.exchange import all_gather, exchange, reduce_scatter
from meshtune.parallel.mesh import Axis

SEQ, HEADS = 2, 1  # dimensions of queries, keys and values [batch, heads, seq, head_dim]


def spans(seq: int, cp: Axis, method: str) -> tuple[range, ...]:
    """Columns, in a row of `seq`, of this rank, in the rank's order: ranges of equal length.

    method: "allgather" (two ranges) or "ulysses" (one). Raises ValueError if the row can't be cut evenly.
    """
    parts = cp.size if method == "ulysses" else 2 * cp.size
    if seq % parts:
        raise ValueError(
            f"A row of {seq} columns does not cut into {parts} parts; make its width a multiple."
        )
    size = seq // parts
    indices = (cp.index,) if method == "ulysses" else (cp.index, parts - 1 - cp.index)
    return tuple(range(part * size, (part + 1) * size) for part in indices)


def columns(seq: int, cp: Axis, method: str) -> Tensor:
    """Index in the whole row of each of this rank's columns, int64 [seq / cp], for rows of `seq` columns.

    method: as in `spans`, also for the error.
    """
    return torch.cat([torch.arange(span.start, span.stop) for span in spans(seq, cp, method)])


def split(micro_batch: MicroBatch, cp: Axis, method: str) -> MicroBatch:
    """This rank's columns of a micro-batch; `documents` stay the lengths of whole rows.

    tokens and label_tokens are those of these columns. method: as in `spans`, also for the error. With one
    rank the micro-batch is returned as it is.
    """
    if cp.size == 1:
        return micro_batch
    index = columns(micro_batch.input_ids.shape[1], cp, method)
    labels = micro_batch.labels[:, index]
    tokens = sum(int((index < sum(row)).sum()) for row in micro_batch.documents)
    return replace(
        micro_batch,
        input_ids=micro_batch.input_ids[:, index],
        labels=labels,
        position_ids=micro_batch.position_ids[:, index],
        tokens=tokens,
        label_tokens=int((labels != IGNORE).sum()),
        columns=index,
        noise=micro_batch.noise and Noise(*(tensor[:, index] for tensor in micro_batch.noise)),
    )


def attach(model: nn.Module, anatomy: Anatomy, cp: Axis, method: str) -> None:
    """Make every block's attention see the other ranks' columns too, by setting its `context`, in place.

    Only meshtune's attention reads `context`. method: "allgather" or "ulysses". Nothing for one rank.
    """
    if cp.size == 1:
        return
    attend = {"allgather": AllGather, "ulysses": Ulysses}[method](cp)
    for block in model.get_submodule(anatomy.blocks).children():
        for module in block.get_submodule(anatomy.attention).modules():  # BERT's calls it one level below
            module.context = attend  # type: ignore[assignment]


@dataclass(frozen=True)
class AllGather:
    """Attention of this rank's queries to the keys and values of all ranks."""

    axis: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, dropout: float,
        softcap: float | None, window: int | None, *, sinks: Tensor | None = None, kernels: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries: [batch, heads, seq / cp, head_dim], as q.

        q, k, v: of this rank's columns; k and v may have fewer heads. documents: lengths in whole rows. The
        other arguments are those of attention.core.attend_documents (None: no softcap, no window).
        """
        k, v = self._whole(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        runs = _runs_of_rank(documents, q.shape[SEQ], self.axis.size, self.axis.index, window)
        return attend_runs(q, k, v, runs, scale, dropout, softcap, sinks=sinks, kernels=kernels)

    def _whole(self, x: Tensor) -> Tensor:
        """All-gather the ranks' columns, into the order of the whole row; gradients are reduce-scattered."""
        ranks = exchange(x, self.axis, SEQ, all_gather, reduce_scatter).unflatten(
            SEQ, (self.axis.size, 2, -1)
        )
        down, up = ranks.unbind(SEQ + 1)  # rank r has part r going down, part 2·cp - 1 - r going up
        return torch.cat((down, up.flip(SEQ)), SEQ).flatten(SEQ, SEQ + 1)


@lru_cache(maxsize=64)
def _runs_of_rank(documents: Lengths, width: int, ranks: int, rank: int, window: int | None) -> QueryRuns:
    """A rank's queries of each document, with the keys that they see.

    Queries are counted among the rank's own columns, keys among those of the whole row. documents: lengths in
    whole rows. width: columns of one rank. ranks, rank: size and index of cp. window: keys that a query sees
    at most; None: all earlier ones of its document.
    """
    runs = []
    begin = 0  # of a span, among this rank's columns
    for span in spans(width * ranks, Axis("cp", ranks, rank), "allgather"):
        for row, lengths in enumerate(documents):
            start = 0
            for length in lengths:
                first, last = max(start, span.start), min(start + length, span.stop)
                if first < last:
                    keys = slice(start if window is None else max(start, first - window + 1), last)
                    queries = slice(begin + first - span.start, begin + last - span.start)
                    runs.append(QueryRun(slice(row, row + 1), queries, keys, window, first))
                start += length
        begin += len(span)
    return QueryRuns(tuple(runs))


@dataclass(frozen=True)
class Ulysses:
    """Attention of 1 / cp of the heads over whole rows, instead of all heads over this rank's columns."""

    axis: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Lengths, scale: float, dropout: float,
        softcap: float | None, window: int | None, *, sinks: Tensor | None = None, kernels: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries: [batch, heads, seq / cp, head_dim], as q.

        q, k, v: of this rank's columns; k and v may have fewer heads. documents: lengths in whole rows. The
        other arguments are those of attention.core.attend_documents (None: no softcap, no window).
        """
        times = self._repeats(q.shape[HEADS], k.shape[HEADS])
        if times > 1:
            k, v = (x.repeat_interleave(times, HEADS) for x in (k, v))
        q, k, v = (_AllToAll.apply(x, self.axis, HEADS, SEQ) for x in (q, k, v))
        own = None if sinks is None else sinks.chunk(self.axis.size)[self.axis.index]
        out = attend_documents(
            q, k, v, documents, scale, dropout, softcap, window, sinks=own, kernels=kernels
        )
        return _AllToAll.apply(out, self.axis, SEQ, HEADS)  # type: ignore[return-value]

    def _repeats(self, heads: int, kv_heads: int) -> int:
        """Fewest copies of each key-value head with which the cp ranks get equally many heads, every rank
        those that its query heads use. heads, kv_heads: of q and of k, before the all-to-all.
        """
        fits = (n for n in range(1, heads // kv_heads + 1) if not (kv_heads * n) % self.axis.size)
        return next(n for n in fits if not (heads // kv_heads) % n)


class _AllToAll(torch.autograd.Function):
    """Split dimension `cut` of x into equal parts, one for each rank, and join the parts received from the
    ranks along dimension `join`, in their order. The gradient does the reverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, cut: int, join: int):  # type: ignore[override]
        ctx.axis, ctx.cut, ctx.join = axis, cut, join
        return _all_to_all(x, axis, cut, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return _all_to_all(grad, ctx.axis, ctx.join, ctx.cut), None, None, None


def _all_to_all(x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
    """Compute the forward of `_AllToAll`, without a gradient."""
    sent = x.unflatten(cut, (axis.size, -1)).movedim(cut, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.movedim(0, join).flatten(join, join + 1)
