"""FLOPs of operations, against counts by hand."""

from types import SimpleNamespace

import pytest
import torch

from meshtune.dryrun.recorder import flops_of, visible_pairs


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("columns", [None, range(9), (1, 8, 4)])
def test_visible_pairs_are_those_of_a_mask(window: int | None, columns: tuple[int, ...] | None) -> None:
    documents = (4, 1, 3)  # of a row of 9: the last column is padding
    for shared in ((), (0, 2, 0)):  # the second begins with two tokens of the first
        pairs = {
            (query, key)
            for keys in ([0, 1, 2, 3], [0, 1, 4] if shared else [4], [5, 6, 7])
            for at, query in enumerate(keys)
            for key in keys[0 if window is None else max(0, at + 1 - window) : at + 1]
        }
        expected = [pair for pair in pairs if columns is None or pair[0] in columns]
        assert visible_pairs(documents, window, columns, shared) == len(expected)


def test_matmuls_and_attention() -> None:
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    assert flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b, lambda *_: 0) == 2 * 3 * 5 * 7
    q, v = torch.empty(10, 4, 8), torch.empty(10, 2, 16)  # tokens, heads, head size
    varlen = SimpleNamespace(namespace="meshtune", _opname="attention")
    assert flops_of(varlen, (q, q, v), {}, None, lambda *_: 55) == 2 * 55 * 4 * (8 + 16)
    backward = SimpleNamespace(namespace="meshtune", _opname="attention_backward")
    assert flops_of(backward, (q, q, q, v), {}, None, lambda *_: 55) == 5 * 55 * 4 * (8 + 16)
