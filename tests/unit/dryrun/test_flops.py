"""FLOPs of operations, against counts by hand."""

from types import SimpleNamespace

import pytest
import torch

from meshtune.dryrun.recorder import flops_of, visible_pairs


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("columns", [None, range(9), (1, 8, 4)])
def test_visible_pairs_are_those_of_a_mask(window: int | None, columns: tuple[int, ...] | None) -> None:
    documents = (4, 1, 3)  # of a row of 9: the last column is padding
    row = [number for number, length in enumerate(documents) for _ in range(length)]
    pairs = [
        (query, key)
        for query in range(len(row))
        for key in range(query + 1)
        if row[query] == row[key] and (window is None or query - key < window)
    ]
    expected = [pair for pair in pairs if columns is None or pair[0] in columns]
    assert visible_pairs(documents, window, columns) == len(expected)


def test_matmuls_and_attention() -> None:
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    assert flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b, lambda *_: 0) == 2 * 3 * 5 * 7
    q, v = torch.empty(10, 4, 8), torch.empty(10, 2, 16)  # tokens, heads, head size
    varlen = SimpleNamespace(namespace="meshtune", _opname="attention")
    assert flops_of(varlen, (q, q, v), {}, None, lambda *_: 55) == 2 * 55 * 4 * (8 + 16)
    backward = SimpleNamespace(namespace="meshtune", _opname="attention_backward")
    assert flops_of(backward, (q, q, q, v), {}, None, lambda *_: 55) == 5 * 55 * 4 * (8 + 16)
