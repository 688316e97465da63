"""Rows go to their experts and come back, whatever the router chose."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshtune.experts.dispatch import LOCAL


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """(index [tokens, k], number of experts): no tokens, idle experts, and one expert for all among them."""
    experts, tokens, k = draw(st.integers(1, 6)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    chosen = (
        st.integers(0, experts - 1) if draw(st.booleans()) else st.just(draw(st.integers(0, experts - 1)))
    )
    index = draw(st.lists(chosen, min_size=tokens * k, max_size=tokens * k))
    return torch.tensor(index, dtype=torch.long).view(tokens, k), experts


@given(routings())
def test_rows_stand_by_expert_and_come_back(routing: tuple[Tensor, int]) -> None:
    index, experts = routing
    tokens, k = index.shape
    torch.manual_seed(0)
    hidden, weights = torch.randn(tokens, 4).double(), torch.randn(tokens, k).double()
    factors = torch.randn(tokens, 4).double()

    def passed(through_experts: bool) -> Any:
        """Output and gradients of the sum of weighted rows, each scaled by its expert's number."""
        x, w = (tensor.clone().requires_grad_() for tensor in (hidden, weights))
        if through_experts:
            rows, counts, receipt = LOCAL.dispatch(x, index, experts)
            assert counts.tolist() == index.flatten().bincount(minlength=experts).tolist()
            parts = rows.split(counts.tolist())
            for expert, part in enumerate(parts):  # stable: the tokens of an expert in their order
                assert torch.equal(part, x[(index == expert).nonzero()[:, 0]])
            scaled = torch.cat([(expert + 1) * part for expert, part in enumerate(parts)])
            scaled = LOCAL.back(scaled, receipt)
        else:
            scaled = x.unsqueeze(1) * (index + 1).unsqueeze(-1)
        out = (scaled * w.unsqueeze(-1)).sum(1)
        return out, *torch.autograd.grad((out * factors).sum(), (x, w))

    for ours, plain in zip(passed(True), passed(False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
