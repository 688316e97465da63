"""Collectives over an axis: values against plain torch on all ranks' tensors, and gradients."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from meshtune.parallel.exchange import all_gather, all_reduce, exchange, identity, reduce_scatter, take_shard
from meshtune.parallel.mesh import Axis

RANKS, SHAPE = 3, (3, 6, 9)


def axis_of_all():
    return Axis("tp", RANKS, dist.get_rank(), dist.group.WORLD)


def drawn(rank, shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def values(dim):
    axis, everyone = axis_of_all(), [drawn(rank) for rank in range(RANKS)]
    mine, whole = everyone[axis.index], sum(everyone)
    before = mine.clone()
    assert torch.equal(all_gather(mine, axis, dim), torch.cat(everyone, dim))
    torch.testing.assert_close(reduce_scatter(mine, axis, dim), whole.chunk(RANKS, dim)[axis.index])
    torch.testing.assert_close(all_reduce(mine, axis, dim), whole)
    assert torch.equal(take_shard(mine, axis, dim), mine.chunk(RANKS, dim)[axis.index])
    assert torch.equal(mine, before)
    transposed = mine.transpose(0, 1)  # whatever lies in memory how
    torch.testing.assert_close(
        reduce_scatter(transposed, axis, 0), whole.transpose(0, 1).chunk(RANKS)[axis.index]
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_exchange_is_what_torch_does_with_all_tensors_at_hand(dim):
    run_ranks(RANKS, values, dim)


def products(ahead, back, dim):
    """<ahead(x), y> and <x, gradient>, each of which adds up over the ranks to the same number."""
    axis = axis_of_all()
    x = drawn(axis.index).requires_grad_()
    out = exchange(x, axis, dim, ahead, back)
    y = drawn(axis.index + 10, out.shape)
    out.backward(y)
    return float((out * y).sum()), float((x * x.grad).sum())


@pytest.mark.ci
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "pair",
    [
        (all_gather, reduce_scatter),
        (reduce_scatter, all_gather),
        (all_reduce, all_reduce),
        (identity, identity),
    ],
)
def test_a_gradient_is_the_adjoint_of_its_exchange(pair, dim):
    ahead, back = zip(*run_ranks(RANKS, products, *pair, dim), strict=True)
    assert sum(ahead) == pytest.approx(sum(back), rel=1e-12)
