"""Compiled blocks under data parallelism, where refusals allow them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import cases
from ranks import run_ranks

from meshtune.layout import Layout
from meshtune.parallel import zero
from meshtune.parallel.mesh import join, parameter_mesh

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import zero_memory


def gradients(text: str, compiled: bool) -> dict[str, np.ndarray]:
    layout = Layout.parse(text)
    mesh = parameter_mesh(join(layout, torch.device("cpu")))
    torch.manual_seed(0)
    root = zero_memory.Whole(torch.float32)
    blocks = list(root.get_submodule("model.model.layers").children())
    if compiled:
        for block in blocks:
            block.compile()
    assert mesh is not None
    zero.shard(root, blocks, mesh, layout.zero)
    for last in (False, True):
        zero_memory.micro_batch(root, layout, last=last)
    return {name: p.grad.full_tensor().numpy() for name, p in root.named_parameters()}


@pytest.mark.parametrize("text", cases(["dp2", "zero3x2"]))
def test_compiled_blocks_give_the_same_gradients(text: str) -> None:
    expected = run_ranks(2, gradients, text, False, forked=True)[0]
    for found in run_ranks(2, gradients, text, True, seconds=200, forked=True):
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, expected[name], atol=2e-6 * np.abs(expected[name]).max())
