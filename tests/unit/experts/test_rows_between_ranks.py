"""Rows reach experts on other ranks, and come back, as if all experts were on one."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from meshtune.experts.dispatch import LOCAL
from meshtune.experts.exchange import Exchange, by_expert

Routing = tuple[int, list[list[list[int]]]]  # number of experts; index [tokens, k] of each rank


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_rows_by_sender_become_rows_by_expert(received: list[list[int]]) -> None:
    """received: rows of each of 4 experts, by sender; senders without a row and idle experts among them."""
    senders = [
        (expert, sender, row)
        for sender, counts in enumerate(received)
        for expert, count in enumerate(counts)
        for row in range(count)
    ]
    index = by_expert(torch.tensor(received), len(senders))
    _, counts, receipt = LOCAL.dispatch(torch.zeros(len(senders), 1), index, 4)
    assert [senders[place] for place in receipt.order.tolist()] == sorted(senders)
    assert counts.tolist() == torch.tensor(received).sum(0).tolist()


ROUTINGS: dict[str, Routing] = {
    "uneven": (4, [[[0, 3], [1, 3], [2, 0]], [[3, 1], [0, 2]]]),
    "a rank receives nothing": (4, [[[0, 1], [1, 0]], [[1, 0], [0, 1]]]),
    "one expert receives all": (4, [[[3], [3]], [[3], [3], [3]]]),
    "a rank has no tokens": (2, [[], [[0, 1], [1, 0]]]),
}


def computed(routing: Routing) -> list[list[Tensor]]:
    """Outputs, gradients of rows and of factors of experts, by rank: summed over ranks."""
    experts, every = routing
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden = [torch.randn(len(index), 8, dtype=torch.float64) for index in every]
    weights, factors = torch.randn(experts, 8).double(), [torch.randn_like(x) for x in hidden]

    def passed(x: Tensor, index: list[list[int]], own: Tensor, dispatcher) -> Tensor:
        k = len(index[0]) if index else 1
        rows, counts, receipt = dispatcher.dispatch(x, torch.tensor(index).long().view(-1, k), experts)
        rows = rows * own.repeat_interleave(counts, 0)
        return dispatcher.back(rows.tanh(), receipt).sum(1)

    x, own = hidden[rank].requires_grad_(), weights.chunk(ranks)[rank].clone().requires_grad_()
    out = passed(x, every[rank], own, Exchange(dist.group.WORLD, ranks))
    ours = [out, *torch.autograd.grad((out * factors[rank]).sum(), (x, own))]
    whole, of_all = weights.clone().requires_grad_(), [x.detach().requires_grad_() for x in hidden]
    outs = [passed(x, index, whole, LOCAL) for x, index in zip(of_all, every, strict=True)]
    loss = torch.stack([(out * factor).sum() for out, factor in zip(outs, factors, strict=True)]).sum()
    *of_rows, of_experts = torch.autograd.grad(loss, (*of_all, whole))
    return [ours, [outs[rank], of_rows[rank], of_experts.chunk(ranks)[rank]]]


@pytest.mark.parametrize("name", ROUTINGS)
def test_ranks_together_compute_what_one_rank_does(name: str) -> None:
    routing = ROUTINGS[name]
    for ours, theirs in run_ranks(len(routing[1]), computed, routing):
        for mine, one in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)
