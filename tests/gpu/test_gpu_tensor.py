"""Tensor parallelism's random numbers on a CUDA device, which has a generator of its own."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from meshtune.parallel.mesh import Axis  # noqa: E402
from meshtune.parallel.tensor import _seeded_forward, _TensorState  # noqa: E402

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(index, sequence):
    """The masks of a block with dropout on tp rank `index`, forward and recomputed; what comes after."""
    block = nn.Dropout(0.5)
    block.forward = partial(_seeded_forward, _TensorState(Axis("tp", 2, index), sequence), block)
    torch.manual_seed(3)
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    y = checkpoint(lambda x: block(x * 1.0) ** 2, x, use_reentrant=False)
    after = torch.rand(4, device=DEVICE)
    y.sum().backward()
    return y.detach() == 0, x.grad == 0, after


@pytest.mark.parametrize("sequence", [True, False])
def test_ranks_mask_alike_or_differently_and_recomputation_repeats(sequence):
    (first, first_again, after), (second, second_again, after_too) = draw(0, sequence), draw(1, sequence)
    assert torch.equal(first, first_again) and torch.equal(second, second_again)
    assert torch.equal(first, second) == (not sequence)
    assert torch.equal(after, after_too)
    assert 300 < first.sum() < 700
