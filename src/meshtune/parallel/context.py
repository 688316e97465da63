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

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshtune.attention.core import attend, attend_rows, flat
from meshtune.data.batch import IGNORE, MicroBatch
from meshtune.data.boundaries import Boundaries, Lengths, boundaries_of, key_columns
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


def split(
    micro_batch: MicroBatch, cp: Axis, method: str, windows: Collection[int | None] = (None,)
) -> MicroBatch:
    """This rank's columns of a micro-batch; `documents` stay the lengths of whole rows.

    tokens and label_tokens are those of these columns. method: as in `spans`, also for the error. windows:
    the model's (`windows_of`). With one rank the micro-batch is returned as it is.
    """
    if cp.size == 1:
        return micro_batch
    seq = micro_batch.input_ids.shape[1]
    index = columns(seq, cp, method)
    boundaries: Any = micro_batch.boundaries
    if method == "allgather":
        documents, width = micro_batch.documents, seq // cp.size
        boundaries = RankDocuments(documents, width, cp.size, cp.index, {}, micro_batch.shared)
        boundaries.runs.update({window: boundaries.run(window) for window in windows})
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
        noise=micro_batch.noise and micro_batch.noise.map(lambda tensor: tensor[:, index]),
        answers=micro_batch.answers and micro_batch.answers.cut(index, labels),
        boundaries=boundaries,
    )


def windows_of(model: nn.Module) -> frozenset[int | None]:
    """The sliding windows of a model's layers, by the attribute that transformers gives attention modules;
    None, for all earlier keys, is always among them.
    """
    return frozenset({None, *(vars(module).get("sliding_window") for module in model.modules())})


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


class Run(NamedTuple):
    """A rank's queries of each document, with the keys that they see, in the order of the documents."""

    queries: Tensor  # int64: index of each in this rank's flattened columns
    keys: Tensor  # int64: index of each in the flattened columns of whole rows
    boundaries: Boundaries


@dataclass(eq=False)  # not frozen, as Boundaries
class RankDocuments:
    """The documents of a micro-batch on a rank whose queries are some columns of its rows."""

    documents: Lengths  # in whole rows
    width: int  # columns of one rank
    ranks: int  # size and index of cp
    rank: int
    runs: dict[int | None, Run]  # by the window: keys that a query sees at most; None: all earlier ones
    shared: Lengths = ()  # as in MicroBatch

    def of(self, window: int | None) -> Run:
        """The runs of layers with this window; made here where no layer was known to have it."""
        if window not in self.runs:
            device = next(iter(self.runs.values())).queries.device
            self.runs[window] = _mapped(self.run(window), lambda tensor: tensor.to(device))
        return self.runs[window]

    def map(self, function: Callable[[Tensor], Tensor]) -> "RankDocuments":
        """The same with `function` of each tensor."""
        return replace(self, runs={window: _mapped(run, function) for window, run in self.runs.items()})

    def run(self, window: int | None) -> Run:
        queries, keys, lengths = [], [], []
        begin, whole = 0, self.width * self.ranks
        for span in spans(whole, Axis("cp", self.ranks, self.rank), "allgather"):
            for row, inside in enumerate(self.documents):
                for start, length, columns in key_columns(inside, self.shared[row] if self.shared else ()):
                    first, last = max(start, span.start), min(start + length, span.stop)
                    if first < last:
                        own = first - start - length  # the key that the first query stands at, from behind
                        seen = columns[: len(columns) + last - start - length]
                        least = 0 if window is None else max(0, len(columns) + own - window + 1)
                        shift = row * self.width + begin - span.start
                        queries.append(torch.arange(first + shift, last + shift))
                        keys.append(row * whole + seen[least:])
                        lengths.append((last - first, len(seen) - least))
            begin += len(span)
        if not lengths:
            # Only padding. The other ranks gather in their backward, so this one needs a backward too, and
            # something saved, or recomputation would not gather again: a token that sees itself.
            return Run(
                torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), boundaries_of([(1, 1)])
            )
        return Run(torch.cat(queries), torch.cat(keys), boundaries_of(lengths))


def _mapped(run: Run, function: Callable[[Tensor], Tensor]) -> Run:
    return Run(function(run.queries), function(run.keys), run.boundaries.map(function))


@dataclass(frozen=True)
class AllGather:
    """Attention of this rank's queries to the keys and values of all ranks."""

    axis: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: RankDocuments, scale: float, dropout: float,
        softcap: float | None, window: int | None, *, sinks: Tensor | None = None, kernels: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries: [batch, seq / cp, heads, head_dim].

        q, k, v: [batch, heads, seq / cp, head_dim] of this rank's columns; k and v may have fewer heads. The
        other arguments are those of attention.core.attend (None: no softcap, no window).
        """
        batch, _, width, _ = q.shape
        k, v = self._whole(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        run = documents.of(window)
        own, seen_k, seen_v = (
            flat(x).index_select(0, index) for x, index in ((q, run.queries), (k, run.keys), (v, run.keys))
        )
        out = attend(
            own, seen_k, seen_v, run.boundaries, scale, dropout, softcap, window, sinks=sinks,
            kernels=kernels,
        )  # fmt: skip
        whole = out.new_zeros(batch * width, *out.shape[1:]).index_copy(0, run.queries, out)
        return whole.unflatten(0, (batch, width))

    def _whole(self, x: Tensor) -> Tensor:
        """All-gather the ranks' columns, into the order of the whole row; gradients are reduce-scattered."""
        ranks = exchange(x, self.axis, SEQ, all_gather, reduce_scatter).unflatten(
            SEQ, (self.axis.size, 2, -1)
        )
        down, up = ranks.unbind(SEQ + 1)  # rank r has part r going down, part 2·cp - 1 - r going up
        return torch.cat((down, up.flip(SEQ)), SEQ).flatten(SEQ, SEQ + 1)


@dataclass(frozen=True)
class Ulysses:
    """Attention of 1 / cp of the heads over whole rows, instead of all heads over this rank's columns."""

    axis: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Boundaries, scale: float, dropout: float,
        softcap: float | None, window: int | None, *, sinks: Tensor | None = None, kernels: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries: [batch, seq / cp, heads, head_dim].

        q, k, v: [batch, heads, seq / cp, head_dim] of this rank's columns; k and v may have fewer heads.
        documents: of whole rows. The other arguments are those of attention.core.attend (None: no softcap, no
        window).
        """
        times = self._repeats(q.shape[HEADS], k.shape[HEADS])
        if times > 1:
            k, v = (x.repeat_interleave(times, HEADS) for x in (k, v))
        q, k, v = (_AllToAll.apply(x, self.axis, HEADS, SEQ) for x in (q, k, v))
        own = None if sinks is None else sinks.chunk(self.axis.size)[self.axis.index]
        out = attend_rows(q, k, v, documents, scale, dropout, softcap, window, sinks=own, kernels=kernels)
        return _AllToAll.apply(out, self.axis, 1, 2)  # type: ignore[return-value]

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
