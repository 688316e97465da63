"""What the kernels behind `op.attention` are given."""

from typing import NamedTuple

from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k and v, or their gradients


class Core(NamedTuple):
    """What a kernel of `attention.op` is asked for besides q, k and v; that operator describes it."""

    query_boundaries: Tensor
    key_boundaries: Tensor
    longest_query: int
    longest_key: int
    scale: float
    window: int | None
    softcap: float | None
