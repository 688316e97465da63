"""Gather again in the backward what sequence parallelism gathered in the forward (`Layout.sp_regather`).

    forward     shard ─ all-gather ─> whole ─> matmuls of attention or mlp, which save `whole`
    saved       only the shard: 1/tp of `whole`
    backward    shard ─ all-gather ─> whole, once for all of the part's matmuls, freed after the last of them

(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.) autograd's hooks on saved tensors replace `whole`
and views of it; other saved tensors stay. They unpack in the order of the backward, which is the same on all
ranks of tp, and so is the order of the collectives.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshtune.parallel.exchange import all_gather
from meshtune.parallel.mesh import Axis


class _Gathered:
    """The gathered input of one attention or mlp in one micro-batch: its shard, and the whole while a
    backward needs it. It lives as long as a matmul has a view of it saved.
    """

    def __init__(self, shard: Tensor, tp: Axis, dim: int) -> None:
        self.shard, self.tp, self.dim = shard, tp, dim
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = all_gather(self.shard, self.tp, self.dim)
        return self._whole


class _View(NamedTuple):
    """Saved in the place of a view of a gathered tensor."""

    source: _Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt  # in elements


def saving_shards(whole: Tensor, shard: Tensor, tp: Axis, dim: int) -> AbstractContextManager[object]:
    """A context in which autograd saves `shard` where it would save `whole` or a view of it.

    whole: all_gather(shard, tp, dim). Outside of gradient mode nothing is saved, and nothing is gathered.
    """
    source, storage = _Gathered(shard.detach(), tp, dim), whole.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Tensor | _View:
        if tensor.dtype != shard.dtype or tensor.untyped_storage()._cdata != storage:
            # An output that is saved with its graph would keep itself alive.
            return tensor.detach() if tensor.requires_grad else tensor
        return _View(source, tensor.size(), tensor.stride(), tensor.storage_offset())

    return saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.source.whole().as_strided(saved.size, saved.stride, saved.offset)
